"""Methods with rounds between workers that come and go."""

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, reducers, server, signatures, transforms

PyTree = Any


class _EndedError(Exception):
  """The loop was left, and takes no further step."""


class OwnLoop(server.FragmentRunner):
  """Yields the state of each local step, until the server ends the run.

  `Rounds.loop` makes it.  Threads handle the messages; a merge, or a new
  beginning after this worker was taken for lost, shows in the next state:

      for state in loop:
        params, opt_state, loss = step(state.params, state.opt_state, batch)
        loop.advance(params, opt_state, loss)

  A step must not donate the parameters, of which a message may be made.
  """

  takes_own_steps = True

  def connect(self, channel: server.Channel, name: str, depth: int) -> None:
    """Sets the connection to the server."""
    self._loop = server.WorkerLoop(channel, name, self, depth=depth)
    self._asked: queue.Queue[Any] = queue.Queue()
    self._answers: queue.Queue[Any] = queue.Queue()
    self._advanced = 0

  def advance(
    self, params: Any, opt_state: Any, loss: Any, model_state: Any = None
  ) -> None:
    """Hands over the result of a step, and the mean loss of its samples."""
    found: Any = jax.tree.structure(params)
    if found != self._structure or not checks.is_number(loss):
      raise ValueError(
        "`params` must be a tree as the state's, and `loss` a number, got "
        f"{checks.show(found)} and {checks.show(loss)}."
      )
    self._advanced += 1
    self._answers.put((params, opt_state, jnp.asarray(loss), model_state))

  def __iter__(self) -> Iterator[Any]:
    """Joins the run, and yields the state before each step."""
    threading.Thread(target=self._run, daemon=True).start()
    try:
      while not isinstance(found := self._asked.get(), BaseException | None):
        self._advanced = 0
        yield found
        if self._advanced != 1:
          raise ValueError(
            "`advance` must be called once in each step of the loop, got "
            f"{self._advanced} calls: hand over parameters, optimizer's state "
            "and loss."
          )
    finally:
      self._answers.put(None)
    if found is not None:
      raise found

  def _run(self) -> None:
    try:
      self._loop.run()
      self._asked.put(None)
    except BaseException as error:
      self._asked.put(error)

  def _local_step(
    self, state: Any, samples: tuple[int, int, int], key: jax.Array
  ) -> tuple[Any, jax.Array]:
    del samples, key
    self._asked.put(state)
    answer = self._answers.get()
    if answer is None:
      raise _EndedError
    params, opt_state, loss, model_state = answer
    if model_state is None:
      model_state = state.model_state
    state = state._replace(opt_state=opt_state, model_state=model_state)
    return state._replace(params=params), loss


class _Parts(NamedTuple):
  """A method's parts, in the words of the protocol and its learners."""

  number: int
  outer: optax.GradientTransformation
  late: bool
  mix: float | None
  push_codec: reducers.MessageCodec | None


