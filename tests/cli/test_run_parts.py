"""Parts of runs that need several processes, or minutes, as a whole."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import checks, cli, collectives, data, training
from jdist.cli import (
  _commands,
  _interrupts,
  _options,
  _train,
  _workload,
)
from jdist.cli.launch import _launch
from jdist.cli.pipelines import _process_run
from jdist.cli.report import _page


class _Ended(BaseException):
  """The process has ended."""


# -- The end of a process among others.


@pytest.fixture
def ended(monkeypatch):
  """Runs `main` with a command's end, as one of several processes."""

  def run(end, *, alone=False, linked=True):
    told = []
    line = types.SimpleNamespace(
      await_verdict=lambda: told.append("waits"),
      leave=lambda status, reason: told.append((status, reason)),
    )

    def status(words):
      if isinstance(end, BaseException):
        raise end
      return end

    def leave(status):
      told.append(status)
      raise _Ended

    monkeypatch.setattr(cli, "_status", status)
    monkeypatch.setattr(cli, "_among_processes", lambda: not alone)
    found = line if linked else None
    monkeypatch.setattr(collectives, "lifeline", lambda: found)
    monkeypatch.setattr(os, "_exit", leave)
    with contextlib.suppress(_Ended):
      told.append(f"returns {cli.main(['train'])}")
    return told

  return run


def test_process_that_ends_well_waits_for_no_other(ended):
  assert ended((0, "")) == ["returns 0"]


@pytest.mark.parametrize("linked", [True, False])
def test_process_that_ends_early_says_why_and_exits_at_once(
  linked, ended, capsys
):
  told = [(2, "error: no data.")] * linked
  assert ended((2, "error: no data.\nF0 B0"), linked=linked) == [*told, 2]
  assert capsys.readouterr().err == "jdist: error: no data.\nF0 B0\n"
  assert ended((2, "error: no data."), alone=True) == ["returns 2"]


@pytest.mark.parametrize("linked", [True, False])
def test_error_may_follow_from_another_process(linked, ended, capsys):
  """Whose status decides, if it is known within a while."""
  error = RuntimeError("a collective has failed.\nMore of it.")
  told = ["waits", (1, "RuntimeError: a collective has failed.")] * linked
  assert ended(error, linked=linked) == [*told, 1]
  assert "Traceback" in capsys.readouterr().err
  with pytest.raises(RuntimeError, match="has failed"):
    ended(error, alone=True)


def test_lost_process_is_no_wrong_option():
  """JAX raises a ValueError in the frame that calls a program."""
  with pytest.raises(ValueError, match="port") as info:
    checks.check_int("port", -1, 0)
  assert cli._is_ours(info.value)
  info.value.args = ("UNKNOWN: Gloo all-reduce failed: Connection closed.",)
  assert not cli._is_ours(info.value)


def test_stages_are_launched_unless_they_are_told_where(monkeypatch):
  """They are not started again, and each may be given its place instead."""
  given = []
  for module, name in ((_launch, "launch"), (_process_run, "train")):
    monkeypatch.setattr(module, name, given.append)
  words = ["train", "--stages", "2", "--runtime", "processes", "--workers", "1"]
  assert cli._status(words) == (0, "")
  (options,) = given
  assert (options.num_processes, options.restarts) == (2, 0)
  assert options.command == tuple(words) and options.train.stages == 2
  place = ["--coordinator-address", "a:1", "--num-processes", "2"]
  place += ["--process-id", "0"]
  assert cli._status([*words, *place]) == (0, "")
  assert given[1].coordinator_address == "a:1"
  # One stage needs no other process.
  words[2] = "1"
  assert cli._status(words) == (0, "")
  assert given[2].stages == 1 and not hasattr(given[2], "command")


# -- Interrupts that Python drops.


def test_dropped_interrupt_is_raised_a_moment_later(monkeypatch):
  begun = []

  def timer(seconds, function):
    begun.append((seconds, function))
    return types.SimpleNamespace(
      start=lambda: begun.append("started"),
      cancel=lambda: begun.append("cancelled"),
    )

  monkeypatch.setattr(threading, "Timer", timer)
  others = []
  monkeypatch.setattr(sys, "unraisablehook", others.append)
  before = signal.getsignal(signal.SIGINT)
  with _interrupts.kept():
    broken = types.SimpleNamespace(exc_type=RuntimeError)
    sys.unraisablehook(broken)
    assert others == [broken] and not begun
    sys.unraisablehook(types.SimpleNamespace(exc_type=KeyboardInterrupt))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  (seconds, function), *rest = begun
  assert 0 < seconds < 1 and function is _interrupts._thread.interrupt_main
  assert rest == ["started", "cancelled"] and len(others) == 1
  assert sys.unraisablehook == others.append
  signal.signal(signal.SIGINT, before)


