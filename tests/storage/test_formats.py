"""Files of today are read tomorrow: their bytes and the numbers of formats.

A test that writes and reads by the same code is green whatever the format is.
A change of a format gives it another number, here as well.
"""

import pathlib
import re

import ml_dtypes
import numpy as np
import pytest

import jdist
from jdist.storage import array_files, hashes, sealed_json

_PACKAGE = pathlib.Path(jdist.__file__).parent
_FORMATS = {
  "cli.pipelines._process_run": 1,
  "prediction._parameter_set": 1,
  "server.run._server_run": 1,
  "storage.array_files": 3,
  "training._checkpoint_directory": 2,
}
_SEALED = (
  '{"format": 7, "sha256": "a16391e064ed3e1a2b870cebfe689e9bcf28b644c052a54c'
  '7e94e8904f86b0a0", "body": {"b": [1.5, null], "a": "\\u00e4"}}'
)
_MANIFEST = (
  '{"format": 3, "sha256": "a57a40a9d8dba44f8d84fdd4f6f4c0e110bc642bfe822c18'
  '7cedf75c0d85eceb", "body": {"files": {"w/0": ["w_0-f3692322f816.npy", "f36'
  '92322f8164f5045452f535adc60b9a6b1ba7bd32b90eb29c4ed7a007cc70a", "bfloat16"'
  ']}, "stale": [], "body": {"what": "figures", "note": [1]}}}'
)
_HEAD = "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize("name", _FORMATS)
def test_format_keeps_its_number(name):
  source = (_PACKAGE / f"{name.replace('.', '/')}.py").read_text()
  (found,) = re.findall(r"^_FORM(?:AT)?\b.*? = (\d+)", source, re.MULTILINE)
  assert int(found) == _FORMATS[name]


def test_every_sealed_file_is_in_the_table():
  writes = {
    ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
    for path in _PACKAGE.rglob("*.py")
    if re.search(r"sealed_json\.write\(", path.read_text())
  }
  assert writes == _FORMATS.keys()


def test_sealed_file_of_today_is_read_and_written(tmp_path):
  path = tmp_path / "sealed.json"
  path.write_text(_SEALED)
  body = {"b": [1.5, None], "a": "\xe4"}
  assert sealed_json.read(path, form=7) == body
  sealed_json.write(path, body, form=7)
  assert path.read_text() == _SEALED


def test_arrays_of_today_are_read_and_written(tmp_path):
  words = b"\x93NUMPY\x01\x00v\x00" + _HEAD.ljust(117).encode() + b"\n"
  words += b"\xc0?\x00\xc0"
  files = {"arrays.json": _MANIFEST.encode(), "w_0-f3692322f816.npy": words}
  for name, data in files.items():
    (tmp_path / name).write_bytes(data)
  found, body = array_files.load_arrays(tmp_path, what="figures")
  assert body == {"what": "figures", "note": [1]}
  assert found["w/0"].dtype == ml_dtypes.bfloat16
  assert found["w/0"].tolist() == [1.5, -2.0]
  array_files.save_arrays(tmp_path, found, body)
  assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == files


def test_hashes_of_today_stay():
  """The identity of an earlier version's run has them."""
  assert hashes.hash_bytes(np.float32([1, 2])) == (
    "b9c80b5adeca450753a16950c3cc655d271f7bef7a485bc83f112b72fef21d37"
  )
  assert hashes.fingerprint(np.float32([1, 2]), np.int8([[3]])) == (
    "28d7d774a190fc47ddbcfd1af17e5f7735e3387fc7309fba4d7ca8aabb9766b5"
  )


def test_hash_is_the_same_however_few_bytes_are_read_at_a_time(monkeypatch):
  arrays = (
    np.arange(15.0).reshape(5, 3)[:, ::2],
    np.float32(2),
    np.zeros((0, 2)),
  )
  whole = hashes.fingerprint(*arrays)
  monkeypatch.setattr(hashes, "_PART", 33)  # Two rows of 16 bytes.
  assert hashes.fingerprint(*arrays) == whole
  assert hashes.fingerprint(arrays[0][:4], *arrays[1:]) != whole
