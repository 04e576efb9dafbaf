"""Every method inside and around Optax's wrappers, and next to other leaves.

What is not trained has no anchor, no momentum, no residual, and is not sent:
with it a method takes the steps, and sends the bytes, of the method alone.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, methods, training, transforms

SGD = optax.sgd(0.1, momentum=0.9)
RUN = methods.Run(12, 0, lambda step: 0.1, interval=3, momentum=0.9)


class Cut:
  """Cuts the kernel off, wherever the method's parameters stand."""

  @staticmethod
  def split(tree):
    own = tree.get("adapter", tree)
    front = {k: v for k, v in own.items() if k != "kernel"}
    front = tree | {"adapter": front} if "adapter" in tree else front
    return front, {"kernel": own["kernel"]}

  @staticmethod
  def join(front, rest):
    if "adapter" in front:
      return front | {"adapter": front["adapter"] | rest}
    return front | rest


def predict(theta, front):
  bias = front.get("adapter", front)["bias"]
  return {"kernel": theta * jnp.outer(bias, jnp.arange(8.0))}


OPTIONS = {
  "mp2": {
    "cut": Cut,
    "predict": predict,
    "predictor_params": jnp.array(0.5),
  },
  "streaming_diloco": {"fragments": 2},
  "topk_sgd": {"ratio": 0.25},
  "dgc": {"ratio": 0.5},
}  # fmt: skip
# This has no optimizer of the user's.
CLOSED = ("muloco",)
# Each mechanism once; the others are in the slow set.
QUICK = ("ssgd", "diloco", "msdpu", "streaming_diloco", "powersgd")
every = pytest.mark.parametrize("name", methods.registry)
most = pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in methods.registry
  ],
)
TRAINED = {
  "bias": np.linspace(-1, 1, 8, dtype=np.float32),
  "kernel": np.linspace(-2, 1, 64, dtype=np.float32).reshape(8, 8),
}
FROZEN = {
  "base": np.ones((3, 5), np.float32),
  "seen": np.array(7, np.int32),
  "on": np.array([True, False]),
}
INTEGERS = {"seen": FROZEN["seen"], "on": FROZEN["on"]}


def build(name, optimizer=SGD, axis="worker", **options):
  options = OPTIONS.get(name, {}) | options
  return methods.registry[name].build(optimizer, RUN, axis=axis, **options)


def labels(params):
  return {part: "train" if part == "adapter" else "rest" for part in params}


def is_adapter(params):
  return jax.tree.map(lambda label: label == "train", labels(params))


def is_rest(params):
  return jax.tree.map(lambda label: label == "rest", labels(params))


PARAMS = {"adapter": TRAINED, "rest": FROZEN}
AROUND = {
  "partition": lambda method: optax.partition(
    {"train": method, "rest": optax.set_to_zero()}, labels
  ),
  "selective_transform": lambda method: optax.transforms.selective_transform(
    method, freeze_mask=is_rest(PARAMS)
  ),
  "masked": lambda method: optax.masked(method, is_adapter),
  "a chain": lambda method: optax.chain(
    optax.partition({"train": method, "rest": optax.set_to_zero()}, labels)
  ),
  "injected": lambda method: AROUND["partition"](
    optax.inject_hyperparams(lambda unused: method)(unused=1.0)
  ),
}


def gradients(params, target):
  """Of a float its distance to a number, of an integer what JAX gives."""

  def one(p):
    if not jnp.issubdtype(p.dtype, jnp.floating):
      return np.zeros(p.shape, jax.dtypes.float0)
    return p - target.astype(p.dtype)

  return jax.tree.map(one, params)


def step_of(optimizer):
  def step(params, state, target):
    grads = gradients(params, target)
    if "rest" in params:  # Its gradients are zeros.
      grads["rest"] = jax.tree.map(jnp.zeros_like, params["rest"])
    updates, state = optimizer.update(
      grads, state, params, loss=target**2, value=target**2
    )
    return transforms.apply_updates(params, updates, state), state

  return step


def run(optimizer, params, steps=5, substrate="vmap"):
  """Runs two workers, with other gradients each."""
  team = collectives.workers(2, substrate=substrate)
  step = step_of(optimizer)
  program = team.jit(step)
  params = team.replicate(params)
  state = team.jit(optimizer.init)(params)
  for t in range(steps):
    target = team.place(np.array([t, -0.5], np.float32))
    params, state = program(params, state, target)
  return params, state


