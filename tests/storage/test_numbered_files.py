"""Checkpoints by number, rows of JSON, and what is in them."""

import math

import numpy as np
import pytest

from jdist.storage import hashes, json_lines, numbered_files


def test_newest_whole_file_is_read_and_damaged_ones_are_named(tmp_path):
  for name in ("step_9", "step_10", "step_2", "step_x", "notes"):
    (tmp_path / name).write_text("damaged" if name == "step_10" else name)

  def read(path):
    if path.read_text() == "damaged":
      raise hashes.DamagedError(path, "has changed")
    return path.name

  found = numbered_files.find(tmp_path, r"step_(\d+)")
  assert list(found) == [10, 9, 2]
  with pytest.warns(UserWarning, match="step_10 is damaged .step_10 has"):
    assert numbered_files.read_newest(found.values(), read) == "step_9"
  with pytest.warns(UserWarning, match="step_10"):
    assert numbered_files.read_newest([found[10]], read) is None
  assert not numbered_files.find(tmp_path / "none", r"step_(\d+)")


@pytest.mark.parametrize(
  ("other", "name"),
  [("update_0000000001", r"step_(\d{8})"), ("step_00000001", r"update_(\d+)")],
)
def test_checkpoints_of_trainers_and_servers_are_kept_apart(
  other, name, tmp_path
):
  (tmp_path / other).mkdir()
  with pytest.raises(ValueError, match=f"servers alone, got .*{other}"):
    numbered_files.find(tmp_path, name)


def test_row_has_null_for_what_json_cannot_say():
  row = {"loss": math.nan, "of": (np.float32(math.inf), [np.int64(3), True])}
  assert json_lines.plain(row) == {"loss": None, "of": [None, [3, True]]}
  assert type(json_lines.plain(np.int64(3))) is int
