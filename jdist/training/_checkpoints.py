"""Checkpoints of complete runs, which resume to the bit.

A checkpoint is a directory written by Orbax, and a manifest:

    step_00000100/       arrays; those equal on all workers are stored once
    step_00000100.json   names, shapes, the files with their hashes

`_checkpoint_directory` decides which checkpoints count.
"""

import concurrent.futures
import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jdist import channel, checks, collectives, signatures, states
from jdist.states import PyTree
from jdist.storage import lease, sealed_json
from jdist.training import _checkpoint_directory, _train_state


class Restored(NamedTuple):
  """A restored step, its state, placed like a template, and its metadata."""

  step: int
  state: PyTree
  metadata: dict[str, Any]


class OtherWorkers(NamedTuple):
  """Rules for resuming from a checkpoint of another number of workers.

  Attributes:
    workers: The workers that have saved the checkpoint.
    template: A function that makes their state, `[workers, ...]`.
    convert: A function that turns the restored state into one of the run's own
      workers, for instance by `training.resize`.

  Two workers resume from a checkpoint of four, with a chain `optimizer` and
  parameters `params` of one worker::

      four = jdist.workers(4, substrate="vmap")
      others = training.OtherWorkers(
        four,
        lambda: training.init_state(four, optimizer, params),
        lambda state: training.resize(state, optimizer, four, workers),
      )
      training.Checkpoints(directory, workers, other_workers=lambda n: others)
  """

  workers: collectives.Workers
  template: Callable[[], PyTree]
  convert: Callable[[PyTree], PyTree]


