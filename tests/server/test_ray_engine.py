"""Ray as the engine: what it refuses, and real actors on this machine."""

import functools
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import optax
import pytest

from jdist import cli, server, training
from jdist.server.runtime.ray_actors import _ray_access
from tests import _processes
from tests.server import _live_runs
from tests.server import test_live_fragments as fragments
from tests.server import test_live_gradients as live

CLUSTER = """
[[nodes]]
name = "worker"
count = {num}

[profile]
seconds_per_sample = 0.001
push_bytes = 38_440
"""


def words(tmp_path, *more, num=2):
  path = tmp_path / "cluster.toml"
  path.write_text(CLUSTER.format(num=num))
  return [
    "train", "--protocol", "h_ps", "--driver", "ray", "--cluster", str(path),
    "--batch-size", "64", "--output", str(tmp_path / "out"), *more,
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("more", "rule"),
  (
    (("--address", "there"), "`address` must be HOST:PORT"),
    (("--address", "10.1.2.3:6379"), "RAY_AUTH_MODE is not `token`"),
    (("--address", "127.0.0.1:1"), "No Ray cluster answers at 127.0.0.1:1"),
    (("--cpus-per-worker", "1000"), "need 3000 CPUs, and Ray has"),
    (("--codec", "int4"), "`--codec` must be left out for h_ps, which"),
    (("--cpus-per-worker", "0"), "`--cpus-per-worker` must be positive"),
    (("--gpus-per-worker", "-1"), "`gpus_per_worker` must be in [0, inf]"),
    (("--gpus-per-worker", "1.5"), "must be a part of one or whole ones"),
  ),
)
def test_engine_that_cannot_run_raises_one_line(
  more, rule, tmp_path, capsys, monkeypatch
):
  monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
  assert cli.main(words(tmp_path, *more)) == 2
  error = capsys.readouterr().err
  assert rule in error and error.count("\n") == 1


def test_remote_cluster_needs_a_token(monkeypatch, tmp_path):
  monkeypatch.setenv("RAY_AUTH_MODE", "token")
  monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
  monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
  with pytest.raises(ValueError, match="There is no token at"):
    _ray_access.check_address("10.1.2.3:6379")


def test_without_ray_one_line_names_the_extra(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  monkeypatch.setattr(_ray_access, "_SET", {"RAY_AUTH_MODE"})
  more = ("--cpus-per-worker", "0.1")
  assert cli.main(words(tmp_path, *more)) == 2
  error = capsys.readouterr().err
  assert 'pip install ".[ray]"' in error and error.count("\n") == 1


def test_outages_need_the_virtual_clock(tmp_path, capsys):
  found = words(tmp_path, "--batch-size", "63")
  with open(tmp_path / "cluster.toml", "a") as file:
    file.write('[[nodes]]\nname = "x"\noutages = [{start_s = 1, end_s = 2}]\n')
  assert cli.main(found) == 2
  assert "`outages` must be left out" in capsys.readouterr().err


def left_behind():
  """Processes of Ray, shared memory, and directories of ours."""
  told = subprocess.run(
    ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
  ).stdout
  found = [
    x
    for x in told.splitlines()
    if any(word in x for word in ("raylet/raylet", "gcs_server", "ray::"))
    # It has ended, and the system's first process has not noticed yet.
    and "<defunct>" not in x
  ]
  found += map(str, pathlib.Path("/dev/shm").glob("plasma*"))
  return found + list(map(str, pathlib.Path("/tmp").glob("jdist-ray-*")))


def make_server(plan):
  protocol = server.BSP(batches=server.FixedBatches(1), timeout_s=5.0)
  return server.LiveServer(protocol, server.EmptyServer(100_000), plan)


def work(name, channel):
  server.WorkerLoop(channel, name, server.EmptyWorker(), depth=1).run()


needs_ray = pytest.mark.skipif(
  # Not imported: an engine must be the first that does.
  importlib.util.find_spec("ray") is None,
  reason="Ray is not installed",
)


@needs_ray
def test_missing_gpus_raise_one_line_and_leave_nothing(tmp_path, capsys):
  before = left_behind()
  more = ("--cpus-per-worker", "0.25", "--gpus-per-worker", "8")
  assert cli.main(words(tmp_path, *more)) == 2
  error = capsys.readouterr().err
  assert "The workers need 16 GPUs, and Ray has" in error
  assert error.count("\n") == 1
  assert left_behind() == before


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
  ("module", "name"), [("worker", "connect"), ("services", "get_node")]
)
def test_start_that_fails_halfway_leaves_nothing(module, name):
  code = (
    f"import os, subprocess, ray._private.{module} as module\n"
    "from jdist import server\n"
    "def fails(*args, **options): raise OSError('It has failed.')\n"
    f"module.{name} = fails\n"
    "own = {'OF_A_TEST': '1'}\n"
    "try: server.RayEngine(1, cpus_per_worker=0.1, environment=own)\n"
    "except ConnectionError as error: print(error)\n"
    "print(os.environ.get('OF_A_TEST'), os.listdir(os.environ['TMPDIR']))\n"
    "words = ['pgrep', '-P', str(os.getpid())]\n"
    "own = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)\n"
    "print(set(own.communicate()[0].split()) - {str(own.pid)})\n"
  )
  # Not pytest's own folder, whose name is too long for Ray's sockets.
  with tempfile.TemporaryDirectory() as folder:
    more = {"RAY_AUTH_MODE": "token", "TMPDIR": folder}
    found = subprocess.run(
      [sys.executable, "-c", code],
      env=_processes.environment() | more,
      capture_output=True,
      text=True,
      timeout=240,
    )
  assert found.stdout.splitlines()[-3:] == [
    "Ray did not start on this machine, which may be too busy: It has failed.",
    "None []",
    "set()",
  ]


