"""The programs of a step, compiled once, and the choice of the next one.

A program depends on the number of sub-tensors that the step sends, and on
whether it ends a round. The host chooses it without waiting for the device,
because the state holds the places of the next two updates in their rounds.
"""

import collections
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, collectives, states, transforms
from jdist.states import PyTree
from jdist.training import _train_state

# Without a decision of the host the device ends rounds.
DEVICE = transforms.Control()


class Choice(NamedTuple):
  """The static arguments for which a step is compiled."""

  control: transforms.Control = DEVICE
  # Whether the round's end sends nothing, because all was streamed before.
  idle: bool = False


class Programs:
  """The programs of a run, and the choice between them."""

  def __init__(
    self, stream_steps: Sequence[int], host_rounds: bool | None = None
  ):
    """Checks the numbers of steps; with `host_rounds=None` a state decides."""
    found = {
      checks.check_int(f"stream_steps[{i}]", number, 1)
      for i, number in enumerate(
        checks.check_list("stream_steps", stream_steps, "ints >= 1")
      )
    }
    self.stream_steps = tuple(sorted(found))
    self.host_rounds = host_rounds

  def for_state(self, opt_state: Any) -> "Programs":
    """Decides from a state, or its shapes, whether the host ends its rounds."""
    if self.stream_steps and not transforms.streams(opt_state):
      raise ValueError(
        "`stream_steps` must be empty for an optimizer that streams nothing, "
        f"got {self.stream_steps}: each is a program, and none would run. "
        "Leave it out, or build the optimizer with "
        "`overlap=Delayed(stream=Stream())`."
      )
    can = jax.eval_shape(transforms.rounds_ahead, opt_state) is not None
    if self.host_rounds and not can:
      raise ValueError(
        "`host_rounds` must be False for an optimizer whose rounds no host "
        "ends, got True. Leave it out: the loop ends rounds where it can."
      )
    ends = can if self.host_rounds is None else self.host_rounds
    return Programs(self.stream_steps, ends)

  def needed(self, due: int, undelayed: bool) -> tuple[Choice, ...]:
    """Returns the programs that a run without fragments may need.

    A mean is applied `due` updates after a round begins, and at its end if this
    is 0. If `undelayed`, the device ends the first rounds, without a delay.
    """
    places = [(-1, 0, 1)] if undelayed else []
    # Longer rounds than these need no other programs.
    for interval in range(1, max(due, *self.stream_steps, 1) + 3):
      window = min(interval, due) or interval
      places += [(window, offset, interval) for offset in range(interval)]
    chosen = [self._one(*place) for place in places]
    return tuple({choice.control: choice for choice in chosen}.values())

  @property
  def at_once(self) -> tuple[Choice, ...]:
    """The programs of rounds whose means are sent whole, when they are due."""
    if self.stream_steps or not self.host_rounds:
      return (self._one(-1, 0, 1),)
    return (self._one(1, 0, 1), self._one(2, 0, 2))

  def fragments_at_once(self, fragments: int) -> Choice:
    """Returns the choice for fragments that are sent whole, when due."""
    if not self.stream_steps:
      return Choice()
    one = transforms.Control(stream_steps=None)
    return Choice(transforms.Control(fragments=(one,) * fragments))

  def choose(self, place: np.ndarray) -> Choice:
    """Chooses the program of one step.

    A place is the window, offset and interval of the update, [3] or [fragments,
    3], see `transforms.rounds_ahead`.

    >>> programs = Programs((1, 2, 4, 8), False)
    >>> programs.choose(np.array([6, 0, 6])).control.stream_steps
    4
    >>> programs.choose(np.array([6, 4, 6])).idle
    True
    """
    if place.ndim == 1:
      return self._one(*map(int, place))
    each = [self._one(*map(int, row)) for row in place]
    if not self.host_rounds and not self.stream_steps:
      return Choice()
    return Choice(
      transforms.Control(fragments=tuple(one.control for one in each)),
      all(one.idle for one in each),
    )

  def _one(self, window: int, offset: int, interval: int) -> Choice:
    # A negative window marks a round that the device ends, as the first one is
    # with a delayed method.
    host_ends = self.host_rounds and window >= 0
    steps: Any = "fixed"
    idle = False
    if self.stream_steps:
      fitting = [s for s in self.stream_steps if s <= window]
      steps = fitting[-1] if fitting and offset < fitting[-1] else None
      # If no number of steps fits into the window, the round's end sends.
      idle = steps is None and (bool(fitting) or window == 0)
    control = transforms.Control(
      round_ends=offset + 1 >= interval if host_ends else None,
      arrives=offset + 1 == window if host_ends else None,
      stream_steps=steps,
    )
    return Choice(control, idle)


