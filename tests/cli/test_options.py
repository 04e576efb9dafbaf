"""Declarations of options: each number has its range."""

import dataclasses
import sys
import typing

import pytest

from jdist import server
from jdist.cli import _commands, _output, _parts

_COMMANDS = [
  x
  for x in vars(_commands).values()
  if dataclasses.is_dataclass(x) and x.__module__ == _commands.__name__
]

# Numbers whose rules depend on other options or on what they are given to,
# which refuses them.
_MEAN = "alpha batch_size bits carry correction delay_steps rank ratio"
_SERVER = "ahead error_limit grace local_momentum quorum"
_ELSEWHERE = {
  "Train": f"{_MEAN} {_SERVER} chunks cuts gpus_per_worker window",
  "Compare": _MEAN,
  "Overlap": "bits rank ratio",
  "Bytes": "bits cut rank ratio",
  "Simulate": f"{_SERVER} interval seed",
  "Pipeline": "batch_size chunks iterations max_live max_versions microbatches "
  "stages window",
}


def _is_number(hint):
  kinds = typing.get_args(hint) or (hint,)
  return int in kinds or float in kinds


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda x: x.__name__)
def test_every_number_has_a_range(command):
  hints = typing.get_type_hints(command)
  without = {
    field.name
    for field in dataclasses.fields(command)
    if _is_number(hints[field.name])
    and getattr(field.metadata.get("option"), "within", None) is None
  }
  assert without == set(_ELSEWHERE.get(command.__name__, "").split())


def test_own_protocol_is_found_in_the_current_directory(tmp_path, monkeypatch):
  # As the installed command starts: without the directory on its path.
  (tmp_path / "nearby.py").write_text("from jdist.server import ASP as Own\n")
  monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
  monkeypatch.chdir(tmp_path)
  _parts.resolve({"protocol": "nearby:Own"})
  assert server.PROTOCOLS.pop("nearby:Own") is server.ASP


def test_table_has_its_title_and_caption():
  grid = _output.table("Title", "Caption", {"a": str, "b": str}, [])
  assert (grid.title, grid.caption) == ("Title", "Caption")
  assert [x.justify for x in grid.columns] == ["left", "right"]
