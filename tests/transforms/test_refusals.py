"""Refusals of transformations and methods: an argument and its rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, reducers, states, transforms
from jdist.transforms import intervals
from tests import _refusals
from tests.transforms import _reducers

SGD = optax.sgd(0.1)


def needing(updates, state, params=None, **given):
  """As that of Optax's Sophia, which takes a function of the caller."""
  raise ValueError("obj_fn must be provided.")


NEEDING = optax.GradientTransformationExtraArgs(lambda w: (), needing)
RATES = optax.cosine_decay_schedule(0.1, 100)


def local(inner=SGD, interval=2, axis=None, **others):
  return transforms.local_steps(inner, interval, axis=axis, **others)


def step(optimizer, **given):
  w = jnp.zeros(3)
  optimizer.update(w, optimizer.init(w), w, **given)


def fragments(control, inner=SGD):
  w = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
  optimizer = transforms.fragment_steps(inner, 2, 2, axis=None)
  optimizer.update(w, optimizer.init(w), w, control=control)


def applied(made):
  w = [jnp.zeros(2)]
  transforms.apply_updates(w, w, local().init(made))


def streamed(interval=4, **delay):
  stream = transforms.Stream()
  return local(interval=interval, overlap=transforms.Delayed(
    stream=stream, **delay
  ))  # fmt: skip


def msdpu(optimizer=SGD, interval=2, learning_rate=RATES, **others):
  return methods.msdpu(optimizer, interval, learning_rate, axis=None, **others)


