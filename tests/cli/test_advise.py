"""`jdist advise`: a step of one's own, its verdict, and bad options."""

import json
import math
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from jdist import advice, cli, cluster, methods, pipeline
from jdist.cli import _groups, _methods
from jdist.cli.programs import _advise

_ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = """
import jax.numpy as jnp

def loss_fn(params, model_state, batch, key):
  return jnp.mean((batch @ params) ** 2), (model_state, {})

def make():
  return loss_fn, jnp.ones((64, 64)), jnp.ones((8, 64))

def number():
  return 5

def short():
  return loss_fn, jnp.ones((64, 64))

def empty():
  return loss_fn, jnp.ones((64, 64)), jnp.ones((0, 64))

def nothing():
  return loss_fn, jnp.ones((64, 64)), {}
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
  (tmp_path / "own_step.py").write_text(MODULE)
  monkeypatch.syspath_prepend(str(tmp_path))
  yield
  sys.modules.pop("own_step", None)


def advise(capsys, *words):
  status = cli.main(["advise", *words])
  return status, capsys.readouterr()


@pytest.mark.parametrize(
  "whole",
  [False, pytest.param(True, marks=pytest.mark.slow)],
  ids=["two_methods", "all"],
)
def test_own_step_is_advised_by_link(whole, capsys, monkeypatch, tmp_path):
  if not whole:
    monkeypatch.setattr(_advise, "_CHOICES", _advise._CHOICES[:2])
  words = (
    "--step", "own_step:make", "--workers", "4", "--limit-s", "0.001",
    "--latency-ms", "0", "--output", str(tmp_path / "out"),
  )  # fmt: skip
  status, said = advise(capsys, *words, "--bandwidth-mbit-per-s", "0.1")
  assert status == 0, said.err
  # The minutes of compiling begin with a line.
  assert said.out.startswith("Compiling ") and "e+0" not in said.out
  assert "Yes: " in said.out
  # No command trains a step of one's own.
  values = {"codec": "int4", "feedback": "error"}
  if not whole:  # Of all methods another one is the best.
    assert f"  jdist.methods.ssgd with {values}" in said.out
  assert "\n  jdist.methods." in said.out
  assert "jdist train --workers" not in said.out
  rows = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
  found = {row["method"]: row for row in map(json.loads, rows)}
  # A ring of four sends 1.5 times the 16 kB.
  assert found["ssgd"]["costs"]["round_bytes"] == pytest.approx(24576, rel=0.01)
  assert found["ssgd int4"]["pays"]
  assert len(found) == (8 if whole else 2)


def test_named_methods_are_compared_with_ssgd(capsys, monkeypatch):
  """A growing interval is fixed, and there is no phase without rounds."""

  real, told = _advise.advice.advise, {}

  def keep(*given, **options):
    told["limit_s"] = options["limit_s"]
    told["found"] = real(*given, **options)
    return told["found"]

  monkeypatch.setattr(_advise.advice, "advise", keep)
  monkeypatch.setitem(sys.modules, "simpy", None)
  status, said = advise(
    capsys, "--step", "own_step:make", "--workers", "4", "--limit-s", "0.001",
    "--bandwidth-mbit-per-s", "0.1", "--latency-ms", "0", "--methods",
    "msdpu", "post_local_sgd",
  )  # fmt: skip
  assert status == 0, said.err
  assert (
    "Servers and pipelines are not shown. `simpy` is needed here" in said.out
  )
  assert told["limit_s"] == 0.001
  costs = told["found"].costs
  assert list(costs) == ["ssgd", "msdpu H=8", "post_local_sgd H=8"]
  # At this constant rate rounds that grow would have one step each.
  assert _advise._named_choice("msdpu")[1] == {"interval_policy": "fixed"}
  assert _advise._named_choice("diloco")[1] == {}
  # Each round of eight steps sends one mean.
  for name in ("msdpu H=8", "post_local_sgd H=8"):
    assert costs[name].round_bytes == pytest.approx(24576, rel=0.01), name
  assert "H=8 takes " in said.out and " with {'interval': 8" in said.out


def test_command_trains_the_choice_with_the_options_that_were_given():
  from jdist.cli import _commands

  options = _commands.Advise(workers=4, interval=16, model="lenet")
  words = _advise._command("local_sgd", {"codec": "int4"}, options)
  assert words == (
    "jdist train --model lenet --workers 4 --interval 16 --codec int4 "
    "--method local_sgd"
  )


def test_servers_are_shown_with_the_same_link_and_slowest_machine():
  """A server that waits takes four times as long as one that does not."""
  pytest.importorskip("simpy")

  costs = advice.MethodCosts(1, (0.1,) * 3, (0.0,) * 3, 1e6, 0, 0)

  def shown(link, *slowdowns):
    found = advice.Advice({"ssgd": costs}, link, slowdowns)
    grid = _advise._others(found, link, 2, np.ones(8), 10**6, None)
    cells = [[x.replace(",", "") for x in y.cells] for y in grid.columns]
    return {name: list(map(float, x)) for name, *x in zip(
      cells[0], cells[1], [x[:-1] for x in cells[2]], cells[3], strict=True
    )}  # fmt: skip

  free = shown(cluster.Link(math.inf), 1.0)
  # Each worker takes 0.1 s; one of two gradients is an update late.
  assert free["bsp"] == [100.0, 1.0, 0.0]
  assert free["asp"][0] == pytest.approx(100.0, rel=0.03)
  assert free["asp"][2] == pytest.approx(1.0, abs=0.1)
  uneven = shown(cluster.Link(math.inf), 4.0)
  assert uneven["bsp"][:2] == [400.0, 1.0]
  # In 0.4 s there are five gradients.
  assert uneven["asp"][0] == pytest.approx(160.0, rel=0.05)
  # The slowest of two machines says the same of itself and the other one.
  slowest = shown(cluster.Link(math.inf), 1.0, 0.25)
  assert slowest["bsp"][:2] == [100.0, 1.0]
  assert slowest["asp"][0] == pytest.approx(40.0, rel=0.05)
  # Two megabytes share the server's link, there and back: 4 s.
  slow = shown(cluster.Link(8e6), 1.0)
  assert slow["bsp"][0] == pytest.approx(4100.0, rel=0.01)


def test_pipelines_are_shown_with_measured_layers_and_the_same_link():
  """Eight micro-batches of two samples run through a stage on each machine."""
  pytest.importorskip("simpy")

  asked = []

  def layer_costs(microbatch):
    asked.append(len(microbatch))
    layer = pipeline.LayerCost(
      "a", forward_s=0.01, backward_s=0.02, weight_s=0.01, output_bytes=1e5
    )
    return [layer] * 2

  def shown(link, *slowdowns):
    costs = advice.MethodCosts(1, (0.1,) * 3, (0.0,) * 3, 1e6, 0, 0)
    # The link of means is another one.
    found = advice.Advice({"ssgd": costs}, cluster.Link(1e3), slowdowns)
    grid = _advise._others(found, link, 2, np.ones(8), 10**6, layer_costs)
    names, seconds = (list(y.cells) for y in grid.columns[:2])
    return {
      name.partition(", ")[2]: float(x.replace(",", "")) / 1e3
      for name, x in zip(names, seconds, strict=True)
      if "," in name
    }

  free = shown(cluster.Link(math.inf), 1.0)
  assert asked == [2]
  # Nine turns of 0.03 s.  The zero bubble waits for one pass of 0.01 s alone.
  assert free == pytest.approx({"gpipe": 0.27, "1f1b": 0.27, "zb_h1": 0.25})
  # The second stage, which has the slowest machine, is never idle but at first.
  uneven = shown(cluster.Link(math.inf), 1.0, 2.0)
  assert uneven["gpipe"] == pytest.approx(0.03 + 8 * 0.06)
  # 1 s for each of 16 messages, which overlap with no other one.
  slow = shown(cluster.Link(8e5), 1.0)
  assert 8 < slow["gpipe"] < 18


@pytest.mark.parametrize(
  ("given", "asked"), [((), 2), (("--workers", "6"), 6)], ids=["link", "given"]
)
def test_processes_that_measure_are_the_workers(
  given, asked, capsys, monkeypatch
):
  """One a host; a plan may be for more hosts than have measured."""

  told = {}

  def stop(*given, **options):
    links = [x for x in given if isinstance(x, cluster.Link)]
    told.update(options, link=links[0])
    raise ValueError("`enough`")

  monkeypatch.setattr(_advise._options, "join_processes", lambda *given: None)
  monkeypatch.setattr(_advise.jax, "process_count", lambda: 2)
  link = cluster.Link(1e6)
  monkeypatch.setattr(_advise.collectives, "workers", lambda number: number)
  sizes = []
  monkeypatch.setattr(
    _advise.advice, "measure_link",
    lambda team, num_bytes: sizes.append(num_bytes) or link,
  )  # fmt: skip
  monkeypatch.setattr(_advise.advice, "advise", stop)
  words = (
    "--step", "own_step:make", "--coordinator-address", "a:1",
    "--num-processes", "2", "--process-id", "0", *given,
  )  # fmt: skip
  with pytest.raises(ValueError, match="enough"):
    advise(capsys, *words)
  assert told["num_workers"] == asked
  # The two send messages over the link that they have measured.
  assert (told["workers"], told["link"]) == (2, link)
  assert sizes == [4 * 64 * 64]  # Means as long as the model's.
  # Messages of a server or a pipeline take half of a round trip, by two links.
  costs = advice.MethodCosts(1, (0.1,) * 3, (0.0,) * 3, 1e6, 0, 0)
  found = advice.Advice({"ssgd": costs}, link, (1.0, 1.0))
  monkeypatch.setattr(_advise.advice, "advise", lambda *args, **options: found)
  monkeypatch.setattr(_advise, "_round_trip_s", lambda number: 1e-3 * number)
  monkeypatch.setattr(_advise, "_others", stop)
  with pytest.raises(ValueError, match="enough"):
    advise(capsys, *words)
  assert told["link"].latency_s == pytest.approx(9.5e-3 / 4)


@pytest.mark.parametrize(
  ("words", "named"),
  [
    (("--step", "own_step"), "`--step` must be MODULE:FUNCTION"),
    (("--step", "own_step:absent"), "absent"),
    (("--step", "no_such_module:make"), "no_such_module"),
    (("--step", "own_step:short"), "`loss_fn, params, batch`"),
    (("--step", "own_step:number"), "got int from own_step:number"),
    (("--step", "own_step:empty"), "a batch with samples, got [0]."),
    (("--step", "own_step:nothing"), "a batch with samples, got []."),
    (("--bandwidth-mbit-per-s", "0"), "`--bandwidth-mbit-per-s`"),
    (("--slowdown", "0.5"), "`--slowdown`"),
    (("--workers", "1"), "`--workers`"),
    (("--num-processes", "2"), "`--coordinator-address` must be given"),
    (
      ("--num-processes", "2", "--slowdown", "2"),
      "`--slowdown` must be left out in several processes",
    ),
    (
      ("--num-processes", "2", "--bandwidth-mbit-per-s", "10"),
      "`--bandwidth-mbit-per-s` must be left out in several processes",
    ),
    (
      ("--methods", "powersgd", "dgc", "--interval", "4"),
      "`--interval` must be left out for powersgd, dgc, without rounds",
    ),
    (("--model", "resnet9"), "`--model`"),
    (("--methods", "nope"), "`--methods`"),
    (("--methods", "mp2"), "`--methods`"),
    (("--methods", "dgc", "dgc"), "`--methods`"),
    (("--interval", "10001"), "`--interval` must be in [1, 10000]"),
    (
      ("--step", "own_step:make", "--model", "lenet"),
      "`--model` must be left out with `--step`",
    ),
    (
      ("--step", "own_step:make", "--batch-size", "64"),
      "`--batch-size` must be left out with `--step`",
    ),
    (("--step", "own_step:make", "--output", "/dev/null/x"), "`--output`"),
  ],
  ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_bad_input_is_refused_in_one_line(words, named, capsys):
  status, said = advise(capsys, *words)
  assert status == 2
  assert named in said.err
  assert len(said.err.strip().splitlines()) == 1


def test_named_model_is_measured_in_each_process(monkeypatch):
  """A process measures its own step, and needs no device of another one."""
  from jdist.cli import _groups

  monkeypatch.setattr("jax.process_count", lambda: 2)
  given = _groups.Common(
    dataset="synthetic", model="mlp", workers=2, batch_size=8
  )
  loss_fn, params, batch, state, layer_costs = _advise._named(given)
  # Each of two workers takes half of the batch.
  assert batch["image"].shape[0] == 4
  assert len(layer_costs(batch)) == 2
  loss, _ = loss_fn(params, state, batch, jax.random.key(0))
  assert loss > 0


@pytest.mark.slow
def test_processes_send_each_methods_messages(tmp_path):
  """On one machine: what a round takes there differs from any link's time."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  words = (
    sys.executable, "-m", "jdist", "advise", "--step", "own_step:make",
    "--coordinator-address", address, "--num-processes", "2",
  )  # fmt: skip
  environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{_ROOT}"}
  running = [
    subprocess.Popen(
      [*words, "--process-id", str(number), "--output", str(tmp_path / "out")],
      env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(2)
  ]  # fmt: skip
  try:
    said = [one.communicate(timeout=400) for one in running]
  finally:  # On a busy machine they would continue.
    for one in running:
      one.kill()
  assert [one.returncode for one in running] == [0, 0], said
  rows = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
  ratios = [json.loads(row)["costs"]["send_ratio"] for row in rows]
  assert len(ratios) == 8 and ratios[0] not in (0, 1)


def test_a_single_named_method_is_compared_with_ssgd(capsys, monkeypatch):

  asked = []

  def stop(loss_fn, params, batch, chains, link, **options):
    asked.append(list(chains))
    raise KeyboardInterrupt

  monkeypatch.setattr(_advise.advice, "advise", stop)
  words = ("--step", "own_step:make", "--bandwidth-mbit-per-s", "1")
  words += ("--latency-ms", "0", "--methods", "local_sgd")
  assert advise(capsys, *words)[0] == 130
  assert asked == [["ssgd", "local_sgd H=8"]]


def test_first_process_alone_reports(capsys, monkeypatch):

  costs = advice.MethodCosts(1, (0.1,) * 3, (0.0,) * 3, 1e6, 0, 0)
  found = advice.Advice({"ssgd": costs}, cluster.Link(1e6), (1.0,))
  monkeypatch.setattr(_advise._options, "join_processes", lambda *given: None)
  monkeypatch.setattr(_advise.advice, "advise", lambda *args, **options: found)
  monkeypatch.setattr(_advise, "_others", lambda *given: "others")
  for process in range(2):
    status, said = advise(
      capsys, "--step", "own_step:make", "--coordinator-address", "a:1",
      "--num-processes", "2", "--process-id", str(process),
    )  # fmt: skip
    assert status == 0, said.err
    assert ("others" in said.out) == ("No: " in said.out) == (process == 0)


def test_method_that_switches_is_measured_behind_its_switch(monkeypatch):
  monkeypatch.setattr(_methods, "build_method", lambda *given, **own: own)
  common = _groups.Common(interval=6)
  for name, method in methods.registry.items():
    build, interval = _advise._chain(name, {}, common)
    switches = "switch_step" in method.arguments
    assert build() == ({"switch_step": 0} if switches else {})
    assert interval == (6 if method.in_rounds else 1)
