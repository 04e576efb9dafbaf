"""Options that parts of commands refuse, without the commands around them."""

import os
import types

import jax
import pytest

from jdist import (
  cli,
  cluster,
  collectives,
  methods,
  models,
  pipeline,
  prediction,
  reducers,
  server,
  transforms,
)
from jdist.cli import (
  _commands,
  _groups,
  _interrupts,
  _methods,
  _output,
  _run_end,
  _trained,
  _workload,
)
from jdist.cli.pipelines import _pipeline_run, _tables
from jdist.cli.programs import _overlap_inputs
from jdist.cli.report import _page
from jdist.cli.servers import _server_parts, _server_run
from tests import _refusals


def _built(name, **options):
  options = _commands.Train(steps=8, **options)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  return _methods.build_method(name, options, budget, None)


def _mean(**options):
  return _methods.compression(_commands.Train(**options))


@_refusals.table(
  (
    "--codec",
    lambda: _mean(reducer="power_sgd", codec="int4"),
    "must be left out with `--reducer power_sgd`, which has its own",
  ),
  ("--codec", lambda: _mean(feedback="error"), "with `--feedback error`"),
  ("--codec", lambda: _mean(reducer="all_to_all"), "`--reducer all_to_all`"),
  (
    "--schedule",
    lambda: _built("diloco", interval_policy="growth", schedule="constant"),
    "must be cosine for diloco, whose rounds grow",
  ),
  (
    "--final-params",
    lambda: _workload.check(_commands.Train(final_params="model.txt")),
    "a file FILE.safetensors, by whose ending",
  ),
  (
    "--predictor",
    lambda: _trained.arguments(_groups.NetworkOptions(), _model()),
    "must be given for mp2",
  ),
  ("--methods", lambda: _overlap_inputs.split("mp2"), "trained networks"),
)
def test_options_that_do_not_match_are_refused(argument, call, rule):
  _refusals.check(argument, call, rule)


def _model():
  return types.SimpleNamespace(state={})


def test_nothing_is_in_front_of_updates_that_are_first(monkeypatch):
  first = methods.Method(
    "", lambda inner, *, axis: transforms.update_first(inner, axis=axis)
  )
  monkeypatch.setitem(methods.registry, "first", first)
  assert isinstance(_built("first"), transforms.UpdateFirst)
  _refusals.check(
    "--skip-nonfinite", lambda: _built("first", skip_nonfinite=True),
    "must be left out for first",
  )  # fmt: skip


def test_means_without_a_codec_are_exact():
  assert _mean(reducer="none", feedback="none") is None
  assert _mean() is None
  found = _mean(reducer="power_sgd", feedback="error")
  assert found.reducer == reducers.PowerSGD(rank=2)
  assert found.feedback == methods.PARTS["feedbacks"]["error"]


def test_method_with_a_delay_of_its_own_may_be_streamed():
  given = _methods._arguments(
    methods.registry["cocod"], _commands.Train(stream=True)
  )
  assert isinstance(given["stream"], transforms.Stream)
  assert "stream" not in _methods._arguments(
    methods.registry["cocod"], _commands.Train()
  )


def test_predictor_of_another_model_says_of_which(monkeypatch, tmp_path):
  theirs = types.SimpleNamespace(cut=types.SimpleNamespace(front="abc"))
  monkeypatch.setattr(prediction, "load_predictor", lambda path: (theirs, None))

  def cut(model, number, name):
    assert (number, name) == (3, "lenet")
    raise ValueError("It has two layers.")

  monkeypatch.setattr(prediction, "cut", cut)
  options = _groups.NetworkOptions(model="lenet", predictor=str(tmp_path))
  told = _refusals.check(
    "--predictor", lambda: _trained.arguments(options, _model()), "trained for"
  )
  assert told.endswith("It has two layers.") and "front='abc'" in told


def test_directory_that_is_read_only_is_refused(monkeypatch, tmp_path):
  _output.make_directory("--output", tmp_path / "a" / "b")
  assert (tmp_path / "a" / "b").is_dir()
  monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
  _refusals.check(
    "--output", lambda: _output.make_directory("--output", tmp_path),
    "cannot be used: not writable. Take another",
  )  # fmt: skip