@pytest.mark.smoke
@_refusals.table(
  (
    "axis",
    lambda: transforms.average_gradients(("a", "a")),
    "None, a name, or two different names",
  ),
  ("axis", lambda: local(axis=3), "None, a name"),
  ("inner", lambda: local(inner=0.1), "an Optax transformation"),
  (
    "rule",
    lambda: transforms.OuterStep("nesterov"),
    "an Optax transformation",
  ),
  (
    "rule",
    lambda: step(local(interval=1, rule=optax.polyak_sgd(0.5))),
    "an optimizer that needs neither pairs of parameters",
  ),
  (
    "rule",
    lambda: step(local(interval=1, rule=optax.lookahead(SGD, 2, 0.5))),
    "an optimizer that needs neither pairs of parameters",
  ),
  (
    "inner",
    lambda: step(local(inner=NEEDING)),
    "its update fails: obj_fn must be provided.",
  ),
  ("interval", lambda: local(interval=0), "an int >= 1"),
  ("interval", lambda: local(interval=True), "an int >= 1"),
  ("interval", lambda: local(interval=2.5), "an int >= 1"),
  ("interval", lambda: local(interval=2**31), "an int from 1 to 2147483647"),
  ("stream", lambda: transforms.Delayed(stream=True), "a `transforms.Stream`"),
  (
    "stream",
    lambda: msdpu(overlap=transforms.Delayed(carry=None, stream=True)),
    "a `transforms.Stream`",
  ),
  ("max_bytes", lambda: transforms.Stream(max_bytes=4), "an int >= 8"),
  (
    "specs",
    lambda: local(
      overlap=transforms.Delayed(
        stream=transforms.Stream(specs=[jax.sharding.PartitionSpec()] * 2)
      )
    ).init(jnp.zeros(3)),
    "one PartitionSpec for each leaf",
  ),
  ("overlap", lambda: local(overlap=1), "`transforms.Delayed(...)`"),
  (
    "overlap",
    lambda: local(overlap=transforms.Delayed),
    "`transforms.Delayed(...)`",
  ),
  ("rule", lambda: local(rule=0.7), "a sync rule, an Optax optimizer"),
  (
    "compression",
    lambda: local(compression=_reducers.Largest(2)),
    "a `jdist.Compression`",
  ),
  (
    "overlap",
    lambda: local(
      rule=transforms.SlowMomentum(0.1, buffers="average"),
      overlap=transforms.Delayed(),
    ),
    "None for `SlowMomentum`",
  ),
  (
    "mix",
    lambda: local(
      rule=transforms.Elastic(0.9), overlap=transforms.Delayed(1, mix=0.5)
    ),
    "None for `Elastic`",
  ),
  (
    "carry",
    lambda: local(
      rule=transforms.Elastic(0.9), overlap=transforms.Delayed(carry=None)
    ),
    "left out for `Elastic`",
  ),
  (
    "overlap",
    lambda: msdpu(warmup_steps=3, overlap=transforms.Delayed(after_step=9)),
    "begin when the warm-up ends",
  ),
  (
    "after_step",
    lambda: local(
      rule=transforms.Elastic(0.9), overlap=transforms.Delayed(after_step=2)
    ),
    "0 for `Elastic`",
  ),
  (
    "after_step",
    lambda: local(
      rule=transforms.ControlVariates(0.1),
      overlap=transforms.Delayed(1, after_step=2),
    ),
    "0 for `ControlVariates` with `steps`",
  ),
  ("carry", lambda: transforms.Delayed(carry=1.5), "in [0, 1]"),
  (
    "carry",
    lambda: transforms.Delayed(1, carry=0.3, mix=0.5),
    "left out with `mix`",
  ),
  (
    "carry",
    lambda: transforms.Delayed(1, carry=None, mix=0.5),
    "left out with `mix`",
  ),
  (
    "after_step",
    lambda: transforms.Delayed(0, mix=0.5, after_step=100),
    "0 where `steps` is 0",
  ),
  (
    "fragments",
    lambda: transforms.Control(fragments=3),
    "a tuple of `Control`",
  ),
  (
    "fragments",
    lambda: transforms.Control(fragments=(transforms.Control(), True)),
    "a tuple of `Control`",
  ),
  (
    "after_step",
    lambda: transforms.fragment_steps(
      SGD, 2, 2, axis=None, overlap=transforms.Delayed(1, after_step=3)
    ),
    "0 for `fragment_steps` (also as `streaming_diloco`), got 3",
  ),
  (
    "control",
    lambda: fragments(transforms.Control(round_ends=True)),
    "say `round_ends` for each fragment, in `fragments`, got True for all",
  ),
  (
    "control",
    lambda: fragments(
      transforms.Control(arrives=False, fragments=(transforms.Control(),) * 2)
    ),
    "say `arrives` for each fragment, in `fragments`, got False for all",
  ),
  (
    "control.fragments",
    lambda: fragments(transforms.Control(fragments=(transforms.Control(),))),
    "one control for each of 2 fragments, got 1",
  ),
  (
    "inner",
    lambda: fragments(None, optax.contrib.schedule_free_sgd(0.1)),
    "not keep iterates",
  ),
  *(
    ("params", lambda made=made: applied(made), "the optimizer's state was")
    for made in ([jnp.zeros(3)], [jnp.zeros(2)] * 2, jnp.zeros(2), ())
  ),
  *(
    ("stream_steps", lambda delay=delay: step(streamed(**delay)), reason)
    for delay, reason in (
      ({"after_step": None}, "the delay begins with the first long round"),
      ({"after_step": 3}, "the first 3 steps are not delayed"),
      (
        {"interval": intervals.ending_at(99, intervals.fixed(4))},
        "the interval is not one number",
      ),
      ({"steps": 2}, "the mean arrives 2 steps into a longer round"),
    )
  ),
  ("carry", lambda: transforms.Delayed(carry=float("nan")), "in [0, 1]"),
  ("carry", lambda: transforms.Delayed(carry="1/N"), "a number in [0, 1]"),
  ("steps", lambda: transforms.delay_gradients(SGD, -1), "an int >= 0"),
  (
    "optimizer",
    lambda: transforms.delay_gradients(None, 1),
    "an Optax transformation",
  ),
  ("strength", lambda: transforms.pull_to_anchor(-1.0, 0.1), "in [0, inf]"),
  ("learning_rate", lambda: transforms.pull_to_anchor(0.1, 0.0), "in (0, inf]"),
  (
    "optimizer",
    lambda: methods.ssgd(None, axis=None),
    "an Optax transformation",
  ),
  (
    "optimizer",
    lambda: methods.local_sgd(None, 2, axis=None),
    "an Optax transformation",
  ),
  (
    "optimizer",
    lambda: methods.post_local_sgd(None, 2, 2, axis=None),
    "an Optax transformation",
  ),
  (
    "switch_step",
    lambda: methods.post_local_sgd(SGD, 2, -1, axis=None),
    "an int >= 0",
  ),
  (
    "optimizer",
    lambda: methods.diloco(None, 2, axis=None),
    "an Optax transformation",
  ),
  (
    "outer_learning_rate",
    lambda: methods.diloco(SGD, 2, -0.7, axis=None),
    "in (0, inf]",
  ),
  (
    "outer_momentum",
    lambda: methods.diloco(SGD, 2, 0.7, 1.0, axis=None),
    "in [0, 1), got 1.0",
  ),
  ("optimizer", lambda: msdpu(optimizer=None), "an Optax transformation"),
  ("interval", lambda: msdpu(interval=0), "an int >= 1"),
  ("learning_rate", lambda: msdpu(learning_rate=-1.0), "in (0, inf]"),
  ("learning_rate", lambda: msdpu(learning_rate=0.1), "a schedule"),
  (
    "learning_rate",
    lambda: msdpu(learning_rate=intervals.fixed(8)),
    "a positive number or a schedule",
  ),
  ("learning_rate", lambda: msdpu(learning_rate=SGD), "place of an optimizer"),
  (
    "optimizer",
    lambda: msdpu(optimizer=intervals.fixed(8)),
    "an Optax transformation",
  ),
  ("correction", lambda: msdpu(correction=-0.1), "in [0, inf]"),
  ("warmup_steps", lambda: msdpu(warmup_steps=-1), "an int >= 0"),
  (
    "shared",
    lambda: states.declare(shared=("m",))(optax.TraceState),
    "name fields of TraceState",
  ),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


def test_parameters_must_be_given():
  optimizer = local()
  w = jnp.ones(2)
  with pytest.raises(ValueError, match=r"`params` must be given to `update`"):
    optimizer.update(w, optimizer.init(w))


def test_needed_loss_must_be_given():
  optimizer = msdpu(interval=intervals.msdpu(2), learning_rate=0.1)
  w = jnp.ones(2)
  state = optimizer.init(w)
  with pytest.raises(ValueError, match=r"`loss` must be given .*loss=loss"):
    optimizer.update(w, state, w)
  with pytest.raises(ValueError, match=r"`loss` must be a scalar.*\(2,\)"):
    optimizer.update(w, state, w, loss=jnp.ones(2))


def test_pull_outside_of_local_steps_is_refused():
  optimizer = optax.chain(transforms.pull_to_anchor(0.1, 0.1), SGD)
  w = jnp.ones(2)
  state = optimizer.init(w)
  for given in ({}, {"anchor": w}, {"interval_steps": 4}):
    with pytest.raises(ValueError, match="must stand in the inner chain of"):
      optimizer.update(w, state, w, **given)
  optimizer.update(w, state, w, anchor=w, interval_steps=4)


def test_two_anchors_side_by_side_are_refused():
  optimizer = optax.chain(local(), local())
  state = jax.eval_shape(optimizer.init, jnp.ones(2))
  with pytest.raises(ValueError, match=r"one `local_steps` at most, .* are 2"):
    transforms.synchronized(state)


# A user's own optimizer, and what its update returns in place of a pair.
UPDATES = {
  "nothing": lambda g, state: None,
  "no state": lambda g, state: g,
  "three": lambda g, state: (g, state, g),
  "no updates": lambda g, state: (None, state),
  "a leaf less": lambda g, state: ({"a": g["a"]}, state),
  "a leaf more": lambda g, state: (g | {"c": g["a"]}, state),
  "another shape": lambda g, state: (jax.tree.map(jnp.sum, g), state),
  "integers": lambda g, state: (jax.tree.map(jnp.int32, g), state),
  "complex": lambda g, state: (jax.tree.map(jnp.complex64, g), state),
  "texts": lambda g, state: ({"a": "a", "b": "b"}, state),
  "another state": lambda g, state: (g, (state, state)),
  "a longer state": lambda g, state: (g, jnp.ones(3)),
  "a text as state": lambda g, state: (g, "a"),
}
HOLDERS = {
  "inner": lambda own: local(own),
  "rule": lambda own: local(rule=own, interval=1),
  "front": lambda own: transforms.update_first(own, axis=None),
  "delayed": lambda own: transforms.delay_gradients(own, 1),
  "predicted": lambda own: transforms.predict_weights(own, 1),
  "fragments": lambda own: transforms.fragment_steps(own, 2, 2, axis=None),
  "synchronous": lambda own: methods.ssgd(own, axis=None),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("wrong", UPDATES)
def test_update_of_another_form_raises(wrong, holder):
  own = optax.GradientTransformation(
    lambda params: jnp.ones(2),
    lambda updates, state, params=None: UPDATES[wrong](updates, state),
  )
  name = {"inner": holder, "rule": holder, "fragments": "inner"}
  name = name.get(holder, "optimizer")
  optimizer = HOLDERS[holder](own)
  w = {"a": jnp.ones(2), "b": jnp.ones((2, 2))}
  state = optimizer.init(w)
  with _refusals.refused(f"{name}.update", "must"):
    jax.eval_shape(optimizer.update, w, state, w)


@pytest.mark.parametrize("holder", HOLDERS)
def test_update_without_parameters_raises(holder):
  own = optax.GradientTransformation(lambda params: (), lambda g, state: g)
  name = {"inner": holder, "rule": holder, "fragments": "inner"}
  name = name.get(holder, "optimizer")
  with pytest.raises(
    ValueError, match=f"`{name}.update` must be a function of"
  ):
    HOLDERS[holder](own)


# With what stands for the gradient of an integer in JAX.
EXACTLY = reducers.Compression(reducers.Exact())
OF_FLOATS = {
  "average_gradients": transforms.average_gradients(None),
  "compressed": transforms.average_gradients(None, EXACTLY),
  "delay_gradients": transforms.delay_gradients(SGD, 1),
  "clip_local": transforms.clip_local(1.0, None),
  "clip_deviations": transforms.clip_deviations(1.0),
  "skip_nonfinite": transforms.skip_nonfinite(None),
}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_invalid_gradients_raise_with_their_leaf(name):
  w = {"n": jnp.array([3]), "w": jnp.ones(2)}
  g = {"n": np.zeros(1, jax.dtypes.float0), "w": jnp.ones(2)}
  optimizer = OF_FLOATS[name]
  with _refusals.refused("updates", "got float0 at 'n'"):
    optimizer.update(g, optimizer.init(w), w)
  whole = transforms.only_floats(optimizer)
  updates, _ = whole.update(g, whole.init(w), w)
  assert updates["n"].tolist() == [0]


@jax.numpy_dtype_promotion("standard")  # A rate times an integer is a float.
def test_optimizer_that_moves_integers_is_refused_with_a_remedy():
  w = {"n": jnp.array([3]), "w": jnp.ones(2)}
  optimizer = transforms.lenient(SGD)
  g = {"n": jnp.array([0]), "w": jnp.ones(2)}
  with _refusals.refused("transforms.only_floats(...)", "around it leaves int"):
    optimizer.update(g, optimizer.init(w), w)
  inside = transforms.lenient(transforms.only_floats(SGD))
  updates, _ = inside.update(g, inside.init(w), w)
  assert updates["n"].tolist() == [0]


def test_invalid_gradients_of_update_first_raise():
  w = {"n": jnp.array([3]), "w": jnp.ones(2)}
  optimizer = transforms.update_first(SGD, axis=None)
  with _refusals.refused("grads", "got float0 at 'n'"):
    optimizer.hold(w | {"n": np.zeros(1, jax.dtypes.float0)}, optimizer.init(w))


@pytest.mark.parametrize("options", [{}, {"scatter": True}, {"pending": 0.5}])
def test_update_first_holds_gradients_like_the_parameters(options):
  w = {"v": jnp.ones(1), "w": jnp.ones(2)}
  optimizer = transforms.update_first(SGD, axis=None, **options)
  state = optimizer.init(w)
  for wrong in (w | {"w": jnp.ones(3)}, {"w": jnp.ones(2)}):
    with pytest.raises(ValueError, match="`grads` must"):
      optimizer.hold(wrong, state)


def test_known_carry_is_known_while_a_program_is_traced():
  # As arrays, which `optax.inject_hyperparams` makes of numbers.
  one = jnp.float32(1.0)

  @jax.jit
  def build(x):
    transforms.Delayed(1, carry=one, mix=0.5)
    return x

  assert build(one) == 1.0


def test_round_as_long_as_its_delay_sends_alike_in_all_steps():
  step(streamed(interval=2, steps=2))
