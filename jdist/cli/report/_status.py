"""The state of a run in a file, and its page, both written as it goes."""

import contextlib
import datetime
import importlib.util
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jdist import channel, training
from jdist.cli import _groups, _options, _output, _run_end
from jdist.cli.report import _page
from jdist.storage import json_lines
from jdist.training import comparison

# Entries of records.
_SHOWN = ("train_loss", "rounds", "samples_per_s", "sent_bytes")
# Seconds between two writes of the file, and of the page.
_FILE_S, _PAGE_S = 2.0, 20.0


class Status:
  """Keeps status.json and report.html of a run's directory up to date.

  It is a context, whose end says how the run has ended. Without the extra
  `report` there is no page, and a full disk ends no run. Of several processes
  only the first one writes.
  """

  def __init__(
    self,
    config: Mapping[str, Any],
    command: Callable[[pathlib.Path], str],
    label: str,
    heading: str,
    num_steps: int = 0,
  ):
    """Makes the directories and prints a heading, before hours of training.

    `config` has the options' values, and `command` returns their command line.
    """
    self.bar = training.Progress(num_steps, label)
    self._config = dict(config)
    fields = _groups.LinkOptions.__dataclass_fields__.keys() & config
    self._link = _groups.LinkOptions(**{x: config[x] for x in fields})
    # JAX does not know the processes of a pipeline's stages.
    self._first = not (jax.process_index() or config.get("process_id"))
    self._warned = not self._first
    # Real workers print events, which would tear the bar.
    self._shows_bar = self._first and config.get("driver") in (None, "clock")
    self._records: list[training.Record] = []
    self._written_s = self._drawn_s = -math.inf
    self.output = pathlib.Path()
    if self._first:
      for name in ("checkpoints", "tensorboard", "final_params"):
        if path := config.get(name):
          path = pathlib.Path(path).parent if name == "final_params" else path
          _output.make_directory(_options.word(name), path)
      self.output = _output.output_directory(config["output"], label)
    self.command = command(self.output)
    if self._first:
      _output.console().print(heading)
      print(f"Command: {self.command}", flush=True)
    self._body: dict[str, Any] = {
      "state": "running", "doing": "starting", "command": self.command,
      "run": channel.run_id(), "process": os.getpid(), "step": 0,
      "num_steps": num_steps, "workers": config.get("workers"),
      **dict.fromkeys(_SHOWN), "row": None, "config": self._config,
    }  # fmt: skip

  def step(
    self, record: training.Record, doing: str, run: str = "", before: int = 0
  ) -> None:
    """Shows the last step of a run, which `before` steps of others precede."""
    self.bar.show(record, doing, run, before)
    # Between steps the last figures stay.
    entries = {} if doing else {x: getattr(record, x) for x in _SHOWN}
    doing = f"{run} {doing or 'training'}"
    if record.diverged and not run:  # A comparison's rates may diverge.
      told = f"the loss is {_run_end.BEYOND}, after step {record.step}"
      doing += f": {told}"
      if not self._warned:
        print(f"Warning: {told}. Ctrl-C ends the run.", flush=True)
      self._warned = True
    self.note(**entries, doing=doing, step=before + record.step)

  def record(self, record: training.Record) -> None:
    """Adds an evaluation to the row of the run so far."""
    self.step(record, "")
    self._records.append(record)
    self.note(row=self._row(self._records))

  def end(self, records: list[training.Record], **more: Any) -> None:
    """Appends the run's row, and prints its path."""
    if self._first:
      path = self.output / "rows.jsonl"
      training.append_rows(path, [self._row(records, **more)])
      print(f"Row: {path}")
    self.note(row=None)

  def _row(self, records: list[training.Record], **more: Any) -> dict[str, Any]:
    names = ("method", "learning_rate", "workers")
    fields = {name: self._config[name] for name in names}
    fields |= comparison.summarize(records) | more
    return training.make_row(self._config, self._config["seed"], **fields)

  def note(self, **entries: Any) -> None:
    """Changes entries, and writes the files where it is time for them.

    The entry `row` is the row of the run so far, with its curve.
    """
    self._body |= entries
    if not self._first:
      return
    now_s = time.monotonic()
    drawn = now_s - self._drawn_s < _PAGE_S
    if not drawn and ("row" in entries or self._drawn_s == -math.inf):
      self._write(page=True)
    elif now_s - self._written_s > _FILE_S:
      self._write(page=False)

  def _write(self, *, page: bool) -> None:
    self._written_s = time.monotonic()
    if page:
      self._drawn_s = self._written_s
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    body = json_lines.plain(self._body | {"updated": now})
    # A run must not end because its page cannot be written.
    with contextlib.suppress(OSError, ValueError):
      json_lines.write(self.output / _page.STATUS, [body])
      if page and importlib.util.find_spec("vl_convert"):
        _page.write(self.output, self._link)

  def __enter__(self) -> "Status":
    # The page takes seconds, in which an interrupt could not be explained yet:
    # the first note draws it.
    if self._first:
      self._write(page=False)
    if self._shows_bar:
      self.bar.__enter__()
    return self

  def __exit__(self, kind: Any, error: object, trace: object) -> None:
    self.bar.__exit__()
    ends = {
      None: "ended",
      KeyboardInterrupt: "interrupted",
      _run_end.TerminatedError: "ended by SIGTERM",
      _run_end.DivergedError: "diverged",
    }
    self._body["state"] = ends.get(kind, "failed")
    self._drawn_s = -math.inf
    self.note(doing=str(error or ""), row=self._body["row"])
