"""Nowcasting in training: at times the parameters jump to their prediction."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, transforms
from jdist.prediction.nowcast import _model

PyTree = Any
_DEVICE = transforms.Control()


class NowcastState(NamedTuple):
  """State of `nowcast_weights`.

  Attributes:
    step: updates so far, int32 scalar.
    history: the parameters at the ends of epochs, float32 [5, *shape]: that of
      epoch e in row e mod 5, so that all five are in order when they are used.
    networks: the trained networks, frozen.
  """

  step: jax.Array
  history: PyTree
  networks: PyTree

  @property
  def jumps(self) -> bool:
    """True: `jdist.anchor` refuses it beside a method with rounds."""
    return True


def nowcast_weights(
  params: dict[_model.Kind, dict[str, Any]],
  steps_per_epoch: int,
  *,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces the parameters by their prediction after every fifth epoch.

  With the parameters :math:`w^{(e)}` at the end of epoch e = 0, 1, ..., and
  when e mod 5 = 4,

  .. math:: w \leftarrow \mathrm{nowcast}(w^{(e-4)}, \dots, w^{(e)})

  Neither the optimizer's state nor the number of steps changes: to save epochs,
  train for fewer.  Nothing is sent; where the parameters are equal on all
  workers to the bit, they stay so.  Its state is five times the size of the
  parameters in float32.

  It stands last in a chain behind `ssgd` or `average_gradients`, where the
  updates are as they will be applied.  With a method that has rounds,
  `local_steps`, `easgd`, `mp2`, ..., it stands last in the inner chain: every
  worker jumps for itself, of `mp2` the front only.  Behind such a method, where
  the jump would be lost on the anchor, it is refused.

  Args:
    params: trained networks, by kind of leaf; see `nowcast`.
    steps_per_epoch: updates in an epoch, >= 1.
    axis: the workers' axis: None, a name, or (inner, outer).

  Returns:
    A transformation; `update` needs `params`.  A drain passes the updates and
    counts nothing.

  Raises:
    ValueError: when an argument is of another kind; at `init`, for complex
      parameters, of which the networks know nothing.

  References:
    Jang et al., Learning to Boost Training by Periodic Nowcasting Near Future
    Weights (ICML 2023).

  >>> networks = _model.init_nowcasters(jax.random.key(0))
  >>> optimizer = optax.chain(
  ...   optax.sgd(1.0), nowcast_weights(networks, 1, axis=None)
  ... )
  >>> w, moves = jnp.array([0.0]), []
  >>> state, update = optimizer.init(w), jax.jit(optimizer.update)
  >>> for _ in range(6):
  ...   updates, state = update(jnp.array([-1.0]), state, w)
  ...   w = w + updates
  ...   moves.append(updates.item())
  >>> moves[:4] + moves[5:]  # The fifth is the jump.
  [1.0, 1.0, 1.0, 1.0, 1.0]
  >>> state[1].history[:, 0].tolist()[1:]  # Row 0 is of the sixth epoch.
  [2.0, 3.0, 4.0, 5.0]
  """
  _model.check_nowcasters(params, some=True)
  if not any(map(checks.is_traced, jax.tree.leaves(params))):
    checks.check_trained("params", params)
  remedy = "Of `data.Batches` take `int(batches.steps_per_epoch)`."
  steps_per_epoch = checks.check_int(
    "steps_per_epoch", steps_per_epoch, 1, remedy=remedy
  )
  collectives.check_axis(axis)
  networks, length = params, _model.HISTORY_LENGTH

  def init_fn(params: optax.Params) -> NowcastState:
    checks.check_real("params", params, "`nowcast_weights`")
    return NowcastState(
      step=jnp.zeros((), jnp.int32),
      history=jax.tree.map(
        lambda x: jnp.zeros((length, *jnp.shape(x)), jnp.float32), params
      ),
      # A buffer of its own, because the state may be donated.
      networks=jax.tree.map(lambda x: jnp.array(x, copy=True), networks),
    )

  def update_fn(
    updates: optax.Updates,
    state: NowcastState,
    params: optax.Params | None = None,
    *,
    control: transforms.Control = _DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, NowcastState]:
    del extra_args
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `nowcast_weights`: call "
        "`optimizer.update(grads, state, params)`."
      )
    if control.drain:
      return updates, state
    state = state._replace(step=optax.safe_increment(state.step))
    return jax.lax.cond(
      collectives.agreed(state.step % steps_per_epoch == 0, axis),
      end_epoch,
      lambda *given: collectives.varying(given[:2], axis),
      updates,
      state,
      params,
    )

  def end_epoch(
    updates: optax.Updates, state: NowcastState, params: optax.Params
  ) -> tuple[optax.Updates, NowcastState]:
    epoch = state.step // steps_per_epoch - 1
    # As the worker will hold them, after the cast to their dtype.
    local = jax.tree.map(
      lambda w: w.astype(jnp.float32),
      transforms.apply_updates(params, updates),
    )
    history = jax.tree.map(
      lambda h, w: h.at[epoch % length].set(w), state.history, local
    )
    updates = jax.lax.cond(
      collectives.agreed(epoch % length == length - 1, axis),
      jump,
      lambda updates, *_: collectives.varying(updates, axis),
      updates,
      local,
      history,
      state.networks,
    )
    state = state._replace(history=history)
    return collectives.varying((updates, state), axis)

  def jump(
    updates: optax.Updates, local: PyTree, history: PyTree, networks: PyTree
  ) -> optax.Updates:
    target = _model.nowcast(history, networks)
    return collectives.varying(
      jax.tree.map(
        lambda u, t, w: (u.astype(jnp.float32) + (t - w)).astype(u.dtype),
        updates, target, local,
      ),
      axis,
    )  # fmt: skip

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
