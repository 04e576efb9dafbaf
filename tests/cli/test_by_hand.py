"""Small parts of commands, with values to follow by hand."""

import io
import itertools
import json
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import cli, data, models, training, transforms
from jdist.cli import (
  _commands,
  _compare,
  _methods,
  _output,
  _train,
  _workload,
)
from jdist.cli.launch import _local_run
from jdist.cli.pipelines import _pipeline_run, _process_run, _tables
from jdist.cli.programs import _overlap_inputs


def test_pipeline_train_has_four_stages_by_default():
  expand = cli._expand
  assert expand(["train", "--steps", "1"]) == ["train", "--steps", "1"]
  assert expand(["pipeline", "train", "gpipe", "--steps", "1"]) == [
    "train", "--stages", "4", "--table", "gpipe", "--steps", "1",
  ]  # fmt: skip
  for given in (["--stages", "2"], ["--stages=2"], ["--help"], ["-h"]):
    assert expand(["pipeline", "train", *given]) == ["train", *given]
  for again in (["--table", "1f1b"], ["--table=1f1b"]):
    with pytest.raises(ValueError, match=r"`--table` must be left out .*'gpip"):
      expand(["pipeline", "train", "gpipe", *again])


def test_version_is_printed(capsys):
  assert cli.main(["--version"]) == cli.main(["-V"]) == 0
  first, second = capsys.readouterr().out.splitlines()
  assert first == second and first.startswith("jdist ")


# -- Texts of a training run.


@pytest.fixture(scope="module")
def text():
  rows = np.arange(40, dtype=np.uint8).reshape(5, 8)
  return data.TextDataset("mine", "train", rows)


def test_quality_of_a_text_is_in_bits():
  found = {"accuracy": 0.25}
  assert _workload.quality(found) == "accuracy 25.00 %"
  found["bits_per_token"] = 1.5
  assert _workload.quality(found) == "1.500 bits per byte  accuracy 25.00 %"


def _images(number, size=8):
  return data.Dataset(
    name="mine", split="train", num_classes=3, mean=(7.5,), std=(4.0,),
    images=np.zeros((number, size, size, 1), np.uint8),
    labels=np.zeros(number, np.int32),
  )  # fmt: skip


@pytest.mark.parametrize(
  ("given", "where", "length"),
  [
    ({"epochs": 2.5}, "vmap", "2.5 epochs"),
    ({"steps": 7, "driver": "clock"}, "clock", "7 steps"),
  ],
)
def test_heading_says_what_is_run(given, where, length):
  workload = types.SimpleNamespace(
    train=_images(1200), test=_images(3),
    workers=types.SimpleNamespace(substrate="vmap"),
    model=lambda seed: models.Model({"w": jnp.ones((30, 50))}, {}, len),
  )  # fmt: skip
  options = _commands.Train(workers=4, batch_size=16, **given)
  assert _workload.heading(options, workload, "ssgd, diloco") == (
    "ssgd, diloco. digits: 1200 training and 3 test images; mlp, 1,500 "
    f"parameters; N = 4 workers ({where}), 16 images a step; {length} on "
    f"{training.make_row({}, 0)['device']}. Options not in the command have "
    "the defaults of the preset digits."
  )


def test_samples_are_called_by_their_shape(text):
  found = [_workload.words(x) for x in (_images(1), _images(1, 1), text)]
  assert found == ["images", "rows", "windows of 7 bytes"]


def test_line_of_an_evaluation_has_all_figures(capsys):
  record = training.Record(
    step=6, rounds=3, sent_bytes=8e6, train_loss=1.25, train_s=2.0,
    metrics={"accuracy": 0.5, "loss": 1.0}, samples_per_s=1234.0,
  )  # fmt: skip
  _workload.print_record(record, 9, _images(1))
  assert capsys.readouterr().out == (
    "step 6/9  accuracy 50.00 %  train loss 1.2500  rounds 3  8 MB sent per "
    "worker  1,234 images/s\n"
  )


def test_workers_evaluate_a_thousand_images_together():
  found = [_workload._evaluation_batch(x, _images(1)) for x in (1, 8, 2000)]
  assert found == [1024, 128, 1]


def test_loss_is_a_dash_where_no_step_was_trained():
  def shown(loss, **more):
    given = {"diverged": False, "skipped": 0} | more
    return _workload.loss(types.SimpleNamespace(train_loss=loss, **given))

  assert shown(1.25) == "1.2500" and shown(math.nan) == "–"
  assert shown(math.nan, diverged=True) == shown(math.nan, skipped=2) == "nan"


