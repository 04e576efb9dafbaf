"""Runs of stages: how they are built, without models, devices or processes."""

import contextlib
import itertools
import types

import jax
import numpy as np
import pytest

from jdist import channel, collectives, models, pipeline, reducers, training
from jdist.cli import _commands, _methods, _workload
from jdist.cli.pipelines import _pipeline_run, _process_run, _tables

TABLE = types.SimpleNamespace(num_iterations=3, window=4)


def _workload_of(num_workers=2):
  team = types.SimpleNamespace(
    axis="axis", num_workers=num_workers, jit=lambda f: f
  )
  model = types.SimpleNamespace(params="p", state="s", apply="apply")
  return types.SimpleNamespace(
    workers=team, steps_per_epoch=5.0, batch_size=48,
    model=lambda seed: model,
    inputs=lambda: "x", evaluator=lambda apply: ("evaluates", apply),
  )  # fmt: skip


@pytest.fixture
def built(monkeypatch):
  """Builds a process's run, and notes what its parts are given."""
  noted = {}

  def note(name, found=None):
    def call(*given, **more):
      noted[name] = given, more
      return found

    return call

  peers = types.SimpleNamespace(check_agreement=note("agreement"), device=0)
  process = types.SimpleNamespace(peers=peers, edge_bytes=640)
  stages = [types.SimpleNamespace(params=x, state=x) for x in "ab"]
  monkeypatch.setattr(_workload, "build", lambda *given: _workload_of())
  monkeypatch.setattr(_pipeline_run, "cut", note("cut", (stages, "microbatch")))
  monkeypatch.setattr(_methods, "build_method", note("method", "optimizer"))
  monkeypatch.setattr(pipeline, "StageProcess", note("process", process))
  monkeypatch.setattr(
    pipeline, "connect", note("connect", contextlib.nullcontext("peers"))
  )
  monkeypatch.setattr(collectives, "traffic", note("traffic", "traffic"))
  identity = types.SimpleNamespace(key=lambda name: f"key of {name}")
  monkeypatch.setattr(channel, "identity", lambda: identity)

  def build(device=0, **options):
    noted.clear()
    noted["stages"], peers.device = stages, device
    options = _commands.Train(**{"steps": 6, "stages": 2} | options)
    with contextlib.ExitStack() as stack:
      return _process_run._Run(options, TABLE, stack), noted

  return build


def test_process_has_its_stages_and_says_with_what_it_trains(built):
  run, noted = built()
  assert "connect" not in noted
  assert noted["process"] == (
    (noted["stages"], training.label_loss, TABLE,
     "microbatch"),
    {"peers": None, "inputs": "x", "edges": None,
     "team": run.workload.workers},
  )  # fmt: skip
  assert noted["method"][1] == {"predicted_steps": None}
  (name, options, budget, axis), _ = noted["method"]
  assert (name, budget, axis) == (options.method, run.budget, "axis")
  ((common,), _) = noted["agreement"]
  assert common["`--steps`"] == 6 and "`--output`" not in common
  assert run._evaluate == ("evaluates", "apply") and run._first
  assert run.added == {"edge_bytes": 640} and run.records == []
  assert (run._train_s, run._samples, run._losses) == (0.0, 0, [])
  assert run._traffic == ["traffic"] * 2
  (_, params, state), more = noted["traffic"]
  assert (params, state) == ("b", "b")
  assert more == {"axis": "axis", "num_workers": options.workers}


def test_other_processes_do_not_evaluate(built):
  run, _ = built(device=1)
  assert run._evaluate is None and not run._first


def test_steps_are_whole_tables(built):
  with pytest.raises(ValueError, match=r"multiple of the 3 .* got 7\. Take 9"):
    built(steps=7)


def test_late_gradients_are_predicted_over_the_window(built):
  _, noted = built(delay_fix="prediction")
  assert noted["method"][1] == {"predicted_steps": 3}


def test_edges_are_coded_with_their_feedback(built):
  _, noted = built(edge_codec="int8")
  codec = _methods.edge_codec(_commands.Pipeline(edge_codec="int8"))
  assert noted["process"][1]["edges"] == reducers.MessageCodec(codec)


@pytest.mark.parametrize(
  ("address", "host"), [("host:70", "host"), ("[::1]:70", "::1")]
)
def test_processes_learn_the_addresses_of_the_first(address, host, built):
  _, noted = built(
    device=2, coordinator_address=address, num_processes=3, process_id=2
  )
  assert noted["connect"] == (
    (2, [(host, 70), ("", 0), ("", 0)], "key of stages"),
    {"connect_s": 900.0, "timeout_s": 3600.0},
  )
  assert noted["process"][1]["peers"] == "peers"


