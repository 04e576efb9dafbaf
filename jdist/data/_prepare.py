"""Data sets that TensorFlow Datasets has prepared, once per machine."""

import importlib.util
import json
import os
import pathlib
import re
import urllib.error
import urllib.request

from jdist import checks
from jdist.data import _catalog


def tfds_dir() -> pathlib.Path:
  """Returns the folder in which TensorFlow Datasets keeps prepared sets."""
  # The rule of tfds.core.constants; importing it takes seconds.
  given = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  return pathlib.Path(given).expanduser()


def find_prepared(name: str) -> pathlib.Path | None:
  """Finds the newest array_record copy of a set by its TFDS name."""
  # TensorFlow Datasets itself would try for minutes to reach a server.
  found = []
  for info in (tfds_dir() / name).glob("*/dataset_info.json"):
    version = info.parent.name
    # An interrupted preparation leaves a folder called "3.0.1.incompleteABC".
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
      continue
    # Only TensorFlow reads the other formats.
    if json.loads(info.read_text()).get("fileFormat") == "array_record":
      found.append(([int(part) for part in version.split(".")], info.parent))
  return max(found)[1] if found else None


def prepare(name: str) -> None:
  """Downloads a data set and prepares it as array_record.

  A set that is prepared, or that needs no preparation (digits), is left as it
  is.  Preparation needs TensorFlow (about 1.3 GB), and reading does not. The
  command is `python -m jdist.data prepare NAME`.

  Args:
    name: A name of `load` or `load_text`.

  Raises:
    ImportError: when TensorFlow or TensorFlow Datasets is not installed.
    ConnectionError: when the server does not answer within seconds.
  """
  source = _catalog.find(name)
  if not source.tfds_name or find_prepared(source.tfds_name):
    return
  tfds = checks.import_extra("tensorflow_datasets", "data")
  if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
      f"Preparing {name!r} needs TensorFlow (reading it afterwards does not), "
      "which is not installed. Install it with: "
      'pip install tensorflow ".[data]" in the clone of jdist'
    )
  _check_reachable(name, source)
  builder = tfds.builder(
    source.tfds_name, data_dir=tfds_dir(), file_format="array_record"
  )
  builder.download_and_prepare(file_format="array_record")


def require_prepared(name: str, *, download: bool = False) -> pathlib.Path:
  """Returns the prepared copy of a set; with `download` it is made first."""
  tfds_name = _catalog.find(name).tfds_name
  prepared = find_prepared(tfds_name)
  if prepared is None and download:
    prepare(name)
    prepared = find_prepared(tfds_name)
  if prepared is None:
    raise FileNotFoundError(_how_to_prepare(name))
  return prepared


def _how_to_prepare(name: str) -> str:
  folder = _catalog.find(name).tfds_name
  message = (
    f"`name`: the data set {name!r} is not prepared as array_record in "
    f"{tfds_dir()}. On a machine with a network, in the clone of "
    'jdist, run:\n  pip install tensorflow ".[data]" &&\n'
    f"  python -m jdist.data prepare {name}\n"
    f"or copy the folder {folder} from where it is prepared, or let "
    "TFDS_DATA_DIR name the folder that holds it."
  )
  if any((tfds_dir() / folder).glob("*/dataset_info.json")):
    message += (
      " There is a copy in another format, which only TensorFlow can read; "
      "keep one folder per format."
    )
  return message


def _check_reachable(name: str, source: _catalog.Source) -> None:
  request = urllib.request.Request(source.url, method="HEAD")
  try:
    # TensorFlow Datasets would retry for minutes before it gives up.
    with urllib.request.urlopen(request, timeout=10.0):
      pass
  except urllib.error.HTTPError:
    # The server is reachable; TensorFlow Datasets reports what it lacks.
    pass
  except OSError as error:
    raise ConnectionError(
      f"The data set {name!r} cannot be downloaded: {source.url} did not "
      f"answer ({error}). Prepare it where there is a network, with "
      f"`python -m jdist.data prepare {name}`, and copy its folder to "
      f"{tfds_dir() / source.tfds_name}."
    ) from error