def test_processes_agree_on_options_but_not_on_paths():
  options = _commands.Train(
    evaluate_every_epochs=2.0, checkpoint_every_epochs=3.0, checkpoints="/a"
  )
  assert _train._common(options, {"seed": 5}) == {
    "`--seed`": 5, "`--evaluate-every-epochs`": 2.0,
    "`--checkpoint-every-epochs`": 3.0, "`--checkpoints`": True,
    "`--final-params`": False,
  }  # fmt: skip


def test_resumed_run_prints_what_has_changed():
  programs = types.SimpleNamespace(
    budget=types.SimpleNamespace(num_steps=6),
    workload=types.SimpleNamespace(steps_per_epoch=2.0),
  )

  def told(step, **before):
    before = {"epochs": 2, "steps": None, "workers": 4} | before
    found = types.SimpleNamespace(step=step, metadata=before)
    options = _commands.Train(workers=4, steps=6)
    return _workload.resumed_text(options, found, programs)

  longer = ", of 6 steps where it had 4; the schedule is that of the longer run"
  assert told(3) == f"Resumes from step 3{longer}."
  assert told(3, steps=6) == "Resumes from step 3."
  assert told(6, steps=6) == "Nothing left to train: step 6 of 6."
  assert told(5, steps=6, workers=2) == (
    "Resumes from step 5, with N = 4 in place of 2."
  )
  with pytest.raises(ValueError, match=r"`--steps` must not.*began, 8 steps"):
    told(5, steps=8)


# -- Optimizers.


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_sgd_decays_weights_behind_its_momentum(plain, decay):
  options = _commands.Train(momentum=0.5, weight_decay=decay)
  run = _methods.run_of(options, 10, 0, lambda step: 0.1)
  optimizer = _methods.optimizer_of(options, run, plain=plain)
  w, g = jnp.array(2.0), jnp.array(1.0)
  state = optimizer.init(w)
  for momenta in (1.5, 1.75) if not plain else (1.0, 1.0):
    updates, state = optimizer.update(g, state, w)
    np.testing.assert_allclose(updates, -0.1 * (momenta + decay * 2), rtol=1e-6)


@pytest.mark.parametrize(
  ("policy", "length"), [("fixed", 6), ("method", 6), ("growth", None)]
)
def test_fragments_have_rounds_of_fixed_steps(policy, length):
  options = _commands.Train(interval=6, interval_policy=policy)
  run = _methods.run_of(options, 100, 0, lambda step: 0.1)
  method = _methods.methods.registry["streaming_diloco"]
  if length is None:
    with pytest.raises(ValueError, match="`--interval-policy` must be fixed"):
      _methods._interval("streaming_diloco", method, options, run)
  else:
    found = _methods._interval("streaming_diloco", method, options, run)
    assert found == length


@pytest.mark.parametrize(
  ("method", "given", "wanted"),
  [
    ("ssgd:first", {"in_flight": 3}, (3, None, None)),
    ("ssgd:scattered", {}, (1, None, None)),
    ("ssgd:hybrid", {"pending": 0.25, "message_mb": 2.0}, (1, 0.25, 2_000_000)),
    ("ssgd:first", {"pending": 0.25, "message_mb": 1e-6}, (1, None, 8)),
  ],
)
def test_forms_of_update_first_have_their_options(
  method, given, wanted, monkeypatch
):
  found = {}
  monkeypatch.setattr(
    transforms, "update_first", lambda inner, **options: found.update(options)
  )
  options = _commands.Overlap(**given)
  _overlap_inputs.make_optimizer(method, options, "worker")
  in_flight, pending, size = wanted
  assert found.pop("axis") == "worker"
  assert found.pop("scatter") == (method == "ssgd:scattered")
  assert found.pop("max_bytes", None) == size
  assert found == {"in_flight": in_flight, "pending": pending or 1.0}


@pytest.mark.parametrize("form", ["streamed", "simple"])
@pytest.mark.parametrize("interval", [1, 6])
def test_forecast_delays_a_whole_round_from_the_first(form, interval):
  """A run of `msdpu` would begin its delay with the first long round."""
  options = _commands.Overlap(interval=interval)
  optimizer = _overlap_inputs.make_optimizer(f"msdpu:{form}", options, None)
  state = optimizer.init({"w": jnp.ones(2)})
  assert transforms.streams(state) == (form == "streamed")
  place = np.asarray(transforms.rounds_ahead(state))[0]
  assert place.tolist() == [interval, 0, interval]


