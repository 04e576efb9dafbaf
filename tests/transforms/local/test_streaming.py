"""Streamed aggregation: the simple form, sent in parts, to the bit."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jdist
from jdist import codecs, collectives, profiling, reducers, transforms
from jdist.transforms import intervals
from tests.transforms import _chains, _reducers, _waiting

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
SHAPES = {"a": (3, 7), "b": {"c": (11,), "d": ()}}
STEPS = (1, 2, 4, 8)
INNER = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(0.1, momentum=0.9),
  "adamw": optax.adamw(1e-2),
}


def params(shapes=None):
  random = np.random.default_rng(0)
  return jax.tree.map(
    lambda shape: random.normal(size=shape).astype(np.float32),
    SHAPES if shapes is None else shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


class Host:
  """A loop of one's own: a program for each number of steps, by name."""

  def __init__(self, optimizer, workers, shapes=None):
    self.workers, self.optimizer = workers, optimizer

    def step(w, state, target, loss, *, steps):
      gradient = jax.tree.map(jnp.subtract, w, target)
      updates, state = optimizer.update(
        gradient,
        state,
        w,
        loss=loss,
        control=transforms.Control(stream_steps=steps),
      )
      return jdist.apply_updates(w, updates, state), state

    self.step = step

    @functools.cache
    def program(steps):
      return workers.jit(
        functools.partial(step, steps=steps), donate_argnums=(0, 1)
      )

    self.program = program
    self.w = workers.replicate(params(shapes))
    self.state = workers.jit(optimizer.init)(self.w)
    self.sent_in = []

  def run(self, targets, losses, choose):
    """Takes a step on each target; `choose` picks the program by the state."""
    for target, loss in zip(targets, losses, strict=True):
      steps = choose(transforms.rounds_ahead(self.state)[0, 0].tolist())
      self.sent_in.append(steps)
      data = self.workers.place((jax.tree.map(np.asarray, target), loss))
      self.w, self.state = self.program(steps)(self.w, self.state, *data)
      yield self.workers.gather((self.w, self.state))


def holding(state, held):
  """The state with another message under way."""
  flight = state.sync.flight._replace(held=held)
  return state._replace(sync=state.sync._replace(flight=flight))


def largest(place):
  """As a host chooses: the whole message within the round."""
  window, offset, _ = place
  fitting = max((s for s in STEPS if s <= window), default=None)
  return fitting if fitting and offset < fitting else None


def data(num_steps, num_workers, shapes=None):
  random = np.random.default_rng(1)
  targets = [
    jax.tree.map(
      lambda x: random.normal(size=(num_workers, *x.shape)).astype(np.float32),
      params(shapes),
    )
    for _ in range(num_steps)
  ]
  fall = 4 * np.exp(-np.arange(num_steps) / 60)[:, None] + 0.1
  losses = (fall * random.uniform(0.7, 1.3, (num_steps, num_workers))).astype(
    np.float32
  )
  return targets, losses


POLICIES = {
  "fixed": 4,
  "adaptive": intervals.msdpu(8, max_interval=8),
  "warm-up": intervals.post_local(6, intervals.adacomm(7, 20)),
}


OUTER = {"mean": (None, 0.7), "nesterov": (NESTEROV, 1.0)}
# `test_matrix` tries the rules; the other combinations are for the slow set, as
# are all at their full length.
QUICK = {
  ("warm-up", "momentum", "nesterov"),
}


def combinations():
  for chosen in itertools.product(POLICIES, INNER, OUTER):
    if chosen in QUICK:
      yield pytest.param(*chosen, True, id=f"quick-{'-'.join(chosen)}")
    yield pytest.param(
      *chosen, False, id="-".join(chosen), marks=pytest.mark.slow
    )