@signatures.checked
class Rounds:
  r"""Runs a method with rounds between workers that join, leave and return.

  A round merges the pushes of the members that are there, once a quorum of them
  has pushed and a grace window has passed, by the outer step of the method:

  .. math:: \Delta = \frac{\sum_{i \in \text{living}} c_i \Delta_i}
            {\sum_{i \in \text{living}} c_i}

  with the samples c of a push.  This is `DecoupledDiLoCo` with `ahead` 0, or
  one merge late for an `overlap`; every worker has a JAX runtime of its own.
  Undisturbed it equals the collective method up to rounding, where a codec's
  mean is a gather: the server sends its merges without compression.  With
  `peers` it sends none: each member makes all merges on its CPU, to the same
  bits, by messages that it gets from the other members as they are encoded.

  A worker that joins or returns takes the parameters, the batch statistics and
  the position of schedules from the server, which has made all merges, and
  begins with a fresh inner optimizer; no worker sends a state of its own.  The
  residual of its feedback stays if only its connection was lost, and is lost
  with its process, as is the progress that it had not pushed.

  Args:
    method: The transformation of a method with rounds, for instance
      `methods.diloco(optimizer, 8, axis=None)`.
    params: The first parameters.
    workers: The names of all workers that may take part.
    samples: Samples of a worker's local step, or an allocation such as
      `server.SpeedBatches`.
    quorum: Part of the members whose pushes a merge waits for.
    grace: The longest wait for the others, in times of a round.  With 1, the
      default, a worker that has joined within a round takes part in its merge.
    timeout_s: Seconds without a push after which a worker counts as lost.
    peers: Whether members send each other their pushes, and merge them.  The
      server, which merges, too, only decides, and serves who joins.
    model_state: The first batch statistics, if any.
    seed: Seed of the random numbers in losses and codecs.

  Attributes:
    protocol: The protocol, for `server.Simulation` and `server.replay`.
    workers: The names.

  Raises:
    ValueError: If an argument is wrong, or the method has a part that a
      server cannot run between tasks.
  """

  def __init__(
    self,
    method: optax.GradientTransformation,
    params: signatures.Numbers,
    *,
    workers: Sequence[str],
    samples: Any = 32,
    quorum: float = 0.5,
    grace: float = 1.0,
    timeout_s: float | None = None,
    peers: bool = False,
    model_state: signatures.Arrays = None,
    seed: signatures.Seed = 0,
  ):
    parts = self._parts = _parts_of(method, params)
    assert isinstance(method, transforms.RoundTransformation)
    self.workers, self._optimizer = tuple(workers), method.parts.optimizer
    self._interval = method.parts.policy.constant or 1
    if not hasattr(samples, "sizes"):
      samples = server.FixedBatches(samples)
    # NumPy's arrays: a process that unpickles them may still choose devices.
    self._params = jax.device_get(params)
    self._common = {
      "fragments": method.fragments,
      "push_codec": parts.push_codec,
      "model_state": jax.device_get(model_state),
    }
    self._seed = seed
    self._merging = {"outer": parts.outer} if peers else {}
    self.protocol: server.Protocol = server.DecoupledDiLoCo(
      batches=samples,
      interval=self._interval,
      fragments=parts.number,
      quorum=quorum,
      grace=grace,
      ahead=2 * parts.late,  # Merges travel while workers compute.
      in_step=parts.late,
      weights="samples",
      timeout_s=timeout_s,
      peers=peers,
    )
    self._plan = server.LivePlan(
      workers=self.workers, versions=server.versions()
    )

  def syncer(self, *, shared: bool = True) -> server.FragmentSyncer:
    """Returns the server's learner; `shared` is that of the samples."""
    return server.FragmentSyncer(
      self._params, workers=self.workers, outer=self._parts.outer,
      shared=shared, **self._common,
    )  # fmt: skip

  def runner(
    self,
    name: str,
    loss_fn: Callable[..., Any],
    samples: server.Samples | None,
    *,
    params: signatures.Numbers = None,
    sizes: Sequence[int] | None = None,
    kind: Any = server.FragmentRunner,
  ) -> Any:
    """Returns the learner of the worker `name`, of class `kind`.

    Its batches come from `samples`, None if local steps take their own, and are
    padded to `sizes`, by default the allocation's.  Parameters that are sharded
    over its devices are given as `params`.
    """
    checks.check_choice("name", name, self.workers)
    batches = self.protocol.batches
    if sizes is None and isinstance(batches, server.FixedBatches):
      sizes = batches.sizes([None])  # Known, and compiled before a task.
    return kind(
      loss_fn, self._optimizer, self._params if params is None else params,
      samples, number=self.workers.index(name), num_workers=len(self.workers),
      sizes=sizes, seed=self._seed, interval=self._interval,
      mix=self._parts.mix, **self._common, **self._merging,
    )  # fmt: skip

  def work(
    self,
    channel: server.Channel,
    name: str,
    loss_fn: Callable[..., Any],
    samples: server.Samples,
    **options: Any,
  ) -> None:
    """Takes part until the server ends the run; arguments as in `runner`."""
    learner = self.runner(name, loss_fn, samples, **options)
    learner.prepare()
    depth = self.protocol.depth
    server.WorkerLoop(channel, name, learner, depth=depth).run()

  def loop(self, channel: server.Channel, name: str, **options: Any) -> OwnLoop:
    """Returns a worker for your own loop; `params` as in `runner`."""
    found: OwnLoop = self.runner(
      name, lambda *args: None, None, kind=OwnLoop, **options
    )
    found.connect(channel, name, self.protocol.depth)
    return found

  def session(
    self,
    engine: Any,
    work: Callable[[server.Channel, str], None],
    *,
    record: str | None = None,
    shared: bool = True,
    **options: Any,
  ) -> server.LiveSession:
    """Returns a live run for `server.ServerRun`, which survivors continue.

    Args:
      engine: `server.ThreadEngine()` or `server.RayEngine(...)`.
      work: What a worker does with its connection and its name, by `work` or
        `loop`; once it returns, the others continue without the worker.
      record: a file for all messages, which `server.replay` reads.
      shared: Whether all workers take from one stream of samples.
      **options: Those of `server.LiveSession`.
    """
    plan = dataclasses.replace(self._plan, record=record)
    works = {x: functools.partial(_call, work, x) for x in self.workers}
    return server.LiveSession(
      engine, functools.partial(self._serve, shared), works, plan,
      survive=True, **options,
    )  # fmt: skip

  def _serve(self, shared: bool, plan: server.LivePlan) -> Any:
    syncer = self.syncer(shared=shared)
    return server.LiveServer(self.protocol, syncer, plan)


