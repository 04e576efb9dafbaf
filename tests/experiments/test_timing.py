"""Steps of the variants, timed in turn and compared within each turn."""

import types

import pytest

from tests.experiments import _loading


class Turn:
  """Takes its blocks' seconds from a list."""

  seconds: dict[str, list[float]]

  def __init__(self, comparison, variant, rate):
    self.traced, self.messages = False, ()
    self.blocks = list(self.seconds[variant])

  def take(self):
    return self.blocks.pop(0)

  def trace(self):
    self.traced = True

  def sent_bytes(self):
    return 1000.0 if self.traced else None


def measure(timing, monkeypatch, **options):
  comparing = _loading.load("comparing_alone", "comparing.py", monkeypatch)
  monkeypatch.setattr(timing, "_Turn", Turn)
  return timing.measure(
    comparing.Config(rates=(0.1,)),
    {"ssgd": None, "ours": None},
    lambda options, variants: types.SimpleNamespace(),
    base="ssgd",
    blocks=3,
    **options,
  )


def test_a_ratio_is_that_of_the_same_turn(monkeypatch, capsys):
  timing = _loading.load("timing_alone", "timing.py", monkeypatch)
  # The machine gets slower and slower; the first block is to get warm.
  Turn.seconds = {
    "ssgd": [9.0, 1.0, 2.0, 4.0],
    "ssgd again": [9.0, 1.0, 2.0, 8.0],
    "ours": [0.1, 0.5, 0.6, 3.0],
  }
  rows = measure(timing, monkeypatch)
  told = {row["method"]: (row["step_s"], row["ratio"]) for row in rows}
  assert told == {
    "ssgd": (2.0, 1.0),
    "ssgd again": (2.0, 1.0),
    "ours": (0.6, 0.5),
  }
  assert rows[1]["quartiles"] == pytest.approx([1.0, 2.0])
  assert "ours" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("bits_per_s", "name", "modelled_s"),
  [(1e4, "8x0.01mbit", 0.5 + 0.8), (float("inf"), "8xunlimited", 0.5)],
)
def test_a_model_over_a_link_is_computation_and_bytes(
  bits_per_s, name, modelled_s, monkeypatch
):
  timing = _loading.load("timing_alone", "timing.py", monkeypatch)
  names = ("ssgd", "ssgd again", "ours", "computation")
  Turn.seconds = dict.fromkeys(names, [1.0] * 4) | {"computation": [0.5] * 4}
  link = timing.Link(8, bits_per_s)
  rows = measure(timing, monkeypatch, link=link)
  assert link.name == name
  assert [row["modelled_s"] for row in rows] == [pytest.approx(modelled_s)] * 4
  assert {(row["hosts"], row["sent_bytes"]) for row in rows} == {(8, 1000.0)}