@pytest.mark.parametrize(
  ("policy", "name", "outer", "quick"), list(combinations())
)
def test_streamed_mean_equals_late_mean_to_the_bit(policy, name, outer, quick):
  outer, carry = OUTER[outer]
  team = collectives.workers(4, substrate="shard_map")
  build = functools.partial(
    _chains.late,
    INNER[name],
    POLICIES[policy],
    axis=team.axis,
    rule=outer,
    carry=carry,
    after_step=6 if policy == "warm-up" else 0,
  )
  # 33 elements and a loss, in parts of up to 3: several in a step, and the
  # last one shifted.
  streamed = Host(build(stream=transforms.Stream(max_bytes=12)), team)
  simple = Host(build(), team)
  num_steps = {"fixed": 200, "adaptive": 330, "warm-up": 250}[policy]
  if quick:
    num_steps //= 2
  with jax.numpy_dtype_promotion("standard"):
    pairs = zip(
      simple.run(*data(num_steps, 4), lambda place: None),
      streamed.run(*data(num_steps, 4), largest),
      strict=True,
    )
    for (w, state), (same_w, same) in pairs:
      chex.assert_trees_all_equal(w, same_w)
      chex.assert_trees_all_equal(state.anchor, same.anchor)
      np.testing.assert_array_equal(state.clock.interval, same.clock.interval)
  assert state.clock.round[0] >= (25 if quick else 50)
  chosen = set(streamed.sent_in)
  assert chosen == {4} if policy == "fixed" else len(chosen) >= 2


@pytest.mark.parametrize(
  "policy", ["fixed", pytest.param("adaptive", marks=pytest.mark.slow)]
)
def test_splitting_changes_no_bit(policy):
  team = collectives.workers(4, substrate="shard_map")
  streams = (
    None,
    transforms.Stream(max_bytes=12),
    transforms.Stream(max_bytes=2**20),
  )
  with jax.numpy_dtype_promotion("standard"):
    runs = []
    for stream in streams:
      optimizer = transforms.local_steps(
        INNER["momentum"],
        POLICIES[policy],
        axis=team.axis,
        overlap=transforms.Delayed(stream=stream),
        rule=NESTEROV,
      )
      choose = largest if stream else lambda place: None
      runs.append(Host(optimizer, team).run(*data(24, 4), choose))
    for (w, state), *others in zip(*runs, strict=True):
      for same_w, same in others:
        chex.assert_trees_all_equal(w, same_w)
        chex.assert_trees_all_equal(state.anchor, same.anchor)
        np.testing.assert_array_equal(state.clock.interval, same.clock.interval)
  assert state.clock.round[0] >= 3
  assert np.abs(state.anchor["b"]["c"] - params()["b"]["c"]).min() > 0.01


def hand_over(place):
  """A host that errs: too slow, too fast, not at all, and changing."""
  del place
  hand_over.turn += 1
  return (8, 1, 2, None, 4, 8, 8)[hand_over.turn % 7]


def test_no_progress_is_lost_for_any_host_choice():
  team = collectives.workers(4, substrate="vmap")
  hand_over.turn = 0
  optimizer = transforms.local_steps(
    optax.sgd(0.1),
    3,
    axis=team.axis,
    overlap=transforms.Delayed(stream=transforms.Stream(max_bytes=12)),
  )
  host = Host(optimizer, team)
  targets, losses = data(40, 4)
  went_in, w = jax.tree.map(np.zeros_like, targets[0]), host.workers.gather(
    host.w
  )  # fmt: skip
  for target, now in zip(
    targets, host.run(targets, losses, hand_over), strict=True
  ):
    went_in = jax.tree.map(
      lambda g, x, t: g + np.float32(0.1) * (x - t), went_in, w, target
    )
    w, state = now
  # Drained, the anchor has moved by the mean of all that went in.
  drain = team.jit(lambda w, state: transforms.drain(optimizer, state, w))
  drained, _ = drain(host.w, host.state)
  jax.tree.map(
    lambda a, start, g: np.testing.assert_allclose(
      a[0], start - g.mean(0), rtol=1e-4, atol=1e-5
    ),
    team.gather(drained),
    params(),
    went_in,
  )
  assert state.clock.round[0] >= 5


