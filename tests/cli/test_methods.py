"""Every method that the commands name can be built, and takes steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import training, transforms
from jdist.cli import _experiment, _methods, _options, _trained

# Two workers who disagree have no majority, and between their targets nothing
# is better than anything; Muon goes a bounded way in each step.
_FAR = {"signsgd": 1.3, "muloco": 1.3}
_SHAPES = {"a": (3,), "b": (2, 2), "c": (), "d": (5,)}


# They have no rounds, and an interval changes nothing.
_IN_EVERY_STEP = {
  "ssgd", "od_sgd", "qsgd", "terngrad", "signsgd", "ef_signsgd",
  "one_bit_adam", "topk_sgd", "dgc", "powersgd", "demo",
}  # fmt: skip
# Those with trained networks have tests of their own.
_NAMES = [name for name in _methods.METHODS if name not in _trained.NEEDS]


@pytest.mark.parametrize(
  ("name", "interval"),
  [(name, 1) for name in _NAMES]
  + [(name, 3) for name in _NAMES if name not in _IN_EVERY_STEP],
)
def test_a_method_trains_towards_its_target(name, interval):
  options = _options.Train(interval=interval, steps=120, momentum=0.5)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  optimizer = _methods.build_method(name, options, budget, "worker")
  params = {key: jnp.zeros(shape) for key, shape in _SHAPES.items()}

  def one(target):
    def body(carry, _):
      w, state = carry
      loss = sum(jnp.mean((x - target) ** 2) for x in w.values())
      gradients = jax.tree.map(lambda x: x - target, w)
      updates, state = optimizer.update(gradients, state, w, loss=loss)
      return (transforms.apply_updates(w, updates, state), state), None

    carry = params, optimizer.init(params)
    w, state = jax.lax.scan(body, carry, length=budget.num_steps)[0]
    return transforms.anchor(state, w)

  # Two workers, whose targets lie around 3.
  anchors = jax.jit(jax.vmap(one, axis_name="worker"))(jnp.array([2.0, 4.0]))
  for x in jax.tree.leaves(anchors):
    np.testing.assert_array_equal(x[0], x[1])
    np.testing.assert_allclose(x, 3.0, atol=_FAR.get(name, 0.7))


def test_the_table_tells_which_options_a_method_uses(monkeypatch):
  read = set()

  class Recorded(_options.Train):
    def __getattribute__(self, name):
      read.add(name)
      return super().__getattribute__(name)

  # It copies all options, and reads them.
  monkeypatch.setattr(
    _methods.Task, "without_momentum", lambda self: self.inner
  )
  budget = _methods.make_budget(_options.Train(steps=12), 0.1, 4.0)
  for name in _NAMES:
    task = _methods.Task(optax.sgd(0.1), Recorded(), budget, None)
    read.clear()
    _methods.METHODS[name](task)
    used = {option for option, who in _methods.USED_BY.items() if name in who}
    assert used == read & set(_methods.USED_BY), name


def test_what_the_preset_has_is_not_given():
  gpu = _options.with_preset(_options.Train, "cifar10-gpu")
  assert gpu.stream
  _methods.check_used(gpu, ("local_sgd",))
  many = dataclasses.replace(gpu, delay_steps=2)
  _methods.check_used(many, ("local_sgd", "msdpu"))
  with pytest.raises(ValueError, match="`--delay-steps` must be left out"):
    _methods.check_used(many, ("local_sgd",))


@pytest.mark.parametrize("rule", ["msdpu", "adacomm"])
def test_a_long_first_interval_is_not_cut(rule):
  options = _options.Train(interval=32, interval_policy=rule, steps=100)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  optimizer = _methods.build_method("local_sgd", options, budget, None)
  assert transforms.interval(optimizer.init(jnp.zeros(2))) == 32


def test_the_host_ends_rounds_where_a_method_takes_it(monkeypatch):
  told = []

  class Recorded(training.Trainer):
    def __init__(self, *args, host_rounds=False, **options):
      told.append(host_rounds)
      super().__init__(*args, host_rounds=host_rounds, **options)

  monkeypatch.setattr(training, "Trainer", Recorded)
  options = _options.Train(
    dataset="digits", model="mlp", workers=2, host_rounds=True, delay_steps=2
  )
  experiment = _experiment.build(options)
  for method in ("ssgd", "local_sgd", "diloco", "easgd", "msdpu"):
    _experiment.Prepared(experiment, method, 0.1)
  # SSGD has no rounds.
  assert told == [False, True, True, True, True]