def _call(work: Callable[..., None], name: str, channel: Any) -> None:
  work(channel, name)


def _parts_of(method: Any, params: PyTree) -> _Parts:
  """Returns a method's parts, or refuses one that a server cannot run."""
  if not isinstance(method, transforms.RoundTransformation):
    raise ValueError(
      "`method` must be one with rounds of local steps, such as "
      "`methods.diloco(...)`, not chained with others, got "
      f"{checks.show(method)}. Gradients in every step are for a protocol: "
      "`server.BSP()`."
    )
  parts, outer, codec = method.parts, method.outer, None
  if parts.axis is not None:
    raise ValueError(f"`axis` must be None with a server, got {parts.axis!r}.")
  if parts.policy.constant is None:
    raise ValueError(
      "`interval` must be a number with a server, which gives tasks of as many "
      "steps, got a policy. Take `intervals.fixed(8)`."
    )
  if outer is None:
    raise ValueError(
      "`rule` must be a mean or an outer optimizer with a server, which keeps "
      f"no other state of a round, got {type(parts.rule).__name__}. Take "
      "`methods.local_sgd` or `methods.diloco`."
    )
  number = max(transforms.fragments_of(params, method.fragments)) + 1
  late, mix = _lateness(method.overlap, parts.policy.constant // number)
  compression, chunks = parts.compression, None
  if compression is not None:
    reducer = compression.reducer
    if isinstance(reducer, reducers.Chunked):  # As of a stream.
      chunks, reducer = reducer, reducer.reducer
    codec = getattr(reducer, "codec", None)
    if codec is None:
      raise ValueError(
        "`compression` must be a codec with a server, to which each worker "
        f"sends its own message, got {checks.show(compression.reducer)}. "
        "Take `Compression(codecs.Quantize(4), ErrorFeedback())`."
      )
    codec = reducers.MessageCodec(
      codec, compression.feedback, seed=compression.seed or 0, chunks=chunks
    )
  return _Parts(number, outer, late, mix, codec)


def _lateness(
  overlap: transforms.Delayed | None, task: int
) -> tuple[bool, float | None]:
  """Returns whether means are one merge late, and the mixture."""
  if overlap is None:
    return False, None
  mix = None if overlap.mix is None else float(np.asarray(overlap.mix))
  if overlap.steps == 0:
    return False, mix
  # None begins with the first round that is longer than the delay.
  at_once = overlap.after_step is None and overlap.steps is None and task > 1
  for name, wrong, rule in (
    ("steps", overlap.steps not in (None, task), f"0 or {task}, the steps of a "
     "task: messages come between tasks"),
    ("carry", overlap.carry is None or np.any(overlap.carry != 1), "1: workers "
     "keep all that is not merged, and 1/N changes as they come and go"),
    ("after_step", overlap.after_step != 0 and not at_once, "0: all merges are "
     "delayed or none"),
  ):  # fmt: skip
    if wrong:
      raise ValueError(
        f"`{name}` of an overlap must be, with a server, {rule}; got "
        f"{checks.show(getattr(overlap, name))}."
      )
  return True, mix
