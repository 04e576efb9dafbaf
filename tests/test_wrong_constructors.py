"""Wrong calls of the constructors and functions that trace nothing, by room.

The law and the table are those of `test_wrong_calls`; these doors cost so
little that each argument meets every wrong value in the default set.
"""

import atexit
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import (
  cluster,
  codecs,
  data,
  elastic,
  methods,
  models,
  pipeline,
  prediction,
  profiling,
  reducers,
  server,
  training,
)
from jdist.training import comparison
from tests import _refusals, _thinned
from tests import test_wrong_calls as calls

SGD, TEAM, PARAMS = calls.SGD, calls.TEAM, calls.PARAMS
LINK = cluster.Link(1e9)
FOUR = cluster.workers([1.0] * 4, link=LINK)
COSTS = [pipeline.LayerCost(x, 1.0, 2.0) for x in "abcdef"]
TABLE = pipeline.make_table("1f1b", 4, 4)
PLAN = pipeline.partition(COSTS, FOUR)
PROFILE = cluster.Profile(0.01)
TRACE = cluster.Trace([cluster.Span("a", "b", 0.0, 1.0)])
DIGITS = data.load("digits")
SAMPLES = data.SampleStream(DIGITS, 2, seed=0)
MODEL = models.build(
  "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(4, 4)
)
LAYERS = MODEL.layers
MICROBATCH = {
  "image": jax.ShapeDtypeStruct((2, 8, 8, 1), "float32"),
  "label": jax.ShapeDtypeStruct((2,), "int32"),
}
ASP = server.ASP()
BATCHES = server.FixedBatches(8)
RECORD = training.Record(
  1, 1, 1.0, 1.0, {"accuracy": 0.5, "loss": 1.0}, 1.0, 1.0
)
CONFIG = {"dataset": "digits", "model": "mlp", "batch_size": 4}
MEASURED = comparison.summarize([RECORD])
ROW = MEASURED | {"method": "ssgd", "workers": 2, "seed": 0, "config": CONFIG}
FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="jdist-doors-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def loss_fn(outputs, batch):
  del batch
  return jnp.mean(outputs), {}


def server_loss(params, model_state, batch, key):
  del batch, key
  return jnp.sum(params["a"]), (model_state, {})


LEARNER = server.GradientLearner(
  server_loss, SGD, PARAMS, SAMPLES, workers=["worker0", "worker1"]
)

(FOLDER / "cluster.toml").write_text("""
[[nodes]]
name = "a"
""")
(FOLDER / "costs.toml").write_text("""
[[stages]]
forward_s = 1.0
""")
(FOLDER / "table.txt").write_text(pipeline.format_table(TABLE))
(FOLDER / "rows.jsonl").write_text('{"a": 1}\n')
training.save_model(FOLDER / "model.safetensors", PARAMS)