# -- Pipelines.


def test_layer_computes_in_another_dtype():
  def apply(params, state, x, *, train):
    return (params["w"] * x).astype(params["w"].dtype), (state, train)

  layer = models.Layer(
    name="one", params={"w": jnp.float32(1.001)}, state=7, apply=apply
  )
  assert _tables.cast_layer(layer, "float32") is layer
  cast = _tables.cast_layer(layer, "bfloat16")
  found, rest = cast.apply(layer.params, 7, jnp.bfloat16(2.0), train=True)
  assert (found.dtype, float(found), rest) == (jnp.bfloat16, 2.0, (7, True))
  assert cast.params["w"].dtype == jnp.float32


class _Saved:
  """Checkpoints with one of a step, which note what they are read into."""

  def __init__(self, step, saved=None):
    self.step, self.saved, self.read = step, saved, None

  def restore(self, template, check):
    self.read = template(self.step or 0)
    if self.step is not None:
      check(self.saved)
    return self.step and types.SimpleNamespace(step=self.step)


@pytest.mark.parametrize(
  ("step", "table", "late"),
  [(2, "first", False), (3, "first", False), (4, "late", True),
   (None, "first", None)],
)  # fmt: skip
def test_checkpoint_of_a_late_run_is_read_into_its_own_table(step, table, late):
  run = types.SimpleNamespace(late="late", _state=lambda phase, seed: phase)
  saved = _Saved(step, {"seed": 1})
  fit = {"checkpoints": saved, "metadata": {"seed": 1}}
  found = _pipeline_run.PreparedStages._is_late(run, "first", fit, 0, 3)
  assert found == bool(late) and saved.read == table
  assert not _pipeline_run.PreparedStages._is_late(run, "first", {}, 0, 3)
  if step is not None:
    fit["metadata"] = {"seed": 2}
    with pytest.raises(ValueError, match="seed"):
      _pipeline_run.PreparedStages._is_late(run, "first", fit, 0, 3)


@pytest.mark.parametrize("behind", [0, 2])
def test_last_record_is_of_a_drained_pipeline(behind, monkeypatch):
  made = object.__new__(_pipeline_run.PreparedStages)
  pipe = types.SimpleNamespace(
    grid=types.SimpleNamespace(behind=behind),
    make_drain=lambda optimizer, axis: lambda state: (optimizer, axis, state),
  )
  made.late = types.SimpleNamespace(pipe=pipe, optimizer="sgd")
  made.first, made.options = None, _commands.Train()
  made.budget = types.SimpleNamespace(num_steps=6)
  team = types.SimpleNamespace(axis="worker", jit=lambda drain: drain)
  made.workload = types.SimpleNamespace(workers=team)
  made.evaluate = lambda model: {"model": model}
  record = training.Record(
    step=6, rounds=6, train_loss=0.0, sent_bytes=0.0, metrics={"model": 1},
    train_s=1.0, samples_per_s=1.0,
  )  # fmt: skip
  for name, value in {
    "_fit": lambda *_: (8, [record, record]), "_state": lambda *_: 0
  }.items():  # fmt: skip
    monkeypatch.setattr(_pipeline_run.PreparedStages, name, value)
  first, last = made.run(0)
  assert first.metrics == {"model": 1}
  drained = {"model": ("sgd", "worker", 8)}
  assert last.metrics == (drained if behind else {"model": 1})


def test_stages_are_evaluated_after_a_share_of_the_epochs():
  given = {}

  def fit(state, batches, num_steps, **options):
    given.update(options, state=state, batches=batches, num_steps=num_steps)
    return "state", "records"

  made = object.__new__(_pipeline_run.PreparedStages)
  made.options = _commands.Train(evaluate_every_epochs=0.5)
  made.evaluate = "evaluate"
  made.workload = types.SimpleNamespace(
    batches=lambda seed: types.SimpleNamespace(iterate=f"batches of {seed}"),
    steps=lambda epochs: round(20 * epochs),
  )
  phase = types.SimpleNamespace(trainer=types.SimpleNamespace(fit=fit))
  assert made._fit(phase, 0, 3, 40, {"free": ()}) == ("state", "records")
  assert given == {
    "state": 0, "batches": "batches of 3", "num_steps": 40,
    "evaluate": "evaluate", "evaluate_every": 10, "free": (),
  }  # fmt: skip


class _Stages:
  """A process of a pipeline that saves a folder for each step."""

  def save(self, folder, state):
    (folder / f"step_{state.step:08d}").mkdir()