def test_first_signal_raises_and_later_ones_do_nothing():
  before, raised = signal.getsignal(signal.SIGTERM), []
  with _interrupts.raised_once():
    for number in range(2):
      try:
        signal.raise_signal(signal.SIGTERM)
      except _interrupts.SigtermError:
        raised.append(number)
  assert raised == [0]
  assert signal.getsignal(signal.SIGTERM) is before


def test_interrupt_has_its_handler_again_unless_one_has_come():
  """A process that was interrupted ends, whatever is pressed again."""
  usual = signal.default_int_handler
  before = signal.signal(signal.SIGINT, usual)
  try:
    with _interrupts.kept():
      assert signal.getsignal(signal.SIGINT) is not usual
    assert signal.getsignal(signal.SIGINT) is usual
    with pytest.raises(KeyboardInterrupt), _interrupts.kept():
      signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, before)


def test_signals_stay_as_they_are_in_other_threads():
  before, seen = signal.getsignal(signal.SIGTERM), []

  def body():
    with _interrupts.raised_once():
      seen.append(signal.getsignal(signal.SIGTERM))

  thread = threading.Thread(target=body)
  thread.start()
  thread.join()
  assert seen == [before]


def test_ignored_interrupt_stays_ignored():
  """Background processes of a shell ignore SIGINT."""
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with _interrupts.raised_once(signal.SIGINT, KeyboardInterrupt):
      assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
      signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, before)


# -- `train`.


def _images():
  return data.Dataset(
    name="mine", split="train", num_classes=3, mean=(7.5,), std=(4.0,),
    images=np.arange(16, dtype=np.uint8).reshape(4, 2, 2, 1),
    labels=np.zeros(4, np.int32),
  )  # fmt: skip


def _text():
  rows = np.arange(40, dtype=np.uint8).reshape(5, 8)
  return data.TextDataset("mine", "train", rows)


@pytest.mark.parametrize("train", [_images(), _text()], ids=["images", "text"])
def test_model_is_saved_with_what_builds_it(train, tmp_path, capsys):
  pytest.importorskip("safetensors")
  path = tmp_path / "m.safetensors"
  options = _commands.Train(width=5, method="ssgd", final_params=str(path))
  workload = types.SimpleNamespace(train=train)
  _train._save_model(options, workload, {"w": jnp.ones(2)}, {"m": jnp.ones(3)})
  assert capsys.readouterr().out == f"Model: {path}\n"
  found = training.load_metadata(path)
  images = isinstance(train, data.Dataset)
  assert found == {
    "build": {
      "name": "mlp", "input_shape": list(train.input_shape), "width": 5,
      "num_classes": 3 if images else 256,
    },
    "dataset": "digits", "method": "ssgd",
  } | ({"mean": [7.5], "std": [4.0]} if images else {})  # fmt: skip
  params, state = training.load_model(
    path, {"w": jnp.zeros(2)}, {"m": jnp.zeros(3)}
  )
  assert params["w"].tolist() == [1, 1] and state["m"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("process", "named"), [(0, False), (1, True)])
def test_one_process_writes_a_model_if_it_has_a_name(
  process, named, tmp_path, monkeypatch
):
  monkeypatch.setattr(jax, "process_index", lambda: process)
  path = tmp_path / "m.safetensors"
  options = _commands.Train(final_params=str(path) if named else None)
  workload = types.SimpleNamespace(train=_images())
  _train._save_model(options, workload, {"w": jnp.ones(2)}, {})
  assert not path.exists()


class _Board(contextlib.nullcontext):
  """A writer of TensorBoard's events that keeps the records."""

  def __init__(self, directory, **options):
    super().__init__()
    self.directory, self.written, self.closed = directory, [], False
    self.options = options
    _Board.made.append(self)

  def __exit__(self, *error):
    self.closed = True

  def write(self, record):
    self.written.append(record.step)


class _Kept(contextlib.nullcontext):
  """Checkpoints that are never written."""

  def __init__(self, directory, workers, *, other_workers):
    super().__init__(self)
    assert (directory, workers, other_workers) == ("kept", "workers", 7)

  def latest_step(self):
    return 6


