"""Update-first order: synchronous SGD, with the mean at the step's start."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jdist import collectives, methods, training, transforms
from tests import _refusals, _thinned
from tests.profiling import _reading
from tests.transforms import _waiting

INNER = {
  "momentum": optax.sgd(0.1, momentum=0.9),
  "adamw": optax.adamw(1e-2),
  "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
}
SHAPES = {"a": (4, 3), "b": {"c": (2, 6), "d": (7,), "e": ()}}


def params():
  random = np.random.default_rng(0)
  return jax.tree.map(
    lambda shape: random.normal(size=shape).astype(np.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def loss_fn(params, model_state, batch, key):
  del key
  hidden = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]["c"][:, :3].T
  loss = jnp.mean((hidden.sum(-1) - batch["y"]) ** 2)
  loss += jnp.sum(params["b"]["d"] ** 2) + params["b"]["e"] ** 2
  return loss, (model_state, {})


def batches(team):
  def iterate(start):
    step = start
    while True:
      random = np.random.default_rng(step)
      rows = random.normal(size=(team.num_workers, 5, 5)).astype(np.float32)
      yield {"x": rows[..., :4], "y": rows[..., 4]}
      step += 1

  return iterate


def team(kind):
  if kind == "none":
    return collectives.workers(1, substrate="none")
  if kind == "two_on_each":
    mesh = collectives.make_mesh((2,), ("worker",))
    return collectives.workers(4, mesh=mesh)
  return collectives.workers(4, substrate=kind)


def fit(workers, chain, num_steps=20):
  step = training.make_step(loss_fn, chain, axis=workers.axis)
  traces = []

  def counted(state, batch):
    traces.append(1)
    return step(state, batch)

  trainer = training.Trainer(workers, counted)
  state = training.init_state(workers, chain, params())
  state, _ = trainer.fit(state, batches(workers), num_steps)
  assert len(traces) <= 2  # To run and to count.
  drain = workers.jit(lambda w, s: transforms.drain(chain, s, w))
  return workers.gather(drain(state.params, state.opt_state)[0]), trainer, state


@functools.cache
def synchronous(name, num_workers):
  """Trains by plain synchronous SGD, the same on any substrate."""
  workers = team("vmap" if num_workers > 1 else "none")
  return fit(workers, methods.ssgd(INNER[name], axis=workers.axis))[0]


KINDS = ("shard_map", "vmap", "two_on_each", "none")
FORMS = {
  "mean": {},
  "scatter": {"scatter": True},
  "front": {"pending": 0.3},
  "back": {"pending": 0.5, "order": "back_first"},
  "nothing": {"pending": 0.0},
}


@pytest.mark.parametrize(
  ("form", "name", "kind"),
  _thinned.thinned(list(FORMS), list(INNER), KINDS, rounds=2),
)
def test_update_first_is_synchronous_sgd(name, kind, form):
  workers = team(kind)
  with jax.numpy_dtype_promotion("standard"):
    wanted = synchronous(name, workers.num_workers)
    first = transforms.update_first(
      INNER[name],
      axis=workers.axis,
      max_bytes=16,
      in_flight=2,
      **FORMS[form],
    )
    found, *_ = fit(workers, first)
  # Compilers contract products and sums differently in the two programs, by
  # the machine: entries then differ by the rounding of the leaf's largest.
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    largest = max(1.0, np.abs(y).max())
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=4e-6 * largest)
  assert all((x == x[:1]).all() for x in jax.tree.leaves(found))


@pytest.mark.smoke
def test_gradients_are_taken_after_the_last_update():
  optimizer = transforms.update_first(optax.sgd(0.5), axis="worker")

  def run(x):
    w, state, seen = jnp.zeros(()), None, []
    state = optimizer.init(w)
    for _ in range(3):
      w, state = optimizer.begin(w, state)
      seen.append(w)
      state = optimizer.hold(w - x, state)
    return jnp.stack(seen), transforms.drain(optimizer, state, w)[0]

  seen, last = jax.jit(jax.vmap(run, axis_name="worker"))(jnp.array([1.0, 3.0]))
  # Towards 2, by half of the way in each step.
  assert seen.tolist() == [[0.0, 1.0, 1.5]] * 2
  assert last.tolist() == [1.75] * 2


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_drain_in_between_changes_nothing(share):
  workers = team("vmap")
  chain = transforms.update_first(
    INNER["momentum"], axis=workers.axis, pending=share
  )
  step = training.make_step(loss_fn, chain, axis=workers.axis)
  run = workers.jit(step)
  drain = workers.jit(lambda w, s: transforms.drain(chain, s, w))
  ends = []
  for drained_at in (None, 3):
    state = training.init_state(workers, chain, params())
    for t, batch in zip(range(6), batches(workers)(0), strict=False):
      if t == drained_at:
        w, opt_state = drain(state.params, state.opt_state)
        state = state._replace(params=w, opt_state=opt_state)
      state, _ = run(state, workers.place(batch))
    ends.append(workers.gather(drain(state.params, state.opt_state)[0]))
  chex.assert_trees_all_equal(*ends)


# One message each.
LAYERS = {"a": jnp.zeros(4), "b": jnp.zeros(4)}


def one_by_one(**options):
  """A chain whose second message goes when the first has arrived."""
  return transforms.update_first(
    optax.sgd(0.1), axis="worker", max_bytes=16, in_flight=1, **options
  )


def begins_after(optimizer, state, name):
  """Of each message of a step's beginning, whether it waits for a layer."""

  def begin(pending, state):
    state = state._replace(pending=state.pending | {name: pending})
    return optimizer.begin(LAYERS, state)

  return _waiting.waiting(begin, LAYERS[name], state)


