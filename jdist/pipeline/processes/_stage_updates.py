"""The updates of a device's stages at the end of an iteration."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, training, transforms
from jdist.pipeline.processes import _device_part, _peers
from jdist.pipeline.runtime import _chain_check, _stages, _traced_model
from jdist.states import PyTree


def sees_all(
  optimizer: optax.GradientTransformation, stages: Sequence[_stages.LayerLike]
) -> bool:
  """Returns whether one device has to run an optimizer for all stages."""
  return _chain_check.needs_all(
    optimizer,
    num_parts=len(stages),
    num_stages=len(stages),
    tied=bool(_stages.shared_paths(stages)),
    one_program=False,
  )


class UpdateProgram:
  """The programs that turn a sum of gradients into new parameters.

  Attributes:
    whole: Whether the optimizer has to see all stages' leaves.  Then the first
      stage's device makes the update of all and keeps the optimizer's state.
  """

  def __init__(
    self,
    optimizer: optax.GradientTransformation,
    stages: Sequence[_stages.LayerLike],
    count: int,
    team: collectives.Workers | None = None,
  ):
    """Makes the programs for means over `count` micro-batches."""
    # All stages share these programs, so JAX compiles equal stages once.
    self._optimizer = transforms.lenient(optimizer)
    self._count, self.whole = count, sees_all(optimizer, stages)
    jit = jax.jit if team is None else team.jit
    self._axis = None if team is None else team.axis
    # Parameters are not donated: later passes may still read this version.
    self.update = jit(self._update, donate_argnums=(0, 1))
    self.squared_norm = jit(self._squared_norm)
    self.clipped_mean = jit(self._clipped_mean, donate_argnums=0)
    self.update_all = jit(self._update_all, donate_argnums=(0, 1))
    self.init = jit(self._optimizer.init)

  def init_all(self, params: Sequence[PyTree]) -> PyTree:
    """Makes the optimizer's state of all stages."""
    state = self.init(_stages.merge(params))
    _chain_check.check_state(state)
    return state

  def _update(
    self,
    total: PyTree,
    opt_state: PyTree,
    params: PyTree,
    model_state: PyTree,
    scale: jax.Array,
  ) -> tuple[PyTree, PyTree, PyTree]:
    grads = self._clipped_mean(total, params, scale)
    updates, opt_state = self._optimizer.update(grads, opt_state, params)
    params = transforms.apply_updates(params, updates, opt_state)
    # Workers average batch statistics where a round ends.
    model_state = training.synchronize_statistics(
      model_state, opt_state, axis=self._axis
    )
    return params, opt_state, model_state

  def _clipped_mean(
    self, total: PyTree, params: PyTree, scale: jax.Array
  ) -> PyTree:
    def mean(total: jax.Array, param: jax.Array) -> jax.Array:
      grad = (total / self._count).astype(param.dtype)
      return grad * scale.astype(grad.dtype)

    return jax.tree.map(mean, total, params)

  def _update_all(
    self, grads: list[PyTree], opt_state: PyTree, params: list[PyTree]
  ) -> tuple[list[PyTree], PyTree]:
    """Returns each stage's new parameters from the means of all stages."""
    together = _stages.merge(params)
    updates, opt_state = self._optimizer.update(
      _stages.merge(grads), opt_state, together
    )
    new = optax.apply_updates(together, updates)
    return [_stages.pick(new, one) for one in params], opt_state

  def _squared_norm(self, total: PyTree) -> jax.Array:
    return _traced_model.squared_norm(total) / self._count**2