def test_run_without_a_directory_has_no_files():
  made = object.__new__(_process_run._Run)
  made._options = _commands.Train()
  assert made._files() == {}
  assert made._restore() is None and made.newest() is None


@pytest.mark.parametrize(
  ("workers", "available", "process", "used"),
  [
    (4, 8, 1, [4, 5, 6, 7]), (4, 6, 2, [4, 5]), (2, 4, 3, [2, 3]),
    (3, 1, 5, [0]), (2, 4, None, [0, 1]),
  ],
)  # fmt: skip
def test_stages_take_turns_on_the_devices(
  workers, available, process, used, monkeypatch
):
  noted = []
  monkeypatch.setattr(collectives, "make_cpu_devices", noted.append)
  monkeypatch.setattr(jax, "local_devices", lambda: list(range(available)))
  monkeypatch.setattr(jax.config, "update", lambda *given: noted.append(given))
  monkeypatch.setattr(collectives, "make_mesh", lambda *given: given)
  monkeypatch.setattr(collectives, "workers", lambda number, mesh: mesh)
  options = _commands.Train(workers=workers, process_id=process)
  mesh = _process_run._team(options)
  assert mesh == ((len(used),), ("worker",), used)
  assert noted == [workers, ("jax_default_device", used[0])]


# -- One program for all stages.


@pytest.fixture
def prepared(monkeypatch):
  """Builds the programs of a run, and notes what they are made of."""
  noted = []

  def one_program(stages, loss, table, microbatch, *, inputs):
    noted.append((stages, loss, microbatch, inputs))
    return types.SimpleNamespace(
      grid=types.SimpleNamespace(delay=7), table=table, apply="apply",
      make_step=lambda optimizer, axis: ("step", optimizer, axis),
    )  # fmt: skip

  monkeypatch.setattr(
    _pipeline_run, "cut", lambda *given: (given[-1].name, "microbatch")
  )
  monkeypatch.setattr(pipeline, "OneProgram", one_program)
  monkeypatch.setattr(
    _methods, "build_method", lambda *given, **more: (given[3], more)
  )
  monkeypatch.setattr(training, "Trainer", lambda *given, **more: (given, more))
  monkeypatch.setattr(
    _workload, "of_trainer", lambda options, *given: {"given": given}
  )

  def build(**options):
    noted.clear()
    options = _commands.Train(**{"steps": 6, "stages": 2} | options)
    table = pipeline.make_table("gpipe", 2, 4)
    made = _pipeline_run.PreparedStages(_workload_of(), options, table)
    return made, noted

  return build


def test_programs_are_those_of_the_table(prepared):
  made, noted = prepared()
  assert noted == [("gpipe", training.label_loss, "microbatch", "x")]
  assert made.first is None and made.late.pipe.table.name == "gpipe"
  assert made.late.optimizer == ("axis", {"predicted_steps": None})
  (team, step), more = made.late.trainer
  assert team is made.workload.workers
  assert step == ("step", made.late.optimizer, "axis")
  assert more["given"][:2] == (team, made.late.optimizer)
  assert made.evaluate == ("evaluates", "apply")
  assert made.budget.num_steps == 6 and made.other_workers(3) is None


def test_programs_before_a_late_table_are_those_of_1f1b(prepared):
  made, noted = prepared(late_from=0.5, delay_fix="prediction")
  assert [x[0] for x in noted] == ["gpipe", "1f1b"]
  assert made.first.pipe.table == pipeline.make_table("1f1b", 2, 4)
  assert made.late.optimizer == ("axis", {"predicted_steps": 7})


