"""Rows that are run again are there, and compared without their times."""

import math

import pytest

from jdist import training
from tests.experiments import _loading

repeat = _loading.alone("repeat_rows", "repeat.py")


def test_times_of_a_machine_are_not_compared():
  row = {
    "accuracy": 0.5, "clock": "wall", "samples_per_s": 3.0, "train_s": 2.0,
    "curve": [{"loss": 1.0, "x": "y"}], "commit": "a", "config": {"seeds": [1]},
  }  # fmt: skip
  found = dict(repeat.numbers(row))
  assert found == {"accuracy": 0.5, "curve[0].loss": 1.0, "config.seeds[0]": 1}
  virtual = dict(repeat.numbers(row | {"clock": "virtual"}))
  assert virtual == found | {"samples_per_s": 3.0}


def test_row_of_another_seed_is_another_run():
  row = {"seed": 1, "method": "a", "config": {"epochs": 2, "seeds": (1,)}}
  assert repeat.unlike(row, row | {"config": {"epochs": 2, "seeds": (5,)}}) == 0
  assert repeat.unlike(row, row | {"config": {"epochs": 3}}) == 1
  assert repeat.unlike(row, row | {"seed": 2}) == math.inf


@pytest.mark.parametrize("name", repeat.REPEATS)
def test_rows_and_commands_are_there(name):
  one = repeat.REPEATS[name]
  rows = training.read_rows(_loading.FOLDER / one.rows)
  assert any(one.row.items() <= row.items() for row in rows)
  assert (_loading.FOLDER / one.command[0]).exists()
