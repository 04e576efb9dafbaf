"""Defaults: what runs when an argument or an option is left out.

They are values of papers or choices that pages state, so that a change is
deliberate: here, in the docstring and in the CHANGELOG.
"""

import contextlib
import dataclasses
import inspect
import itertools
import math

import pytest

from jdist import (
  advice,
  channel,
  cluster,
  codecs,
  collectives,
  conformance,
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
  transforms,
)
from jdist.cli import _commands, _groups
from jdist.cli.servers import _server_options
from jdist.training import comparison
from jdist.transforms import intervals

_DEFAULTS = {
  advice.MethodCosts: {"send_ratio": 1.0},
  advice.advise: {"slowdown": 1.0, "limit_s": 60.0},
  advice.measure_link: {"num_bytes": 2**22, "repeats": 5},
  channel.listen: {"host": "127.0.0.1", "port": 0},
  cluster.Cluster: {"server": "server"},
  cluster.Device: {"launch_s": 0.0},
  cluster.Link: {"latency_s": 0.0},
  cluster.Link.send_s: {"messages": 0},
  cluster.Network: {"sharing": "fair"},
  cluster.Network.send: {"name": "message", "kind": "communicate"},
  cluster.Node: {"speed": 1.0, "jitter": 0.0, "memory_bytes": math.inf},
  cluster.Outage: {"end_s": math.inf},
  cluster.Profile: {
    "seconds_per_batch": 0.0, "bytes_per_sample": 0.0, "bytes_of_model": 0.0,
    "pull_bytes": 0.0, "push_bytes": 0.0, "seconds_per_encoding": 0.0,
    "name": "model",
  },
  cluster.Profile.compute_s: {"passes": 1},
  cluster.Slowdown: {"end_s": math.inf},
  cluster.Span: {"kind": "compute"},
  cluster.Trace: {"until_s": math.inf},
  cluster.Trace.add: {"kind": "compute"},
  cluster.plot_trace: {"title": ""},
  cluster.ring_messages: {"kind": "all-reduce"},
  cluster.workers: {"jitter": 0.0},
  codecs.Cast: {"dtype": "bfloat16", "rounding": "nearest"},
  codecs.RandomK: {"shared": True, "scaled": True},
  codecs.Sign: {"scale": "mean_abs"},
  codecs.Ternary: {"rounding": "stochastic"},
  collectives.Buckets.of: {"order": "front_first", "num_rows": 1},
  collectives.Collective: {"count": 1, "depth": 1},
  collectives.Phase: {"unit": "step"},
  collectives.Phase.times: {"after": 0},
  collectives.Traffic.sent_bytes: {"after_steps": 0, "after_rounds": 0},
  collectives.agree: {"timeout_s": 900.0},
  collectives.pack_bytes: {"num_leading": 0},
  collectives.start_processes: {
    "cpu_devices_per_process": 1, "timeout_s": 900.0,
  },
  collectives.workers: {"substrate": "auto", "axis": "worker"},
  conformance.check: {"sees_all": True, "within": 1.3},
  data.Batches.iterate: {"start_step": 0},
  data.TextDataset: {"num_classes": 256},
  data.load: {"split": "train"},
  data.load_text: {
    "split": "train", "window_length": 128, "test_fraction": 0.1,
  },
  data.random_crop: {"padding": 4},
  data.random_flip: {"probability": 0.5},
  models.build: {"seed": 0},
  models.functional: {"seed": 0},
  prediction.PredictorFit: {
    "num_epochs": 30, "samples_per_batch": 25, "images_per_batch": 125,
    "image_batches": 100, "learning_rate": 1e-3, "mixup": 1.0, "seed": 0,
  },
  prediction.choose_steps: {"per_epoch": 15, "seed": 0},
  prediction.cut: {"name": "model"},
  prediction.evaluate_predictor: {
    "samples_per_batch": 25, "images_per_batch": 500,
  },
  prediction.predictor: {"rank": 1},
  prediction.published_model: {"num_classes": 10},
  profiling.Event: {"flops": 0, "num_bytes": 0},
  profiling.GpuTarget: {"nodes": 1},
  profiling.GpuTarget.mesh: {"axis": "worker"},
  profiling.forecast: {"branch": "sends"},
  methods.demo: {"decay": 0.999, "chunk": 64, "k": 32},
  methods.dgc: {"ratio": 0.001, "momentum": 0.9},
  methods.diloco: {"outer_learning_rate": 0.7, "outer_momentum": 0.9},
  methods.easgd: {"moving_rate": 0.9},
  methods.fed_prox: {"strength": 0.01},
  methods.msdpu: {"correction": 0.1, "warmup_steps": 0},
  methods.muloco: {
    "outer_learning_rate": 0.7, "outer_momentum": 0.9, "bits": 2,
    "momentum": 0.95, "weight_decay": 0.0,
  },
  methods.overlap_local_sgd: {"pull": 0.6, "momentum": 0.0},
  methods.powersgd: {"rank": 2},
  methods.qsgd: {"wire": "gather", "bits": 4, "block": 512},
  methods.scaffold: {"global_learning_rate": 1.0},
  methods.signsgd: {"momentum": 0.0},
  methods.slow_mo: {
    "buffers": "maintain", "slow_learning_rate": 1.0, "slow_momentum": 0.5,
  },
  methods.sparse_loco: {
    "density": 1 / 64, "outer_learning_rate": 1.0, "decay": 0.95, "bits": 2,
    "chunk": 4096,
  },
  methods.streaming_diloco: {
    "outer_learning_rate": 0.7, "outer_momentum": 0.9, "delay_steps": 1,
    "mix": 0.5,
  },
  methods.terngrad: {"wire": "gather", "deviations": 2.5},
  methods.topk_sgd: {"feedback": True, "ratio": 0.01},
  transforms.Delayed: {"steps": None, "carry": 1.0, "after_step": 0},
  transforms.Stream: {"max_bytes": 4 * 2**20},
  transforms.update_first: {
    "order": "front_first", "max_bytes": 4 * 2**20, "in_flight": 1,
    "pending": 1.0,
  },
  intervals.adacomm: {
    "learning_rate": 1.0, "form": "halving", "max_interval": 16,
  },
  intervals.msdpu: {"learning_rate": 1.0, "max_interval": 16, "decay": 0.9},
  reducers.ErrorFeedback: {"decay": 1.0},
  reducers.MomentumCorrection: {"mask": True, "momentum": 0.9},
  reducers.Smoothing: {"momentum": 0.9},
  reducers.warm_up: {"final_ratio": 0.001},
  reducers.Chunked: {"max_bytes": 4 * 2**20, "multiple": 1},
  reducers.PowerSGD: {"rank": 2, "seed": 0, "factors": None},
  # A reader of bytes says how many it expects.
  channel.Connection: {"max_body": 0},
  channel.Listener: {"max_body": 0},
  channel.call: {"max_body": 0},
  codecs.DCTTopK: {"chunk": 64},
  codecs.Quantize: {
    "bits": 8, "block": 256, "range": "max_abs", "rounding": "nearest",
  },
  codecs.SampledTopK: {"sample": 0.01},
  server.BSP: {"backups": 0, "restart_s": None, "timeout_s": None},
  server.SSP: {"bound": 3},
  server.Simulation: {"seed": 0, "detection_s": 1.0},
  server.HPS: {"pipelined": True, "pipelined_from": 0, "slack": 0.9},
  server.SpeedBatches: {"smoothing": 0.5, "minimum": 1},
  server.DecoupledDiLoCo: {
    "interval": 8, "fragments": 1, "quorum": 0.5, "grace": 0.5, "ahead": 1,
    "peers": False,
    "weights": "paper", "in_step": False,
  },
  server.dbs: {"rate": "linear", "smoothing": 0.5, "minimum": 1},
  server.fedbuff: {"buffer": 10},
  server.h_ps: {
    "tasks": True, "pipelined_from": 0, "accumulate": True, "pipelined": True,
    "smoothing": 0.5, "slack": 0.9,
  },
  elastic.Rounds: {
    "samples": 32, "quorum": 0.5, "grace": 1.0, "timeout_s": None, "seed": 0,
    "peers": False,
  },
  elastic.Rounds.session: {"record": None, "shared": True},
  elastic.Rounds.syncer: {"shared": True},
  server.FragmentRunner: {
    "sizes": None, "fragments": 1, "push_codec": None, "seed": 0, "interval": 1,
    "mix": None,
  },
  server.FragmentSyncer: {
    "outer": None, "fragments": 1, "push_codec": None, "shared": True,
  },
  pipeline.Candidate: {
    "extra_live": 0, "send_factor": 1.0, "plan": None, "made": None,
    "times": None, "samples_per_s": 0.0, "delay": None, "reason": None,
  },
  pipeline.Footprint: {
    "optimizer_copies": 1.0, "versions": 1, "in_flight": 1, "recompute": False,
    "input_bytes": 0.0,
  },
  pipeline.OneProgram: {
    "inputs": "image", "late_sends": True, "clip_norm": None, "axis": "stage",
  },
  pipeline.OneProgram.init_state: {"seed": 0},
  pipeline.OneProgram.times: {"between_s": 0.0, "all_wait": False},
  pipeline.StageProcess: {
    "inputs": "image", "recompute": "none", "clip_norm": None,
    "timeline": False, "team": None, "edges": None, "edge_samples": None,
  },
  pipeline.StageProcess.init_state: {"seed": 0},
  pipeline.StageProcess.save: {"keep": 3},
  pipeline.StageTimes: {
    "forward": 1.0, "backward": 1.0, "weight": 1.0, "send": 0.0,
  },
  pipeline.Table: {"num_iterations": 1, "window": 1, "weights": "delayed"},
  pipeline.check_table: {
    "sends": "buffered", "max_live": None, "max_versions": None,
  },
  pipeline.connect: {"connect_s": 60.0, "timeout_s": 300.0},
  pipeline.layer_costs: {
    "inputs": "image", "source": "compiled", "flops_per_s": 1e12,
    "bytes_per_s": math.inf, "repeats": 5,
  },
  pipeline.ours: {"window": None, "num_iterations": 8, "max_live": None},
  pipeline.partition: {"footprint": None, "num_microbatches": 1},
  pipeline.place: {"num_microbatches": 1, "evaluations": 300, "seed": 0},
  pipeline.plan: {
    "samples": 1, "recompute": (False, True), "max_delay": 0,
    "optimizer_copies": 1.0, "input_bytes": 0.0,
  },
  pipeline.simulate: {"optimizer_copies": 1.0},
  pipeline.stage_times: {"send_factor": 1.0, "split": False},
  pipeline.zb_h2: {"num_iterations": 8, "max_live": None, "max_saved": None},
  pipeline.zb_v: {"num_iterations": 8, "max_live": None, "max_saved": None},
  elastic.OwnLoop: {"fragments": 1, "seed": 0, "interval": 1},
  methods.Method: {"interval_policy": "fixed"},
  methods.Run: {
    "steps_per_epoch": 1, "interval": 1, "optimizer": "sgd", "momentum": 0.0,
    "weight_decay": 0.0,
  },
  methods.ef_signsgd: {"wire": "all_to_all"},
  methods.mp2: {"interval": 1},
  pipeline.Action: {"microbatch": 0, "iteration": 0},
  pipeline.LayerCost: {
    "name": "layer", "forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0,
    "parameter_bytes": 0.0, "output_bytes": 0.0, "sent_share": 1.0,
    "saved_bytes": 0.0, "working_bytes": 0.0,
  },
  pipeline.Peers: {"timeout_s": 300.0},
  pipeline.draw_table: {"max_ticks": 60},
  pipeline.greedy: {"num_iterations": 1},
  pipeline.parse_table: {"name": "table"},
  reducers.Hierarchical: {"parts": 1},
  reducers.MessageCodec: {"seed": 0, "first": 0},
  reducers.Rule: {"min_size": 0, "min_ndim": 0},
  reducers.compressed: {"owner_feedback": True},
  server.Assignment: {
    "sent_s": 0.0, "push_plan": 0, "pull_plan": 0, "round": 0, "fragment": 0,
  },
  server.BalancedBatches: {
    "measured": True, "smoothing": 0.5, "minimum": 1, "accumulate": True,
  },
  server.BitPlans: {"block": 64},
  server.EmptyServer: {"num_bytes": 0},
  server.EmptyWorker: {"stateless": True},
  server.GradientLearner: {"compensation": 0.0, "seed": 0},
  server.GradientServer: {"shared": True, "seed": 0, "compensation": 0.0},
  server.GradientWorker: {"seed": 0},
  server.LivePlan: {"unit": "samples", "shards": 1, "shard": 0},
  server.LiveSession: {"startup_s": 900.0},
  server.LocalStep: {"momentum": 0.0},
  server.Pace: {"seed": 0},
  server.Push: {"waited_s": 0.0},
  server.RayEngine: {
    "cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "spares": 0,
  },
  server.Reply: {"passes": 1, "push_plan": 0, "pull_plan": 0, "fragment": 0},
  server.ServerState: {
    "version": 0, "now_s": 0.0, "next_task": 0, "joined": 0,
    "total_samples": 0, "pushes": 0, "applied": 0,
  },
  server.Weighting: {"samples": "none"},
  server.WorkerLoop: {"patience_s": 120.0},
  server.fit_bit_plans: {"error_limit": 0.02, "block": 64, "seed": 0},
  training.Checkpoints: {"keep": 3},
  training.OtherRunError: {"argument": "metadata"},
  training.Progress: {"start_step": 0},
  training.Record: {"clock": "wall", "skipped": 0},
  training.Trainer: {"max_shapes": 8, "timeout_s": 900.0},
  training.check_same_run: {"argument": "metadata"},
  training.init_state: {"seed": 0},
  training.make_gradient: {"accumulate": 1},
  training.make_step: {"accumulate": 1},
  training.sample_counts: {"leading": 0},
  comparison.Study: {"max_extensions": 2, "order": "variant"},
  comparison.Workload: {
    "accumulate": 1, "dtype": "float32", "evaluation_batch": 128,
  },
  comparison.paired_difference: {"confidence": 0.95},
  comparison.tune: {"max_extensions": 2},
  transforms.Control: {"stream_steps": "fixed"},
  transforms.ControlVariates: {"global_learning_rate": 1.0},
  transforms.Elastic: {"moving_rate": 0.9},
  transforms.PulledAnchor: {"pull": 0.6, "momentum": 0.0},
  transforms.SlowMomentum: {
    "slow_learning_rate": 1.0, "momentum": 0.5, "buffers": "maintain",
  },
  transforms.lenient: {"argument": "optimizer"},
  transforms.outer_sgd: {"outer_learning_rate": 0.7, "outer_momentum": 0.9},
  transforms.refuse_iterates: {"argument": "inner"},
  intervals.growth: {"start": 1 / 3, "max_interval": 16},
}  # fmt: skip
# Options of the command line by the class that declares them, all but those
# whose default is None.
_OPTIONS = {
  _groups.ModelOptions: {
    "preset": "digits", "dataset": "digits", "model": "mlp", "dtype": "float32",
  },
  _groups.WorkerOptions: {
    "workers": 8, "substrate": "auto", "batch_size": 128, "accumulate": 1,
    "augment": False,
  },
  _groups.BudgetOptions: {
    "epochs": 30.0, "optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0,
    "schedule": "cosine", "warmup_epochs": 1.0, "skip_nonfinite": False,
  },
  _groups.RoundOptions: {
    "interval": 8, "interval_policy": "method", "growth_start": 1 / 3,
    "overlap": False, "stream": False,
  },
  _groups.ResultOptions: {"host_rounds": True, "evaluate_every_epochs": 2.0},
  _groups.CheckpointOptions: {"checkpoint_every_epochs": 2.0},
  _groups.LinkOptions: {"bandwidth_mbit_per_s": 100.0, "latency_ms": 1.0},
  _groups.CompilerOptions: {
    "topology": "8xh200", "host_rounds": True, "pending": 0.33,
    "tell_compiler": False,
  },
  _groups.RateOptions: {"latency_us": 2.0, "launch_us": 2.0},
  _groups.StageOptions: {"table": "1f1b", "cuts": (), "delay_fix": "none"},
  _server_options.ProtocolOptions: {
    "parts": ("tasks", "pipeline", "bits"), "pipeline_from": 0.0,
    "peers": False,
  },
  _server_options.ServerOptions: {
    "error_limit": 0.02, "elastic": False, "cpus_per_worker": 1.0,
    "gpus_per_worker": 0.0, "paced": True, "shards": 1, "owned": False,
  },
  _commands.Train: {
    "method": "msdpu", "learning_rate": 0.1, "seed": 0,
    "runtime": "one_program",
  },
  _commands.Compare: {
    "methods": ("ssgd", "local_sgd", "diloco", "msdpu"), "seeds": (0, 1, 2),
    "learning_rate": (0.1,), "grid_extensions": 2, "tuning_seeds": 1,
  },
  _commands.Advise: {
    "methods": (), "batch_size": 128, "interval": 8, "optimizer": "sgd",
    "slowdown": 1.0, "limit_s": 60.0,
  },
  _commands.Overlap: {
    "methods": ("msdpu",), "model": "resnet50", "batch_size": 32,
    "length": 1024, "dtype": "bfloat16", "interval": 8,
  },
  _commands.Bytes: {
    "methods": ("ssgd", "qsgd", "topk_sgd", "dgc", "powersgd"),
    "model": "resnet18", "workers": 8, "interval": 8, "steps": 10000,
    "warmup_steps": 0,
  },
  _commands.Simulate: {
    "cluster": "", "protocols": ("bsp", "asp", "dbs"), "batch_size": 32,
    "interval": 8, "seed": 0,
  },
  _commands.Pipeline: {
    "action": "draw", "tables": (), "sends": "buffered", "batch_size": 256,
    "samples": 1, "max_delay": 0, "forward_s": 1.0, "backward_s": 2.0,
    "output_bytes": 0.0, "parameter_bytes": 0.0, "saved_bytes": 0.0,
    "optimizer_copies": 1.0,
  },
  _commands.Report: {"folder": ""},
  _commands.Launch: {
    "num_processes": 1, "restarts": 5, "backoff_s": 1.0, "name": "jdist",
    "image": "jdist:latest", "claim": "jdist-checkpoints", "command": (),
  },
}  # fmt: skip
_GROUPS = [
  one
  for module in (_groups, _server_options, _commands)
  for one in vars(module).values()
  if dataclasses.is_dataclass(one) and one.__module__ == module.__name__
]


