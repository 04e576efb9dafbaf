"""What is refused: the argument, the rule, the value and the remedy."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import methods, reducers, states, transforms
from jdist.transforms import intervals
from tests.transforms import _reducers

SGD = optax.sgd(0.1)


def local(inner=SGD, interval=2, axis=None, **others):
  return transforms.local_steps(inner, interval, axis=axis, **others)


def msdpu(optimizer=SGD, interval=2, learning_rate=0.1, **others):
  return methods.msdpu(optimizer, interval, learning_rate, axis=None, **others)


REJECTED = {
  "axis": (
    lambda: transforms.average_gradients(("a", "a")),
    r"`axis` must be None, a name, or two different names \(inner, outer\), "
    r"got \('a', 'a'\)",
  ),
  "axis of local steps": (lambda: local(axis=3), "`axis` must be .*, got 3"),
  "inner": (
    lambda: local(inner=0.1),
    r"`inner` must be an Optax transformation, for instance "
    r"`optax.sgd\(0.1\)`, got 0.1",
  ),
  "outer": (
    lambda: transforms.OuterStep("nesterov"),
    "`outer` must be an Optax transformation, .*, got 'nesterov'",
  ),
  "interval 0": (
    lambda: local(interval=0),
    "`interval` must be an int >= 1, got 0",
  ),
  "interval True": (
    lambda: local(interval=True),
    "`interval` must be an int >= 1, got True",
  ),
  "interval 2.5": (
    lambda: local(interval=2.5),
    "`interval` must be an int >= 1, got 2.5",
  ),
  "interval too long": (
    lambda: local(interval=2**31),
    "`interval` must be at most 1073741824, got 2147483648",
  ),
  "stream True": (
    lambda: transforms.Delayed(stream=True),
    r"`stream` must be a `transforms.Stream`, .*`stream=Stream\(\)`, .* True",
  ),
  "msdpu's stream": (
    lambda: msdpu(overlap=transforms.Delayed(carry=None, stream=True)),
    "`stream` must be a `transforms.Stream`, .* got True",
  ),
  "order": (
    lambda: transforms.Stream(order="fifo"),
    "`order` must be 'front_first', 'back_first' or a function .* got 'fifo'",
  ),
  "order of parts": (
    lambda: reducers.Chunked(reducers.Exact(), order="fifo"),
    "`order` must be 'front_first', .* got 'fifo'",
  ),
  "max_bytes": (
    lambda: transforms.Stream(max_bytes=4),
    "`max_bytes` must be an int >= 8, got 4",
  ),
  "specs": (
    lambda: local(
      overlap=transforms.Delayed(
        stream=transforms.Stream(specs=[jax.sharding.PartitionSpec()] * 2)
      )
    ).init(jnp.zeros(3)),
    "`specs` must have one PartitionSpec for each leaf of the parameters: 1, "
    "got 2. `Workers.specs",
  ),
  "overlap": (
    lambda: local(overlap=1),
    r"`overlap` must be `transforms.Delayed\(...\)`, .* got 1",
  ),
  "rule": (
    lambda: local(rule=0.7),
    "`rule` must be a sync rule, an Optax optimizer .* got 0.7",
  ),
  "compression": (
    lambda: local(compression=_reducers.Largest(2)),
    "`compression` must be a `jdist.Compression`",
  ),
  "momenta that would be late": (
    lambda: local(
      rule=transforms.SlowMomentum(0.1, buffers="average"),
      overlap=transforms.Delayed(),
    ),
    "`overlap` must be None for `SlowMomentum`",
  ),
  "a mix of what is pulled": (
    lambda: local(
      rule=transforms.Elastic(0.9), overlap=transforms.Delayed(1, mix=0.5)
    ),
    "`mix` must be None for `Elastic`",
  ),
  "a part carried beside the anchor": (
    lambda: local(
      rule=transforms.Elastic(0.9), overlap=transforms.Delayed(carry=None)
    ),
    "`carry` must be left out for `Elastic`",
  ),
  "two ends of a warm-up": (
    lambda: msdpu(warmup_steps=3, overlap=transforms.Delayed(after_step=9)),
    "`overlap` must begin when the warm-up ends",
  ),
  "a warm-up beside the anchor": (
    lambda: local(
      rule=transforms.Elastic(0.9), overlap=transforms.Delayed(after_step=2)
    ),
    "`after_step` must be 0 for `Elastic`",
  ),
  "a warm-up of variates within a round": (
    lambda: local(
      rule=transforms.ControlVariates(0.1),
      overlap=transforms.Delayed(1, after_step=2),
    ),
    "`after_step` must be 0 for `ControlVariates` with `steps`",
  ),
  "carry": (
    lambda: transforms.Delayed(carry=1.5),
    r"`carry` must be in \[0, 1\], got 1.5",
  ),
  "carry nan": (
    lambda: transforms.Delayed(carry=float("nan")),
    r"`carry` must be in \[0, 1\], got nan",
  ),
  "carry text": (
    lambda: transforms.Delayed(carry="1/N"),
    r"`carry` must be a number in \[0, 1\], got '1/N'",
  ),
  "steps": (
    lambda: transforms.delay_gradients(SGD, -1),
    "`steps` must be an int >= 0, got -1",
  ),
  "delayed optimizer": (
    lambda: transforms.delay_gradients(None, 1),
    "`optimizer` must be an Optax transformation, .*, got None",
  ),
  "strength": (
    lambda: transforms.pull_to_anchor(-1.0, 0.1),
    r"`strength` must be in \[0, inf\], got -1.0",
  ),
  "pull's learning_rate": (
    lambda: transforms.pull_to_anchor(0.1, 0.0),
    r"`learning_rate` must be in \(0, inf\], got 0.0",
  ),
  "ssgd": (
    lambda: methods.ssgd(None, axis=None),
    "`optimizer` must be an Optax transformation, .*, got None",
  ),
  "local_sgd": (
    lambda: methods.local_sgd(None, 2, axis=None),
    "`optimizer` must be an Optax transformation, .*, got None",
  ),
  "post_local_sgd": (
    lambda: methods.post_local_sgd(None, 2, 2, axis=None),
    "`optimizer` must be an Optax transformation, .*, got None",
  ),
  "switch_step": (
    lambda: methods.post_local_sgd(SGD, 2, -1, axis=None),
    "`switch_step` must be an int >= 0, got -1",
  ),
  "diloco": (
    lambda: methods.diloco(None, 2, axis=None),
    "`optimizer` must be an Optax transformation, .*, got None",
  ),
  "outer_learning_rate": (
    lambda: methods.diloco(SGD, 2, -0.7, axis=None),
    r"`outer_learning_rate` must be in \(0, inf\], got -0.7",
  ),
  "outer_momentum": (
    lambda: methods.diloco(SGD, 2, 0.7, 1.1, axis=None),
    r"`outer_momentum` must be in \[0, 1\], got 1.1",
  ),
  "msdpu's optimizer": (
    lambda: msdpu(optimizer=None),
    "`optimizer` must be an Optax transformation, .*, got None",
  ),
  "msdpu's interval": (
    lambda: msdpu(interval=0),
    "`interval` must be an int >= 1, got 0",
  ),
  "msdpu's learning_rate": (
    lambda: msdpu(learning_rate=-1.0),
    r"`learning_rate` must be in \(0, inf\], got -1.0",
  ),
  "msdpu's interval above the highest": (
    lambda: msdpu(interval=32),
    "`interval` must be at most `max_interval`, 16, got 32: .* Give "
    "`max_interval=32` or more",
  ),
  "a policy for a rate": (
    lambda: msdpu(learning_rate=intervals.fixed(8)),
    "`learning_rate` must be a positive number or a schedule, .* got an "
    "IntervalPolicy. An interval policy is given as `interval`",
  ),
  "an optimizer for a rate": (
    lambda: msdpu(learning_rate=SGD),
    "`learning_rate` must be .* got a GradientTransformationExtraArgs. .* its "
    "rate is meant",
  ),
  "a policy for an optimizer": (
    lambda: msdpu(optimizer=intervals.fixed(8)),
    "`optimizer` must be an Optax transformation, .* got an IntervalPolicy",
  ),
  "correction": (
    lambda: msdpu(correction=-0.1),
    r"`correction` must be in \[0, inf\], got -0.1",
  ),
  "warmup_steps": (
    lambda: msdpu(warmup_steps=-1),
    "`warmup_steps` must be an int >= 0, got -1",
  ),
  "max_interval": (
    lambda: msdpu(max_interval=0),
    "`max_interval` must be an int >= 1, got 0",
  ),
  "shared fields": (
    lambda: states.declare(shared=("m",))(optax.TraceState),
    r"`shared` must name fields of TraceState, got \['m'\]",
  ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", REJECTED)
def test_an_argument_out_of_range_is_refused(name):
  make, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    make()


def test_parameters_must_be_given():
  optimizer = local()
  w = jnp.ones(2)
  with pytest.raises(ValueError, match=r"`params` must be given to `update`"):
    optimizer.update(w, optimizer.init(w))


def test_a_needed_loss_must_be_given():
  optimizer = msdpu()
  w = jnp.ones(2)
  state = optimizer.init(w)
  with pytest.raises(ValueError, match=r"`loss` must be given .*loss=loss"):
    optimizer.update(w, state, w)
  with pytest.raises(ValueError, match=r"`loss` must be a scalar.*\(2,\)"):
    optimizer.update(w, state, w, loss=jnp.ones(2))


def test_a_pull_outside_of_local_steps_is_refused():
  optimizer = optax.chain(transforms.pull_to_anchor(0.1, 0.1), SGD)
  w = jnp.ones(2)
  with pytest.raises(ValueError, match="must stand in the inner chain of"):
    optimizer.update(w, optimizer.init(w), w)


def test_two_anchors_side_by_side_are_refused():
  optimizer = optax.chain(local(), local())
  state = jax.eval_shape(optimizer.init, jnp.ones(2))
  with pytest.raises(ValueError, match=r"one `local_steps` at most, .* are 2"):
    transforms.synchronized(state)
