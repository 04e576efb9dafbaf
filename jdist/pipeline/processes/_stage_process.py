"""A pipeline's device as a process of its own."""

import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, cluster
from jdist.pipeline.processes import (
  _device_part,
  _peers,
  _segment,
  _stage_files,
  _stage_program,
  _update_program,
)
from jdist.pipeline.runtime import (
  LayerLike,
  make_inputs,
  merge,
  needs_all,
  OutputLoss,
  pick,
  shared_paths,
)
from jdist.pipeline.schedule import (
  check_table,
  format_table,
  Op,
  read_versions,
  Table,
)
from jdist.storage import array_files, hashes

PyTree = Any


class StageProcess:
  r"""One device's part of a pipeline, in a process of its own.

  Every process runs the actions of its device in the table's order, each with a
  compiled program of its stage, and waits for nothing else but what they need.
  What it sends is buffered: a sender goes on at once.

  All tables run.  The gradient of iteration k is taken at the version of the
  parameters that `Table.weights` names; with `"newest"` (PACI), at the newest
  parameters of each pass: the backward pass runs the stage again from its saved
  input, and nothing is stashed (reconstruction).  Where the optimizer holds a
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
    stages: Sequence[LayerLike],
    loss: OutputLoss,
    table: Table,
    microbatch: PyTree,
    *,
    peers: _peers.Peers | None = None,
    inputs: str | Callable[..., Any] = "image",
    recompute: _stage_program.Recompute = "none",
    clip_norm: float | None = None,
    timeline: bool = False,
  ):
    """Traces the stages' shapes and compares them with the other processes'.

    Args:
      stages: of the whole model, from `cut_layers`, the same in all processes.
      loss: `(outputs, microbatch) -> loss, metrics`, means over the
        micro-batch's samples.
      table: which `check_table` passes, the same in all processes.
      microbatch: one, of arrays or `jax.ShapeDtypeStruct`.
      peers: the other processes, from `connect`; None for a table of one
        device.
      inputs: of the first stage: a key of the micro-batch, or a function of it,
        which gets a random key too, if it takes one as `key`.
      recompute: what a backward pass runs again: `"none"`, each of its
        `"layers"` from the layer's input, or the `"stage"` from the stage's.
      clip_norm: greatest norm of the whole model's mean gradient; a larger one
        is scaled to it, as `optax.clip_by_global_norm` does.  All stages wait
        for each other's norm before an update.
      timeline: whether the seconds of each action are kept, see `trace`.

    Raises:
      ValueError: when an argument is out of its range, the table does not fit
        the stages or the processes, other processes have others, or a stage's
        backward pass cannot be split as the table has it.
      TableError: when the table cannot run.
    """
    if len(stages) != table.num_stages:
      raise ValueError(
        f"`stages` must be the table's {table.num_stages}, got {len(stages)}."
      )
    checks.check_function("loss", loss, "outputs and a micro-batch")
    if clip_norm is not None:
      clip_norm = checks.check_number("clip_norm", clip_norm, open_low=True)
    number = 1 if peers is None else peers.num_devices
    if len(table.devices) != number:
      raise ValueError(
        f"`peers` must be processes for the table's {len(table.devices)} "
        f"devices, this one among them, got {number}."
      )
    check_table(table)
    self.table, self.stages, self.peers = table, tuple(stages), peers
    device = 0 if peers is None else peers.device
    own = tuple(
      s for s in range(table.num_stages) if table.device_of[s] == device
    )
    tied = shared_paths(stages)
    if clip_norm is not None:
      _device_part.check_barriers(table, len(own), "`clip_norm`")
    if tied:
      _device_part.check_barriers(table, len(own), "tied parameters")
    # Where the passes of a micro-batch read unlike versions, the backward pass
    # cannot use what the forward pass saved.
    if table.weights == "newest":
      recompute = "stage"
    read = make_inputs(inputs)
    self._microbatch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), microbatch
    )
    halves = {
      x.stage for x in table.devices[device] if x.op == Op.BACKWARD_INPUT
    }
    programs, between, x = {}, [], None
    for s, stage in enumerate(stages):
      program = _stage_program.StageProgram(
        stage,
        first=s == 0,
        loss=loss if s + 1 == len(stages) else None,
        inputs=read,
        recompute=recompute,
      )
      if s in own:
        programs[s] = program
        if s in halves:
          program.split(x, self._microbatch)
      x, (_, metrics) = program.shapes(x, self._microbatch)
      between.append(x)
    self._part = _device_part.DevicePart(
      table,
      device,
      own,
      programs,
      read_versions(table),
      tuple(between[:-1]),
      tuple(
        jax.eval_shape(lambda x: jax.tree.map(jnp.asarray, x), x.params)
        for x in stages
      ),
      tied,
      clip_norm,
      between[-1].dtype,
      ("loss", *sorted(set(metrics) - {"loss"})),
      peers,
    )
    self._timeline: list[tuple[int, float, float]] | None = (
      [] if timeline else None
    )
    self._updates: _update_program.UpdateProgram | None = None
    self._exchanges = 0
    # Of which this run has restored or to which it has saved.
    self._directories: set[pathlib.Path] = set()
    self._agree()

  def __repr__(self) -> str:
    stages = ", ".join(map(str, self._part.own))
    return (
      f"StageProcess({self.table.name}: device {self._part.device} of "
      f"{len(self.table.devices)}, stages {stages})"
    )

  def init_state(
    self,
    optimizer: optax.GradientTransformation,
    params: PyTree = None,
    model_state: PyTree = None,
    *,
    seed: int = 0,
  ) -> _device_part.ProcessState:
    """Makes this process's state at the run's beginning.

    Args:
      optimizer: any Optax chain.  It sees the leaves of one stage at a time;
        one that decides by all leaves at once, as `optax.clip_by_global_norm`
        does, runs on the first stage's device, to which all others send their
        gradients and parameters in every iteration, and for which they wait.
        To clip alone `clip_norm` sends a number instead.
      params: nested dict of the whole model; the stages' own if None.
      model_state: likewise.
      seed: of the run's random key.

    Raises:
      ValueError: when the optimizer decides by all leaves, and a device has
        several stages whose iterations overlap, or it has rounds or predicts
        weights.
    """
    checks.check_optimizer("optimizer", optimizer)
    own = {s: _part_of(self.stages[s].params, params) for s in self._part.own}
    self._updates = updates = _update_program.UpdateProgram(
      optimizer,
      self.table.num_microbatches,
      whole=self.sees_all(optimizer),
    )
    if updates.whole:
      _device_part.check_barriers(
        self.table, len(own), "an optimizer that decides by all leaves"
      )
      opt_state: dict[int, PyTree] = dict.fromkeys(own, ())
      if 0 in own:
        opt_state[0] = updates.init_all(
          [_part_of(x.params, params) for x in self.stages]
        )
    else:
      opt_state = {s: jax.jit(optimizer.init)(own[s]) for s in own}
    return _device_part.ProcessState(
      0,
      own,
      opt_state,
      {s: _part_of(self.stages[s].state, model_state) for s in self._part.own},
      np.asarray(jax.random.key_data(jax.random.key(seed))),
    )

  def sees_all(self, optimizer: optax.GradientTransformation) -> bool:
    """Returns whether a chain runs on the first stage's device, for all."""
    return needs_all(
      optimizer,
      num_parts=len(self.stages),
      num_stages=len(self.stages),
      tied=bool(self._part.tied),
      agree=False,
      named=True,
    )

  def save(
    self,
    directory: str | os.PathLike[str],
    state: _device_part.ProcessState,
    *,
    keep: int = 3,
  ) -> None:
    """Saves this process's stages; every process must call it.

    Between two calls of `run` nothing is under way, so that a run that is
    killed and goes on from there, with the same batches in each call, has the
    same bits.

    Args:
      directory: of the run; the same for all processes, or one of its own on
        each machine.
      state: to save.
      keep: steps to keep, this one and those before it; an earlier one goes
        when all processes have this one.

    Raises:
      ValueError: when another run has saved a later step there.
    """
    checks.check_int("keep", keep, 1)
    self._exchanges += 1
    names = [x.name for x in self.stages]
    place = array_files.folder(directory).resolve()
    _stage_files.save_stages(
      directory,
      self._part,
      state,
      names,
      self._exchanges,
      keep,
      place in self._directories,
    )
    self._directories.add(place)

  def restore(
    self,
    directory: str | os.PathLike[str],
    optimizer: optax.GradientTransformation,
  ) -> _device_part.ProcessState | None:
    """Restores the newest step that all processes have whole, if there is any.

    Every process must call it.

    Args:
      directory: of `save`.
      optimizer: as in `init_state`.

    Raises:
      ValueError: when the stages are cut otherwise, or are those of another
        model or optimizer, or processes have no step in common.
    """
    like = self.init_state(optimizer)
    self._exchanges += 1
    names = [x.name for x in self.stages]
    found = _stage_files.restore_stages(
      directory, self._part, like, names, self._exchanges
    )
    self._directories.add(array_files.folder(directory).resolve())
    return found

  def run(
    self, state: _device_part.ProcessState, batches: Iterable[PyTree]
  ) -> tuple[_device_part.ProcessState, list[dict[str, float]]]:
    """Runs the table, once for each `table.num_iterations` batches.

    At its end all has been applied that was begun, so that a run without a
    flush should be given many iterations in one table.

    Args:
      state: of `init_state` or an earlier run; its optimizer states and sums
        are used up.
      batches: one for each iteration, the same in all processes; samples are
        cut into micro-batches.

    Returns:
      The state, and loss and metrics of each iteration.

    Raises:
      ValueError: when the batches do not fit the table.
      ConnectionError: when another process is gone.
      TimeoutError: when another process has sent nothing for too long.
    """
    if self._updates is None:
      raise ValueError(
        "`state` must be of this process's `init_state` or `restore`, which "
        "have not been called."
      )
    batches = [self._cut(batch) for batch in batches]
    turns, rest = divmod(len(batches), self.table.num_iterations)
    if rest or not turns:
      raise ValueError(
        f"`batches` must be a multiple of the table's "
        f"{self.table.num_iterations} iterations, got {len(batches)}."
      )
    found: list[dict[str, float]] = []
    for turn in range(turns):
      first = turn * self.table.num_iterations
      chunk = batches[first : first + self.table.num_iterations]
      state, metrics = _segment.Segment(
        self._part, self._updates, state, chunk, self._timeline
      ).run()
      found.extend(metrics)
    return state, found

  def gather(self, state: _device_part.ProcessState) -> tuple[PyTree, PyTree]:
    """Returns parameters and state of the whole model, in all processes.

    Nested dicts, as the unsplit model has them, of NumPy arrays.
    """
    self._exchanges += 1
    trees = []
    for s, stage in enumerate(self.stages):
      like = (stage.params, stage.state)
      tag = _peers.Tag(_peers.Kind.MOVED, s, 0, self._exchanges)
      own = None
      if s in self._part.own:
        held = state.params[s], state.model_state[s]
        own = jax.tree.leaves(jax.device_get(held))
      leaves = self._part.share(
        self.table.device_of[s], tag, own, jax.tree.leaves(like)
      )
      trees.append(jax.tree.unflatten(jax.tree.structure(like), leaves))
    if len(trees) == 1:
      return trees[0]
    return merge([x[0] for x in trees]), merge([x[1] for x in trees])

  def trace(self) -> cluster.Trace:
    """Returns the timeline of the last `run` so far, of all processes.

    Every process must call it.  Seconds are those of the machine's steady
    clock since the earliest action: processes on several machines are not
    aligned.

    Raises:
      ValueError: when the process was made without `timeline=True`.
    """
    if self._timeline is None:
      raise ValueError(
        "`timeline` must be True when the process is made, to have its trace."
      )
    self._exchanges += 1
    orders = self.table.devices
    rows = np.asarray([x[1:] for x in self._timeline], np.float64)
    turns = len(rows) // max(1, len(orders[self._part.device]))
    self._timeline.clear()
    found = []
    for device, order in enumerate(orders):
      tag = _peers.Tag(_peers.Kind.MOVED, device, 1, self._exchanges)
      shape = turns, len(order), 2
      own = [rows] if device == self._part.device else None
      (came,) = self._part.share(device, tag, own, [np.zeros(shape)])
      found.append(came.reshape(shape))
    return _segment.make_trace(orders, found)

  def _agree(self) -> None:
    if self.peers is None:
      return
    shapes = [
      f"{x.dtype}{list(x.shape)}"
      for tree in (self._microbatch, self._part.between)
      for x in jax.tree.leaves(tree)
    ]
    names = [stage.name for stage in self.stages]
    text = format_table(self.table).encode()
    digest = hashes.hash_bytes(text)
    self.peers.check_agreement(
      "Table, stages and micro-batch",
      f"{self.table} ({digest[:12]}), stages {names}, micro-batch and "
      f"what stages pass on {shapes}, clip_norm {self._part.clip_norm}",
    )

  def _cut(self, batch: PyTree) -> PyTree:
    """Cuts a batch's arrays into micro-batches."""
    number = self.table.num_microbatches

    def cut(x: Any) -> np.ndarray:
      x = np.asarray(x)
      if x.ndim == 0 or x.shape[0] % number:
        raise ValueError(
          f"`batches` must divide into the table's {number} micro-batches, got "
          f"an array of shape {list(x.shape)}. Take a multiple of {number} "
          "samples, or another table."
        )
      return x.reshape(number, x.shape[0] // number, *x.shape[1:])

    return jax.tree.map(cut, batch)


def _part_of(own: PyTree, whole: PyTree) -> PyTree:
  """Returns a stage's part of a whole model's tree, on this device."""
  found = own if whole is None else pick(whole, own)
  return jax.tree.map(jnp.asarray, found)