def _run_of(folder, *, first=True):
  made = object.__new__(_process_run._Run)
  made._options = _commands.Train(checkpoints=folder and str(folder))
  made._peers = types.SimpleNamespace(any=lambda bad, tag: bad)
  made._identity, made.records = {"seed": 1}, []
  made._train_s, made._samples, made._losses = 1.5, 20, [0.5]
  made._first, made._process = first, _Stages()
  return made


def _state_of(step, value=1.0):
  return types.SimpleNamespace(
    step=step,
    params={"v": np.float32(1.0), "w": np.float32(value)},
    model_state=(),
  )


def test_stages_are_saved_with_the_records_of_their_run(tmp_path):
  assert not _run_of(None)._save(_state_of(2))
  run = _run_of(tmp_path)
  (tmp_path / "step_00000001.json").write_text("{}")
  assert run._save(_state_of(2))
  # The records of step 1 belong to no saved stages any more.
  assert sorted(x.name for x in tmp_path.iterdir()) == [
    "step_00000002", "step_00000002.json",
  ]  # fmt: skip
  body = json.loads((tmp_path / "step_00000002.json").read_text())
  assert [1.5, 20, [0.5]] in _values(body)
  assert _run_of(tmp_path, first=False)._save(_state_of(3))
  assert not (tmp_path / "step_00000003.json").exists()