@pytest.mark.smoke
def test_no_collective_waits_for_the_step_or_a_conditional():
  team = collectives.workers(4, substrate="shard_map")
  build = functools.partial(
    _chains.late, optax.sgd(0.1), 4, carry=1.0, axis=team.axis
  )
  counted = {}
  for name, stream in (("simple", None), ("streamed", transforms.Stream(12))):
    host = Host(build(stream=stream), team)
    target, losses = (x[0] for x in data(1, 4))
    program = host.program("fixed").lower(
      host.w, host.state, *team.place((target, losses))
    )
    counted[name] = profiling.read_collectives(program.compile())
  assert all(c.conditional for c in counted["simple"])
  assert not any(c.conditional for c in counted["streamed"])
  # A quarter of 33 elements, in sub-tensors of 3.
  assert sum(c.payload_bytes for c in counted["streamed"]) == 9 * 4


ON_THE_WAY = {
  "fixed": (4, {}, {}),
  "adaptive": (POLICIES["adaptive"], {}, {"stream_steps": 4}),
  "late by steps": (4, {"steps": 2}, {"stream_steps": 2}),
  "adaptive, late by steps": (
    POLICIES["adaptive"],
    {"steps": 2},
    {"stream_steps": 2},
  ),
  "compressed": (
    4,
    {
      "compression": reducers.Compression(
        codecs.TopK(0.5), reducers.ErrorFeedback()
      )
    },
    {},
  ),
  "the host ends rounds": (4, {}, {"round_ends": False}),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_streamed_parts_and_step_are_independent(name):
  interval, others, options = ON_THE_WAY[name]
  optimizer = _chains.late(
    optax.stateless(lambda updates, _: jax.tree.map(jnp.sin, updates)),
    interval,
    carry=1.0,
    axis="worker",
    stream=transforms.Stream(max_bytes=12),
    **others,
  )
  control = transforms.Control(**options)
  w = jax.tree.map(jnp.asarray, params())
  state, loss = optimizer.init(w), jnp.float32(1.0)

  def update(present, state, w):
    gradients, loss = present
    return optimizer.update(gradients, state, w, loss=loss, control=control)

  assert not _waiting.waits(update, (w, loss), state, w)
  assert not _waiting.is_held_up("sin", update, (w, loss), state, w)


@pytest.mark.parametrize(
  "reducer", [None, _reducers.Plain()], ids=["exact", "reduced"]
)
def test_front_layers_are_sent_first(reducer):
  # In a round of two steps the front leaf moves by 2, and that behind it by 4.
  optimizer = transforms.local_steps(
    optax.sgd(1.0),
    2,
    axis=None,
    compression=None if reducer is None else reducers.Compression(reducer),
    overlap=transforms.Delayed(stream=transforms.Stream(max_bytes=8)),
  )
  w = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
  gradients = {"a": jnp.full(4, 1.0), "b": jnp.full(4, 2.0)}
  state, update = optimizer.init(w), jax.jit(optimizer.update)
  for _ in range(3):
    updates, state = update(gradients, state, w)
    w = jdist.apply_updates(w, updates, state)
  # One half of the message in the second round's first step.
  found = np.abs(state.sync.flight.held.arrived["float32"]).ravel()
  assert sorted(found) == [0.0] * 4 + [2.0] * 4


@pytest.mark.smoke
def test_received_means_depend_on_the_state_only():
  optimizer = transforms.local_steps(
    optax.sgd(0.1),
    4,
    axis=None,
    overlap=transforms.Delayed(stream=transforms.Stream(12)),
  )
  w = jax.tree.map(jnp.asarray, params())
  state = optimizer.init(w)

  def arrived(gradient, state):
    # In the middle of a round: what is there has come through `send`.
    _, state = optimizer.update(gradient, state, w)
    return state.sync.flight.held.arrived["float32"]

  none, some = jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.ones_like, w)
  pending = state.sync.flight.held._replace(
    sent=jax.tree.map(jnp.ones_like, state.sync.flight.held.sent)
  )
  np.testing.assert_array_equal(arrived(none, state), arrived(some, state))
  changed = arrived(none, holding(state, pending))
  assert changed.sum() == 9  # A quarter of 33 elements.


