"""Parts of a server's run: what each of them is given."""

import types

import jax.numpy as jnp
import pytest

from jdist import cluster, server, training
from jdist.cli import _commands
from jdist.cli.servers import _protocols, _server_parts, _server_run
from jdist.server.run import _run_marks

pytest.importorskip("simpy")


@pytest.mark.parametrize(
  ("protocol", "batches", "name", "sizes"),
  [
    ({}, {"total": 80}, "a", (10, 20, 30, 50, 80)),
    ({}, {"total": 80, "maximum": 40}, "a", (5, 10, 15, 25, 40)),
    # A protocol or its batches say how much a machine's memory holds.
    ({"limits": {"a": 16}}, {"total": 80}, "a", (2, 4, 6, 10, 16)),
    ({"limits": {"a": 16}}, {"total": 80}, "b", (10, 20, 30, 50, 80)),
    ({"limits": None}, {"total": 80, "limits": {"a": 8}}, "a", (1, 2, 3, 5, 8)),
    ({"limits": {"a": 16}}, {"total": 80, "limits": {"a": 8}}, "a",
     (1, 2, 3, 5, 8)),
    ({}, {"total": 80, "maximum": 40, "limits": {"a": 64}}, "a",
     (5, 10, 15, 25, 40)),
    ({}, {"total": 3}, "a", (1, 2, 3)),
  ],
)  # fmt: skip
def test_batches_are_padded_to_eighths_of_the_largest(
  protocol, batches, name, sizes
):
  made = types.SimpleNamespace(
    **protocol, batches=types.SimpleNamespace(**batches)
  )
  assert _server_parts.batch_sizes(made, name) == sizes


def test_batches_without_a_total_have_the_sizes_of_their_own():
  asked = []
  batches = types.SimpleNamespace(sizes=lambda x: asked.append(x) or [4, 8])
  made = types.SimpleNamespace(batches=batches)
  assert _server_parts.batch_sizes(made, "a") == (4, 8) and asked == [[None]]


@pytest.fixture
def made(monkeypatch):
  """Notes what learners are made of."""
  found = {}
  for name in (
    "GradientServer", "GradientWorker", "FragmentSyncer", "FragmentRunner"
  ):  # fmt: skip
    monkeypatch.setattr(
      server, name,
      lambda *given, _name=name, **more: found.update({_name: (given, more)})
      or types.SimpleNamespace(parts=(3, 4)),
    )  # fmt: skip
  monkeypatch.setattr(
    server, "message_plans", lambda *given: ("plans of", *given)
  )
  monkeypatch.setattr(
    _server_parts._methods, "outer_optimizer", lambda options: "outer"
  )
  monkeypatch.setattr(
    _server_parts, "batch_sizes", lambda protocol, name: f"sizes of {name}"
  )
  return found


def _parts(protocol, **more):
  usual = {
    "options": _commands.Train(seed=5), "protocol": protocol, "rounds": None,
    "machines": cluster.Cluster((cluster.Node("a"), cluster.Node("b"))),
    "model": types.SimpleNamespace(params="params", state="state"),
    "samples": types.SimpleNamespace(shared=True), "optimizer": "optimizer",
    "push_codec": "codec", "plans": "bits", "loss": "loss",
    "local_step": "step",
  }  # fmt: skip
  return types.SimpleNamespace(**usual | more)


def test_gradients_have_a_server_and_workers(made):
  protocol = server.ASP()
  parts = _parts(protocol)
  found, _ = _server_parts._server_learner(parts)
  assert found is protocol
  plans = ("plans of", "codec", "bits")
  assert made["GradientServer"] == (
    ("optimizer", "params", plans),
    {"seed": 5, "workers": ("a", "b"), "shared": True, "model_state": "state"},
  )
  _server_parts._worker_learner(parts, "b")
  assert made["GradientWorker"] == (
    ("loss", "params", parts.samples, plans),
    {
      "local_step": "step", "number": 1, "num_workers": 2, "seed": 5,
      "sizes": "sizes of b", "model_state": "state",
    },
  )  # fmt: skip


@pytest.mark.parametrize("peers", [False, True])
def test_fragments_have_a_syncer_and_runners(peers, made):
  protocol = server.DecoupledDiLoCo(
    batches=server.FixedBatches(4), fragments=2, peers=peers
  )
  parts = _parts(protocol)
  found, _ = _server_parts._server_learner(parts)
  # The syncer alone knows the fragments' sizes.
  assert found.parts == (3, 4) and found.fragments == 2
  assert made["FragmentSyncer"] == (
    ("params",),
    {
      "outer": "outer", "fragments": 2, "push_codec": "codec",
      "workers": ("a", "b"), "shared": True, "model_state": "state",
    },
  )  # fmt: skip
  _server_parts._worker_learner(parts, "a")
  assert made["FragmentRunner"] == (
    ("loss", "optimizer", "params", parts.samples),
    {
      "fragments": 2, "push_codec": "codec", "number": 0, "num_workers": 2,
      "sizes": "sizes of a", "model_state": "state", "seed": 5,
      # Workers that merge take the outer step themselves.
      "outer": "outer" if peers else None,
    },
  )  # fmt: skip