def holds_after(optimizer, state, name):
  """Of each message of a step's end, whether it waits for a layer."""

  def hold(gradient, others, state):
    return optimizer.hold(others | {name: gradient}, state)

  return _waiting.waiting(hold, LAYERS[name], LAYERS, state)


@pytest.mark.parametrize(
  ("options", "first", "last"),
  [({}, "a", "b"), ({"order": "back_first"}, "b", "a")],
  ids=["by default", "back first"],
)
def test_front_layers_are_sent_first_by_default(options, first, last):
  optimizer = one_by_one(**options)
  state = optimizer.init(LAYERS)
  assert begins_after(optimizer, state, first) == [True, True]
  assert begins_after(optimizer, state, last) == [False, True]


def test_halves_of_a_mean_start_at_opposite_ends():
  optimizer = one_by_one(scatter=True)
  rows = (jnp.zeros(2), jnp.zeros(2))
  # Of its own, `init` deals out what is pending over an axis.
  state = one_by_one().init(LAYERS)._replace(pending=rows)
  assert holds_after(optimizer, state, "b") == [True, True]
  assert holds_after(optimizer, state, "a") == [False, True]
  row = jnp.zeros(2)

  def begin(row, number):
    rows = [jnp.zeros(2), jnp.zeros(2)]
    rows[number] = row
    return optimizer.begin(LAYERS, state._replace(pending=tuple(rows)))

  waits = [
    _waiting.waiting(functools.partial(begin, number=number), row)
    for number in (0, 1)
  ]
  assert waits == [[True, True], [False, True]]


def test_by_default_the_front_layers_are_held_back():
  optimizer = one_by_one(pending=0.5)
  state = optimizer.init(LAYERS)
  assert holds_after(optimizer, state, "a") == [False]
  assert holds_after(optimizer, state, "b") == [True]
  assert begins_after(optimizer, state, "a") == [True]
  assert begins_after(optimizer, state, "b") == [False]