def test_micro_batch_is_a_workers_part_of_the_batch(monkeypatch):
  batch = {"image": np.zeros((2, 24, 8, 3), np.float32),
           "label": np.zeros((2, 24), np.int32)}  # fmt: skip
  workload = _workload_of()
  workload.batches = lambda seed: [batch]
  asked = []
  monkeypatch.setattr(
    _pipeline_run, "_balanced", lambda *given: asked.append(given) or (1,)
  )
  monkeypatch.setattr(pipeline, "cut_layers", lambda *given: given)
  monkeypatch.setattr(_tables, "cast_layer", lambda *given: given)
  table = pipeline.make_table("gpipe", 2, 4)
  model = models.Model({}, {}, len, layers=("a", "b", "c"))

  def cut(**options):
    options = _commands.Train(dtype="bfloat16", **options)
    return _pipeline_run.cut(workload, options, model, table)

  (layers, cuts), micro = cut()
  assert layers == [(x, "bfloat16") for x in "abc"] and cuts == (1,)
  assert micro == {
    "image": jax.ShapeDtypeStruct((6, 8, 3), np.float32),
    "label": jax.ShapeDtypeStruct((6,), np.int32),
  }
  assert asked == [(layers, 2, micro, "x")]
  assert cut(cuts=(2,))[0] == (layers, (2,)) and len(asked) == 1
  with pytest.raises(ValueError, match="must be 1 layer for the 2 stages"):
    cut(cuts=(1, 2))


class _Process:
  """A stage's process whose states are numbers of steps."""

  edge_bytes = 0

  def __init__(self, peers, count, begun=None):
    self.peers, self.begun = peers, begun
    self.table = types.SimpleNamespace(num_iterations=count)
    self.taken = []

  def init_state(self, optimizer, *, seed):
    return _state(0)

  def restore(self, directory, optimizer):
    return None if self.begun is None else _state(self.begun)

  def gather(self, state):
    return state.params, state.model_state

  def save(self, folder, state):
    (folder / f"step_{state.step:08d}").mkdir()

  def run(self, state, batches):
    self.taken.append(batches)
    metrics = [{"loss": float(x)} for x in batches]
    return _state(state.step + len(batches)), metrics


def _state(step, weight=1.0):
  return pipeline.ProcessState(
    step, {0: np.float32(weight), 1: np.float32(2.0)}, {0: 7.0, 1: ()},
    {0: (), 1: ()}, np.zeros(2, "uint32"),
  )  # fmt: skip


def _run(process, first=True, **options):
  """Returns a run of eight steps, recorded each five and saved each four."""
  made = object.__new__(_process_run._Run)
  made._options = _commands.Train(
    **{"evaluate_every_epochs": 5, "checkpoint_every_epochs": 4} | options
  )
  made.budget = types.SimpleNamespace(num_steps=8)
  made.workload = types.SimpleNamespace(
    batches=lambda seed: types.SimpleNamespace(
      iterate=lambda first: itertools.count(first)
    ),
    steps=lambda epochs: epochs, batch_size=48, steps_per_epoch=1.0,
    train=types.SimpleNamespace(input_shape=(8, 8, 1)),
    workers=types.SimpleNamespace(view=lambda tree: tree),
  )  # fmt: skip
  made._process, made._peers, made._first = process, process.peers, first
  made._optimizer, made._identity = "optimizer", {"epochs": 2, "steps": 8}
  made._drained = lambda params, own, kept: (params * 10, own)
  made._evaluate = None
  if first:
    made._evaluate = types.SimpleNamespace(
      measure=lambda params, state: {
        "accuracy": 0.5, "loss": float(params[0] + params[1]), "kept": state[0]
      }
    )  # fmt: skip
  made._traffic = [
    types.SimpleNamespace(sent_bytes=lambda step, rounds, x=x: x * step)
    for x in (100, 1)
  ]
  made.records, made.added, made._losses = [], {}, []
  made._train_s, made._samples = 0.0, 0
  return made


def _peers(device=0):
  return types.SimpleNamespace(device=device, any=lambda mine, step: mine)


def _signal(monkeypatch, asked):
  signal = types.SimpleNamespace(asks_at=lambda step: step == asked)
  monkeypatch.setattr(
    training, "Preemption", lambda: contextlib.nullcontext(signal)
  )