def test_elastic_rounds_make_their_own_pair(made):
  log = []
  rounds = types.SimpleNamespace(
    syncer=lambda **more: log.append(more) or "syncer",
    runner=lambda *given, **more: log.append((*given, more)) or "runner",
  )
  parts = _parts("protocol", rounds=rounds)
  assert _server_parts._server_learner(parts) == ("protocol", "syncer")
  assert _server_parts._worker_learner(parts, "b") == "runner"
  assert log == [
    {"shared": True}, ("b", "loss", parts.samples, {"sizes": "sizes of b"})
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("codec", "file", "size"),
  [(None, "c", 7.0), (None, None, 12.0), (3, "c", 3.0), (3, None, 3.0)],
)
def test_clock_knows_the_bytes_of_a_push(codec, file, size, monkeypatch):
  """The file gives them, unless a codec or the model says more."""
  monkeypatch.setattr(
    _server_parts, "_server_learner", lambda parts: ("protocol", "learner")
  )
  monkeypatch.setattr(
    _server_parts, "_worker_learner", lambda parts, name: f"worker {name}"
  )
  monkeypatch.setattr(_server_parts, "shared_links", lambda parts: "links")
  monkeypatch.setattr(server, "Pair", lambda *given: given)
  monkeypatch.setattr(
    server, "Simulation", lambda *given, **more: (*given, more)
  )
  found = codec and types.SimpleNamespace(num_bytes=lambda params: codec)
  parts = _parts(
    None, push_codec=found, profile=cluster.Profile(0.5, push_bytes=7.0),
    options=_commands.Train(seed=5, cluster=file),
    model=types.SimpleNamespace(params={"w": jnp.ones(3)}),
  )  # fmt: skip
  machines, protocol, profile, more = _server_parts.simulation(parts)
  assert (machines, protocol) == ("links", "protocol")
  assert (profile.push_bytes, profile.seconds_per_sample) == (size, 0.5)
  workers = {"a": "worker a", "b": "worker b"}
  assert more == {"seed": 5, "learner": ("learner", workers)}


@pytest.mark.parametrize("driver", ["clock", "threads", "ray"])
def test_session_is_of_the_engine_that_is_named(driver, monkeypatch, capsys):
  stopped, made = [], {}

  def engine(name):
    def make(*given, **more):
      made[name] = given, more
      return types.SimpleNamespace(stop=lambda: stopped.append(name))

    return make

  monkeypatch.setattr(server, "ThreadEngine", engine("threads"))
  monkeypatch.setattr(server, "RayEngine", engine("ray"))
  monkeypatch.setattr(
    _server_parts, "shared_links", lambda parts: parts.machines
  )
  monkeypatch.setattr(_server_parts, "simulation", lambda parts: "simulation")
  monkeypatch.setattr(server, "ClockSession", lambda *given: ("clock", *given))
  monkeypatch.setattr(server, "versions", lambda: {"jax": "1"})
  monkeypatch.setattr(
    server, "LiveSession", lambda *given, **more: (given, more)
  )
  options = _commands.Train(
    driver=driver, record="r", shards=3, cluster="c", address="h:1",
    cpus_per_worker=2.0, gpus_per_worker=0.5, elastic=True,
  )  # fmt: skip
  parts = _parts("protocol", options=options)
  with _server_run._session(parts) as found:
    assert not stopped
  if driver == "clock":
    assert found == ("clock", "simulation") and not made
    return
  assert stopped == [driver] and [*made] == [driver]
  wanted = (), {}
  if driver == "ray":
    wanted = (2,), {
      "address": "h:1", "cpus_per_worker": 2.0, "gpus_per_worker": 0.5,
    }  # fmt: skip
    assert "Starting 3 processes on Ray" in capsys.readouterr().out
  assert made[driver] == wanted
  (_, make_server, works, plan), more = found
  assert make_server.func is _server_parts.make_server
  assert {x: y.args for x, y in works.items()} == {
    name: (options, "bits", name) for name in "ab"
  }
  assert (plan.workers, plan.machines) == (("a", "b"), parts.machines)
  assert (plan.record, plan.shards, plan.versions) == ("r", 3, {"jax": "1"})
  assert more["model"] == ("params", "state") and more["survive"] is True
  assert more["on_event"] is _server_run._print_event