# Ray takes GPUs that it is told of for real.
SEEING = """
import functools, os, sys
from jdist import server
from jdist.server.runtime.ray_actors import _ray_access

import_ray = _ray_access.import_ray

def with_gpus():
  ray = import_ray()
  ray.init = functools.partial(ray.init, num_gpus=2)
  return ray

def make_server(plan):
  protocol = server.BSP(batches=server.FixedBatches(1))
  assert os.environ["JAX_PLATFORMS"] == "cpu"
  return server.LiveServer(protocol, server.EmptyServer(1_000), plan)

def work(name, folder, channel):
  with open(f"{folder}/{name}", "w") as file:
    variables = "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"
    file.write(" ".join(os.environ[x] for x in variables))
  server.WorkerLoop(channel, name, server.EmptyWorker(), depth=1).run()

_ray_access.import_ray = with_gpus
engine = server.RayEngine(2, cpus_per_worker=0.25, gpus_per_worker=1)
works = {x: functools.partial(work, x, sys.argv[1]) for x in ("a", "b")}
try:
  plan = server.LivePlan(workers=("a", "b"))
  session = server.LiveSession(engine, make_server, works, plan)
  server.ServerRun(session).fit(2.0, "seconds")
finally:
  engine.stop()
"""


@needs_ray
@pytest.mark.slow
def test_each_worker_sees_its_own_gpu(tmp_path):
  subprocess.run([sys.executable, "-c", SEEING, str(tmp_path)], check=True)
  seen = sorted((tmp_path / name).read_text() for name in "ab")
  # CUDA computes; merges by peers are on the CPU.
  assert seen == ["0 cuda,cpu", "1 cuda,cpu"]


@needs_ray
@pytest.mark.slow
def test_killed_worker_is_restarted_and_leaves_nothing():
  before = left_behind()
  engine = server.RayEngine(2, cpus_per_worker=0.25)
  killed = []

  def on_status(status):
    if not killed and status["updates"] > 20:
      killed.append(time.monotonic())
      os.kill(engine.process_of("a"), signal.SIGKILL)

  works = {x: functools.partial(work, x) for x in ("a", "b")}
  try:
    result = _live_runs.run(
      engine, make_server, works, 30.0, "seconds", on_status=on_status
    )
    # Once more in the processes that are there.
    again = _live_runs.run(engine, make_server, works, 1.0, "seconds")
  finally:
    engine.stop()
  assert [x["kind"] for x in result.events] == ["lost", "back"]
  nodes = result.summary["nodes"]
  assert nodes["b"]["updates"] > nodes["a"]["updates"] > 20
  assert "repeated" not in result.summary["discarded"]
  assert again.summary["updates"] > 20 and not again.events
  assert left_behind() == before