# A door, and its right arguments as far as they have no default.
ROOMS = {
  "cluster": {
    "Cluster": {"nodes": (cluster.Node("a"), cluster.Node("b"))},
    "Device": {"name": "a", "flops_per_s": 1.0, "memory_bytes_per_s": 1.0},
    "Link": {"bandwidth_bits_per_s": 1.0},
    "Node": {"name": "a"},
    "Outage": {"start_s": 1.0, "end_s": 2.0},
    "Profile": {"seconds_per_sample": 1.0},
    "Slowdown": {"start_s": 1.0, "factor": 2.0, "end_s": 2.0},
    "Topology": {"links": {("a", "b"): LINK}},
    "load_cluster": {"path": FOLDER / "cluster.toml"},
    "plot_trace": {"trace": TRACE, "path": FOLDER / "trace.png"},
    "ring_messages": {"num_workers": 2},
    "star": {"links": {"a": LINK}, "centre": "b"},
    "workers": {"speeds": [1.0, 2.0]},
  },
  "data": {
    "Batches": {
      "dataset": DIGITS, "num_workers": 2, "batch_size": 4, "seed": 0,
    },
    "SampleStream": {"dataset": DIGITS, "num_workers": 2, "seed": 0},
    "evaluation_batches": {
      "dataset": DIGITS, "num_workers": 2, "batch_size": 4,
    },
    "load": {"name": "digits"},
    "load_text": {"source": FOLDER / "none.txt"},
    "partition": {"labels": np.arange(8) % 2, "num_workers": 2, "seed": 0},
    "random_crop": {"padding": 1},
    "random_flip": {"probability": 0.5},
  },
  "models": {
    "build": {
      "name": "mlp", "input_shape": (8, 8, 1), "num_classes": 10,
      "abstract": True,
    },
    "num_params": {"model": MODEL},
    "functional": {"module": None},
  },
  "prediction": {
    "PredictorFit": {},
    "choose_steps": {"num_epochs": 2, "steps_per_epoch": 20},
    "cut": {"model": MODEL, "num_layers": 1},
    "predictor": {"cut": prediction.cut(MODEL, 1)},
    "published_cut": {"name": "none"},
    "published_model": {"name": "none"},
    "ParameterSet": {"directory": FOLDER / "none"},
  },
  "profiling": {
    "GpuTarget": {"kind": "h200", "gpus_per_node": 2},
    "Forecast": {"collectives": (), "kernels": ()},
    "abstract": {"workers": TEAM, "tree": PARAMS},
    "abstract_state": {
      "workers": TEAM, "optimizer": calls.DILOCO, "params": PARAMS,
    },
    "forecast": {
      "program": "", "device": cluster.Device("a", 1.0, 1.0), "link": LINK,
    },
    "gpu_target": {"text": "8xh200"},
    "read_collectives": {"program": ""},
  },
  "training": {
    "Checkpoints": {"directory": FOLDER / "checkpoints", "workers": TEAM},
    "Evaluator": {
      "workers": TEAM, "apply": MODEL.apply,
      "batches": data.evaluation_batches(DIGITS, 2, 8)[:1],
    },
    "MetricsWriter": {"directory": FOLDER / "metrics"},
    "Progress": {"num_steps": 2, "label": "a"},
    "append_rows": {"path": FOLDER / "more.jsonl", "rows": [{"a": 1}]},
    "check_same_run": {"found": {}, "metadata": {}},
    "classification_loss": {"apply": MODEL.apply},
    "format_bytes": {"num_bytes": 1},
    "format_rate": {"per_s": 1.0},
    "is_diverged": {"metrics": {"loss": 1.0}, "losses": [1.0]},
    "load_metadata": {"path": FOLDER / "model.safetensors"},
    "load_model": {"path": FOLDER / "model.safetensors", "params": PARAMS},
    "make_gradient": {"loss_fn": calls.loss_fn},
    "make_row": {"config": {"a": 1}, "seed": 0},
    "make_update": {"optimizer": calls.DILOCO, "axis": calls.AXIS},
    "read_rows": {"path": FOLDER / "rows.jsonl"},
    "save_model": {"path": FOLDER / "a.safetensors", "params": PARAMS},
  },
  "comparison": {
    "Study": {
      "variants": ["a", "b"], "learning_rates": [0.1], "seeds": [0],
    },
    "Rows": {"path": FOLDER / "comparison.jsonl", "config": {"a": 1}},
    "Trial": {
      "purpose": "tuning", "variant": "a", "learning_rate": 0.1, "seed": 0,
    },
    "Workload": {
      "workers": TEAM, "train": DIGITS, "test": DIGITS,
      "model": lambda seed: MODEL, "batch_size": 4,
    },
    "accuracy": {"row": ROW},
    "by_loss": {"row": ROW},
    "quality": {"row": ROW},
    "mean": {"rows": [ROW], "value": "accuracy"},
    "mean_and_spread": {"rows": [ROW], "value": "accuracy"},
    "paired_difference": {"rows": [ROW], "base": [ROW]},
    "summarize": {"records": [RECORD]},
    "tune": {"learning_rates": [0.1], "measure": lambda rate: [ROW]},
    "compare": {
      "study": comparison.Study(["a"], [0.1], [0]),
      "rows": comparison.Rows(FOLDER / "compare.jsonl", {"a": 1}),
      "fit": lambda trial: MEASURED,
    },
  },
  "pipeline": {
    "Action": {"op": pipeline.Op.FORWARD, "stage": 0},
    "Footprint": {},
    "LayerCost": {},
    "Peers": {"device": 0, "connections": {}},
    "StageTimes": {},
    "Table": {
      "name": "a", "devices": TABLE.devices, "num_stages": 4,
      "num_microbatches": 4,
    },
    "check_table": {"table": TABLE},
    "connect": {"device": 0, "addresses": [("127.0.0.1", 1)], "token": "a"},
    "cut": {
      "model": models.Model(
        {"a": np.ones((), np.float32)}, {},
        lambda params, state, x, *, train: (
          jax.tree.map(lambda y: y * params["a"], x), state
        ),
      ),
      "cuts": 1, "inputs": np.zeros((2, 2), np.float32),
    },
    "cut_layers": {"layers": LAYERS, "cuts": 2},
    "draw_table": {"table": TABLE},
    "format_table": {"table": TABLE},
    "greedy": {"times": [pipeline.StageTimes()] * 2, "num_microbatches": 2},
    "layer_costs": {
      "layers": LAYERS, "microbatch": MICROBATCH, "source": "lowered",
    },
    "load_costs": {"path": FOLDER / "costs.toml"},
    "load_table": {"path": FOLDER / "table.txt"},
    "make_table": {
      "name": "1f1b", "num_stages": 4, "num_microbatches": 4,
    },
    "ours": {"times": 2, "num_microbatches": 2},
    "parse_table": {"text": pipeline.format_table(TABLE)},
    "partition": {"costs": COSTS, "machines": FOUR},
    "place": {"costs": COSTS, "machines": FOUR, "evaluations": 2},
    "plan": {
      "costs": COSTS, "machines": FOUR, "batch_size": 8,
      "num_stages": [2], "tables": ["1f1b"], "num_microbatches": [2],
    },
    "simulate": {
      "table": TABLE, "costs": COSTS[:4], "machines": FOUR,
    },
    "stage_times": {"found": PLAN, "machines": FOUR},
    "whole_model": {"optimizer": SGD},
    "OneProgram": {
      "stages": pipeline.cut_layers(LAYERS, 2), "loss": loss_fn,
      "table": pipeline.make_table("1f1b", 2, 2), "microbatch": MICROBATCH,
    },
    "StageProcess": {
      "stages": pipeline.cut_layers(LAYERS, 1), "loss": loss_fn,
      "table": pipeline.make_table("1f1b", 1, 2), "microbatch": MICROBATCH,
    },
  },
  "reducers": {"MessageCodec": {"codec": codecs.Quantize(4)}},
  "server": {
    "ASP": {},
    "BSP": {},
    "SSP": {},
    "NSoftsync": {"n": 2},
    "Ringmaster": {"max_staleness": 2},
    "DecoupledDiLoCo": {},
    "HPS": {"batches": server.BalancedBatches(8)},
    "dbs": {"total": 8},
    "h_ps": {"total": 8},
    "FixedBatches": {"samples": 2},
    "SpeedBatches": {"total": 8},
    "BalancedBatches": {"total": 8},
    "BitPlans": {},
    "Weighting": {},
    "LocalStep": {"rate": 0.1},
    "LivePlan": {"workers": ("a", "b")},
    "Simulation": {"machines": FOUR, "protocol": ASP, "profile": PROFILE},
    "ClockSession": {
      "simulation": server.Simulation(
        cluster.workers([1.0] * 2), ASP, PROFILE, learner=LEARNER
      )
    },
    "GradientLearner": {
      "loss_fn": server_loss, "optimizer": SGD, "params": PARAMS,
      "samples": SAMPLES, "workers": ["a", "b"],
    },
    "GradientServer": {
      "optimizer": SGD, "params": PARAMS, "plans": server.message_plans(),
      "workers": ["a", "b"],
    },
    "GradientWorker": {
      "loss_fn": server_loss, "params": PARAMS, "samples": SAMPLES,
      "plans": server.message_plans(), "number": 0, "num_workers": 2,
    },
    "FragmentRunner": {
      "loss_fn": server_loss, "optimizer": SGD, "params": PARAMS,
      "samples": SAMPLES, "number": 0, "num_workers": 2,
    },
    "FragmentSyncer": {"params": PARAMS, "workers": ["a", "b"]},
    "LiveServer": {
      "protocol": ASP, "learner": LEARNER.server,
      "plan": server.LivePlan(workers=("a", "b")),
    },
    "Pace": {"node": cluster.Node("a"), "profile": PROFILE},
    "Pair": {"server": LEARNER.server, "workers": LEARNER.workers},
    "fit_bit_plans": {"gradient": PARAMS},
    "inverse_staleness": {"staleness": 1},
    "message_plans": {},
    "replay": {
      "path": FOLDER / "none.bin", "protocol": ASP, "learner": LEARNER.server,
    },
  },
  "elastic": {
    "Rounds": {
      "method": methods.diloco(calls.SGD, 2, axis=None), "params": PARAMS,
      "workers": ["a", "b"],
    },
  },
}  # fmt: skip
_ROOM = {
  "cluster": cluster, "data": data, "models": models, "prediction": prediction,
  "profiling": profiling, "training": training, "comparison": comparison,
  "pipeline": pipeline, "reducers": reducers, "server": server,
  "elastic": elastic,
}  # fmt: skip
for _room, _doors in ROOMS.items():
  for _name, _given in _doors.items():
    calls.door(f"{_room}.{_name}", getattr(_ROOM[_room], _name), **_given)


