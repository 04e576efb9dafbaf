"""Checkpoints by number, rows of JSON, and what is in them."""

import math

import numpy as np
import pytest

from jdist.storage import hashes, json_lines, numbered_files


def test_newest_whole_file_is_read_and_damaged_ones_are_named(tmp_path):
  numbers = "00000009", "99999999", "100000000"  # Not in the order of text.
  for number in numbers:
    (tmp_path / f"step_{number}").write_text(number)
  for name in ("step_00000010.json", "step_x", "notes"):
    (tmp_path / name).touch()

  def read(path):
    if path.name == "step_100000000":
      raise hashes.DamagedError(path, "has changed")
    return path.read_text()

  found = numbered_files.find(tmp_path, "step_")
  assert list(found) == [10**8, 10**8 - 1, 9]
  assert list(numbered_files.find(tmp_path, "step_", ".json")) == [10]
  with pytest.warns(UserWarning, match="step_100000000 is damaged"):
    assert numbered_files.read_newest(found.values(), read) == "99999999"
  with pytest.warns(UserWarning, match="step_100000000"):
    assert numbered_files.read_newest([found[10**8]], read) is None
  assert not numbered_files.find(tmp_path / "none", "step_")


@pytest.mark.parametrize(
  ("here", "there"), [("step_", "update_"), ("update_", "step_")]
)
def test_checkpoints_of_trainers_and_servers_are_kept_apart(
  here, there, tmp_path
):
  (tmp_path / f"{there}0000000001").mkdir()
  with pytest.raises(ValueError, match=f"servers alone, got .*{there}"):
    numbered_files.find(tmp_path, here)


def test_row_has_null_for_what_json_cannot_say():
  row = {"loss": math.nan, "of": (np.float32(math.inf), [np.int64(3), True])}
  assert json_lines.plain(row) == {"loss": None, "of": [None, [3, True]]}
  assert type(json_lines.plain(np.int64(3))) is int
