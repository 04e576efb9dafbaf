"""Steps of the variants, timed in turn and compared within each turn."""

import jax
import pytest

from jdist import methods
from jdist.training import comparison
from jdist.training.comparison import _step_times


class Turn:
  """Takes its blocks' seconds from a list."""

  seconds: dict[str, list[float]]

  def __init__(self, chains, variant, rate):
    self.traced, self.messages = False, ()
    self.blocks = list(self.seconds[variant])

  def take(self):
    return self.blocks.pop(0)

  def trace(self):
    self.traced = True

  def sent_bytes(self):
    return 1000.0 if self.traced else None


def measure(monkeypatch, **options):
  monkeypatch.setattr(_step_times, "_Turn", Turn)
  chains = comparison.Chains(
    comparison.Config(rates=(0.1,)), {"ssgd": None, "ours": None}, "a workload"
  )
  return comparison.step_times(chains, base="ssgd", blocks=3, **options)


def test_a_ratio_is_that_of_the_same_turn(monkeypatch, capsys):
  # The machine gets slower and slower; the first block is to get warm.
  Turn.seconds = {
    "ssgd": [9.0, 1.0, 2.0, 4.0],
    "ssgd again": [9.0, 1.0, 2.0, 8.0],
    "ours": [0.1, 0.5, 0.6, 3.0],
  }
  rows = measure(monkeypatch)
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
  names = ("ssgd", "ssgd again", "ours", "computation")
  Turn.seconds = dict.fromkeys(names, [1.0] * 4) | {"computation": [0.5] * 4}
  link = comparison.HostLinks(8, bits_per_s)
  rows = measure(monkeypatch, links=link)
  assert link.name == name
  assert [row["modelled_s"] for row in rows] == [pytest.approx(modelled_s)] * 4
  assert {(row["hosts"], row["sent_bytes"]) for row in rows} == {(8, 1000.0)}


@pytest.mark.parametrize("one_core", [False, True])
def test_the_step_without_messages_runs(one_core):
  pytest.importorskip("sklearn")
  kind = comparison.Chains
  chains = (comparison.on_one_core(kind) if one_core else kind)(
    comparison.Config(dataset="digits", model="mlp", workers=2, rates=(0.1,)),
    {"ssgd": lambda run: methods.ssgd(run.inner, axis=run.axis)},
  )
  with jax.numpy_dtype_promotion("standard"):  # Of Optax's schedules.
    rows = comparison.step_times(
      chains, blocks=2, links=comparison.HostLinks(1, float("inf"))
    )
  sent = {row["method"]: row["sent_bytes"] for row in rows}
  assert sent["computation"] == 0 < sent["ssgd"]