def test_evaluation_sees_the_pending_update():
  workers = team("vmap")

  def apply(params, model_state, images, *, train):
    del train
    hidden = jnp.tanh(images @ params["a"]) @ params["b"]["c"][:, :3].T
    return hidden + params["b"]["e"], model_state

  random = np.random.default_rng(5)
  rows = {
    "image": random.normal(size=(4, 3, 4)).astype(np.float32),
    "label": np.zeros((4, 3), np.int32),
    "mask": np.ones((4, 3), np.float32),
  }

  def losses(chain, num_steps, seen):
    _, _, state = fit(workers, chain, num_steps)
    evaluators = [
      training.Evaluator(workers, apply, [rows], optimizer=given)
      for given in seen
    ]
    return [evaluate(state)["loss"] for evaluate in evaluators]

  simple = methods.ssgd(INNER["momentum"], axis=workers.axis)
  first = transforms.update_first(INNER["momentum"], axis=workers.axis)
  (before,) = losses(simple, 4, [None])
  (after,) = losses(simple, 5, [None])
  assert abs(after - before) > 1e-3
  assert losses(first, 5, [first]) == pytest.approx([after], rel=1e-6)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_number_in_flight_is_bounded(in_flight):
  optimizer = transforms.update_first(
    optax.sgd(0.1), axis="worker", max_bytes=16, in_flight=in_flight
  )
  buckets = collectives.Buckets.of(params(), max_bytes=16).buckets

  def begin(w):
    return optimizer.begin(w, optimizer.init(w))[0]

  rows = jax.tree.map(lambda x: jnp.stack([x, x]), params())
  traced = str(jax.make_jaxpr(jax.vmap(begin, axis_name="worker"))(rows))
  assert traced.count("optimization_barrier") == len(buckets) - in_flight
  assert len(buckets) > 6
  # A mean depends on the one that many places before it, and on no later one.
  sent = collectives.traffic(begin, params(), axis="worker", num_workers=2)
  wanted = [1 + i // in_flight for i in range(len(buckets))]
  assert [one.depth for one in sent.collectives] == wanted


def test_mean_in_two_halves_sends_as_much():
  workers = team("shard_map")
  sent = {}
  for scatter in (False, True):
    chain = transforms.update_first(
      INNER["momentum"], axis=workers.axis, scatter=scatter
    )
    _, trainer, state = fit(workers, chain, 1)
    batch = workers.place(next(batches(workers)(0)))
    traffic = trainer.traffic(state, batch)
    sent[scatter] = traffic.bytes_per_step
    kinds = {c.kind for c in traffic.collectives}
    assert kinds == (
      {"reduce-scatter", "all-gather"} if scatter else {"all-reduce"}
    )
    assert not any(c.conditional for c in traffic.collectives)
  # 32 elements, three quarters of them twice.
  assert sent[False] == sent[True] == 32 * 4 * 1.5


def test_leaves_that_are_not_pending_are_averaged_at_once():
  # Half of the four elements are the urgent leaf's.
  optimizer = transforms.update_first(
    optax.sgd(1.0), axis="worker", pending=0.5, order="back_first"
  )

  def run(x):
    grads = {"a": jnp.stack([x, x]), "b": jnp.stack([x, 3 * x])}
    state = optimizer.hold(grads, optimizer.init(grads))
    zeros = jax.tree.map(jnp.zeros_like, grads)
    return state.pending, optimizer.begin(zeros, state)[0]

  pending, w = jax.jit(jax.vmap(run, axis_name="worker"))(jnp.array([1.0, 3.0]))
  assert pending["a"].tolist() == [[2, 2], [2, 2]]
  assert pending["b"].tolist() == [[1, 3], [3, 9]]
  assert w["a"].tolist() == [[-2, -2]] * 2
  assert w["b"].tolist() == [[-2, -6]] * 2


def scaled_by_loss(rate, name="loss"):
  """SGD whose steps are as long as the loss is large, given by this name."""

  def update(updates, state, params=None, **given):
    del params
    loss = given[name]
    return jax.tree.map(lambda g: -rate * loss * g, updates), state + loss

  return optax.GradientTransformationExtraArgs(
    lambda params: jnp.zeros(()), update
  )


# Also by the name that Optax's plateau has for it.
@pytest.mark.parametrize(
  ("form", "name"), [*((form, "loss") for form in FORMS), ("mean", "value")]
)
def test_loss_reaches_the_optimizer_as_the_mean(form, name):
  optimizer = transforms.update_first(
    scaled_by_loss(0.5, name), axis="worker", max_bytes=16, **FORMS[form]
  )

  def run(x):
    w = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    state = optimizer.init(w)
    for _ in range(2):
      w, state = optimizer.begin(w, state)
      grads = jax.tree.map(lambda y: y - x, w)
      state = optimizer.hold(grads, state, loss=x)
    return transforms.drain(optimizer, state, w)

  w, state = jax.jit(jax.vmap(run, axis_name="worker"))(jnp.array([1.0, 3.0]))
  # Of both workers the mean target is 2, and so is the mean loss.
  assert w["a"].tolist() == [[2.0] * 3] * 2
  assert w["b"].tolist() == [[2.0] * 2] * 2
  assert state.inner.tolist() == [4.0, 4.0]
  assert transforms.sharing(state).state.inner is True


@pytest.mark.parametrize(
  ("inner", "more"), [(INNER["momentum"], 0), (scaled_by_loss(0.1), 1)]
)
def test_unused_loss_is_not_sent(inner, more):
  optimizer = transforms.update_first(inner, axis="worker")
  like = jax.ShapeDtypeStruct((5,), jnp.float32)
  traffic = collectives.traffic(
    lambda w: optimizer.begin(w, optimizer.init(w)),
    like,
    axis="worker",
    num_workers=2,
  )
  payloads = [c.payload_bytes for c in traffic.collectives]
  assert sorted(payloads) == [4] * more + [20]


def held_in_bfloat16(**options):
  """Two float32 leaves, whose gradients are bfloat16: states, parameters."""
  optimizer = transforms.update_first(
    optax.sgd(1.0), axis="worker", max_bytes=16, **options
  )

  def run(x):
    w = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    before = optimizer.init(w)
    grads = jax.tree.map(lambda y: jnp.full_like(y, x, "bfloat16"), w)
    after = optimizer.hold(grads, before)
    return before, after, transforms.drain(optimizer, after, w)[0]

  return jax.jit(jax.vmap(run, axis_name="worker"))(jnp.array([1.0, 3.0]))


@pytest.mark.parametrize("form", [f for f in FORMS if f != "scatter"])
def test_gradients_of_another_dtype_are_held_in_the_parameters(form):
  before, after, w = held_in_bfloat16(**FORMS[form])
  chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
  assert w["a"].tolist() == [[-2.0] * 3] * 2


def test_two_halves_refuse_gradients_of_another_dtype():
  with _refusals.refused("grads", "the parameters' dtypes with `scatter`"):
    held_in_bfloat16(scatter=True)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_sharded_worker_sends_its_own_parts(share):
  mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"))
  workers = collectives.workers(2, mesh=mesh)
  specs = {
    "a": PartitionSpec("fsdp"),
    "b": {
      "c": PartitionSpec(None, "fsdp"), "d": PartitionSpec(),
      "e": PartitionSpec(),
    },
  }  # fmt: skip
  chain = transforms.update_first(
    optax.sgd(0.1),
    axis=workers.axis,
    max_bytes=16,
    specs=specs,
    pending=share,
  )
  state = training.init_state(workers, chain, params(), specs=specs)
  placed = workers.specs(state)

  def step(w, s):
    w, s = chain.begin(w, s)
    return w, chain.hold(w, s)

  program = workers.jit(
    step,
    out_specs=(placed.params, placed.opt_state),
  ).lower(state.params, state.opt_state)
  text = program.compile().as_text()
  groups = [found for _, found in _reading.groups(text)]
  # Devices 0 and 1 are one worker.
  assert groups and all(x == [[0, 2], [1, 3]] for x in groups), groups


REJECTED = {
  "optimizer": (
    {"optimizer": 0.1},
    "`optimizer` must be an Optax transformation",
  ),
  "in_flight": ({"in_flight": 0}, "`in_flight` must be an int >= 1, got 0"),
  "max_bytes": ({"max_bytes": 1}, "`max_bytes` must be an int >= 8, got 1"),
  "pending": ({"pending": 1.1}, r"`pending` must be in \[0, 1\], got 1.1"),
  "order": (
    {"order": "fifo"},
    "`order` must be 'front_first', .* got 'fifo'",
  ),
  "traced": (
    {"pending": jnp.ones(())},
    "`pending` shapes the program and must be a Python number, got an array",
  ),
  "two_splits": (
    {"scatter": True, "pending": 0.5},
    "`scatter` splits all means in two and cannot be used with `pending`",
  ),
  "scatter": (
    {"scatter": True, "specs": PartitionSpec("fsdp")},
    "`scatter` splits flat buckets by rows and cannot be used with `specs`",
  ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_arguments_raise(name):
  changes, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    transforms.update_first(
      **({"optimizer": optax.sgd(0.1), "axis": None} | changes)
    )


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.bool_, jnp.int32])
@pytest.mark.parametrize("more", [{}, {"scatter": True}, {"pending": 0.0}])
@jax.numpy_dtype_promotion("standard")  # A mean of bools is promoted.
def test_integers_among_the_parameters_stay(more, dtype):
  w = {"k": jnp.array([0, 1], dtype), "w": jnp.array(2.0)}
  optimizer = transforms.update_first(optax.sgd(0.5), axis=None, **more)
  state = optimizer.init(w)
  grads = {"k": jnp.zeros_like(w["k"]), "w": jnp.array(3.0)}
  new, state = optimizer.begin(w, optimizer.hold(grads, state))
  assert (new["k"].tolist(), new["k"].dtype) == (w["k"].tolist(), dtype)
  assert new["w"] == 0.5


def test_arguments_of_the_optimizer_are_those_of_the_call():
  def scaled(updates, state, params=None, *, factor=1.0, **more):
    del params, more
    return jax.tree.map(lambda g: factor * g, updates), state

  inner = optax.GradientTransformationExtraArgs(lambda _: (), scaled)
  optimizer, w = transforms.update_first(inner, axis=None), jnp.zeros(2)
  _, state = optimizer.update(w + 1.0, optimizer.init(w), w, factor=2.0)
  late, _ = optimizer.update(w + 5.0, state, w, factor=3.0)
  # The gradient of the first call, with the factor of the second one.
  np.testing.assert_array_equal(late, [3.0, 3.0])