FRAGMENTS = "two fragments in four bits"
# Of each protocol: itself, and the codecs of its messages.
RECORDED = live.CASES | {"ssp": (live.SSP, {}), FRAGMENTS: (None, {})}


def recorded(name):
  """A protocol, its server's learner, and its workers'."""
  if name == FRAGMENTS:
    rule, codec = fragments.CASES[name]
    return (
      rule,
      fragments.syncer(2, codec),
      lambda x: fragments.runner(live.NAMES.index(x), 2, codec),
    )
  rule, options = RECORDED[name]
  plans = server.message_plans(**options)
  learner = live.gradient_server(plans)
  return rule, learner, functools.partial(live.gradient_worker, plans)


def recorded_server(name, plan):
  rule, learner, _ = recorded(name)
  return server.LiveServer(rule, learner, plan)


def recorded_work(name, worker, channel):
  rule, _, make = recorded(name)
  learner = make(worker)
  learner.prepare()
  server.WorkerLoop(channel, worker, learner, depth=rule.depth).run()


class FirstIsBad:
  """Samples whose number is their place; the first is not a number."""

  shared = True

  def batch(self, worker, start, count, *, size=None):
    del worker, count
    x = np.arange(start, start + size, dtype=np.float32)
    return {"x": np.where(x == 0, np.nan, 1.0), "mask": np.ones(size)}


def product(params, model_state, batch, key):
  del key
  return (params["w"] * batch["x"].mean()).sum(), (model_state, {})


PARAMS = {"w": np.ones(3, np.float32)}
PLANS = server.message_plans()


def product_server(plan):
  learner = server.GradientServer(
    optax.sgd(0.25), PARAMS, PLANS, workers=("a", "b")
  )
  return server.LiveServer(
    server.ASP(batches=server.FixedBatches(4)), learner, plan
  )


def product_work(name, channel):
  learner = server.GradientWorker(
    product, PARAMS, FirstIsBad(), PLANS, number="ab".index(name),
    num_workers=2, sizes=[4],
  )  # fmt: skip
  server.WorkerLoop(channel, name, learner, depth=1).run()


@needs_ray
@pytest.mark.slow
def test_push_that_is_not_a_number_is_refused_on_ray():
  engine = server.RayEngine(2, cpus_per_worker=0.25)
  try:
    works = {x: functools.partial(product_work, x) for x in ("a", "b")}
    result = _live_runs.run(engine, product_server, works, 8)
  finally:
    engine.stop()
  assert result.summary["refused"] == {"nan": 1}
  # Each of the eight other gradients is 1.
  np.testing.assert_array_equal(
    result.payload.view(np.float32)[:3], np.full(3, 1 - 8 * 0.25, np.float32)
  )


@needs_ray
@pytest.mark.slow
def test_replayed_runs_of_ray_end_with_the_same_bits(tmp_path):
  # Bits are those of one compiler's flags.
  flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "JAX_PLATFORMS": "cpu"}
  engine = server.RayEngine(2, cpus_per_worker=0.25, environment=flags)
  try:
    for name in RECORDED:
      path = str(tmp_path / "record")
      result = _live_runs.run(
        engine,
        functools.partial(recorded_server, name),
        {x: functools.partial(recorded_work, name, x) for x in live.NAMES},
        8,
        plan=server.LivePlan(workers=live.NAMES, record=path),
      )
      rule, learner, _ = recorded(name)
      delivery = server.replay(path, rule, learner)
      assert delivery.state.version == result.summary["updates"] == 8
      np.testing.assert_array_equal(learner.save()[1], result.payload)
  finally:
    engine.stop()


