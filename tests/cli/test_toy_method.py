"""A user's method is a sync rule and an entry of the registry."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import cli, methods, training, transforms


# The sync rule decides how a round ends.
class SignedOuterStep(transforms.OuterStep):
  """Moves the anchor by the signs of the mean pseudo-gradient."""

  def move(self, end, mean, exact, relative):
    return super().move(end, jax.tree.map(jnp.sign, mean), exact, relative)


# A method of the library has its entry in `methods.registry`.
TOY = methods.Method(
  "local steps; the signs of their mean are an outer gradient",
  functools.partial(
    transforms.local_steps, rule=SignedOuterStep(optax.sgd(0.01))
  ),
)
_WORDS = (
  "--codec", "int4", "--feedback", "error", "--interval", "2", "--steps", "6",
  "--workers", "4", "--batch-size", "32", "--evaluate-every-epochs", "0.05",
  "--warmup-epochs", "0",
)  # fmt: skip


def test_new_sync_rule_trains_from_the_command_line(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(methods.registry, "toy", TOY)
  words = ["train", "--method", "toy", *_WORDS, "--output", str(tmp_path)]
  assert cli.main(words) == 0
  (row,) = training.read_rows(tmp_path / "rows.jsonl")
  assert row["method"] == "toy" and row["rounds"] == 3
  # Each of 9,610 parameters takes four bits, and blocks have scales.
  exact = 2 * 3 / 4 * 4 * 9610
  assert row["sent_bytes"] / row["rounds"] == pytest.approx(exact / 8, rel=0.15)
  assert cli.main(["--help"]) == 0
  assert TOY.summary in capsys.readouterr().out
