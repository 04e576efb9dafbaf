"""Options that do not go together, refused by the check of each command."""

import dataclasses

import pytest

from jdist import pipeline
from jdist.cli import _commands, _compare, _methods, _options, _workload
from jdist.cli.launch import _launch
from jdist.cli.pipelines import _pipeline_run, _process_run
from jdist.cli.programs import _bytes, _overlap_inputs
from jdist.cli.servers import _server_run
from jdist.training import comparison
from tests import _refusals


def _train(**options):
  return _commands.Train(**options)


def _stages(**options):
  given = {"stages": 2, "workers": 2, "batch_size": 64, "method": "ssgd"}
  return _pipeline_run.check(_train(**given | options))


def _process(table="1f1b", **options):
  given = {"stages": 2, "workers": 1, "method": "ssgd", "table": table}
  made = pipeline.make_table(table, 2, 4)
  _process_run._check(_train(**given | options), made)


def _compared(**options):
  given = {"methods": ("ssgd",), "workers": 2, "batch_size": 64}
  usual = _options.with_preset(_commands.Compare, _commands.Compare().preset)
  return _compare._check(dataclasses.replace(usual, **given | options))


def _counted(**options):
  _bytes.count(_commands.Bytes(**{"methods": ("ssgd",)} | options))


def _overlapped(**options):
  _overlap_inputs.check(_commands.Overlap(**options))


def _served(**options):
  given = {"protocol": "bsp", "cluster": "c.toml", "driver": "clock"}
  _server_run._check(_train(**given | options))


def _elastic(**options):
  given = {"elastic": True, "method": "diloco", "driver": "threads"}
  _server_run._check(_train(**given | options))


def _launched(train=None, **options):
  given = {"workers": 4, "batch_size": 64} | (train or {})
  options = {"num_processes": 4, "command": ("train",)} | options
  return _launch._check(_commands.Launch(train=_train(**given), **options))


def _printed(train=None, **options):
  given = {"checkpoints": "/run"} | (train or {})
  return _launched(given, **{"print": "kubernetes"} | options)


PLACE = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}