# Their right calls need a file, a network by name, or a program.
_NEEDY = {
  "data.load_text", "models.functional", "prediction.ParameterSet",
  "prediction.published_cut", "prediction.published_model",
  "profiling.forecast", "profiling.read_collectives", "server.replay",
}  # fmt: skip
_RIGHT = {f"{room}.{name}" for room, doors in ROOMS.items() for name in doors}


VALUES = (
  None, -1, 0, 1.5, float("nan"), "", "text", b"x", [], [1, 2], (), {"x": 1},
  np.ones(5), int, object(), "a\0b", {1, 2}, range(3), 10**400, lambda: 1,
  jax.random.key(0),
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(_RIGHT - _NEEDY))
def test_right_call_is_right(name):
  function, given, then = calls.ROOMS[name]
  then(function(**given))


# The pipeline's cases take over 10 s.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
  "room", _thinned.some(list(ROOMS), [x for x in ROOMS if x != "pipeline"])
)
def test_wrong_argument_is_named(room, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # Some values are names of files.
  found = []
  for name in ROOMS[room]:
    found += calls.raw_errors(f"{room}.{name}", VALUES)
  assert not found


@pytest.mark.parametrize(
  ("argument", "call", "rule"),
  [
    ("num_stages", lambda: plan(num_stages=0), "a list of ints"),
    ("num_stages", lambda: plan(num_stages=[0]), "an int >= 1"),
    ("num_stages", lambda: pipeline.make_table("1f1b", 10**6, 8), "at most"),
    ("num_stages", lambda: pipeline.ours(10**9, 8), "at most"),
    (
      "num_microbatches",
      lambda: pipeline.greedy([pipeline.StageTimes()], 10**9),
      "at most",
    ),
    ("num_microbatches", lambda: part(num_microbatches=2**63), "from 1 to 92"),
    ("num_epochs", lambda: prediction.choose_steps(10**9, 20), "to 1000000"),
    ("footprint", lambda: part(footprint=""), "a `pipeline.Footprint` or None"),
    ("batch_size", lambda: workload(batch_size=0), "an int >= 1"),
    ("accumulate", lambda: workload(accumulate=0), "an int >= 1"),
    ("rows", lambda: comparison.mean([], "accuracy"), "one at least"),
    ("row", lambda: comparison.quality({"a": 1}), "'test_loss'"),
    ("nodes", lambda: part(nodes=()), "one machine at least"),
    (
      "metadata",
      lambda: training.check_same_run({}, {"a": np.ones(2)}),
      "a value of JSON",
    ),
  ],
)
def test_wrong_value_is_refused(argument, call, rule):
  _refusals.check(argument, call, rule)


def plan(**options):
  return pipeline.plan(COSTS, FOUR, 8, **options)


def part(**options):
  return pipeline.partition(COSTS, FOUR, **options)


def workload(**options):
  given = ROOMS["comparison"]["Workload"] | options
  return comparison.Workload(**given)


@pytest.mark.parametrize(
  "load",
  [
    cluster.load_cluster,
    pipeline.load_costs,
    pipeline.load_table,
    training.read_rows,
    training.load_metadata,
  ],
)
@pytest.mark.parametrize("bytes_", [b"", b"\xff\xfe\x00\n", b"x = ["])
def test_file_of_another_kind_is_named(load, bytes_, tmp_path):
  path = tmp_path / "file"
  path.write_bytes(bytes_)
  if load is training.read_rows and b"\n" not in bytes_:
    assert load(path) == []  # The last line may have been cut off.
  else:
    with pytest.raises(ValueError, match=str(path)):
      load(path)
