"""Options of a method become its arguments: policies, rates, predictions."""

import math
import types

import optax
import pytest

from jdist import methods, transforms
from jdist.cli import _commands, _methods
from jdist.transforms import intervals


def _noted(monkeypatch, module, *names):
  """Has functions of a module return their name and what they are given."""
  for name in names:
    monkeypatch.setattr(
      module, name, lambda *given, _name=name, **more: (_name, given, more)
    )


_LONG = {"max_interval": 16}


@pytest.mark.parametrize(
  ("policy", "wanted"),
  [
    ("fixed", (("fixed", (6,), {}))),
    ("growth", ("growth", ("rate",), {"start": 0.5, "max_interval": 6})),
    ("msdpu", ("msdpu", (6, "rate"), _LONG)),
    ("adacomm", ("adacomm", (6, 4, "rate"), _LONG)),
    # Half of the rate behind the warm-up.
    ("qsr", ("qsr", ("rate", 0.5 * 3.0 * 6**0.5, 6), {"warmup_steps": 3})),
  ],
)
def test_policy_is_given_the_run(policy, wanted, monkeypatch):
  _noted(monkeypatch, intervals, "fixed", "growth", "msdpu", "adacomm", "qsr",
         "ending_at")  # fmt: skip
  rate = float  # At step 3 it is 3.
  options = _commands.Train(
    interval=6, interval_policy=policy, growth_start=0.5
  )
  run = _methods.run_of(options, 40, 3, rate)
  name, given, more = wanted
  given = tuple(rate if x == "rate" else x for x in given)
  found = _methods._interval("diloco", methods.registry["diloco"], options, run)
  assert found == ("ending_at", (40, (name, given, more)), {})
  short = _methods.run_of(options, 9, 0, rate)
  found = _methods._interval(
    "diloco", methods.registry["diloco"], options, short
  )
  _, (end, (_, given, _)), _ = found
  assert end == 9 and (policy != "adacomm" or given[1] == 1)


@pytest.mark.parametrize(
  ("policy", "interval", "most"),
  [
    ("fixed", 6, 6), ("growth", 6, 6), ("msdpu", 6, 16), ("msdpu", 20, 20),
    ("adacomm", 6, 16), ("qsr", 6, math.inf),
  ],
)  # fmt: skip
def test_delay_is_as_long_as_the_longest_round(policy, interval, most):
  def made(delay):
    options = _commands.Train(
      interval=interval, interval_policy=policy, delay_steps=delay
    )
    run = _methods.run_of(options, 40, 3, optax.constant_schedule(0.1))
    _methods._interval("diloco", methods.registry["diloco"], options, run)

  if most == math.inf:
    return made(1000)
  made(most)
  with pytest.raises(ValueError, match=f"`--delay-steps` .* from 0 to {most},"):
    made(most + 1)


@pytest.mark.parametrize(
  ("schedule", "warmup_epochs", "wanted"),
  [
    ("cosine", 0.5, ("cosine", (0.1, 1.0, 5, 20, 0.01))),
    ("constant", 0.5, ("constant", (0.1, 1.0, 5))),
    ("constant", 0.0, ("constant", (1.0, 1.0, 0))),
    # A warm-up takes half of a short run at most.
    ("cosine", 9.0, ("cosine", (0.1, 1.0, 10, 20, 0.01))),
  ],
)
def test_rates_are_of_the_run(schedule, warmup_epochs, wanted, monkeypatch):
  monkeypatch.setattr(
    optax, "warmup_cosine_decay_schedule", lambda *given: ("cosine", given)
  )
  monkeypatch.setattr(
    optax.schedules, "warmup_constant_schedule",
    lambda *given: ("constant", given),
  )  # fmt: skip
  options = _commands.Train(
    schedule=schedule, warmup_epochs=warmup_epochs, steps=20, interval=7,
    momentum=0.25, weight_decay=0.125, optimizer="adamw",
  )  # fmt: skip
  run = _methods.make_budget(options, 1.0, steps_per_epoch=9.5)
  name, given = wanted
  assert (run.num_steps, run.warmup_steps) == (20, given[2])
  assert run.learning_rate == (name, pytest.approx(given))
  assert run.steps_per_epoch == 10 and run.interval == 7
  assert (run.momentum, run.weight_decay) == (0.25, 0.125)
  assert run.optimizer == "adamw"
  one = _methods.make_budget(
    _commands.Train(epochs=0.01, schedule=schedule), 1.0, steps_per_epoch=9.5
  )
  assert one.num_steps == 1 and one.warmup_steps == 0
  assert schedule != "cosine" or one.learning_rate[1][3] == 1


@pytest.mark.parametrize(
  ("optimizer", "own_momentum", "steps", "b2"),
  [
    ("adamw", False, 2, 0.999), ("sgd", False, 2, None),
    ("adamw", True, 2, None), ("adamw", False, None, None),
  ],
)  # fmt: skip
def test_weights_are_predicted_for_gradients_that_are_late(
  optimizer, own_momentum, steps, b2, monkeypatch
):
  asked, given = [], {}
  monkeypatch.setattr(
    _methods, "optimizer_of",
    lambda options, run, *, plain: ("inner", options.optimizer, plain),
  )  # fmt: skip
  monkeypatch.setattr(
    transforms, "predict_weights",
    lambda inner, number, *, b2: asked.append((inner, number, b2)) or "later",
  )  # fmt: skip
  method = types.SimpleNamespace(
    arguments=(), in_rounds=False, own_momentum=own_momentum,
    build=lambda inner, run, **more: given.update(more, inner=inner) or "made",
  )  # fmt: skip
  monkeypatch.setitem(methods.registry, "mine", method)
  options = _commands.Train(optimizer=optimizer)
  found = _methods.build_method(
    "mine", options, "run", "axis", predicted_steps=steps, fixed=3
  )
  inner = "inner", optimizer, own_momentum
  assert found == "made"
  assert asked == ([] if steps is None else [(inner, 2, b2)])
  assert given == {
    "axis": "axis", "fixed": 3, "inner": inner if steps is None else "later",
  }  # fmt: skip


def test_adam_decays_weights_by_its_own_rule(monkeypatch):
  _noted(monkeypatch, optax, "adamw")
  options = _commands.Train(optimizer="adamw", weight_decay=0.25)
  run = _methods.run_of(options, 4, 0, "rate")
  found = _methods.optimizer_of(options, run)
  assert found == ("adamw", ("rate",), {"weight_decay": 0.25})
  run = _methods.run_of(options, 4, 0, optax.constant_schedule(0.1))
  plain = _methods.optimizer_of(options, run, plain=True)
  assert isinstance(plain, optax.GradientTransformation)