@pytest.mark.parametrize("first", [True, False])
def test_process_records_and_saves_at_their_steps(first, monkeypatch, capsys):
  _signal(monkeypatch, None)
  clock = itertools.count(0.0, 3.0)
  monkeypatch.setattr(
    _process_run, "time",
    types.SimpleNamespace(perf_counter=lambda: next(clock)),
  )  # fmt: skip
  process, saved, shown = _Process(_peers(), 2, begun=2), [], []
  made = _run(process, first, checkpoints="kept")
  made._restore = lambda: _state(2)
  made._save = lambda state: saved.append(state.step)
  monkeypatch.setattr(
    _process_run.transforms, "rounds",
    lambda own, step: step // 2 if own == 7.0 else -1,
  )  # fmt: skip
  made.run(types.SimpleNamespace(record=lambda record: shown.append(record)))
  # A resumed run takes the batches that come next.
  assert process.taken == [[2, 3], [4, 5], [6, 7]] and saved == [4, 8]
  assert [x.step for x in made.records] == [6, 8]
  one, two = made.records
  # The mean loss is of the steps since the record before.
  assert (one.train_loss, two.train_loss) == (3.5, 6.5)
  assert (one.rounds, two.rounds, one.sent_bytes) == (3, 4, 606)
  # The first call compiles, and has no seconds.
  assert (one.train_s, two.train_s) == (3.0, 6.0)
  assert one.samples_per_s == two.samples_per_s == 32.0
  # One process evaluates, by stages drained where they have a state.
  drained = {"accuracy": 0.5, "loss": 12.0, "kept": 7.0}
  assert one.metrics == (drained if first else {})
  assert shown == (made.records if first else [])
  assert capsys.readouterr().out.count("\n") == (2 if first else 0)
  assert not one.diverged


@pytest.mark.parametrize(("asked", "saved"), [(4, True), (6, False), (8, None)])
def test_sigterm_ends_processes_between_two_runs_of_the_table(
  asked, saved, monkeypatch
):
  _signal(monkeypatch, asked)
  made = _run(_Process(_peers(), 2), evaluate_every_epochs=9)
  made._restore, made._record = lambda: None, lambda *given: None
  kept = []
  made._save = lambda state: kept.append(state.step) or state.step == 4
  if saved is None:  # A run that is over ends as usual.
    made.run(None)
    assert kept == [4, 8]
    return
  with pytest.raises(training.PreemptedError) as stopped:
    made.run(None)
  assert (stopped.value.step, stopped.value.saved) == (asked, saved)
  assert kept == [4, 6][: asked // 2 - 1]


def test_process_resumes_with_the_records_of_its_step(tmp_path, capsys):
  """A newer file without its arrays was left by a save that has failed."""
  folder = tmp_path / "saved"
  folder.mkdir()
  process = _Process(_peers(), 2)
  made = _run(process, checkpoints=str(folder))
  record = training.Record(
    step=4, rounds=4, sent_bytes=8.0, train_loss=1.0, train_s=2.0,
    metrics={"accuracy": 0.5}, samples_per_s=3.0,
  )  # fmt: skip
  made.records = [record]
  made._train_s, made._samples, made._losses = 2.5, 96, [0.5]
  assert made._save(_state(4)) is True
  made.records, made._losses = [record, record], []
  keep = process.save

  def fail(folder, state):
    raise OSError("full")

  process.save = fail
  with pytest.raises(OSError, match="full"):
    made._save(_state(6))
  assert [*made._files()] == [6, 4] and made.newest() == "step 6"
  found = _run(_Process(_peers(), 2, begun=4), checkpoints=str(folder))
  assert found._restore().step == 4
  assert capsys.readouterr().out == "Resumes from step 4.\n"
  assert found.records == [record] and found.added == {"resumed_from_step": 4}
  assert (found._train_s, found._samples, found._losses) == (2.5, 96, [0.5])
  # Another process has the state alone.
  other = _run(_Process(_peers(1), 2, begun=4), False, checkpoints=str(folder))
  assert other._restore().step == 4 and other.records == []
  assert capsys.readouterr().out == ""
  other._identity = {"epochs": 2, "steps": 8, "seed": 3}
  with pytest.raises(training.OtherRunError, match="seed"):
    other._restore()
  # A run may become longer.
  other._identity = {"epochs": 4, "steps": 16}
  assert other._restore().step == 4
  # The next save removes the file that is of no arrays.
  process.save = keep
  assert made._save(_state(8)) is True
  assert [*made._files()] == [8, 4]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_stages_that_are_not_finite_are_not_saved(elsewhere, tmp_path):
  asked, peers = [], _peers()
  peers.any = lambda mine, step: (
    asked.append((mine, step)) or (elsewhere or mine)
  )
  made = _run(_Process(peers, 2), checkpoints=str(tmp_path))
  told = "The state after step 4 is not finite and was not saved."
  with pytest.warns(RuntimeWarning, match=told):
    assert made._save(_state(4, 1.0 if elsewhere else np.nan)) is False
  # Each process has its own stages, and all of them ask.
  assert asked == [(not elsewhere, -4)] and not [*tmp_path.iterdir()]
  made._options = _commands.Train()
  assert made._save(_state(4)) is False and len(asked) == 1
