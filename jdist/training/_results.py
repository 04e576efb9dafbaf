"""Result rows, JSON objects to repeat a run by, and their TensorBoard form."""

import contextlib
import functools
import math
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jdist import channel, checks, signatures
from jdist.storage import json_lines, sealed_json
from jdist.training.loop import _record


def make_row(
  config: dict[str, Any], seed: int, **measured: Any
) -> dict[str, Any]:
  """Adds the circumstances of a measurement to its results.

  Args:
    config: Every option of the run.
    seed: The seed of the run.
    **measured: The results, with units in their names.

  Returns:
    `{config, seed, run, commit, device, versions, ...measured}`, where `run`
    is the id of the run.  The commit is that of the environment variable
    `JDIST_COMMIT`, if it is set, else that of the repository.
  """
  return {
    "config": config, "seed": seed, "run": channel.run_id(),
    "commit": _commit(), "device": _device(),
    "versions": channel.package_versions()
    | {"python": platform.python_version()}, **measured,
  }  # fmt: skip


@signatures.checked
def append_rows(
  path: str | os.PathLike[str], rows: Iterable[dict[str, Any]]
) -> None:
  """Appends rows to a file, each in one write.

  Numbers that are not finite, such as the loss of a diverged run, become null,
  since JSON has no other value for them.

  Raises:
    OSError: If the rows cannot be written, as when the disk is full.
    ValueError: If JSON cannot hold a value, for instance an array.
  """
  plain = [*map(json_lines.plain, rows)]
  json_lines.append(path, sealed_json.check("rows", plain))


@signatures.checked
def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads all rows of a file, except a last line that was cut off."""
  rows = list(json_lines.read(path))
  for row in rows:
    checks.check_type("path", row, dict, f"rows of objects in {path}")
  return rows


@functools.cache
def _commit() -> str:
  """Returns the commit of the running code, `+` for changed or new code."""
  # For a copy without its repository, for instance on a GPU machine.
  if commit := os.environ.get("JDIST_COMMIT"):
    return commit
  folder = pathlib.Path(__file__).parent
  try:
    git = functools.partial(
      subprocess.run, cwd=folder, capture_output=True, text=True, check=True
    )
    commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
    code = ["--", ":/", ":/!*.jsonl"]  # Running commands append rows.
    changed = git(["git", "status", "--porcelain", "-uno", *code]).stdout
    added = ["git", "ls-files", "--others", "--exclude-standard", ":/*.py"]
    changed += git(added).stdout
  except (OSError, subprocess.CalledProcessError):
    # An installed package has no repository. Its version identifies it.
    return "unknown"
  return commit + ("+" if changed else "")


def _device() -> str:
  kind, count = jax.devices()[0].device_kind, jax.process_count()
  if jax.default_backend() == "cpu":
    # JAX calls every processor "cpu", which does not distinguish machines.
    kind = f"{platform.machine()} CPU with {os.cpu_count()} cores"
  processes = f"{count} process{'es' if count > 1 else ''}"
  return f"{jax.device_count()} x {kind} in {processes}"


@signatures.checked
class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
  """Writes records for TensorBoard during a run.

  Pass its `write` to `Trainer.fit(..., on_record=writer.write)`. A resumed run
  continues in the same directory.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    learning_rate: Callable[[int], Any] | None = None,
  ):
    """Opens or makes the directory, which `tensorboard --logdir` shows.

    The `settings` are written as text at the start, and the learning rate at
    each record's last step.
    """
    board = checks.import_extra("tensorboardX", "metrics")
    self._directory, self._rate = os.fspath(directory), learning_rate
    self._last = 0, 0  # Steps and rounds of the record before.
    self._writer = board.SummaryWriter(self._directory)
    for name, value in (settings or {}).items():
      self._writer.add_text(f"settings/{name}", str(value))

  def write(self, record: _record.Record) -> None:
    """Writes a record's metrics, losses, rounds, bytes, rates and interval.

    The interval is the mean one since the record before.

    Raises:
      OSError: If the events cannot be written, for instance because the disk
        is full.
    """
    values = {f"test/{name}": value for name, value in record.metrics.items()}
    values |= {
      "train/loss": record.train_loss,
      "train/rounds": record.rounds,
      "train/sent_bytes": record.sent_bytes,
      "train/samples_per_s": record.samples_per_s,
      "train/skipped": record.skipped,
    }
    if self._rate is not None:
      values["train/learning_rate"] = float(self._rate(max(record.step - 1, 0)))
    steps, rounds = record.step - self._last[0], record.rounds - self._last[1]
    if rounds > 0:
      values["train/interval"] = steps / rounds
    self._last = record.step, record.rounds
    # The rate of the first step is unknown, and TensorBoard would draw a NaN.
    if math.isnan(record.samples_per_s):
      del values["train/samples_per_s"]
    try:
      for name, value in values.items():
        self._writer.add_scalar(name, value, record.step)
      # TensorBoard shows a running experiment, so records are not buffered.
      self._writer.flush()
    except OSError as error:
      raise OSError(
        f"events could not be written to {self._directory}: {error.strerror}. "
        "Make room, or take another `directory`."
      ) from error

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()

  def __exit__(self, kind: object, error: object, trace: object) -> None:
    if error is None:
      self.close()
      return
    # After a failed write the file cannot be flushed, and a second error would
    # hide the first one.
    with contextlib.suppress(OSError):
      self.close()
