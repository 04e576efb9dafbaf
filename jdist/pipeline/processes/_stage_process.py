"""A pipeline's device as a process of its own."""

import itertools
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import channel, checks, cluster, collectives, reducers, signatures
from jdist.pipeline.processes import (
  _device_part,
  _peers,
  _segment,
  _stage_files,
  _stage_program,
  _stage_updates,
)
from jdist.pipeline.runtime import _stages, _traced_model
from jdist.pipeline.schedule._table import Table
from jdist.states import num_bytes, PyTree
from jdist.storage import array_files, hashes, lease


@signatures.checked
class StageProcess:
  r"""One device's part of a pipeline, in a process of its own.

  Every process runs the actions of its device in the table's order, each with a
  compiled program of its stage, and waits only for the messages that they need.
  Sends are buffered: a sender continues at once.

  All tables run.  The gradient of iteration k is taken at the version of the
  parameters that `Table.weights` names.  With `"newest"` (PACI) each pass reads
  the newest parameters: the backward pass runs the stage again from its saved
  input, and nothing is stashed (reconstruction).  If the optimizer holds a
  `transforms.predict_weights`, versions are predicted when they are made.

  Parameters that several stages share are tied: their gradients are summed over
  the stages before each of them applies the same update.

  >>> from jdist import models, pipeline
  >>> layer = models.Layer(
  ...   "a", {"a": jnp.array(2.0)}, {}, lambda p, s, x, **_: (x * p["a"], s)
  ... )
  >>> process = StageProcess(
  ...   pipeline.cut_layers([layer], 1),
  ...   lambda y, batch: (jnp.mean(y), {}),
  ...   pipeline.make_table("1f1b", 1, 2),
  ...   {"x": jnp.ones(1)},
  ...   inputs="x",
  ... )
  >>> state = process.init_state(optax.sgd(0.5))
  >>> state, metrics = process.run(state, [{"x": np.array([1.0, 3.0])}])
  >>> float(state.params[0]["a"]), metrics
  (1.0, [{'loss': 4.0}])
  """

  def __init__(
    self,
    stages: _stages.Layers,
    loss: _traced_model.OutputLoss,
    table: Table,
    microbatch: signatures.Shapes,
    *,
    peers: _peers.Peers | None = None,
    inputs: str | Callable[..., Any] = "image",
    recompute: _stage_program.Recompute = "none",
    clip_norm: float | None = None,
    timeline: bool = False,
    team: collectives.Workers | None = None,
    edges: reducers.MessageCodec | None = None,
    edge_samples: tuple[str, int] | None = None,
  ):
    """Traces the stages' shapes and compares them with the other processes'.

    Args:
      stages: The stages of the whole model, from `cut_layers`, the same in all
        processes.
      loss: `(outputs, microbatch) -> loss, metrics`, which are means over the
        micro-batch's samples.
      table: A table that `check_table` accepts, the same in all processes.
      microbatch: One micro-batch, of arrays or `jax.ShapeDtypeStruct`.
      peers: The other processes, from `connect`; None for a table of one
        device.
      inputs: The inputs of the first stage: a key of the micro-batch, or a
        function of it, which may take a random key as `key`.
      recompute: What a backward pass runs again: `"none"`; each of its
        `"layers"` from the layer's input; or the `"stage"` from the stage's
        input.
      clip_norm: The greatest norm of the whole model's mean gradient; a larger
        one is scaled to it, as by `optax.clip_by_global_norm`.  All stages wait
        for each other's norm before an update.
      timeline: Whether to record the seconds of each action for `trace`.
      team: Workers that train a pipeline each; stage s of all of them is in one
        process, where they communicate, and codecs see the stage's own leaves.
        Arrays then begin with an axis of workers, and other axes of the mesh
        may split a stage.  Default: one model.
      edges: The codec of outputs and gradients between processes, with the
        feedback of each sender.  The default sends them as they are.
      edge_samples: The key of the micro-batch with each sample's number, and
        how many numbers there are, to send the change of an output since the
        same sample's last message (AQ-SGD).  Both processes at an edge then
        keep an output of each sample, in float32.

    Raises:
      ValueError: If an argument is out of its range, the table cannot run or
        does not fit the stages or the processes, other processes have other
        arguments, or a stage's backward pass cannot be split as the table has
        it.
    """
    self.peers = _peers.ALONE if peers is None else peers
    # Each process checks its own arguments; `_agree` then compares all of them.
    model = _traced_model.trace_model(
      stages, loss, table, microbatch, inputs, clip_norm
    )
    if len(table.devices) != self.peers.num_devices:
      raise ValueError(
        f"`peers` must be processes for the table's {len(table.devices)} "
        f"devices, this one among them, got {self.peers.num_devices}."
      )
    self.table, self.stages = table, model.stages
    self._coded = edges, edge_samples
    self._part = _stage_program.make_part(
      model, table, self.peers, recompute, team, edges, edge_samples
    )
    self._timeline: list[tuple[int, float, float]] | None = (
      [] if timeline else None
    )
    self._updates: _stage_updates.UpdateProgram | None = None
    # All processes make the same calls in the same order, so a count separates
    # messages of one call from those of another.
    self._exchanges = itertools.count(1)
    # Directories that this run has restored from or saved to, and those leased.
    self._directories: set[pathlib.Path] = set()
    self._leases: dict[pathlib.Path, lease.Lease] = {}
    self._agree()

  def __repr__(self) -> str:
    stages = ", ".join(map(str, self._part.own))
    return (
      f"StageProcess({self.table.name}: device {self._part.device} of "
      f"{len(self.table.devices)}, stages {stages})"
    )

  @property
  def edge_bytes(self) -> int:
    """The bytes that all processes send in an iteration's passes."""
    part, device_of = self._part, self.table.device_of
    sent = [
      getattr(part.edges.get((_peers.Kind.OUTPUT, s + 1)), "kinds", like)
      for s, like in enumerate(part.model.between)
      if device_of[s] != device_of[s + 1]
    ]
    return 2 * self.table.num_microbatches * num_bytes(part.like(sent))

  def init_state(
    self,
    optimizer: optax.GradientTransformation,
    params: PyTree = None,
    model_state: PyTree = None,
    *,
    seed: int = 0,
    specs: PyTree = None,
  ) -> _device_part.ProcessState:
    """Makes this process's initial state.

    Args:
      optimizer: Any Optax chain.  It sees the leaves of one stage at a time.  A
        chain that decides by all leaves at once, such as
        `optax.clip_by_global_norm`, runs on the first stage's device, to which
        all others send their gradients and parameters in every iteration.  To
        clip only, use `clip_norm`, which sends a single number.
      params: Nested dict of the whole model; by default the stages' own.
      model_state: Nested dict of the whole model; by default the stages' own.
      seed: The seed of the run's random key.
      specs: How a team's parameters are split over the other axes of its mesh:
        a nested dict of `PartitionSpec`s for the whole model; by default they
        are not.

    Raises:
      ValueError: If the optimizer decides by all leaves, and there is a team,
        or a device has several stages whose iterations overlap, or it has
        rounds or predicts weights.
    """
    checks.check_optimizer("optimizer", optimizer)
    team = self._part.team

    def part(whole: PyTree, own: PyTree, specs: PyTree = None) -> PyTree:
      tree = _stages.part_of(whole, own)
      if team is None:
        return jax.tree.map(jnp.asarray, tree)
      split = () if specs is None else (_stages.pick(specs, own),)
      return team.replicate(tree, *split)

    held = {s: self.stages[s] for s in self._part.own}
    own = {s: part(params, x.params, specs) for s, x in held.items()}
    self._updates = updates = _stage_updates.UpdateProgram(
      optimizer, self.stages, self.table.num_microbatches, team
    )
    # The other stages keep no optimizer state then, and send their gradients.
    if updates.whole:
      if team is not None and team.num_workers > 1:
        raise ValueError(
          "`optimizer` must see the leaves of one stage only where there is a "
          "`team`, whose rounds end by stage. Clip by `clip_norm`."
        )
      _device_part.check_barriers(
        self.table, len(own), "an optimizer that decides by all leaves"
      )
      opt_state: dict[int, PyTree] = dict.fromkeys(own, ())
      if 0 in own:
        every = [part(params, x.params) for x in self.stages]
        opt_state[0] = updates.init_all(every)
    else:
      # Each stage has its own state, so stages may update at different times.
      opt_state = {s: updates.init(own[s]) for s in own}
    kept = {s: part(model_state, x.state) for s, x in held.items()}
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    coded: dict[int, PyTree] = {s: {} for s in own}
    for (kind, stage), edge in self._part.edges.items():
      sender = stage - 1 if kind == _peers.Kind.OUTPUT else stage + 1
      if sender in own:
        first = edge.init(kind.name, 2 * stage + kind)
        coded[sender] |= first if team is None else team.replicate(first)
    return _device_part.ProcessState(0, own, opt_state, kept, key, coded)

  def save(
    self,
    directory: str | os.PathLike[str],
    state: _device_part.ProcessState,
    *,
    keep: int = 3,
  ) -> None:
    """Saves this process's stages; every process must call it.

    Between two calls of `run` no work is in progress, so a run that is killed
    and resumed from here, with the same batches in each call, has the same
    bits.

    Args:
      directory: The run's directory, the same for all processes or one on each
        machine.
      state: The state to save.
      keep: The number of steps to keep, including this one.  An earlier step is
        removed when all processes have saved this one.

    Raises:
      ValueError: If another run has saved a later step there, or has leased
        the directory and is alive.
    """
    checks.check_int("keep", keep, 1)
    place = self._claim(directory)
    _stage_files.save_stages(
      directory,
      self._part,
      state,
      exchange=next(self._exchanges),
      keep=keep,
      ours=place in self._directories,
    )
    self._directories.add(place)

  def restore(
    self,
    directory: str | os.PathLike[str],
    optimizer: optax.GradientTransformation,
  ) -> _device_part.ProcessState | None:
    """Restores the newest step that all processes have saved completely.

    Every process must call it, with the run's optimizer.  It returns None if
    nothing was saved.

    Raises:
      ValueError: If the stages are cut differently or belong to another model
        or optimizer, or processes have no step in common.
    """
    place, like = self._claim(directory), self.init_state(optimizer)
    found = _stage_files.restore_stages(
      directory, self._part, like, exchange=next(self._exchanges)
    )
    self._directories.add(place)
    return found

  def _claim(self, directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a directory that the first process has leased for the run."""
    place = array_files.folder(directory).resolve()
    if not self._part.device:
      place.mkdir(parents=True, exist_ok=True)
      new = lease.Lease(place, channel.run_id())
      held = self._leases.setdefault(place, new)
      held.claim()
      # A process that was suspended for long may have lost it.
      held.check()
    return place

  def run(
    self, state: _device_part.ProcessState, batches: Iterable[PyTree]
  ) -> tuple[_device_part.ProcessState, list[dict[str, float]]]:
    """Runs the table, once for each `table.num_iterations` batches.

    At its end every gradient has been applied, which flushes the pipeline: give
    a run without a flush many iterations in one table.

    Args:
      state: The state from `init_state` or an earlier run.  The states of its
        optimizer and edges are donated and must not be used again.
      batches: The batch of each iteration, the same in all processes; samples
        are cut into micro-batches.

    Returns:
      The state, and loss and metrics of each iteration.

    Raises:
      ValueError: If the batches do not fit the table.
      ConnectionError: If another process has ended.
      TimeoutError: If another process has sent nothing for too long.
    """
    if self._updates is None:
      raise ValueError(
        "`state` must be of this process's `init_state` or `restore`, which "
        "have not been called."
      )
    count, number = self.table.num_iterations, self.table.num_microbatches
    # Batches stay on the host, from where each pass takes its micro-batch.
    batches = [
      self._part.model.cut(
        jax.tree.map(np.asanyarray, x), number, "batches", self._part.front
      )
      for x in batches
    ]
    turns, rest = divmod(len(batches), count)
    if rest or not turns:
      raise ValueError(
        f"`batches` must be a multiple of the table's {count} iterations, got "
        f"{len(batches)}."
      )
    if self._coded[1] is not None:
      key, most = self._coded[1]
      ends = [f(x[key]) for x in batches for f in (np.min, np.max)]
      if not 0 <= min(ends) <= max(ends) < most:
        raise ValueError(
          f"`batches` must have numbers of samples from 0 to {most - 1} in "
          f"{key!r}, the `edge_samples`, got {min(ends)} to {max(ends)}."
        )
    found: list[dict[str, float]] = []
    # A segment ends with an empty pipeline, so the next needs the state only.
    for first in range(0, len(batches), count):
      chunk = batches[first : first + count]
      state, metrics = _segment.Segment(
        self._part, self._updates, state, chunk, self._timeline
      ).run()
      found.extend(metrics)
    return state, found

  def gather(self, state: _device_part.ProcessState) -> tuple[PyTree, PyTree]:
    """Returns parameters and state of the whole model in all processes.

    They are nested dicts of NumPy arrays, as the unsplit model has them, with
    the axis of a team's workers.  Every process must call it.
    """
    trees, exchange = [], next(self._exchanges)
    # Each stage is broadcast separately, so no process sends more than it has.
    for s, stage in enumerate(self.stages):
      like = self._part.like((stage.params, stage.state))
      tag = _peers.Tag(_peers.Kind.MOVED, s, 0, exchange)
      own = None
      if s in self._part.own:
        own = jax.device_get((state.params[s], state.model_state[s]))
      trees.append(self._part.share(self.table.device_of[s], tag, own, like))
    params, kept = zip(*trees, strict=True)
    return _stages.merge(params), _stages.merge(kept)

  def trace(self) -> cluster.Trace:
    """Returns the timeline of all processes since the last call.

    Every process must call it.  Seconds are those of the machine's monotonic
    clock since the earliest action; processes on different machines are not
    aligned.

    Raises:
      ValueError: If the process was made without `timeline=True`.
    """
    if self._timeline is None:
      raise ValueError(
        "`timeline` must be True when the process is made, to have its trace."
      )
    orders, exchange = self.table.devices, next(self._exchanges)
    # Only times are sent: the places follow from the table's order.
    rows = np.asarray([x[1:] for x in self._timeline], np.float64)
    turns = len(rows) // max(1, len(orders[self._part.device]))
    self._timeline.clear()
    found = []
    for device, order in enumerate(orders):
      tag = _peers.Tag(_peers.Kind.MOVED, device, 1, exchange)
      like = np.zeros((turns, len(order), 2))
      own = rows if device == self._part.device else None
      times = self._part.share(device, tag, own, like)
      found.append(times.reshape(like.shape))
    return _segment.make_trace(orders, found)

  def _agree(self) -> None:
    """Raises a ValueError unless all processes have the same arguments.

    A process with another table would wait for messages that are never sent,
    so this is found at once rather than by a timeout.
    """
    model = self._part.model
    shapes = [
      f"{x.dtype}{list(x.shape)}"
      for x in jax.tree.leaves((model.microbatch, model.between))
    ]
    digest = hashes.hash_bytes(repr(self.table).encode())
    facts = {
      "the table": f"{self.table} ({digest[:12]})",
      "the list of stages": [stage.name for stage in self.stages],
      "what stages take and pass on": shapes,
      "`clip_norm`": str(model.clip_norm),
      "`edges`": str(self._coded),
    }
    self.peers.check_agreement(facts | channel.package_versions())