@pytest.mark.parametrize("steps", [None, 1])
def test_leaves_without_elements_are_streamed_at_once(steps):
  overlap = transforms.Delayed(steps, stream=transforms.Stream())
  optimizer = transforms.local_steps(
    optax.sgd(0.1), 2, axis=None, overlap=overlap
  )
  w = {"w": jnp.zeros((0, 3))}
  state = optimizer.init(w)
  for _ in range(4):
    control = transforms.Control(stream_steps=1)
    updates, state = optimizer.update(w, state, w, control=control)
  assert updates["w"].shape == (0, 3) and state.clock.round.item() == 2


def test_each_entry_is_sent_once_per_round():
  # In a round of 4 every element goes once, but for the last part's overlap.
  stream = transforms.Stream(max_bytes=12)
  number, size = stream.cut(33, 4, itemsize=4)
  assert (number, size) == (3, 3)
  assert 33 <= number * size * 4 < 33 + number * size


def test_a_sharded_worker_sends_its_own_parts():
  mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"))
  team = collectives.workers(2, mesh=mesh)
  specs = {"a": PartitionSpec("fsdp"), "b": PartitionSpec(None, "fsdp")}
  specs["c"] = PartitionSpec()
  shapes = {"a": (4, 3), "b": (2, 6), "c": (5,)}
  random = np.random.default_rng(0)
  tree = {
    name: random.normal(size=shape).astype(np.float32)
    for name, shape in shapes.items()
  }
  target = {
    name: random.normal(size=(2, *shape)).astype(np.float32)
    for name, shape in shapes.items()
  }

  def build(stream):
    return transforms.local_steps(
      optax.sgd(0.1, momentum=0.9),
      3,
      axis=team.axis,
      overlap=transforms.Delayed(stream=stream),
    )

  def run(optimizer):
    from jdist import training

    state = training.init_state(team, optimizer, tree, specs=specs)

    def step(state, target):
      gradient = jax.tree.map(jnp.subtract, state.params, target)
      updates, opt_state = optimizer.update(
        gradient, state.opt_state, state.params
      )
      w = jdist.apply_updates(state.params, updates, opt_state)
      return state._replace(params=w, opt_state=opt_state)

    program = team.jit(step, donate_argnums=0, out_specs=team.specs(state))
    placed = {
      name: jax.device_put(x, team.sharding(specs[name]))
      for name, x in target.items()
    }
    compiled = program.lower(state, placed).compile()
    for _ in range(9):
      state = program(state, placed)
    assert program._cache_size() == 1
    return compiled, state

  streamed, state = run(build(transforms.Stream(specs=specs)))
  _, reference = run(build(None))
  pending = state.opt_state.sync.flight.held
  assert {k: v.shape for k, v in pending.sent.items()} == {
    "shards:fsdp/float32": (2, 2, 12),
    "float32": (2, 1, 5),
  }
  assert pending.sent["shards:fsdp/float32"].sharding.spec == PartitionSpec(
    "worker", "fsdp"
  )
  for ours, theirs in (
    (state.params, reference.params),
    (state.opt_state.anchor, reference.opt_state.anchor),
  ):
    chex.assert_trees_all_equal(team.gather(ours), team.gather(theirs))
  for found in profiling.read_collectives(streamed):
    assert found.num_workers == 2
    assert found.kind == "all-reduce", found
    # Devices of one worker are neighbours: 0 and 1.
  groups = [
    line
    for line in streamed.as_text().splitlines()
    if "replica_groups" in line and "all-" in line
  ]
  assert groups and not any("{0,1}" in line for line in groups)


@pytest.mark.parametrize(("delay", "parts"), [(2, 2), (None, 8), (8, 8)])
def test_message_has_as_many_parts_as_steps_to_send_it(delay, parts):
  optimizer = transforms.local_steps(
    optax.sgd(0.1), 8, axis="worker",
    overlap=transforms.Delayed(delay, stream=transforms.Stream()),
    compression=reducers.Compression(
      codecs.Quantize(4), reducers.ErrorFeedback()
    ),
  )  # fmt: skip
  assert optimizer.parts.compression.reducer.multiple == parts