def _values(body):
  """Lists all values of nested dicts."""
  found = list(body.values())
  return found + [y for x in found if isinstance(x, dict) for y in _values(x)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_stages_that_are_not_finite_are_not_saved(bad, tmp_path):
  with pytest.warns(RuntimeWarning, match="step 4 is not finite"):
    assert not _run_of(tmp_path)._save(_state_of(4, bad))
  assert not list(tmp_path.iterdir())


class _Signal:
  """Is asked to stop at a step, as by SIGTERM."""

  def __init__(self, at):
    self.at = at

  def __enter__(self):
    return self

  def __exit__(self, *error):
    return None

  def asks_at(self, step):
    return self.at is not None and step >= self.at


@pytest.mark.parametrize(
  ("first", "count", "stops", "log", "steps"),
  [
    (0, 1, None, "r2 s3 r4 r6 s6 r7 s7", 7), (4, 1, None, "r6 s6 r7 s7", 3),
    # A table of two iterations passes over some of the marks.
    (1, 2, None, "r3 s3 r5 r7 s7", 3), (0, 1, 5, "r2 s3 r4 s5", 5),
    (0, 1, 7, "r2 s3 r4 r6 s6 r7 s7", 7), (7, 1, None, "", 0),
  ],
)  # fmt: skip
def test_stages_are_recorded_and_saved_at_their_marks(
  first, count, stops, log, steps, monkeypatch
):
  """Every two steps and every three, and at the end."""
  done, taken = [], []
  made = object.__new__(_process_run._Run)
  monkeypatch.setattr(training, "Preemption", lambda: _Signal(stops))

  def run(state, batches):
    taken.append(batches)
    losses = [{"loss": float(x)} for x in batches]
    return types.SimpleNamespace(step=state.step + count), losses

  made._process = types.SimpleNamespace(
    run=run, table=types.SimpleNamespace(num_iterations=count),
    init_state=lambda optimizer, seed: types.SimpleNamespace(step=0),
  )  # fmt: skip
  start = types.SimpleNamespace(step=first) if first else None
  made._options = _commands.Train(
    evaluate_every_epochs=2.0, checkpoint_every_epochs=3.0
  )
  made.budget, made._optimizer = types.SimpleNamespace(num_steps=7), "sgd"
  made.workload = types.SimpleNamespace(
    batch_size=4, steps=int,
    batches=lambda seed: types.SimpleNamespace(iterate=itertools.count),
  )  # fmt: skip
  made._peers = types.SimpleNamespace(any=lambda asked, step: asked)
  made._losses, made._train_s, made._samples = [], 0.0, 0
  for name, note in {
    "_restore": lambda self: start,
    "_record": lambda self, state, status: done.append(f"r{state.step}"),
    "_save": lambda self, state: done.append(f"s{state.step}") or True,
  }.items():
    monkeypatch.setattr(_process_run._Run, name, note)
  if stops == 5:
    with pytest.raises(training.PreemptedError) as stopped:
      made.run("status")
    assert (stopped.value.step, stopped.value.saved) == (5, True)
  else:
    made.run("status")
  assert " ".join(done) == log and len(taken) == steps
  assert [x for one in taken for x in one] == [
    first + i for i in range(count * steps)
  ]
  assert made._losses == [float(first + i) for i in range(count * steps)]
  # The first run compiles, and its time is none of training.
  assert made._samples == 4 * count * max(steps - 1, 0)
  assert (made._train_s > 0) == (steps > 1)


@pytest.mark.parametrize("first", [True, False])
def test_record_of_stages_is_of_drained_parameters(first, monkeypatch, capsys):
  """Only the first stage has the state of a chain that sees all of them."""
  asked, shown = [], []
  made = object.__new__(_process_run._Run)
  made._drained = lambda params, own, kept: (params + own, kept + 1)
  made.workload = types.SimpleNamespace(
    workers=types.SimpleNamespace(view=lambda x: x),
    train=types.SimpleNamespace(input_shape=(8, 8, 1)),
  )
  made._process = types.SimpleNamespace(
    gather=lambda state: (state.params, state.model_state)
  )
  measured = {"accuracy": 0.5, "loss": 1.0}
  made._evaluate = types.SimpleNamespace(
    measure=lambda *model: asked.append(model) or measured
  ) if first else None  # fmt: skip
  monkeypatch.setattr(transforms, "rounds", lambda own, step: own + step)
  made._traffic = [
    types.SimpleNamespace(sent_bytes=lambda steps, rounds: steps + 10 * rounds)
  ] * 2
  made._losses, made._train_s, made._samples = [1.0, 2.0], 0.5, 20
  made.records, made._first = [], first
  made.budget = types.SimpleNamespace(num_steps=9)
  state = training.TrainState(
    6, {0: 1.0, 1: 5.0}, {0: 2.0, 1: ()}, {0: 10, 1: 20}, None
  )
  status = types.SimpleNamespace(record=shown.append)
  made._record(state, status)
  (record,) = made.records
  assert asked == [({0: 3.0, 1: 5.0}, {0: 11, 1: 20})] * first
  assert record == training.Record(
    step=6, rounds=8, sent_bytes=2 * (6 + 80), train_loss=1.5, train_s=0.5,
    metrics=measured if first else {}, samples_per_s=40.0, diverged=False,
  )  # fmt: skip
  assert made._losses == [] and shown == [record] * first
  assert ("step 6/9  accuracy 50.00 %" in capsys.readouterr().out) == first


# -- Comparisons.


@pytest.mark.parametrize("text", [False, True])
def test_methods_are_compared_by_the_measure_of_their_data(text, monkeypatch):
  """Seeds are paired, and a text's measure is its bits."""

  def runs(accuracies, bits, sent):
    return [
      {
        "seed": seed, "method": "x", "accuracy": accuracy,
        "test_loss": 1.0, "rounds": 1200, "sent_bytes": sent, "train_s": 2.0,
        "samples_per_s": 50.0, "learning_rate": 0.25,
      } | ({"bits_per_token": bit} if text else {})
      for seed, (accuracy, bit) in enumerate(zip(accuracies, bits, strict=True))
    ]  # fmt: skip

  found = {
    "ssgd": runs((0.5, 0.7), (2.0, 2.2), 4e6),
    "diloco": runs((0.4, 0.8), (2.5, 2.7), 1e6),
  }
  options = _commands.Compare(methods=("ssgd", "diloco"), seeds=(0, 1))
  shown = {}
  monkeypatch.setattr(
    _output, "table",
    lambda title, caption, columns, rows: shown.update({
      method: [column(method, one) for column in columns.values()]
      for method, one in rows
    }),
  )  # fmt: skip
  _compare._print_table(_output.console(), found, options)
  quality, more = ("2.600 ± 0.141", "+0.500 ± 0.000")
  if not text:
    quality, more = "60.00 ± 28.28", "+0.00 ± 127.06"
  assert shown["diloco"] == [
    "diloco", quality, more, "1,200", "1", "4.0x", "50", "0.25",
  ]  # fmt: skip
  assert (shown["ssgd"][2], shown["ssgd"][5]) == ("-", "1.0x")


# -- Processes of one machine.


def test_lines_of_another_process_have_its_number(capsys):
  """Errors of jdist wait until it is known whether others print them, too."""
  stream = io.StringIO("Loading.\njdist: error: no data.\nDone.\n")
  echo = _local_run._Echo(3, stream)
  echo.thread.join(timeout=10)
  assert capsys.readouterr().err == "[3] Loading.\n[3] Done.\n"
  echo.show()
  assert capsys.readouterr().err == "[3] jdist: error: no data.\n"