@pytest.mark.parametrize("process", [0, 1])
def test_first_process_shows_what_happens(
  process, tmp_path, monkeypatch, capsys
):
  """All of them take part, and have the records."""
  monkeypatch.setattr(jax, "process_index", lambda: process)
  monkeypatch.setattr(_Board, "made", [], raising=False)
  monkeypatch.setattr(training, "MetricsWriter", _Board)
  monkeypatch.setattr(training, "Checkpoints", _Kept)
  monkeypatch.setattr(_page, "write", lambda *given: None)
  monkeypatch.setattr(_workload, "heading", lambda *given: "heading")
  monkeypatch.setattr(_train, "_save_model", lambda *given: ends.append(given))
  ends = []
  record = training.Record(
    step=6, rounds=6, sent_bytes=8.0, train_loss=1.0, train_s=2.0,
    metrics={"accuracy": 0.5, "loss": 1.0}, samples_per_s=3.0,
  )  # fmt: skip

  def run(seed, *, on_record, on_resume, on_end, **fit):
    before = {"epochs": 2, "steps": 6, "workers": 2}
    on_resume(training.Restored(4, "state", before))
    on_record(record)
    on_end("params", "statistics")
    fits.append((seed, fit))
    return [record]

  fits, workload = (
    [],
    types.SimpleNamespace(
      train=_images(), steps_per_epoch=2.0, steps=lambda epochs: 10 * epochs,
      workers="workers",
    ),
  )  # fmt: skip
  programs = types.SimpleNamespace(
    workload=workload, run=run, other_workers=lambda seed: seed,
    budget=types.SimpleNamespace(num_steps=6, learning_rate="schedule"),
  )  # fmt: skip
  options = _commands.Train(
    seed=7, steps=6, workers=2, output=str(tmp_path), tensorboard="board",
    final_params="m", checkpoint_every_epochs=0.5,
    checkpoints="kept" if process else None,
  )  # fmt: skip
  monkeypatch.chdir(tmp_path)
  _train._run(options, programs, {"seed": 7})
  out = capsys.readouterr().out
  assert ("Resumes from step 4." in out) == (process == 0)
  assert ("step 6/6  accuracy 50.00 %" in out) == (process == 0)
  assert [x.written for x in _Board.made] == [[6]] * (process == 0)
  for board in _Board.made:
    assert board.closed and board.directory == "board"
    settings = vars(options)
    assert board.options == {"settings": settings, "learning_rate": "schedule"}
  # The model is given to each process, of which one writes it.
  assert ends == [(options, workload, "params", "statistics")]
  ((seed, fit),) = fits
  assert seed == 7 and fit.get("checkpoint_every") == (5.0 if process else None)
  assert fit["metadata"] == {"seed": 7} and fit["stop_on_sigterm"] is True
  assert isinstance(fit["checkpoints"], _Kept if process else type(None))
  assert fit["free"] == _workload.FREE
  rows = tmp_path / "rows.jsonl"
  assert rows.exists() == (process == 0)
  if not process:
    (row,) = training.read_rows(rows)
    assert row["resumed_from_step"] == 4 and row["steps"] == 6


def test_end_of_a_run_is_given_the_evaluated_model():
  made, ends = object.__new__(_workload.Prepared), []
  made.budget, made.evaluate_every = types.SimpleNamespace(num_steps=6), 3

  def run(seed, num_steps, **given):
    assert (seed, num_steps, given) == (2, 6, {"evaluate_every": 3, "label": 1})
    return "state", "records"

  evaluate = types.SimpleNamespace(model=lambda state: (state, "statistics"))
  made.programs = types.SimpleNamespace(run=run, evaluate=evaluate)
  end = lambda *given: ends.append(given)  # noqa: E731
  assert made.run(2, on_end=end, label=1) == "records"
  assert ends == [("state", "statistics")]
  assert made.run(2, label=1) == "records"


def test_checkpoint_of_other_workers_is_read_on_this_host():
  """Four workers average their momenta for the two of the run."""
  made, own = object.__new__(_workload.Prepared), collectives.workers(2)
  params = {"w": jnp.zeros(3)}
  made.workload = types.SimpleNamespace(
    workers=own,
    model=lambda seed: types.SimpleNamespace(params=params, state={}),
  )
  asked = []

  def method_for(axis, model):
    asked.append(axis)
    return optax.sgd(0.1, momentum=0.9)

  made.method_for = method_for
  made.programs = types.SimpleNamespace(optimizer=method_for(own.axis, None))
  found = made.other_workers(5)(4)
  assert found.workers.num_workers == 4
  assert found.workers.substrate == "vmap"
  assert asked == [own.axis, found.workers.axis]
  state = found.template()
  assert state.params["w"].shape == (4, 3)
  key = jax.random.key_data(jax.random.key(5))
  np.testing.assert_array_equal(state.key[0], key)
  state = found.convert(state)
  assert state.params["w"].shape == (2, 3)


@pytest.mark.parametrize(
  ("dataset", "needed"),
  [
    ("digits", {"sklearn": "data"}),
    ("synthetic", {}),
    ("cifar10",
     {"tensorflow_datasets": "data", "array_record": "data", "PIL": "data"}),
  ],
)  # fmt: skip
def test_data_sets_need_their_readers(dataset, needed):
  assert _workload._check_data(_commands.Train(dataset=dataset)) == needed


@dataclasses.dataclass
class _Read:
  given: tuple
  name: str


