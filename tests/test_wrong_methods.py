"""Wrong calls of the methods of public classes, by room: one clear error each.

The law is that of `test_wrong_calls`: a method takes what it is given, or a
ValueError of its own quotes the argument.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import (
  cluster,
  codecs,
  collectives,
  pipeline,
  prediction,
  reducers,
  server,
)
from jdist.training import comparison
from tests import test_wrong_calls as calls
from tests import test_wrong_constructors as doors

TEAM, PARAMS, FOLDER = calls.TEAM, calls.PARAMS, doors.FOLDER
NODE = cluster.Node("a", slowdowns=(cluster.Slowdown(1.0, 0.5),))
TRIAL = comparison.Trial("tuning", "a", 0.1, 0)
WORKLOAD = comparison.Workload(**doors.ROOMS["comparison"]["Workload"])
ROWS = comparison.Rows(FOLDER / "methods.jsonl", {"a": 1})
CUT = prediction.cut(doors.MODEL, 1)
PREDICTOR = prediction.predictor(CUT)


def network():
  import simpy

  topology = cluster.star({"a": doors.LINK}, "b")
  return cluster.Network(simpy.Environment(), topology)


def codec_calls(codec):
  x = jnp.arange(8.0)
  key = None if codec.key == "none" else jax.random.key(0)
  payload, state = codec.encode(x, codec.init(x), key)
  return codec, {
    "num_bits": {"like": x}, "check": {"like": x}, "init": {"like": x},
    "encode": {"x": x, "state": codec.init(x), "key": key},
    "decode": {"payload": payload, "state": state, "like": x},
    "add_to": {"total": x, "payload": payload, "state": state},
  }  # fmt: skip


def reducer_calls(reducer):
  state = reducer.init(PARAMS, None)
  key = jax.random.key(0)
  return reducer, {
    "init": {"like": PARAMS, "axis": None},
    "reduce": {"tree": PARAMS, "state": state, "key": key, "axis": None},
    "flush": {"state": state, "like": PARAMS, "axis": None},
    "num_bits": {"like": PARAMS, "num_workers": 2},
    "num_workers": {"axis": None},
  }


def feedback_calls(feedback):
  state = feedback.init(PARAMS)
  wanted, kept = feedback.prepare(PARAMS, state)
  return feedback, {
    "init": {"like": PARAMS}, "prepare": {"x": PARAMS, "state": state},
    "finish": {
      "mean": PARAMS, "own_share": PARAMS, "wanted": wanted, "state": kept,
    },
    "keep_cast": {"left": PARAMS, "state": state},
    "absorb": {"held": PARAMS, "state": state},
  }  # fmt: skip


def message_calls(codec):
  found, _ = codec.encode(PARAMS, codec.init(PARAMS))
  return codec, {
    "init": {"like": PARAMS}, "kinds": {"like": PARAMS},
    "num_bytes": {"like": PARAMS}, "part": {"first": 0, "end": 1},
    "encode": {"tree": PARAMS, "state": codec.init(PARAMS)},
    "decode": {"found": found, "like": PARAMS},
  }  # fmt: skip


def sizes_calls(batches):
  return batches, {
    "sizes": {"speeds": np.array([1.0, 2.0])}, "every": {"num_workers": 2}
  }  # fmt: skip


# An object, and the right arguments of its methods without a default.
ROOMS = {
  "cluster": [
    (NODE, {
      "end_s": {"start_s": 0.0, "work_s": 1.0},
      "draw": {"generator": random.Random(0)},
      "available": {"now_s": 0.0},
    }),
    (cluster.Node("a"), {"end_s": {"start_s": 0.0, "work_s": 1.0}}),
    (doors.PROFILE, {
      "compute_s": {"samples": 2},
      "memory_bytes": {"samples": 2},
      "max_samples": {"memory_bytes": 2.0},
    }),
    (doors.LINK, {"send_s": {"num_bytes": 8}}),
    (cluster.Device("a", 1.0, 1.0), {
      "compute_s": {"flops": 1.0, "num_bytes": 1.0}
    }),
    (doors.FOUR, {
      "node": {"name": "worker0"},
      "check_batches": {"profile": doors.PROFILE, "samples": [1, 1, 1, 1]},
    }),
    (cluster.star({"a": doors.LINK}, "b"), {
      "link": {"one": "a", "other": "b"},
      "route": {"source": "a", "target": "b"},
    }),
    (cluster.Trace([cluster.Span("a", "b", 0.0, 1.0)]), {
      "add": {"resource": "a", "name": "b", "start_s": 1.0, "end_s": 2.0},
      "cut": {"resource": "a", "end_s": 0.5},
    }),
    (doors.TRACE, {"save_perfetto": {"path": FOLDER / "trace.json"}}),
    (network(), {
      "send": {
        "source": "a", "target": "b", "num_bytes": 8, "name": "x",
        "kind": "push",
      },
    }),
  ],
  "codecs": [
    codec_calls(x)
    for x in (
      codecs.Dense(), codecs.Cast(), codecs.Quantize(4, block=4),
      codecs.Sign(), codecs.Ternary(), codecs.TopK(0.5),
      codecs.SampledTopK(0.5), codecs.RandomK(0.5), codecs.DCTTopK(2, k=1),
    )
  ],
  "collectives": [
    (collectives.Traffic(()), {"sent_bytes": {"steps": 2, "rounds": 1}}),
    (TEAM, {
      "gather": {"tree": np.ones((2, 3))},
      "jit": {"step": lambda x: x},
      "spmd": {"step": lambda x: x},
      "specs": {"tree": jnp.ones((2, 3))},
    }),
  ],
  "data": [
    (doors.DIGITS, {
      "batch": {"rows": np.arange(2)}, "select": {"rows": np.arange(2)},
      "normalize": {"images": doors.DIGITS.images[:2]},
    }),
    (doors.SAMPLES, {
      "batch": {"worker": 0, "start": 0, "count": 2, "size": 2},
      "indices": {"worker": 0, "start": 0, "count": 2},
    }),
    (jdist.data.Batches(doors.DIGITS, 2, 4, seed=0), {
      "indices": {"step": 0}, "iterate": {"start_step": 0},
      "__getitem__": {"step": 0},
    }),
  ],
  "comparison": [
    (WORKLOAD, {
      "steps": {"epochs": 1.0}, "hold_out": {"fraction": 0.1},
      "batches": {"seed": 0}, "loss": {"apply": doors.MODEL.apply},
      "gradient": {"apply": doors.MODEL.apply},
      "evaluator": {"apply": doors.MODEL.apply},
      "programs": {
        "optimizer": calls.DILOCO, "apply": doors.MODEL.apply,
      },
    }),
    (ROWS, {
      "find": {"trial": TRIAL},
      "is_of": {"row": {"config": {}, **TRIAL._asdict()}, "trial": TRIAL},
      "make_row": {"trial": TRIAL, "measured": doors.MEASURED},
      "add": {"trial": TRIAL, "measured": doors.MEASURED},
    }),
    (comparison.Difference(0.1, 0.2, 0.3, 4), {
      "interval": {}, "plus_minus": {},
    }),
  ],
  "pipeline": [
    (pipeline.Footprint(), {
      "check": {"num_stages": 2}, "copies": {"stage": 0}, "live": {"stage": 0},
    }),
    (doors.COSTS[0], {
      "coded": {"codec": codecs.Quantize(4)},
      "recomputed": {"input_bytes": 8.0}, "scaled": {"factor": 2.0},
    }),
    (doors.TABLE, {
      "last_backward": {"stage": 0},
      "needs": {"action": doors.TABLE.devices[0][0]},
      "sends_to": {"action": doors.TABLE.devices[0][0]},
    }),
    (doors.PLAN, {"stage_of": {"layer": 0}}),
  ],
  "prediction": [
    (CUT, {
      "split": {"tree": doors.MODEL.params},
      "flatten_front": {"tree": CUT.split(doors.MODEL.params)[0]},
      "unflatten_front": {"vector": jnp.ones(CUT.num_front)},
      "unflatten_rear": {"vector": jnp.ones(CUT.num_rear)},
      "check_vector": {"half": "front", "vector": jnp.ones(CUT.num_front)},
    }),
    (PREDICTOR, {"init": {"key": jax.random.key(0)}}),
  ],
  "reducers": [
    *map(reducer_calls, (
      reducers.Exact(), reducers.compressed(codecs.Quantize(4)),
      reducers.compressed(codecs.TopK(0.5)), reducers.PowerSGD(2),
      reducers.MajorityVote(), reducers.Chunked(reducers.Exact()),
      reducers.PerLeaf((reducers.Rule(reducers.Exact()),)),
    )),
    *map(feedback_calls, (
      reducers.ErrorFeedback(), reducers.EF21(),
      reducers.MomentumCorrection(0.9), reducers.Smoothing(0.9),
    )),
    (reducers.Bits(1, 2.0), {"times": {"count": 2}}),
    message_calls(reducers.MessageCodec(codecs.Quantize(4))),
    message_calls(
      reducers.MessageCodec(codecs.TopK(0.5), reducers.ErrorFeedback())
    ),
  ],
  "server": [
    sizes_calls(server.FixedBatches(8)),
    sizes_calls(server.SpeedBatches(8)),
    sizes_calls(server.BalancedBatches(8)),
    (server.BSP(), {"init": {"workers": ["a", "b"]}}),
    (server.h_ps(8), {"init": {"workers": ["a", "b"]}}),
  ],
}  # fmt: skip
VALUES = (
  None, "a", -1, float("nan"), 10**400, [], object(), {1, 2},
)  # fmt: skip
# Arrays and a tree of another kind, which only these methods tell apart.
MORE = (jnp.arange(3.0), jnp.ones((2, 2), jnp.int32), {"z": jnp.ones(2)})

for _room, _objects in ROOMS.items():
  for _number, (_object, _methods) in enumerate(_objects):
    for _name, _given in _methods.items():
      calls.door(
        f"{_room} {_number} {type(_object).__name__}.{_name}",
        getattr(_object, _name),
        **_given,
      )
NAMES = [name for name in calls.ROOMS if " " in name]


@pytest.mark.parametrize("name", NAMES)
def test_right_call_is_right(name):
  function, given, then = calls.ROOMS[name]
  then(function(**given))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("room", ROOMS)
def test_wrong_argument_is_named(room, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # Some values are names of files.
  found = []
  for name in NAMES:
    if name.startswith(f"{room} "):
      takes = room in ("codecs", "reducers") or name.endswith("init")
      more = MORE if takes else ()
      found += calls.raw_errors(name, VALUES + more)
  # Python describes lists that do not match.
  assert not [error for error in found if "zip" not in error]