def test_stages_of_all_workers_need_devices(monkeypatch):
  made = []
  monkeypatch.setattr(_workload, "build", lambda options, team: team())
  monkeypatch.setattr(collectives, "make_cpu_devices", made.append)
  monkeypatch.setattr(jax, "device_count", lambda: 5)
  options = _commands.Train(workers=3, stages=2)
  _refusals.check(
    "--stages", lambda: _pipeline_run.prepare(options, None),
    "`--workers` must be at most the 5 available devices, got 2 times 3",
  )  # fmt: skip
  assert made == [6]
  # A process among several has its devices already.
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  with pytest.raises(ValueError, match="at most the 5"):
    _pipeline_run.prepare(options, None)
  assert made == [6]


def test_table_of_a_file_has_its_number_of_stages(tmp_path):
  path = tmp_path / "mine.txt"
  path.write_text(pipeline.format_table(pipeline.make_table("1f1b", 3, 5)))
  options = _commands.Train(stages=2, table=str(path))
  _refusals.check(
    "--stages", lambda: _tables.of_options(options),
    f"the 3 devices of `--table` {path}, got 2",
  )  # fmt: skip


def test_report_without_a_cache_is_written(monkeypatch, tmp_path):
  bundles = []
  library = types.SimpleNamespace(
    javascript_bundle=lambda: bundles.append("") or "script"
  )
  monkeypatch.setattr(_page.checks, "import_extra", lambda *given: library)
  monkeypatch.setattr(_page.importlib.metadata, "version", lambda name: "1.2")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  for _ in range(2):
    _page.vega.cache_clear()
    assert _page.vega() == "script" and len(bundles) == 1
  assert (tmp_path / "jdist/report/vega-1.2.js").read_text() == "script"

  def private_directory(path):
    raise PermissionError(path)

  monkeypatch.setattr(_page.channel, "private_directory", private_directory)
  _page.vega.cache_clear()
  assert _page.vega() == "script" and len(bundles) == 2
  _page.vega.cache_clear()


def test_servers_of_one_shard_have_the_links_of_their_file(monkeypatch):
  machines = cluster.Cluster((cluster.Node("a"),))
  parts = types.SimpleNamespace(
    machines=machines, options=types.SimpleNamespace(shards=1)
  )
  assert _server_parts.shared_links(parts) is machines
  divided = []
  monkeypatch.setattr(
    _server_parts, "_server_learner", lambda parts: (None, "learner")
  )
  monkeypatch.setattr(
    server, "divide", lambda *given: divided.append(given) or []
  )
  parts.options.shards = 2
  assert _server_parts.shared_links(parts) is machines
  assert divided == [("learner", 2)]


def test_end_outside_of_the_training_is_a_termination(monkeypatch):
  stopped = []
  monkeypatch.setattr(
    server, "ThreadEngine",
    lambda: types.SimpleNamespace(stop=lambda: stopped.append(1)),
  )  # fmt: skip

  def session(*given, **more):
    raise _interrupts.SigtermError

  monkeypatch.setattr(server, "LiveSession", session)
  parts = types.SimpleNamespace(
    options=_commands.Train(driver="threads"), protocol=None, plans=None,
    machines=cluster.Cluster((cluster.Node("a"),)), rounds=None, bits=None,
    model=models.Model({}, {}, len),
  )  # fmt: skip
  ended = pytest.raises(_run_end.TerminatedError, match="of the training")
  with ended, _server_run._session(parts):
    pass
  assert stopped == [1]


@pytest.mark.parametrize("own", [{}, {"mine": "`--codec mine:C`"}])
@pytest.mark.parametrize("ours", [True, False])
def test_error_of_types_may_be_of_a_part_of_the_users(own, ours, monkeypatch):
  """It is a bug of jdist if all parts are, and needs its traceback."""

  def write(*given):
    cli._options.OWN.update(own)
    raise TypeError("It takes one.")

  monkeypatch.setattr(cli._options, "OWN", {})
  monkeypatch.setattr(_page, "write", write)
  monkeypatch.setattr(cli, "_is_ours", lambda error: ours)
  if own and ours:
    told = "error: `--codec mine:C` failed: It takes one.."
    assert cli._status(["report", "."]) == (2, told)
  else:
    with pytest.raises(TypeError, match="takes one"):
      cli._status(["report", "."])
