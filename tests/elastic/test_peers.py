"""Workers that merge each other's messages stay at the server's bits."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import threading

import jax
import numpy as np
import pytest

from jdist import cluster, server
from jdist.server import _links
from jdist.server.decoupled import _decoupled_diloco, _merged_model
from jdist.server.gradients import _gradient_messages
from jdist.server.runtime import _delivery, _engine, _envelope
from jdist.storage import hashes
from tests.elastic import test_rounds as plain

NAMES = plain.NAMES


@pytest.fixture(autouse=True)
def merges(monkeypatch):
  """Compares all that a worker has merged with the server's, at each task.

  Returns how many tasks named merges and how many brought the parameters.
  """
  sent, counts = {}, {"named": 0, "sent": 0}
  reply = server.FragmentSyncer.reply
  receive = _merged_model.PeerMerges.receive

  def replied(self, message):
    found = reply(self, message)
    sent[message.task] = jax.device_get(self.merged.exact(None))
    return found

  def received(self, header, payload):
    found = receive(self, header, payload)
    own = jax.device_get(self.exact(None))
    jax.tree.map(np.testing.assert_array_equal, own, sent[header["task"]])
    if header["pulled"] is not None:
      counts["named" if header["merges"] else "sent"] += 1
    return found

  monkeypatch.setattr(server.FragmentSyncer, "reply", replied)
  monkeypatch.setattr(_merged_model.PeerMerges, "receive", received)
  return counts


class ByHand:
  """A server and its workers, whose messages are handed over one by one."""

  def __init__(self, found, saved=None, loss=plain.loss):
    self.found, self.syncer = found, found.syncer(shared=False)
    self.delivery = _delivery.Delivery(
      found.protocol, self.syncer, NAMES, () if saved else NAMES
    )
    self.tasks = {x: [] for x in NAMES}
    self.runners = {x: found.runner(x, loss, plain.Samples()) for x in NAMES}
    if saved is not None:
      self.syncer.load(*saved[0])
      self.delivery.load(saved[1])
      for name in list(self.delivery.state.members):
        self.deliver(server.Leave(name))
      for name in NAMES:
        self.deliver(server.Join(name))
    for name in NAMES:
      self.deliver(server.Pull(name))

  def deliver(self, message):
    self.delivery.deliver(message, 0.0)
    for task in self.delivery.take_sent()[0]:
      header = task.reply._asdict() | {"more": task.more}
      header, payload = _envelope.unpack(_envelope.pack(header, task.payload))
      if task.reply.merges:
        assert task.payload is None
        header["messages"] = [
          self.syncer.messages[x] for m in task.reply.merges for x in m.tasks
        ]
      self.tasks[task.reply.worker].append((header, payload))

  def work(self, *names):
    for name in names:
      header, payload = self.tasks[name].pop(0)
      runner = self.runners[name]
      runner.receive(header, payload)
      # It computes from what it has merged.
      jax.tree.map(
        np.testing.assert_array_equal, runner._state.anchor,
        runner._merging.anchor,
      )  # fmt: skip
      more, found = runner.compute(header)
      payload, more = _gradient_messages.sendable(found, more)
      seconds = 1.0 + NAMES.index(name)
      push = server.Push(name, header["task"], header["samples"], seconds)
      assert self.delivery.accept(push, more, payload)
      self.deliver(push)
      self.deliver(server.Pull(name))

  def leave(self, name):
    self.tasks[name].clear()
    self.runners[name].restart()
    for message in (server.Leave(name), server.Join(name), server.Pull(name)):
      self.deliver(message)


# The others combine what these have.
@pytest.mark.parametrize(
  "name", ["diloco", "streaming late int4", "msdpu", "local_sgd"]
)
def test_undisturbed_peers_merge_as_the_server(name, merges):
  found, like = plain.rounds(name, peers=True), plain.rounds(name)
  hand = ByHand(found)
  for _ in range(6):
    hand.work(*NAMES)
  pair, _ = plain.on_clock(like, hand.delivery.state.version)
  jax.tree.map(
    np.testing.assert_array_equal, hand.syncer.model.params, pair.model.params
  )
  # All tasks but the first of each worker, and with late merges the second.
  late = int(found.protocol.in_step)
  assert merges == {"named": len(NAMES) * (5 - late), "sent": 0}


def test_a_merge_by_hand(monkeypatch):
  """Two push 1 and 3: half of their mean 2 is subtracted."""
  kept = _merged_model.PeerMerges(
    [np.zeros(2, np.float32)], None, codec=None, outer=plain.optax.sgd(0.5),
    indices=[(0,)], num_workers=2,
  )  # fmt: skip
  messages = [
    _gradient_messages.tree_bytes(([np.full(2, x, np.float32)], {}))
    for x in (1.0, 3.0)
  ]
  header = {"pulled": (0,), "merges": [[0, [4, 5], [0.5, 0.5], ["a", "b"]]]}
  monkeypatch.undo()  # No server has sent this task.
  ((merged,),) = kept.receive(header | {"messages": messages}, None)
  np.testing.assert_array_equal(merged, -1.0)


def test_returning_worker_takes_parameters_and_outer_momentum(merges):
  hand = ByHand(plain.rounds("diloco int4", peers=True, quorum=0.6))
  hand.work(*NAMES)
  hand.work("b", "a")  # b has pushed what is merged once it is away.
  hand.leave("b")
  hand.work("c")
  ((header, _),) = hand.tasks["b"]
  assert header["pulled"] is None and header["merges"] == []
  for _ in range(3):
    hand.work(*NAMES)
  assert merges == {"named": 11, "sent": 0}


def test_peers_merge_statistics_and_return_to_them(merges):
  def loss(params, model_state, batch, key):
    value, _ = plain.loss(params, model_state, batch, key)
    seen = batch["rows"].mean()
    return value, ({"mean": 0.9 * model_state["mean"] + 0.1 * seen}, {})

  statistics = {"mean": np.float32(1.0)}
  found = plain.rounds("local_sgd", peers=True, model_state=statistics)
  hand = ByHand(found, loss=loss)
  for _ in range(2):
    hand.work(*NAMES)
  hand.leave("b")
  hand.work("a", "c", "b", *NAMES)
  state = hand.runners["b"]._merging.model_state
  assert state["mean"] != 1.0
  assert merges["sent"] == 0


def test_uneven_pushes_weigh_as_at_the_server(merges):
  batches = server.SpeedBatches(24)
  hand = ByHand(plain.rounds("diloco", peers=True, samples=batches))
  for _ in range(6):
    hand.work(*NAMES)
  ((header, _),) = hand.tasks["a"]
  ((_, _, weights, workers),) = header["merges"]
  assert workers == list(NAMES) and weights[0] > weights[1] > weights[2]
  assert merges == {"named": 15, "sent": 0}


@pytest.mark.parametrize(
  ("name", "parts"), [("local_sgd", 1), ("streaming", 2)]
)
def test_member_far_behind_is_sent_the_parameters(name, parts, merges):
  """Messages are kept for a fixed number of merges only."""
  found = plain.rounds(name, peers=True, quorum=0.3)
  hand, kept = ByHand(found), parts * _decoupled_diloco.KEPT_MERGES
  for _ in range(kept):
    hand.work("a")
  hand.work("c")  # Exactly as far behind as messages are kept.
  assert merges == {"named": kept - 1, "sent": 0}
  assert len(hand.syncer.messages) == kept
  hand.work("a", "b")
  hand.work("b")
  assert merges["sent"] == 1
  assert len(hand.syncer.messages) <= kept + 1


def test_peers_of_a_resumed_server_begin_with_its_merges(merges):
  """Pushes of the checkpoint, without messages, are merged before all join."""
  found = plain.rounds("streaming late", peers=True)
  hand = ByHand(found)
  hand.work(*NAMES)
  hand.work("a", "a")  # The checkpoint has pushes whose messages are lost.
  saved = hand.syncer.save(), hand.delivery.save()
  hand = ByHand(found, saved)
  for _ in range(4):
    hand.work(*NAMES)
  assert merges == {"named": 7, "sent": 0}


def test_disturbed_peers_are_replayed_to_the_same_bits(tmp_path, merges):
  found = plain.rounds("diloco int4", quorum=0.5, grace=1.0, peers=True)
  own = plain.in_turn(found, threading.Event(), threading.Event())
  path = str(tmp_path / "messages")
  session, _, summary = plain.live(found, own, 12, record=path)
  assert [x["kind"] for x in session.events] == ["lost", "back"]
  assert merges["named"] > 10
  syncer = found.syncer(shared=False)
  delivery = server.replay(path, found.protocol, syncer)
  np.testing.assert_array_equal(syncer.save()[1], session.payload)
  assert delivery.summary()["merges"] == summary["merges"]


def test_engine_carries_handles_in_place_of_messages(monkeypatch, merges):
  """The server hands on what an engine has given it, and keeps few."""
  way, fetched, servers = _engine._ThreadChannel, [], []
  push, pull = way.push, way.pull

  def with_handle(self, header, payload=None):
    servers[:] = [self._server]
    # Also the push of a first task, which has named no merges.
    assert header["kind"] != "push" or header["shared"]
    return push(self, header | {"handle": {"object": payload}}, payload)

  def fetch(self, worker, life):
    header, payload = pull(self, worker, life)
    handles = header.get("messages", [])
    fetched.extend(handles)
    header = header | {"messages": [x["object"] for x in handles]}
    return header, payload

  monkeypatch.setattr(way, "push", with_handle)
  monkeypatch.setattr(way, "pull", fetch)
  found = plain.rounds("local_sgd", peers=True)
  own = functools.partial(
    found.work, loss_fn=plain.loss, samples=plain.Samples()
  )
  plain.live(found, own, 20)
  assert len(fetched) >= 19 * 3 * 2
  core, kept = servers[0]._core, len(NAMES) * _decoupled_diloco.KEPT_MERGES
  assert core._handles.keys() >= core.messages.keys()
  assert len(core._handles) <= kept + 2 * len(NAMES)
  # A worker that cannot fetch one asks for it, or has to join again.
  task, message = next(iter(core.messages.items()))
  assert servers[0].message(task) is message
  with pytest.raises(ConnectionError, match="forgotten"):
    servers[0].message(-1)


def test_modelled_links_carry_messages_from_their_workers(monkeypatch, merges):
  carried, send = [], _links.Links.send

  def noted(self, kind, worker, *args, parts=None, **options):
    if parts is not None:
      carried.append((worker, parts))
    send(self, kind, worker, *args, parts=parts, **options)

  monkeypatch.setattr(_links.Links, "send", noted)
  found = plain.rounds("local_sgd", peers=True)
  link = cluster.Link(bandwidth_bits_per_s=1e9)
  machines = cluster.Cluster(
    tuple(map(cluster.Node, NAMES)),
    cluster.star(dict.fromkeys((*NAMES, "server"), link), "switch"),
  )
  found._plan = dataclasses.replace(found._plan, machines=machines)
  own = functools.partial(
    found.work, loss_fn=plain.loss, samples=plain.Samples()
  )
  plain.live(found, own, 3)
  assert len(carried) >= 2 * 3
  for worker, parts in carried:
    assert parts == [(x, 32) for x in NAMES if x != worker]


def test_merges_are_compiled_before_the_first_task(monkeypatch):
  found, merging, compiled = plain.rounds("streaming", peers=True), [], []
  # Another outer optimizer than those of the tests before.
  outer = plain.optax.sgd(0.6)
  found._parts = found._parts._replace(outer=outer)
  found._merging = {"outer": outer}
  hand, merge = ByHand(found), _merged_model.MergedModel.merge
  hand.syncer.prepare()
  for runner in hand.runners.values():
    runner.prepare()

  def noted(self, *args):
    merging.append(True)
    merge(self, *args)
    merging.pop()

  monkeypatch.setattr(_merged_model.MergedModel, "merge", noted)
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: (
      compiled.append(event) if merging and "backend_compile" in event else None
    )
  )
  try:
    for _ in range(3):
      hand.work(*NAMES)
  finally:
    jax.monitoring.clear_event_listeners()
  assert not compiled


def test_learner_without_the_outer_optimizer_is_told(monkeypatch):
  found = plain.rounds("local_sgd", peers=True)
  found._merging = {}
  runner = found.runner("a", plain.loss, plain.Samples())
  header = {"pulled": None, "merges": (), "more": {"steps": 0}}
  with pytest.raises(ValueError, match="`outer` must be the server's outer"):
    runner.receive(header, np.zeros(32, np.uint8))


def test_outer_optimizer_does_nothing_without_peers():
  """A protocol without them sends merged fragments."""
  found = plain.rounds("diloco")
  found._merging = {"outer": found._parts.outer}
  own = functools.partial(
    found.work, loss_fn=plain.loss, samples=plain.Samples()
  )
  _, params, _ = plain.live(found, own, 6)
  pair, _ = plain.on_clock(plain.rounds("diloco"), 6)
  jax.tree.map(np.testing.assert_array_equal, params, pair.model.params)


def test_learner_of_another_kind_keeps_no_messages():
  """Its payloads are sent, also if the protocol has peers."""
  found = plain.rounds("local_sgd", peers=True)

  def make_server(plan):
    return server.LiveServer(found.protocol, server.EmptyServer(), plan)

  def work(channel, name):
    server.WorkerLoop(channel, name, server.EmptyWorker(), depth=1).run()

  engine = server.ThreadEngine()
  session = server.LiveSession(
    engine, make_server, {x: functools.partial(_call, work, x) for x in NAMES},
    server.LivePlan(workers=NAMES),
  )  # fmt: skip
  try:
    server.ServerRun(session).fit(5)
    assert session.summary()["updates"] >= 5
  finally:
    engine.stop()


def _call(work, name, channel):
  work(channel, name)


def test_own_loop_merges(merges):
  found = plain.rounds("diloco", peers=True)

  def own(channel, name):
    loop = found.loop(channel, name)
    for number, state in enumerate(loop):
      batch = plain.Samples().batch(
        NAMES.index(name), number * plain.EACH, plain.EACH
      )
      loop.advance(*plain.one_step(state.params, state.opt_state, batch))

  _, params, summary = plain.live(found, own, 6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
    params, plain.collective("diloco"),
  )  # fmt: skip
  assert merges["named"] >= 12 and summary["merged_share"] == 1.0
  # Eight parameters of float32: with momentum at first, and then two messages
  # for each merge. The run ends before one of them has the last merge.
  assert summary["pulled_bytes"] == 3 * 2 * 32 + (6 * 3 - 1) * 2 * 32


@pytest.mark.parametrize(("peers", "seconds"), [(False, 7.0), (True, 6.0)])
def test_clock_takes_messages_from_peers(peers, seconds):
  """A round of three, at links of 100 B/s, messages and parameters of 100 B.

  Computing takes 1 s, and pushes 3 s on the server's link.  Then the server
  sends 300 B, or each worker gets two messages on its own link.
  """
  protocol = plain.rounds("local_sgd", peers=peers).protocol
  link = cluster.Link(bandwidth_bits_per_s=800)
  nodes = tuple(cluster.Node(x) for x in NAMES)
  machines = cluster.Cluster(
    nodes, cluster.star(dict.fromkeys((*NAMES, "server"), link), "switch")
  )
  costs = cluster.Profile(1 / 16, pull_bytes=100, push_bytes=100)
  times = []
  for updates in (1, 2, 3):
    run = server.Simulation(machines, protocol, costs)
    run.run(updates=updates)
    times.append(run.now_s)
  assert times == pytest.approx([7.0, 7.0 + seconds, 7.0 + 2 * seconds])
  # Three times the parameters at the beginning, and after each merge but one.
  assert run.pulled_bytes == (300 + 3 * (600 if peers else 300))


def test_clock_takes_as_many_bytes_as_a_fragment_has():
  protocol = server.DecoupledDiLoCo(
    batches=server.FixedBatches(4), interval=2, fragments=2, quorum=1.0,
    grace=0.0, ahead=0, parts=(3.0, 1.0), peers=True,
  )  # fmt: skip
  costs = cluster.Profile(0.01, pull_bytes=1000, push_bytes=100)
  run = server.Simulation(cluster.workers([1.0, 1.0]), protocol, costs)
  pulled = []
  for updates in (1, 2, 3):
    run.run(updates=updates, seconds=100.0)
    run.run(seconds=run.now_s)
    pulled.append(run.pulled_bytes)
  # Both begin with all parameters, and get the other's push of each fragment.
  assert np.diff([2000, *pulled]).tolist() == [150, 50, 150]


def test_clock_trains_to_the_same_bits_with_peers():
  away = {"outages": (cluster.Outage(0.3, 0.6),)}
  params = [
    plain.on_clock(
      plain.rounds("diloco int4", quorum=0.5, grace=1.0, peers=x), 8, c=away
    )[0].model.params
    for x in (False, True)
  ]
  jax.tree.map(np.testing.assert_array_equal, *params)


def test_decoupled_diloco_takes_peers_as_a_protocol():
  protocol = server.DecoupledDiLoCo(
    batches=server.FixedBatches(4), interval=2, peers=True
  )
  state = protocol.init(["a", "b"])
  for name in "ab":
    (first,) = protocol.receive(state, 0.0, server.Pull(name))
    assert first.merges == () and first.pulled is None
  protocol.receive(state, 1.0, server.Push("a", 0, 8, 1.0))
  *_, last = protocol.receive(state, 1.0, server.Push("b", 1, 8, 1.0))
  assert last == server.Apply((0, 1), (0.5, 0.5), (0, 0))
  (task,) = protocol.receive(state, 1.0, server.Pull("b"))
  assert task.merges == (server.Merge(0, (0, 1), (0.5, 0.5), ("a", "b")),)
  assert task.pulled == (0,)
  # A member that returns is not told the merges while it was away.
  protocol.receive(state, 2.0, server.Leave("b"))
  (task,) = protocol.receive(state, 2.0, server.Pull("a"))
  protocol.receive(state, 3.0, server.Push("a", task.task, 8, 1.0))
  protocol.receive(state, 4.0, server.Join("b"))
  (task,) = protocol.receive(state, 4.0, server.Pull("b"))
  assert (task.version, task.merges, task.pulled) == (2, (), None)
  plainly = dataclasses.replace(protocol, peers=False).init(["a"])
  assert plainly.log == [] and plainly.told == {}


def all_of(merged):
  return hashes.fingerprint(*jax.tree.leaves(merged.exact(None)))


class Noting(server.FragmentRunner):
  """Writes what it has merged, by task; its steps take a while."""

  folder = None

  def receive(self, header, payload):
    super().receive(header, payload)
    note = header["task"], bool(header["merges"]), all_of(self._merging)
    with (self.folder / f"{os.getpid()}").open("a") as file:
      file.write(json.dumps(note) + "\n")
    threading.Event().wait(0.1)


def noted_work(folder, channel, name):
  Noting.folder = folder
  plain.rounds("diloco int4", **ELASTIC).work(
    channel, name, plain.loss, plain.Samples(), kind=Noting
  )


ELASTIC = {"quorum": 0.5, "grace": 1.0, "peers": True, "timeout_s": 20.0}


@pytest.mark.skipif(
  importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)
@pytest.mark.slow
def test_killed_peers_return_to_the_servers_bits(tmp_path, monkeypatch):
  """Processes of Ray, one of which is killed, take messages from each other."""
  signal.alarm(300)  # Ray's processes start slowly on a busy machine.
  found, path = plain.rounds("diloco int4", **ELASTIC), str(tmp_path / "record")
  notes, killed = tmp_path / "notes", []
  notes.mkdir()
  # Bits are those of one compiler's flags.
  flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "JAX_PLATFORMS": "cpu"}
  engine = server.RayEngine(3, cpus_per_worker=0.2, environment=flags)

  def on_status(status):
    if not killed and status["updates"] > 10:
      killed.append(engine.process_of("b"))
      os.kill(killed[0], signal.SIGKILL)

  try:
    session = found.session(
      engine, functools.partial(noted_work, notes), record=path, shared=False,
      on_status=on_status, model=(plain.PARAMS, {}),
    )  # fmt: skip
    server.ServerRun(session).fit(120)
    session.summary()  # It brings the server's state.
  finally:
    engine.stop()
  assert [x["kind"] for x in session.events] == ["lost", "back"]
  states, reply = {}, server.FragmentSyncer.reply

  def replied(self, message):
    result = reply(self, message)
    states[message.task] = all_of(self.merged)
    return result

  monkeypatch.setattr(server.FragmentSyncer, "reply", replied)
  syncer = found.syncer(shared=False)
  server.replay(path, found.protocol, syncer)
  np.testing.assert_array_equal(syncer.save()[1], session.payload)
  noted = [
    json.loads(line)
    for file in notes.iterdir()
    for line in file.read_text().splitlines()
  ]
  assert len(list(notes.iterdir())) == 4  # One process has taken b's place.
  assert {task: state for task, _, state in noted}.items() <= states.items()
  assert sum(named for _, named, _ in noted) > 200
