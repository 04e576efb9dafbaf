"""Nowcasts in training: the jump, alone and inside of methods."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, methods, prediction, transforms
from jdist.prediction.nowcast import _model

NETWORKS = prediction.init_nowcasters(jax.random.key(0))
NETWORK = NETWORKS["conv"]


def train(optimizer, team, num_steps, substrate_params):
  """Quadratic valleys, one of each worker; gives params and states."""
  shape = substrate_params["w"].shape

  def step(params, state, target):
    gradients = jax.tree.map(lambda w: w - target, params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  params = team.replicate(substrate_params)
  state = team.jit(optimizer.init)(params)
  step, seen = team.jit(step), []
  draw = np.random.default_rng(0)
  for _ in range(num_steps):
    targets = draw.normal(size=(team.num_workers, *shape)).astype(np.float32)
    params, state = step(params, state, team.place(targets))
    seen.append(np.asarray(params["w"]))
  return seen, state


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_the_jump_by_hand(substrate):
  team = collectives.workers(4, substrate=substrate)
  inner = methods.ssgd(optax.sgd(0.1, momentum=0.9), axis=team.axis)
  jump = prediction.nowcast_weights(NETWORKS, 2, axis=team.axis)
  begin = {"w": jnp.ones((3, 2))}
  seen, state = train(optax.chain(inner, jump), team, 20, begin)
  plain, _ = train(inner, team, 10, begin)
  # Until the fifth epoch's last step, nothing is different.
  # But that two programs round differently.
  np.testing.assert_allclose(seen[:9], plain[:9], rtol=1e-5, atol=1e-6)
  ends = np.stack([*(seen[i][0] for i in (1, 3, 5, 7)), plain[9][0]])
  wanted = _model.nowcast_entries(NETWORKS["dense"], np.moveaxis(ends, 0, -1))
  np.testing.assert_allclose(seen[9][0], wanted, rtol=1e-5, atol=1e-6)
  assert np.abs(wanted - ends[4]).max() > 1e-3
  # All workers jump alike, and all that is kept is known to be shared.
  for w in seen:
    assert all(row.tobytes() == w[0].tobytes() for row in w)
  labels = transforms.sharing(state)
  assert labels.params and all(jax.tree.leaves(labels.state))
  # The history of the second jump is the next five epochs.
  history = np.asarray(state[1].history["w"][0])
  np.testing.assert_array_equal(
    history[:4], [seen[i][0] for i in (11, 13, 15, 17)]
  )


def test_the_optimizer_does_not_notice_the_jump():
  momentum = optax.trace(0.9)
  jump = prediction.nowcast_weights(NETWORKS, 1, axis=None)
  chain = optax.chain(momentum, jump)
  w = jnp.zeros((2, 3))
  state, alone = chain.init(w), momentum.init(w)
  update = jax.jit(chain.update)
  for t in range(6):
    gradient = jnp.full((2, 3), 1.0 + t)
    updates, state = update(gradient, state, w)
    _, alone = momentum.update(gradient, alone)
    w = w + updates
  np.testing.assert_array_equal(state[0].trace, alone.trace)


def test_a_jump_in_bfloat16_under_jit_and_donation():
  chain = optax.chain(
    optax.sgd(jnp.bfloat16(0.125)),
    prediction.nowcast_weights(NETWORKS, 1, axis=None),
  )
  w = {"w": jnp.ones((4, 2), jnp.bfloat16)}
  state = chain.init(w)
  assert state[1].history["w"].dtype == jnp.float32
  step = jax.jit(chain.update, donate_argnums=(1,))
  for _ in range(5):
    updates, state = step(w, state, w)
    w = optax.apply_updates(w, updates)
  assert w["w"].dtype == jnp.bfloat16 and jnp.isfinite(w["w"]).all()


def test_draining_counts_nothing():
  chain = optax.chain(
    transforms.delay_gradients(optax.sgd(1.0), 1),
    prediction.nowcast_weights(NETWORKS, 1, axis=None),
  )
  w = jnp.array([0.0])
  updates, state = chain.update(jnp.array([3.0]), chain.init(w), w)
  w, state = transforms.drain(chain, state, w + updates)
  assert w.item() == -3.0 and state[1].step.item() == 1


class Halves:
  """The second leaf is predicted from the first."""

  split = staticmethod(lambda tree: (tree["a"], tree["b"]))
  join = staticmethod(lambda front, rest: {"a": front, "b": rest})


def sgd_and_jump():
  # After the fifth step.
  jump = prediction.nowcast_weights(NETWORKS, 1, axis=None)
  return optax.chain(optax.sgd(1.0), jump)


@pytest.mark.parametrize(
  "method",
  [
    lambda sgd: methods.local_sgd(sgd, 5, axis=None),
    lambda sgd: methods.diloco(sgd, 5, axis=None),
    lambda sgd: methods.easgd(sgd, 5, axis=None),
    lambda sgd: methods.mp2(sgd, Halves, lambda _, f: f, 0.0, axis=None),
    lambda sgd: transforms.predict_rest(
      methods.ssgd(sgd, axis=None), Halves, lambda _, f: f, 0.0, axis=None
    ),
  ],
  ids=("local_sgd", "diloco", "easgd", "mp2", "predict_rest"),
)
def test_a_jump_beside_rounds_is_refused(method):
  w = {"a": jnp.ones(3), "b": jnp.ones(3)}
  jump = prediction.nowcast_weights(NETWORKS, 1, axis=None)
  beside = optax.chain(method(optax.sgd(1.0)), jump).init(w)
  within = method(sgd_and_jump()).init(w)
  for ask in (
    lambda state: transforms.apply_updates(w, w, state),
    lambda state: transforms.anchor(state, w),
    transforms.synchronized,
  ):
    with pytest.raises(
      ValueError, match=r"hold `nowcast_weights` beside.*lost.*inner chain"
    ):
      ask(beside)
    ask(within)


def test_a_jump_at_a_rounds_end_is_kept_in_the_inner_chain():
  local = methods.local_sgd(sgd_and_jump(), 5, axis=None)
  plain, w, alone = sgd_and_jump(), jnp.zeros(3), jnp.zeros(3)
  state, own = local.init(w), plain.init(w)
  updates = jax.jit(local.update), jax.jit(plain.update)
  for step in range(6):
    gradient = jnp.full(3, 1.0 + step)
    moves, state = updates[0](gradient, state, w)
    w = transforms.apply_updates(w, moves, state)
    moves, own = updates[1](gradient, own, alone)
    before, alone = alone, alone + moves
    np.testing.assert_allclose(w, alone, rtol=1e-6)
    assert (abs(alone - (before - gradient)).max() > 1e-3) == (step == 4)
  np.testing.assert_allclose(
    transforms.anchor(state, w), alone + gradient, rtol=1e-6
  )


def test_networks_are_looked_at_when_the_jump_is_made():
  for wrong, rule in (
    ({"conv": 1}, r"in conv there is no leaf head\.bias"),
    ({"dense": {}}, "in dense there is no leaf"),
    (
      {"bias": NETWORK | {"more": jnp.zeros(1)}},
      "in bias there is a leaf more besides",
    ),
    (
      {"conv": NETWORK | {"head": {"kernel": np.ones(3), "bias": np.ones(1)}}},
      r"in conv head\.kernel has shape \[3\] and not \[64, 1\]",
    ),
  ):
    for call in (
      lambda wrong=wrong: prediction.nowcast_weights(wrong, 1, axis=None),
      lambda wrong=wrong: prediction.nowcast(jnp.zeros(5), wrong),
    ):
      with pytest.raises(ValueError, match=f"`params` .*{rule}.*`fit_nowcas"):
        call()


def test_the_history_is_what_the_worker_holds():
  jump = prediction.nowcast_weights(NETWORKS, 1, axis=None)
  w = jnp.linspace(0.9, 1.1, 7).astype(jnp.bfloat16)

  @jax.jit
  def step(updates, state, w):
    updates, state = jump.update(updates, state, w)
    return transforms.apply_updates(w, updates), state

  after, state = step(jnp.full(7, 0.0037), jump.init(w), w)
  np.testing.assert_array_equal(state.history[0], after.astype(jnp.float32))