@pytest.mark.parametrize("codec", [codecs.TopK, codecs.RandomK])
def test_one_in_a_hundred_entries_is_sent_by_default(codec):
  assert (codec().ratio, codec().k) == (0.01, None)
  assert codecs.DCTTopK().k == 32 and codecs.DCTTopK(chunk=4).k == 16


@pytest.mark.parametrize("door", _DEFAULTS, ids=lambda x: x.__qualname__)
def test_default_is_the_stated_one(door):
  found = {
    name: argument.default
    for name, argument in inspect.signature(door).parameters.items()
  }
  if dataclasses.is_dataclass(door):
    found |= {x.name: x.default for x in dataclasses.fields(door)}
  stated = _DEFAULTS[door]
  assert {name: found[name] for name in stated} == stated


def _doors(module):
  """Yields public functions and classes that can be called."""
  for name in dir(module):
    door = getattr(module, name)
    if not name.startswith("_") and callable(door):
      with contextlib.suppress(TypeError, ValueError):
        yield door, inspect.signature(door).parameters.values()


_MODULES = (
  advice, channel, cluster, codecs, collectives, conformance, data, elastic,
  methods, models, pipeline, prediction, profiling, reducers, server, training,
  comparison, transforms, intervals,
)  # fmt: skip
# Arguments that are False unless they are given.
_OFF = {
  "abstract": {"build"}, "asynchronous": {"TableEntry"},
  "augment": {"Workload"}, "conditional": {"Collective"},
  "diverged": {"Record", "Tuned"}, "download": {"load", "load_text"},
  "drain": {"Control"}, "in_step": {"DecoupledDiLoCo"},
  "independent": {"Trainer", "make_step", "make_update"},
  "inverse_staleness": {"dbs"}, "needs_loss": {"IntervalPolicy"},
  "nesterov": {"dgc", "MomentumCorrection", "LocalStep"},
  "own_momentum": {"Method"}, "owned": {"SampleStream"},
  "peers": {"Rounds", "DecoupledDiLoCo"}, "recompute": {"Footprint", "Plan"},
  "residuals": {"drain"}, "scatter": {"update_first"},
  "split": {"greedy", "stage_times"}, "survive": {"LiveSession"},
  "timeline": {"StageProcess"}, "weighted": {"make_step"},
}  # fmt: skip


def test_what_is_off_by_default_is_stated():
  found = {}
  for door, arguments in itertools.chain(*map(_doors, _MODULES)):
    for argument in arguments:
      if argument.default is False:
        found.setdefault(argument.name, set()).add(door.__name__)
  assert found == _OFF


@pytest.mark.parametrize("module", _MODULES, ids=lambda x: x.__name__)
def test_every_number_that_may_be_left_out_is_stated(module):
  missing = [
    f"{door.__qualname__}({argument.name}={argument.default!r})"
    for door, arguments in _doors(module)
    for argument in arguments
    if isinstance(argument.default, int | float | str)
    and argument.default is not False
    and argument.name not in _DEFAULTS.get(door, {})
  ]
  assert not missing


@pytest.mark.parametrize("group", _GROUPS, ids=lambda x: x.__name__)
def test_default_of_every_option_is_the_stated_one(group):
  own = inspect.get_annotations(group)
  found = {
    x.name: x.default
    for x in dataclasses.fields(group)
    if x.name in own and x.default is not None
  }
  assert found == _OPTIONS.get(group, {})