@_refusals.table(
  # Stages.
  ("--accumulate", lambda: _stages(accumulate=2), "left out with `--stages`"),
  ("--final-params", lambda: _stages(final_params="x.safetensors"), "left out"),
  ("--stages", lambda: _stages(method="mp2"), "predicts a whole model, got 2"),
  (
    "--late-from",
    lambda: _stages(table="gpipe", late_from=0.5),
    "left out with `--table` gpipe, whose gradients are in time",
  ),
  ("--delay-fix", lambda: _stages(delay_fix="prediction"), "left out with"),
  (
    "--batch-size",
    lambda: _stages(batch_size=60, microbatches=4),
    "2 workers times 4 micro-batches, got 60. Take 56 or 64, or other",
  ),
  # Processes of stages.
  ("--late-from", lambda: _process(late_from=0.5), "`--runtime processes`"),
  ("--stream", lambda: _process(stream=True), "left out with `--runtime"),
  ("--tensorboard", lambda: _process(tensorboard="b"), "left out with"),
  (
    "--skip-nonfinite",
    lambda: _process(workers=2, skip_nonfinite=True),
    "and workers, whose stages would not skip the same",
  ),
  (
    "--skip-nonfinite",
    lambda: _process(method="diloco", skip_nonfinite=True),
    "left out with `--runtime processes` and workers",
  ),
  (
    "--delay-fix",
    lambda: _process(table="pipedream", delay_fix="prediction"),
    "left out for `--table` pipedream, whose",
  ),
  *(
    (
      "--coordinator-address",
      lambda change=change: _process(**PLACE | change),
      "must be given together",
    )
    for change in (
      {"num_processes": 3}, {"num_processes": None}, {"process_id": 2},
      {"process_id": None}, {"coordinator_address": None},
      {"coordinator_address": "a"}, {"coordinator_address": ":1"},
    )
  ),
  # Comparisons.
  ("--seeds", lambda: _compared(seeds=(1, 1)), "different"),
  (
    "--learning-rate",
    lambda: _compared(learning_rate=(0.1, 0.1)), "different",
  ),
  ("--methods", lambda: _compared(methods=("best",)), "must be one"),
  ("--batch-size", lambda: _compared(batch_size=63), "2 workers, got 63"),
  *(
    (
      f"--{name}",
      lambda name=name: _compared(
        learning_rate=(0.1,), **{name.replace("-", "_"): 7}
      ),
      "left out with one `--learning-rate`",
    )
    for name in ("grid-extensions", "tuning-seeds")
  ),
  # Bytes and overlaps.
  ("--model", lambda: _counted(model="transformer"), "must be one of"),
  ("--methods", lambda: _counted(methods=("best",)), "must be one"),
  ("--cut", lambda: _counted(cut=2), "left out for ssgd"),
  ("--methods", lambda: _overlapped(methods=("ssgd", "ssgd")), "different"),
  ("--methods", lambda: _overlapped(methods=("best",)), "must be one"),
  ("--model", lambda: _overlapped(model="none"), "must be one of"),
  ("--topology", lambda: _overlapped(topology="none"), ""),
  (
    "--rank",
    lambda: _overlapped(methods=("ssgd",), rank=3), "left out",
  ),
  # Servers.
  ("--protocol", lambda: _served(protocol="best"), "must be one of"),
  ("--bound", lambda: _served(bound=3), "left out"),
  ("--cluster", lambda: _served(cluster=None), "given with `--protocol`"),
  ("--stream", lambda: _served(stream=True), "which does not use it"),
  ("--protocol", lambda: _elastic(protocol="bsp"), "left out with `--elastic`"),
  (
    "--workers",
    lambda: _elastic(cluster="c.toml", workers=3), "which does not use it",
  ),
  (
    "--interval-policy",
    lambda: _elastic(interval_policy="qsr"), "fixed with `--elastic`",
  ),
  ("--method", lambda: _elastic(method="best"), "must be one of"),
  ("--rank", lambda: _elastic(rank=3), "left out"),
  # Launches.
  ("--", lambda: _launch._check(_commands.Launch(2)), "must be `train`"),
  (
    "--process-id",
    lambda: _launched({"process_id": 1}), "left out behind `--`",
  ),
  (
    "--num-processes",
    lambda: _launched({"driver": "threads"}), "must be 1 with `--protocol`",
  ),
  ("--workers", lambda: _launched({"workers": 3}), ""),
  (
    "--num-processes",
    lambda: _launched({"runtime": "processes", "stages": 3}),
    "the 3 stages with `--runtime processes`, got 4",
  ),
  ("--name", lambda: _printed(name="A"), "lower-case letters"),
  ("--checkpoints", lambda: _printed({"checkpoints": None}), "given with"),
  (
    "--num-processes",
    lambda: _printed(gpus_per_node=3), "a multiple of the 3 GPUs",
  ),
  ("--checkpoints", lambda: _printed({"checkpoints": "run"}), "absolute"),
  # Data and models.
  ("--dataset", lambda: _workload.check(_train(dataset="none")), "must be one"),
  ("--model", lambda: _workload.check(_train(model="none")), "must be one of"),
  (
    "--dataset",
    lambda: _workload.named(_train(text="t.txt", dataset="mnist")),
    "left out with `--text`",
  ),
  ("--files", lambda: _workload.named(_train(text="t", files="f")), "left out"),
  (
    "--batch-size",
    lambda: _workload.check(_train(batch_size=66, workers=3, accumulate=4)),
    "3 workers times 4, got 66. Take 60 or 72",
  ),
)  # fmt: skip
def test_options_that_do_not_match_are_refused(argument, call, rule):
  _refusals.check(argument, call, rule)


def test_options_that_match_are_taken():
  assert _stages(table="ours", window=2, late_from=0.5).window == 2
  _process(**PLACE)
  _process(table="ours", delay_fix="prediction")
  study = _compared(
    methods=("ssgd", "diloco"), learning_rate=(0.1, 0.2), seeds=(3, 4),
    grid_extensions=5, tuning_seeds=2,
  )  # fmt: skip
  assert study == comparison.Study(
    ("ssgd", "diloco"), (0.1, 0.2), (3, 4), 5, (10_000, 10_001), "seed"
  )
  _served()
  _elastic()
  _launched()
  _launched({"runtime": "processes", "stages": 4, "workers": 1})
  _launched({"driver": "threads", "protocol": "bsp"}, num_processes=1)
  _printed(gpus_per_node=2)
  _printed({"checkpoints": "run"}, print="slurm")
  assert _workload.named(_train()) == _train()


@pytest.mark.parametrize("size", [0, 5, 7, 12])
def test_batch_is_divided_by_all_parts(size):
  if size == 12:
    return _workload.check_batch(size, 2, 3, "")
  near = max(size // 6, 1) * 6
  with pytest.raises(
    ValueError, match=f"got {size}. Take {near} or {near + 6}"
  ):
    _workload.check_batch(size, 2, 3, "")


def test_methods_are_checked_with_what_they_take():
  options = _train(rank=3)
  with pytest.raises(ValueError, match="`--rank` must be left out"):
    _methods.check("--method", options, ("ssgd",))
  _methods.check("--method", options, ("powersgd",))