class StageUpdates:
  """The newest parameters of a device's stages, and their updates."""

  def __init__(
    self,
    part: _device_part.DevicePart,
    programs: UpdateProgram,
    state: _device_part.ProcessState,
  ):
    self._part, self._programs, self._step = part, programs, state.step
    self.params, self.opt_state = dict(state.params), dict(state.opt_state)
    self._waiting: dict[int, list[int]] = {}

  def read(self, stage: int) -> PyTree:
    """Returns a stage's newest parameters, as passes read them."""
    return transforms.predicted_weights(
      self.opt_state[stage], self.params[stage]
    )

  def ready(self, stage: int, iteration: int) -> list[int]:
    """Returns the stages to update when the table updates a stage.

    Barriers need gradients of other devices.  A device must not wait for them
    before all of its own stages are done, or two devices could wait for each
    other; so the last of its updates makes all of them.
    """
    part, clips = self._part, self._part.model.clip_norm is not None
    if not (clips or part.tied or self._programs.whole):
      return [stage]
    waiting = self._waiting.setdefault(iteration, [])
    waiting.append(stage)
    if len(waiting) < len(part.own):
      return []
    return sorted(self._waiting.pop(iteration))

  def update(
    self,
    totals: dict[int, PyTree],
    iteration: int,
    model_state: dict[int, PyTree],
  ) -> None:
    """Makes new parameters from the sums of gradients of some stages.

    If a round of several workers ends, it averages their batch statistics.
    """
    # The norm is that of the summed gradients, as in the unsplit model.
    if self._part.tied:
      totals = self._tied(totals, iteration)
    scale = self._scale(totals, iteration)
    if self._programs.whole:
      self._update_whole(totals, scale, iteration)
      return
    for s, total in totals.items():
      found = self._programs.update(
        total, self.opt_state[s], self.params[s], model_state[s], scale
      )
      self.params[s], self.opt_state[s], model_state[s] = found

  def _update_whole(
    self, totals: dict[int, PyTree], scale: jax.Array, iteration: int
  ) -> None:
    """Updates all stages together on the first stage's device."""
    part, stages = self._part, range(self._part.table.num_stages)
    device_of, step = part.table.device_of, self._step + iteration
    up, down = (
      [_peers.Tag(_peers.Kind.UPDATE, s, way, step) for s in stages]
      for way in (0, 1)
    )
    pairs = {}
    for s, total in totals.items():
      grads = self._programs.clipped_mean(total, self.params[s], scale)
      pairs[s] = grads, self.params[s]
    if part.device != device_of[0]:
      for s, pair in pairs.items():
        part.peers.send(device_of[0], up[s], pair)
      for s in pairs:
        self.params[s] = part.peers.receive(
          device_of[0], down[s], self.params[s]
        )
      return
    for s in stages:
      # The shapes of another device's stage follow from the model.
      if s not in pairs:
        params = part.like(part.model.stages[s].params)
        pairs[s] = part.peers.receive(device_of[s], up[s], (params, params))
    grads, params = zip(*(pairs[s] for s in stages), strict=True)
    found, self.opt_state[0] = self._programs.update_all(
      list(grads), self.opt_state[0], list(params)
    )
    # Its own stages stay; the others' parameters return to their devices.
    for s, params in enumerate(found):
      if s in totals:
        self.params[s] = params
      else:
        part.peers.send(device_of[s], down[s], params)

  def _scale(self, totals: dict[int, PyTree], iteration: int) -> jax.Array:
    """Returns the factor that clips the norm of all stages' gradients."""
    most = self._part.model.clip_norm
    if most is None:
      return jnp.ones(self._part.front, jnp.float32)
    norms = {}
    for s, total in totals.items():
      counted = {
        path: leaf
        for path, leaf in _stages.by_path(total).items()
        # A tied leaf counts once, in its first stage.
        if self._part.tied.get(path, (s,))[0] == s
      }
      norms[s] = self._programs.squared_norm(list(counted.values()))
    every = self._part.collect(_peers.Kind.NORM, norms, self._step + iteration)
    # Every device adds in the stages' order, so that all scale by equal bits.
    squared = sum(jnp.asarray(every[s]) for s in sorted(every))
    return _traced_model.clip_scale(jnp.asarray(squared), most)

  def _tied(
    self, totals: dict[int, PyTree], iteration: int
  ) -> dict[int, PyTree]:
    """Adds up the gradients of tied parameters, in the stages' order."""
    found = {s: _stages.by_path(total) for s, total in totals.items()}
    sums = {}
    for number, (path, stages) in enumerate(self._part.tied.items()):
      if not any(s in totals for s in stages):
        continue
      own = {s: found[s][path] for s in stages if s in totals}
      # Each device adds in the stages' order, so that all have equal bits.
      parts = self._part.collect(
        _peers.Kind.TIED, own, self._step + iteration, stages, number
      )
      sums[path] = sum((parts[s] for s in stages[1:]), parts[stages[0]])
    shared = {}
    for s, total in totals.items():
      # Each stage needs its own copy, as an update donates its gradients.
      leaves = [
        jnp.array(sums[path]) if path in sums else leaf
        for path, leaf in found[s].items()
      ]
      shared[s] = jax.tree.unflatten(jax.tree.structure(total), leaves)
    return shared