@signatures.checked
class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
  """Saves and restores states of a run in one directory.

  Files are written in the background. `wait` returns when all of them are on
  the disk, and leaving the context waits, too.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    workers: collectives.Workers,
    *,
    keep: signatures.PositiveInt = 3,
    other_workers: Callable[[int], OtherWorkers] | None = None,
  ):
    """Opens or makes the directory.

    Args:
      directory: The directory of the checkpoints, which several processes must
        share.
      workers: The run's workers.
      keep: The number of checkpoints to keep, at least 1. With 2 or more, a run
        survives a damaged one.
      other_workers: A function of the number of workers of a checkpoint, if it
        differs, that returns how `restore` converts it. By default such a
        checkpoint is refused.
    """
    self._orbax = checks.import_extra("orbax.checkpoint", "checkpoints")
    name = os.fspath(directory)
    url = name.partition("/")[0].endswith(":")
    if url or name != name.encode(errors="ignore").decode():
      raise ValueError(
        "`directory` must be a local folder whose path is UTF-8, got "
        f"{name!r}. Mount a bucket, or rename the folder."
      )
    self._directory = _checkpoint_directory.CheckpointDirectory(
      pathlib.Path(name).absolute()
    )
    self._lease = lease.Lease(self._directory.path, channel.run_id())
    self._workers = workers
    self._keep = keep
    self._other_workers = other_workers
    self._is_first = jax.process_index() == 0
    if self._is_first:
      self._directory.path.mkdir(parents=True, exist_ok=True)
    self._writer = self._orbax.AsyncCheckpointer(
      self._orbax.PyTreeCheckpointHandler()
    )
    # Orbax writes in threads of its own. Another thread waits for it and then
    # writes the manifest, so that training does not wait for the disk.
    self._on_several_hosts = _spans_hosts(workers)
    self._fingerprints = workers.jit(collectives.fingerprint)
    self._finisher = concurrent.futures.ThreadPoolExecutor(
      1, thread_name_prefix="jdist-checkpoint"
    )
    self._finishing: concurrent.futures.Future[None] | None = None

  def claim(self) -> None:
    """Leases the directory for this run until `close`, as `save` does.

    Raises:
      ValueError: If another run that is alive has leased it.
    """
    if self._is_first:
      self._lease.claim()

  @signatures.checked
  def save(
    self,
    step: signatures.NonNegativeInt,
    state: PyTree,
    shared: PyTree = None,
    metadata: dict[str, Any] | None = None,
  ) -> None:
    """Saves a state, and returns when its arrays may be donated.

    Args:
      step: The number of the step, from 0. `restore` finds the highest one.
      state: Any tree of arrays `[workers, ...]`, including typed PRNG keys.
      shared: A bool for each leaf, or for each subtree, true for leaves that
        are equal on all workers, which are stored once. By default
        methods' states declare them.
      metadata: JSON values, which `restore` returns.

    Raises:
      OSError: If this checkpoint, or the one before it, cannot be written, for
        instance because the disk is full. The last complete one stays.
      RuntimeError: If a leaf that should be equal on all workers is not.
      ValueError: If JSON cannot hold the metadata, `shared` does not fit the
        state, or another run has leased the directory.
    """
    sealed_json.check("metadata", metadata)
    checks.check_arrays("state", state, shapes=False)
    checks.check_some("state", state)
    for name, leaf in checks.named_leaves(state).items():
      checks.check_bits("state", leaf, name, "iufc")
    self.wait()
    names, leaves = _named(state)
    flags = _train_state.shared_flags(shared, state)
    self._check_equal(names, leaves, flags)
    arrays, entries = {}, []
    for number, (name, leaf, once) in enumerate(
      zip(names, leaves, flags, strict=True)
    ):
      form = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
      entries.append({"name": name, "shared": once} | form)
      # Orbax refuses arrays without elements.
      if leaf.size:
        arrays[f"{number:05d}"] = self._to_save(states.key_words(leaf), once)
    # While arrays of the same step are replaced, no manifest may claim them.
    self.claim()
    if self._is_first:
      self._directory.forget(step)
    with self._written(step):
      self._writer.save(
        self._directory.target(step),
        args=self._orbax.args.PyTreeSave(arrays),
        force=True,
      )
    manifest = {
      "step": step, "workers": self._workers.num_workers, "leaves": entries,
      "metadata": metadata or {},
    }  # fmt: skip
    self._finishing = self._finisher.submit(self._finish, step, manifest)

  def _check_equal(
    self, names: list[str], leaves: list[jax.Array], flags: list[bool]
  ) -> None:
    # Only fingerprints are gathered, since whole parameters would take too
    # long.
    chosen = [i for i, once in enumerate(flags) if once]
    if not chosen:  # JAX maps no program without arguments.
      return
    prints = self._workers.gather(
      self._fingerprints([leaves[i] for i in chosen])
    )
    differs = (prints != prints[:1]).any(axis=(0, 2))
    if differs.any():
      wrong = [names[i] for i, bad in zip(chosen, differs, strict=True) if bad]
      raise RuntimeError(
        "The workers have diverged: leaves that should be equal on all of "
        f"them to the bit are not: {', '.join(wrong[:5])}"
        f"{' and more' if len(wrong) > 5 else ''}. Nothing was saved. Either "
        "a worker computed something else (its data must only enter through "
        "its gradients), or a transformation keeps state of its own per "
        "worker behind `average_gradients`."
      )

  def _to_save(self, leaf: jax.Array, once: bool) -> Any:
    # A worker's own part of a shared leaf may lie on several hosts. No host
    # could write it alone, so that it is first replicated.
    if once and self._on_several_hosts:
      assert self._workers.mesh is not None
      everywhere = jax.sharding.NamedSharding(
        self._workers.mesh, jax.sharding.PartitionSpec()
      )
      return np.asarray(jax.jit(lambda x: x[0], out_shardings=everywhere)(leaf))
    if once:
      return np.asarray(self._workers.view(leaf))
    return leaf if jax.process_count() > 1 else np.asarray(leaf)

  def _finish(self, step: int, manifest: dict[str, Any]) -> None:
    with self._written(step):
      self._writer.wait_until_finished()
    if not self._is_first:
      return
    # The arrays may be another run's, if this one was suspended for long.
    self._lease.check()
    with self._written(step):
      self._directory.complete(step, manifest)
    for old in self._directory.steps()[self._keep :]:
      self._directory.forget(old)
    self._directory.tidy()

  @contextlib.contextmanager
  def _written(self, step: int) -> Iterator[None]:
    """Turns the error of a write into one line, and removes partial files."""
    try:
      yield
    except Exception as error:
      text = str(error)
      lost = isinstance(error, jax.errors.JaxRuntimeError)
      if (lost or channel.lost_process(error)) and jax.process_count() > 1:
        # A collective has lost another process, which the disk did not cause.
        raise
      reason = text.strip().splitlines()[:1] or [type(error).__name__]
      if "No space left" in text:
        reason = ["no space left on the disk"]
      # Other processes may still be writing files of theirs.
      if self._is_first and jax.process_count() == 1:
        self._directory.tidy()
      stays = "There is no other one"
      if whole := self._directory.steps():
        stays = f"The one of step {whole[0]} stays"
      raise OSError(
        f"the checkpoint of step {step} could not be written to "
        f"{self._directory.path}: {reason[0]}. {stays}: make room and start "
        "the run again."
      ) from error

  def restore(
    self,
    template: PyTree | Callable[[int], PyTree],
    *,
    check: Callable[[dict[str, Any]], None] | None = None,
  ) -> Restored | None:
    """Restores the newest undamaged checkpoint; returns None without any.

    Args:
      template: A state of the same shapes, `[workers, ...]`, whose arrays also
        determine the placement of the restored ones; or a function of the step
        that returns it, if shapes depend on the step.
      check: Called with the checkpoint's metadata before anything else is read.
        It may raise an error, for instance `OtherRunError`.

    Raises:
      ValueError: If checkpoints exist and all are damaged, or if the newest
        undamaged one has another model, optimizer or number of workers.
    """
    self.wait()
    step = _checkpoint_directory.NOTHING
    if self._is_first:
      step = self._directory.newest_whole()
    # One process decides, as others may see the shared disk a moment later.
    if jax.process_count() > 1:
      collectives.agree("the checkpoint", {})
      step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    if step == _checkpoint_directory.NOTHING:
      return None
    if step == _checkpoint_directory.ALL_DAMAGED:
      raise ValueError(
        f"`directory` {self._directory.path} has checkpoints and all are "
        "damaged. Start again in another directory."
      )
    manifest = self._directory.read(step)
    if check is not None:
      check(manifest["metadata"])
    # Metadata come first: a run with other options would otherwise be refused
    # for its shapes, which says less.
    number = manifest["workers"]
    if self._other_workers and number != self._workers.num_workers:
      others = self._other_workers(number)
      with Checkpoints(self._directory.path, others.workers) as checkpoints:
        found = checkpoints.restore(others.template())
      return found and found._replace(state=others.convert(found.state))
    # A tree may be callable, too, as a module of Equinox is.
    if callable(template) and jax.tree_util.all_leaves([template]):
      template = template(step)
    checks.named_leaves(template, "template")
    names, leaves = _named(template)
    self._check_fits(manifest, names, leaves)
    target = self._directory.target(step)
    values = self._read(target, manifest["leaves"], leaves)
    state = jax.tree.unflatten(jax.tree.structure(template), values)
    return Restored(step, state, manifest["metadata"])

  def _check_fits(
    self, manifest: dict[str, Any], names: list[str], leaves: list[jax.Array]
  ) -> None:
    if manifest["workers"] != self._workers.num_workers:
      raise ValueError(
        f"`workers` must be {manifest['workers']}, as in the checkpoint, got "
        f"{self._workers.num_workers}: each worker has state of its own. "
        f"Resume with {checks.counted(manifest['workers'], 'worker')}, or by "
        "`other_workers=`, which turns its state into one for these."
      )
    saved = {
      e["name"]: (tuple(e["shape"]), e["dtype"]) for e in manifest["leaves"]
    }
    here = {
      n: (x.shape, str(x.dtype)) for n, x in zip(names, leaves, strict=True)
    }
    if different := sorted({n for n, _ in saved.items() ^ here.items()}):
      name = different[0]
      raise ValueError(
        "`template` must be a state of the run that was saved, but leaves "
        f"differ, {len(different)} in all: `{name}` is {saved.get(name)} in "
        f"the checkpoint and {here.get(name)} here. Resume with the same "
        "model and optimizer."
      )

  def _read(
    self,
    target: pathlib.Path,
    entries: list[dict[str, Any]],
    leaves: list[jax.Array],
  ) -> list[jax.Array]:
    several = jax.process_count() > 1
    templates, leaves = leaves, list(map(states.key_words, leaves))
    where = {}
    for number, (entry, leaf) in enumerate(zip(entries, leaves, strict=True)):
      if not leaf.size:
        continue
      where[f"{number:05d}"] = (
        self._orbax.ArrayRestoreArgs(
          sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )
        if several and not entry["shared"]
        else self._orbax.RestoreArgs(restore_type=np.ndarray)
      )
    arrays = self._writer.restore(
      target, args=self._orbax.args.PyTreeRestore(restore_args=where)
    )
    # Leaves without elements were not saved, and are taken from the template.
    values = list(leaves)
    once = [i for i, x in enumerate(leaves) if entries[i]["shared"] and x.size]
    # One program for all shared leaves, because each compiles for a while.
    spread = self._workers.replicate(
      [arrays[f"{i:05d}"] for i in once],
      self._workers.specs([leaves[i] for i in once]),
    )
    for i, value in zip(once, spread, strict=True):
      values[i] = value
    for i, leaf in enumerate(leaves):
      if leaf.size and not entries[i]["shared"]:
        own = arrays[f"{i:05d}"]
        values[i] = own if several else jax.device_put(own, leaf.sharding)
    return list(map(states.as_key, values, templates))

  def latest_step(self) -> int | None:
    """Returns the step of the newest checkpoint, None if there is none.

    It is on the disk, but only `restore` finds out whether it is damaged.
    """
    self.wait()
    return next(iter(self._directory.steps()), None)

  def wait(self) -> None:
    """Waits until all files are on the disk, and raises errors of writes."""
    if self._finishing is not None:
      finishing, self._finishing = self._finishing, None
      finishing.result()

  def close(self) -> None:
    """Waits, and frees the threads."""
    try:
      self.wait()
    finally:
      self._finisher.shutdown()
      self._lease.release()
      # `wait` has raised the error of a write already.
      with contextlib.suppress(Exception):
        self._writer.close()

  def __exit__(self, *error: object) -> None:
    self.close()


def _named(tree: PyTree) -> tuple[list[str], list[jax.Array]]:
  pairs = jax.tree_util.tree_leaves_with_path(tree)
  names = [jax.tree_util.keystr(path) for path, _ in pairs]
  return names, [jnp.asarray(leaf) for _, leaf in pairs]


def _spans_hosts(workers: collectives.Workers) -> bool:
  """Returns whether a worker is sharded over several processes' devices."""
  if workers.mesh is None:
    return False
  dim = workers.mesh.axis_names.index(workers.mesh_axis)
  rows = np.moveaxis(workers.mesh.devices, dim, 0)
  return any(len({d.process_index for d in np.ravel(row)}) > 1 for row in rows)