@needs_ray
@pytest.mark.slow
def test_interrupted_run_leaves_no_processes(tmp_path):
  before = left_behind()
  more = ("--cpus-per-worker", "0.25", "--epochs", "1000")
  process = subprocess.Popen(
    [sys.executable, "-c", INTERRUPTIBLE, *words(tmp_path, *more),
     "--evaluate-every-epochs", "1"],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  # Lines on what is trained come first.
  assert any(line.startswith("update") for line in process.stdout)
  process.send_signal(signal.SIGINT)
  _, told = process.communicate(timeout=60)
  assert process.returncode == 130
  assert told.splitlines()[-1].startswith("jdist: interrupted: its status is")
  time.sleep(1.0)
  assert left_behind() == before


@needs_ray
@pytest.mark.slow
def test_sigterm_saves_a_run_and_leaves_no_processes(tmp_path):
  before = left_behind()
  more = (
    "--cpus-per-worker", "0.25", "--epochs", "1000", "--checkpoints",
    str(tmp_path / "kept"),
  )  # fmt: skip
  process = subprocess.Popen(
    [sys.executable, "-m", "jdist", *words(tmp_path, *more),
     "--evaluate-every-epochs", "1"],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  # Lines on what is trained come first.
  assert any(line.startswith("update") for line in process.stdout)
  process.send_signal(signal.SIGTERM)
  _, told = process.communicate(timeout=60)
  assert process.returncode == 143
  (update,) = re.findall(
    r"^jdist: SIGTERM: ended after update (\d+), which is saved", told, re.M
  )
  kept = [x.name for x in (tmp_path / "kept").glob("update_*")]
  assert f"update_{int(update):010d}" in kept
  assert left_behind() == before


@needs_ray
@pytest.mark.slow
def test_sigterm_ends_an_engine_and_leaves_no_processes(tmp_path):
  before = left_behind()
  process = subprocess.Popen(
    [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True
  )
  assert process.stdout.readline() == "here\n"
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=60)
  assert process.returncode == 143
  assert left_behind() == before


# A shell's background jobs, and what they start, ignore SIGINT.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jdist import cli
sys.exit(cli.main())
"""
ENGINE = """
import time
from jdist import server
engine = server.RayEngine(1, cpus_per_worker=0.25)
try:
  print("here", flush=True)
  time.sleep(60)
finally:
  engine.stop()
"""


@needs_ray
@pytest.mark.slow
def test_decoupled_diloco_in_four_bits_learns_on_ray(tmp_path):
  more = (
    "--protocol", "decoupled_diloco", "--cpus-per-worker", "0.25",
    "--interval", "4", "--fragments", "2", "--codec", "int4", "--feedback",
    # A merge of one worker moves the anchor as far as one of both: by the usual
    # momentum of 0.9 it diverges over so short rounds.
    "error", "--learning-rate", "0.05", "--epochs", "4", "--outer-momentum",
    "0.5",
  )  # fmt: skip
  run = [sys.executable, "-m", "jdist", *words(tmp_path, *more)]
  told = subprocess.run(run, capture_output=True, text=True, timeout=300)
  assert told.returncode == 0, told.stderr
  (row,) = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert row["accuracy"] > 0.6 and row["refused"] == {}
  # A push is of a fragment, half of the parameters, in a seventh of the bytes.
  assert row["pushed_bytes"] < 0.2 * row["pulled_bytes"]


@needs_ray
@pytest.mark.slow
def test_training_on_ray_is_recorded_and_resumed(tmp_path):
  more = (
    "--cpus-per-worker", "0.25", "--evaluate-every-epochs", "1",
    "--learning-rate", "0.05", "--checkpoints", str(tmp_path / "kept"),
    "--record", str(tmp_path / "record"), "--local-momentum", "0.9",
  )  # fmt: skip
  run = [sys.executable, "-m", "jdist", *words(tmp_path, *more)]
  for epochs in ("2", "2"):
    told = subprocess.run(
      [*run, "--epochs", epochs], capture_output=True, text=True, timeout=300
    )
    assert told.returncode == 0, told.stderr
  first, second = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert first["clock"] == "wall" and first["accuracy"] > 0.7
  assert set(first["staleness"]["counts"]) == {"0", "1"}
  assert second["samples"] == first["samples"]


@needs_ray
@pytest.mark.slow
def test_run_ends_if_the_work_of_a_worker_returns_before_it():
  engine = server.RayEngine(2, cpus_per_worker=0.25)
  works = {x: functools.partial(work, x) for x in ("a", "b")}
  early = works | {"b": lambda channel: None}
  try:
    with pytest.raises(server.LostRunError, match=r"^b: its work returned"):
      _live_runs.run(engine, make_server, early, 60.0, "seconds")
    # In the processes that are there.
    again = _live_runs.run(engine, make_server, works, 1.0, "seconds")
  finally:
    engine.stop()
  assert again.summary["updates"] > 20 and not again.events
