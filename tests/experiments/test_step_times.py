"""Steps of the variants, timed in turn and compared within each turn."""

import jax
import pytest

from jdist import methods
from tests.experiments import _loading

optax_chains = _loading.shared("optax_chains")


class Turn:
  """A turn whose blocks take the seconds of a list."""

  messages = ()

  def __init__(self, *blocks):
    self.traced, self.blocks = False, list(blocks)

  def take(self):
    return self.blocks.pop(0)

  def trace(self):
    self.traced = True

  def sent_bytes(self):
    return 1000.0 if self.traced else None


def measure(turns, **options):
  return optax_chains.step_times(
    turns, {"workers": 8}, base="ssgd", blocks=3, **options
  )


def test_ratio_compares_blocks_of_the_same_turn(capsys):
  # The machine gets slower and slower; the first block only warms it up.
  rows = measure(
    {
      "ssgd": Turn(9.0, 1.0, 2.0, 4.0),
      "ssgd again": Turn(9.0, 1.0, 2.0, 8.0),
      "ours": Turn(0.1, 0.5, 0.6, 3.0),
    }
  )
  found = {row["method"]: (row["step_s"], row["ratio"]) for row in rows}
  assert found == {
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
def test_modelled_step_adds_bytes_to_the_computation(
  bits_per_s, name, modelled_s
):
  turns = {name: Turn(*[1.0] * 4) for name in ("ssgd", "ssgd again", "ours")}
  turns["computation"] = Turn(*[0.5] * 4)
  link = optax_chains.HostLinks(8, bits_per_s)
  rows = measure(turns, links=link)
  assert link.name == name
  assert [row["modelled_s"] for row in rows] == [pytest.approx(modelled_s)] * 4
  assert {(row["hosts"], row["sent_bytes"]) for row in rows} == {(8, 1000.0)}


@pytest.mark.parametrize("one_core", [False, True])
def test_step_without_messages_is_measured(one_core):
  pytest.importorskip("sklearn")
  kind = optax_chains.Chains
  chains = (optax_chains.on_one_core(kind) if one_core else kind)(
    optax_chains.Config(dataset="digits", model="mlp", workers=2, rates=(0.1,)),
    {"ssgd": lambda run: methods.ssgd(run.inner, axis=run.axis)},
  )
  # Optax's schedules mix dtypes.
  with jax.numpy_dtype_promotion("standard"):
    rows = chains.step_times(
      blocks=2, links=optax_chains.HostLinks(1, float("inf"))
    )
  sent = {row["method"]: row["sent_bytes"] for row in rows}
  assert sent["computation"] == 0 < sent["ssgd"]