class RoundHost:
  """Chooses the program of each update, as `Trainer` does.

  A program depends on whether its update ends a round, and on how much of a
  streamed message it sends. The host passes both by `update(...,
  control=control)`. It never waits for the running update: meanwhile it reads
  the state before it.

  >>> import functools, jax.numpy as jnp, jdist, optax
  >>> from jdist import training
  >>> workers = jdist.workers(2, substrate="vmap")
  >>> optimizer = jdist.local_sgd(optax.sgd(0.5), 2, axis=workers.axis)
  >>> def step(w, state, control):
  ...   updates, state = optimizer.update(w, state, w, control=control)
  ...   return jdist.apply_updates(w, updates, state), state
  >>> @functools.cache
  ... def program(control):
  ...   return workers.jit(functools.partial(step, control=control))
  >>> w = workers.place(jnp.array([8.0, 4.0]))
  >>> state = workers.jit(optimizer.init)(w)
  >>> host = training.RoundHost(workers, state)
  >>> for _ in range(2):
  ...   control = host.control()
  ...   w, state = program(control)(w, state)
  ...   host.follow(state)
  ...   print(control.round_ends, w.tolist())
  False [4.0, 2.0]
  True [1.5, 1.5]
  """

  def __init__(
    self,
    workers: collectives.Workers,
    opt_state: PyTree,
    *,
    stream_steps: Sequence[int] = (),
    host_rounds: bool | None = None,
  ):
    """Reads the position of the run in its round.

    Args:
      workers: The run's workers.
      opt_state: The optimizer's state, `[workers, ...]`, before an update.
      stream_steps: As in `Trainer`, the numbers of updates in which a streamed
        message may be sent.
      host_rounds: As in `Trainer`. By default (None) the host ends rounds if
        the method allows it.

    Raises:
      ValueError: If the optimizer streams nothing although `stream_steps` is
        given, or if no host can end its rounds although `host_rounds` is True.
    """
    self._choices = Programs(stream_steps, host_rounds).for_state(opt_state)
    self._places: collections.deque[Any] = collections.deque()
    if jax.eval_shape(transforms.rounds_ahead, opt_state) is None:
      return
    ahead = workers.jit(transforms.rounds_ahead)(opt_state)
    both = np.asarray(workers.view(ahead))
    self._places.extend((both[..., 0, :], both[..., 1, :]))
    # The place of the next update is known already, that of the one after it is
    # new in each state.
    self._following = workers.jit(
      lambda state: transforms.rounds_ahead(state)[..., 1, :]  # type: ignore[index]
    )

  def control(self) -> transforms.Control:
    """Returns the control of the next update."""
    if not self._places:
      return transforms.Control()
    place = self._places[0]
    if isinstance(place, jax.Array):
      # All workers have it. A view would start a program in each step.
      place = np.asarray(place.addressable_shards[0].data)[0]
    return self._choices.choose(place).control

  def follow(self, opt_state: PyTree) -> None:
    """Takes the state that an update has returned, before it is donated."""
    if self._places:
      self._places.popleft()
      self._places.append(self._following(opt_state))