@functools.cache
def alone(name, nested=False):
  # A leaf draws its random numbers by its path, so the path must be the same.
  return run(build(name), {"adapter": TRAINED} if nested else TRAINED)


assert_same = chex.assert_trees_all_equal


def num_bytes(state):
  return sum(x.nbytes for x in jax.tree.leaves(state))


def sent(optimizer, params):
  team = collectives.workers(2, substrate="vmap")
  state = jax.eval_shape(team.spmd(optimizer.init), jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), params
  ))  # fmt: skip
  state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state
  )
  step = step_of(optimizer)
  target = jax.ShapeDtypeStruct((), np.float32)
  traffic = collectives.traffic(
    step, params, state, target, axis="worker", num_workers=2
  )
  return traffic.sent_bytes(12, 4)


@pytest.fixture
def lenient():
  """Lets Optax mix dtypes, as it does in both of these."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@every
def test_only_trained_leaves_are_sent(name):
  wanted = sent(build(name), TRAINED)
  for way in ("partition", "masked"):
    assert sent(AROUND[way](build(name)), PARAMS) == wanted > 0
  assert sent(build(name), TRAINED | INTEGERS) == wanted


@most
def test_nested_method_takes_its_own_steps(name):
  params, state = alone(name, nested=True)
  ways = AROUND if name in ("ssgd", "diloco") else ("partition",)
  for way in ways:
    found, wrapped = run(AROUND[way](build(name)), PARAMS)
    assert_same(found["adapter"], params["adapter"])
    for part, before in FROZEN.items():
      assert_same(found["rest"][part], np.stack([before] * 2))
    extra = 32 if way == "injected" else 0
    assert num_bytes(wrapped) <= num_bytes(state) + extra
    anchor = transforms.anchor(wrapped, found)
    alone_anchor = transforms.anchor(state, params)
    assert_same(anchor["adapter"], alone_anchor["adapter"])
    assert_same(anchor["rest"], found["rest"])


@most
def test_integers_and_bools_pass_through(name):
  params, state = alone(name)
  found, beside = run(build(name), TRAINED | INTEGERS)
  assert_same({k: found[k] for k in TRAINED}, params)
  for part, before in INTEGERS.items():
    assert_same(found[part], np.stack([before] * 2))
  assert num_bytes(beside) == num_bytes(state)
  assert_same(transforms.anchor(beside, found)["seen"], found["seen"])


FLOATS = {"adapter": TRAINED, "rest": {"base": FROZEN["base"]}}
INSIDE = {
  "freeze": optax.chain(SGD, optax.transforms.freeze(is_rest(FLOATS))),
  "partition": optax.partition(
    {"train": SGD, "rest": optax.set_to_zero()}, labels
  ),
  "masked": optax.chain(
    optax.masked(SGD, is_adapter), optax.transforms.freeze(is_rest(FLOATS))
  ),
}


@pytest.mark.parametrize("way", INSIDE)
@most
def test_wrappers_inside_hold_what_they_freeze(name, way):
  if name in CLOSED or name == "mp2":
    pytest.skip("it has no optimizer of all the parameters")
  if way != "freeze" and name not in ("ssgd", "diloco"):
    pytest.skip("one wrapper is enough here")
  params, _ = run(build(name, INSIDE[way]), FLOATS)
  assert_same(params["rest"]["base"], np.stack([FROZEN["base"]] * 2))
  assert (np.asarray(params["adapter"]["bias"]) != TRAINED["bias"]).any()


@most
def test_transformations_behind_an_anchor_are_refused(name):
  optimizer = build(name)
  state = jax.eval_shape(
    jax.vmap(optimizer.init, axis_name="worker"),
    jax.tree.map(lambda x: np.stack([x] * 2), TRAINED),
  )
  for behind in (
    optax.scale(0.5),
    optax.add_decayed_weights(0.1),
    optax.transforms.freeze({"bias": True, "kernel": False}),
    optax.sgd(0.1),
  ):
    chain = optax.chain(optimizer, behind)
    for way in (chain, optax.masked(chain, True), optax.chain(chain)):
      if not hasattr(state, "clock"):
        jax.eval_shape(lambda way=way: run(way, TRAINED, steps=1))
        break
      with pytest.raises(ValueError, match=r"diloco\(optax.chain\(optimizer"):
        jax.eval_shape(lambda way=way: run(way, TRAINED, steps=1))


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
  "around",
  [
    lambda x: optax.apply_if_finite(x, 3),
    lambda x: optax.contrib.schedule_free(x, 0.1),
    lambda x: optax.named_chain(("method", x), ("scale", optax.scale(0.5))),
    lambda x: optax.MultiSteps(
      x, 2, should_skip_update_fn=optax.skip_not_finite
    ),
  ],
)
def test_wrappers_that_change_updates_are_refused(around):
  with pytest.raises(
    ValueError, match="whose anchor takes its updates as done"
  ):
    run(around(build("diloco")), TRAINED, steps=1)


def test_one_vector_around_rounds_is_told_its_place():
  with pytest.raises(ValueError, match=r"`optax\.flatten` goes into a method"):
    run(optax.flatten(build("diloco")), TRAINED, steps=1)


def test_declared_wrapper_passes_updates_on():
  class Counted(tuple):  # A plain tuple is a chain.
    pass

  from typing import NamedTuple

  class Own(NamedTuple):
    inner: object

  inner = build("diloco")

  def update(updates, state, params=None, **extra):
    updates, state = inner.update(updates, state.inner, params, **extra)
    return updates, Own(state)

  own = optax.GradientTransformationExtraArgs(
    lambda params: Own(inner.init(params)), update
  )
  with pytest.raises(ValueError, match="Own stands around it"):
    run(own, TRAINED, steps=1)
  from jdist import states

  states.declare()(Own)
  assert_same(run(own, TRAINED)[0], alone("diloco")[0])


@pytest.mark.usefixtures("lenient")
@most
def test_accumulation_in_inner_chain_is_accepted(name):
  if name in CLOSED:
    pytest.skip("it has no optimizer of the user's")
  params, _ = run(build(name, optax.MultiSteps(SGD, 2)), TRAINED, steps=2)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.usefixtures("lenient")
def test_accumulated_steps_by_hand():
  one = methods.local_sgd(optax.MultiSteps(optax.sgd(0.5), 2), 2, axis=None)
  w = jnp.array(0.0)
  state = one.init(w)
  for gradient in (1.0, 3.0):  # Their mean is 2.
    updates, state = one.update(jnp.array(gradient), state, w)
    w = transforms.apply_updates(w, updates, state)
  assert w == state.anchor == -1.0


@pytest.mark.parametrize(
  "name", [n for n, m in methods.registry.items() if m.in_rounds]
)
def test_numpy_interval_is_accepted(name):
  with_numpy = build(name, interval=np.int64(3))
  like = jax.tree.map(lambda x: np.stack([x] * 2), TRAINED)
  program = jax.vmap(with_numpy.init, axis_name="worker")
  found = jax.eval_shape(program, like)
  wanted = jax.eval_shape(jax.vmap(build(name).init, axis_name="worker"), like)
  assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(
    lambda x: x.dtype, wanted
  )


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("substrate", ["none", "vmap", "shard_map"])
@pytest.mark.parametrize("name", ["ssgd", "diloco", "msdpu"])
def test_plateau_receives_the_mean_loss(name, substrate):
  team = collectives.workers(
    1 if substrate == "none" else 2, substrate=substrate
  )
  plateau = optax.chain(
    SGD, optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9)
  )
  optimizer = build(name, plateau, axis=team.axis)

  def loss(params, model_state, batch, key):
    del key
    return jnp.mean((params["bias"] - batch) ** 2), (model_state, {})

  step = team.jit(training.make_step(loss, optimizer, axis=team.axis))
  state = training.init_state(team, optimizer, TRAINED)
  batch = team.place(np.zeros((team.num_workers, 1), np.float32))
  for _ in range(4):
    state, _ = step(state, batch)
  found = [
    x.scale
    for x in jax.tree.leaves(
      state.opt_state, is_leaf=lambda x: hasattr(x, "plateau_count")
    )
    if hasattr(x, "plateau_count")
  ]
  assert found and (np.asarray(found[0]) < 1).all()


def test_outer_optimizer_of_its_own_may_be_given_under_injection():
  outer = optax.sgd(0.7, 0.9, nesterov=True)
  make = functools.partial(
    methods.diloco, optax.sgd(0.1), interval=2, axis=None
  )
  injected = optax.inject_hyperparams(make, static_args=("interval",))
  params = {"w": jnp.ones(2)}

  def after_a_round(optimizer):
    state, now = jax.jit(optimizer.init)(params), params
    for _ in range(2):
      updates, state = jax.jit(optimizer.update)(params, state, now)
      now = optax.apply_updates(now, updates)
    return now

  chex.assert_trees_all_close(
    after_a_round(injected(rule=outer)), after_a_round(make())
  )
