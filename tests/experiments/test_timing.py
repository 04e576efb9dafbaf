"""Steps of the variants, timed in turn and compared within each turn."""

import types

import pytest

from tests.experiments import _loading


class Turn:
  """Takes its blocks' seconds from a list."""

  seconds: dict[str, list[float]]

  def __init__(self, comparison, variant, rate):
    self.blocks, self.messages = list(self.seconds[variant]), ()

  def take(self):
    return self.blocks.pop(0)


def test_a_ratio_is_that_of_the_same_turn(monkeypatch, capsys):
  timing = _loading.load("timing_alone", "timing.py", monkeypatch)
  comparing = _loading.load("comparing_alone", "comparing.py", monkeypatch)
  monkeypatch.setattr(timing, "_Turn", Turn)
  # The machine gets slower and slower; the first block is to get warm.
  Turn.seconds = {
    "ssgd": [9.0, 1.0, 2.0, 4.0],
    "ssgd again": [9.0, 1.0, 2.0, 8.0],
    "ours": [0.1, 0.5, 0.6, 3.0],
  }
  rows = timing.measure(
    comparing.Config(rates=(0.1,)),
    {"ssgd": None, "ours": None},
    lambda options, variants: types.SimpleNamespace(),
    base="ssgd",
    blocks=3,
  )
  told = {row["method"]: (row["step_s"], row["ratio"]) for row in rows}
  assert told == {
    "ssgd": (2.0, 1.0),
    "ssgd again": (2.0, 1.0),
    "ours": (0.6, 0.5),
  }
  assert rows[1]["quartiles"] == pytest.approx([1.0, 2.0])
  assert "ours" in capsys.readouterr().out