class CompiledStep:
  """A worker's step as one program per control, and the traffic of each.

  It outlives a call of `fit`, so that several calls share the programs.
  """

  def __init__(
    self,
    workers: collectives.Workers,
    step: Callable[..., tuple[_train_state.TrainState, dict[str, jax.Array]]],
    max_shapes: int,
  ):
    """Compiles nothing yet; batches may have `max_shapes` shapes."""
    checks.check_function("step", step, "a state and a batch", 2)
    self.workers = workers
    self._max_shapes = max_shapes
    self._shapes: list[Any] = []
    self.takes_control = _takes_control(step)
    # The names of the metrics are known once the step has been traced.
    self.names: tuple[str, ...] = ()
    self._user_step = step
    self._programs: dict[Any, Any] = {}
    self._traffic: dict[Any, collectives.Traffic] = {}

    def all_finite(state: _train_state.TrainState) -> jax.Array:
      bad = ~_train_state.is_finite(
        state.params, state.opt_state, state.model_state, state.laws
      )
      # The workers must decide alike, since all of them write a checkpoint.
      return collectives.sum(bad.astype(jnp.float32), workers.axis) == 0

    self._fingerprints = workers.jit(collectives.fingerprint)
    self._all_finite = workers.jit(all_finite)

  def _step(
    self, state: _train_state.TrainState, batch: PyTree, control: Any
  ) -> tuple[_train_state.TrainState, dict[str, jax.Array]]:
    """Runs the user's step, and checks what it returns."""
    # A user's own step may not have the parameter, so the default is left out.
    given = {} if control == transforms.Control() else {"control": control}
    found = self._user_step(state, batch, **given)
    rule = "a state like its own"
    new, metrics = checks.check_pair("step", found, f"{rule} and a dict")
    checks.check_type("step(...)[1]", metrics, dict, "a dict of scalars")
    checks.check_form(f"`step` must return {rule}", new, state, exact=True)
    for name in metrics:
      checks.check_type("step(...)[1]", name, str, "a dict with names as keys")
    if missing := {"loss", "rounds"} - metrics.keys():
      raise ValueError(
        f"`step` must return the metrics `loss` and `rounds`, but {missing} "
        f"are missing; got {sorted(metrics)}."
      )
    for name, value in metrics.items():
      if not checks.is_number(value):
        raise ValueError(
          f"`step` must return scalars as metrics, got {checks.show(value)} as "
          f"{name!r}. Take a mean."
        )
    return new, metrics

  def _packed(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control,
  ) -> tuple[_train_state.TrainState, jax.Array]:
    """Runs the step, and stacks its metrics into one array."""
    state, metrics = self._step(state, batch, control)
    self.names = tuple(sorted(metrics))
    # Each array that the host reads is a transfer, so all metrics are one.
    values = [jnp.asarray(metrics[n], jnp.float32) for n in self.names]
    return state, jnp.stack(values)

  def shape_number(self, placed: PyTree) -> int:
    """Returns the number of a batch's shape, from 0 in order of appearance."""
    leaves, structure = jax.tree.flatten(placed)
    shape = structure, tuple((x.shape, x.dtype) for x in leaves)
    if shape in self._shapes:
      return self._shapes.index(shape)
    number, most = len(self._shapes) + 1, self._max_shapes
    if number > most:
      raise ValueError(
        f"`max_shapes` must be at least the number of shapes of the batches, "
        f"each of which compiles programs of its own, got {most} and a batch "
        f"of shape {number}: {[x.shape for x in leaves]}. Pad the batches and "
        'give them a `"mask"`, or raise `max_shapes`.'
      )
    if self._shapes:
      warnings.warn(
        f"Batch shape {number} of at most {most} (`max_shapes`) compiles "
        f"further programs: {[x.shape for x in leaves]}.",
        RuntimeWarning,
        stacklevel=2,
      )
    self._shapes.append(shape)
    return number - 1

  def program(
    self, state: _train_state.TrainState, control: transforms.Control
  ) -> Any:
    """Returns the compiled step for states with the sharding of this one."""
    specs = self.workers.specs(state)
    leaves, structure = jax.tree.flatten(specs)
    key = (control, structure, tuple(leaves))
    if key not in self._programs:
      # The output gets the input's sharding. Otherwise the compiler may choose
      # another one over the mesh's other axes, and the next call recompiles.
      self._programs[key] = self.workers.jit(
        functools.partial(self._packed, control=control),
        donate_argnums=0,
        out_specs=(specs, None),
      )
    return self._programs[key]

  def traffic(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control,
  ) -> collectives.Traffic:
    """Returns the collectives of one worker's step and of its rounds."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    args = jax.tree.map(one, (state, batch))
    leaves, structure = jax.tree.flatten(args)
    key = (control, structure, tuple((x.shape, str(x.dtype)) for x in leaves))
    # Counting costs as much as tracing the step, so the result is kept.
    if key not in self._traffic:
      self._traffic[key] = collectives.traffic(
        functools.partial(self._step, control=control), *args,
        axis=self.workers.axis, num_workers=self.workers.num_workers,
        inner_axes=self.workers.inner_axes,
      )  # fmt: skip
    return self._traffic[key]

  def is_finite(self, state: _train_state.TrainState) -> bool:
    """Returns whether training can continue from a state."""
    return bool(self.workers.view(self._all_finite(state)))

  def fingerprints(self, state: _train_state.TrainState) -> dict[str, str]:
    """Returns a hash of each leaf that must be equal on all workers, by name.

    A worker of several processes computes it by collectives of its own.
    """
    shared = checks.named_leaves(_train_state.shared_leaves(state))
    leaves = checks.named_leaves(state)
    chosen = {name: leaves[name] for name, once in shared.items() if once}
    (row, *_) = local_rows(self._fingerprints(chosen))
    # A dict's leaves are sorted by their names.
    return {
      f"`{name}`": np.asarray(x).tobytes().hex()
      for name, x in zip(sorted(chosen), row, strict=True)
    }

  def check_communicates(
    self, state: _train_state.TrainState, traffic: list[collectives.Traffic]
  ) -> None:
    """Raises a ValueError for several workers whose programs send nothing."""
    num = self.workers.num_workers
    # A step with plain Optax may still average its batch statistics, so that
    # these bytes alone do not count as communication.
    laws = states.find_laws(state.model_state, "statistic", state.laws)
    pairs = zip(
      jax.tree.leaves(state.model_state), jax.tree.leaves(laws), strict=True
    )
    statistics = sum(
      x.nbytes // x.shape[0] for x, law in pairs if law == "statistic"
    )
    sent = max(
      sum(c.payload_bytes * c.count for c in x.collectives) for x in traffic
    )
    if num > 1 and sent <= statistics:
      raise _train_state.silent_step_error("step", num)


def _takes_control(step: Callable[..., Any]) -> bool:
  """Returns whether a user's own step passes a control to its optimizer."""
  try:
    parameters = inspect.signature(step).parameters
  except (TypeError, ValueError):
    return False
  kinds = {p.kind for p in parameters.values()}
  return "control" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def local_rows(metrics: jax.Array) -> np.ndarray:
  """Returns the metrics of this process's workers, [local workers, metrics]."""
  if metrics.is_fully_addressable:
    return np.asarray(metrics)
  return np.concatenate(
    [np.asarray(s.data) for s in metrics.addressable_shards]
  )