def test_events_and_changes_are_told(capsys):
  _server_run._print_event({"worker": "a", "kind": "lost", "reason": "killed"})
  _server_run._print_event({"worker": "a", "kind": "back", "reason": ""})
  assert capsys.readouterr().out == "a lost: killed\na back\n"
  record = training.Record(
    step=3, rounds=3, sent_bytes=2e6, train_loss=0.5,
    metrics={"accuracy": 0.25}, train_s=1.5, samples_per_s=40.0,
  )  # fmt: skip
  mark = _run_marks.Mark(
    3, 60, 1.5, 4e6, 0.25, 0.5, 0.5, True, None,
    changes=[(1.25, 2, "joined", "b", 2)],
  )  # fmt: skip
  train = types.SimpleNamespace(input_shape=(8, 8, 1))
  _server_run._print_record(record, mark, train)
  assert capsys.readouterr().out == (
    "b joined at 1.25 s, update 2; living: 2\n"
    "update 3  1.5 s  accuracy 25.00 %  train loss 0.5000  staleness 0.25  "
    "2 MB pushed per worker  40 images a s\n"
  )


def test_resumed_server_may_have_other_values_of_these_options_alone(tmp_path):
  path = tmp_path / "cluster.toml"
  path.write_text("[[nodes]]\n")
  found = _server_run._identity(_commands.Train(cluster=str(path)))
  assert found["cluster"] == "[[nodes]]\n"
  assert {*_commands.Train.__dataclass_fields__} - {*found} == {
    "checkpoints", "checkpoint_every_epochs", "address", "cpus_per_worker",
    "gpus_per_worker", "record", "output", "preset", "text", "files",
  }  # fmt: skip
  assert _server_run._identity(_commands.Train())["cluster"] is None


@pytest.mark.parametrize(
  ("paced", "file"), [(True, "c"), (False, "c"), (True, None)]
)
def test_worker_is_prepared_before_its_first_task(paced, file, monkeypatch):
  """A machine of the file takes its time; one that is not modelled has none."""
  log = []
  parts = _parts(
    types.SimpleNamespace(depth=3), profile="profile",
    options=_commands.Train(seed=5, paced=paced, cluster=file),
  )  # fmt: skip
  learner = types.SimpleNamespace(prepare=lambda: log.append("prepared"))
  monkeypatch.setattr(_server_parts, "_assemble_once", lambda *given: parts)
  monkeypatch.setattr(
    _server_parts, "_worker_learner", lambda parts, name: learner
  )
  monkeypatch.setattr(server, "Pace", lambda *given: given)

  def loop(*given, **more):
    log.append((*given, more))
    return types.SimpleNamespace(run=lambda: log.append("ran"))

  monkeypatch.setattr(server, "WorkerLoop", loop)
  _server_parts.work("options", "plans", "b", "channel")
  pace = (cluster.Node("b"), "profile", 5) if paced and file else None
  assert log == [
    "prepared", ("channel", "b", learner, {"depth": 3, "pace": pace}), "ran"
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("given", "updates", "wanted"),
  [
    (
      {"parts": ("tasks",), "interval": 3},
      None,
      {"tasks": True, "pipelined": False, "plans": None, "interval": 3},
    ),
    (
      {"parts": ("pipeline", "bits"), "pipeline_from": 0.5},
      11.0,
      {"tasks": False, "pipelined": True, "pipelined_from": 6, "interval": 8,
       "plans": server.BitPlans()},
    ),
    (
      {"parts": (), "splits": 2, "max_staleness": 1},
      11.0,
      {"n": 2, "max_staleness": 1, "plans": None, "interval": 8},
    ),
  ],
)  # fmt: skip
def test_protocol_is_built_for_its_machines(given, updates, wanted):
  found = {}

  def factory(
    total, batches, n, max_staleness, limits, interval, tasks, pipelined,
    pipelined_from, plans,
  ):  # fmt: skip
    found.update(locals())
    return server.ASP()

  server.PROTOCOLS["mine"] = factory
  machines = cluster.Cluster(
    (cluster.Node("a", memory_bytes=70.0), cluster.Node("b"))
  )
  profile = cluster.Profile(0.1, bytes_per_sample=10.0, bytes_of_model=20.0)
  options = _commands.Train(**given)
  _protocols.build("mine", options, 8, machines, profile, None, updates)
  del found["found"]
  assert found == {
    "total": 16, "batches": server.FixedBatches(8), "n": 1, "max_staleness": 2,
    "limits": {"a": 5, "b": None}, "tasks": False, "pipelined": False,
    "pipelined_from": 0,
  } | wanted  # fmt: skip
