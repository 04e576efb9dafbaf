"""Runs of stages: how they are built, without models, devices or processes."""

import contextlib
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
  with pytest.raises(ValueError, match="must be 1 layers for the 2 stages"):
    cut(cuts=(1, 2))