@pytest.mark.parametrize(
  ("options", "wanted"),
  [
    ({"dataset": "mnist"}, ("load", "mnist", {})),
    ({"files": "own", "image_size": 32}, ("load", "own", {"size": 32})),
    ({"dataset": "tiny_shakespeare"}, ("load_text", "tiny_shakespeare", {})),
    ({"text": "a.txt"}, ("load_text", "a.txt", {})),
    ({"text": "a.txt", "window_length": 9},
     ("load_text", "a.txt", {"window_length": 9})),
    ({"dataset": "tiny_shakespeare", "window_length": 8},
     ("load_text", "tiny_shakespeare", {"window_length": 8})),
  ],
)  # fmt: skip
def test_both_sets_are_read_as_they_are_told(options, wanted, monkeypatch):
  def noted(kind):
    return lambda *given, **more: _Read((kind, *given, more), "a name of its")

  for kind in ("load", "load_text"):
    monkeypatch.setattr(data, kind, noted(kind))
  options = _commands.Train(**options)
  kind, source, more = wanted
  assert _workload._load(options) == tuple(
    _Read((kind, source, part, more), options.dataset)
    for part in ("train", "test")
  )


@pytest.mark.parametrize(
  ("options", "more"),
  [
    ({}, {}),
    ({"checkpoints": "a"}, {"orbax.checkpoint": "checkpoints"}),
    ({"tensorboard": "a"}, {"tensorboardX": "metrics"}),
    ({"final_params": "a.safetensors"}, {"safetensors": "export"}),
    ({"driver": "clock"}, {"simpy": "sim"}),
    ({"checkpoints": "a", "driver": "clock"},
     {"orbax.checkpoint": "checkpoints", "simpy": "sim"}),
  ],
)  # fmt: skip
def test_options_need_their_extras(options, more, monkeypatch):
  asked = []
  monkeypatch.setattr(_workload.checks, "check_extras", asked.append)
  _workload.check(_commands.Train(**options))
  assert asked == [{"sklearn": "data"} | more]


@pytest.mark.parametrize(
  "options",
  [{}, {"norm": "group"}, {"num_layers": 3, "width": 7}, {"num_heads": 2}],
)
def test_model_is_built_with_what_is_given(options):
  train = _images()
  found = _workload.build_arguments(
    _commands.Train(model="mlp", **options), train
  )
  size = {"input_shape": train.input_shape, "num_classes": train.num_classes}
  assert found == {"name": "mlp"} | size | options


def test_speed_of_a_text_is_in_bytes():
  record = types.SimpleNamespace(samples_per_s=30.0)
  # A window of eight has seven bytes to predict.
  assert _workload.speed(record, _text()) == "210 bytes"
  assert _workload.speed(record, _images()) == "30 images"


# -- Several processes.


def test_processes_are_joined_as_they_are_told(monkeypatch):
  joined = []
  monkeypatch.setattr(
    collectives, "start_processes",
    lambda *given, **more: joined.append((given, more)),
  )  # fmt: skip
  join, train = _options.join_processes, _commands.Train
  join(train(), 8)
  assert not joined
  join(train(coordinator_address="auto"), 8)
  assert joined.pop() == ((), {})
  place = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}
  join(train(workers=4, **place), 8, lambda: {"seed": 3})
  assert joined.pop() == (
    ("a:1", 2, 1), {"cpu_devices_per_process": 4, "options": {"seed": 3}}
  )  # fmt: skip
  for wrong in (
    place | {"process_id": 2}, place | {"process_id": None},
    place | {"coordinator_address": None}, place | {"num_processes": 3},
  ):  # fmt: skip
    with pytest.raises(ValueError, match="`--"):
      join(train(workers=4, **wrong), 8)


@pytest.mark.parametrize(
  ("preset", "more", "wanted"),
  [
    ("digits", {}, "jdist train --seed 3 --output o"),
    ("cifar10", {}, "jdist train --preset cifar10 --seed 3 --output o"),
    (
      "digits", {"coordinator_address": "127.0.0.1:9", "num_processes": 2,
                 "process_id": 1},
      "jdist launch -n 2 -- train --seed 3 --output o",
    ),
    (
      "digits", {"text": "t.txt", "dataset": "t-123"},
      "jdist train --seed 3 --text t.txt --output o",
    ),
    ("digits", {"augment": True, "host_rounds": False},
     "jdist train --augment --seed 3 --no-host-rounds --output o"),
  ],
)  # fmt: skip
def test_command_of_a_run_starts_it_again(preset, more, wanted):
  usual = _options.with_preset(_commands.Train, preset)
  values = vars(usual) | {"seed": 3} | more
  found = _options.command_line(_commands.Train(**values), "o").split()
  # Options stand in the order of their declaration.
  assert (
    found[: found.index("train") + 1]
    == (wanted.split()[: wanted.split().index("train") + 1])
  )
  assert sorted(found) == sorted(wanted.split())
