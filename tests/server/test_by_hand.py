"""Small parts of a server, whose order and state are followed by hand."""

import concurrent.futures
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, reducers, server
from jdist.server.run import _run_checkpoints
from jdist.server.runtime import (
  _envelope,
  _live_marks,
  _server_core,
  _server_shards,
)
from jdist.storage import numbered_files
from tests.server import _reference
from tests.server.test_decoupled import begin, protocol, push

pytest.importorskip("simpy")


# -- Members of Decoupled DiLoCo that wait for a merge.


def test_member_that_asks_again_while_it_waits_gets_one_task():
  """A worker whose pull was lost asks again; the merge answers once."""
  rule = protocol(quorum=1.0, grace=0.0, ahead=0)
  state = begin(rule, "ab")
  assert rule.receive(state, 1.0, push("a", 0)) == []
  for _ in range(2):
    assert rule.receive(state, 1.1, server.Pull("a")) == []
  actions = rule.receive(state, 2.0, push("b", 1))
  assert [x.worker for x in actions if isinstance(x, server.Reply)] == ["a"]
  (reply,) = rule.receive(state, 2.1, server.Pull("b"))
  assert reply.worker == "b"


# -- Checkpoints that wait for the states of workers.


def _newest(folder):
  """Reads the newest checkpoint, as another run would."""
  found = numbered_files.read_newest(
    _run_checkpoints._targets(folder), _run_checkpoints._read
  )
  assert found is not None
  return found


def _header(updates):
  return {
    "updates": updates, "now_s": 1.0, "marks": [], "limits": [], "state": {},
  }  # fmt: skip


def _newest(folder):
  return _run_checkpoints._read(_run_checkpoints._targets(folder)[0])


def test_worker_that_owes_its_state_is_left_out_in_the_end(tmp_path):
  saved = _run_checkpoints.RunCheckpoints(str(tmp_path), {})
  done = [concurrent.futures.Future() for _ in range(3)]
  part = {"server": np.uint8([1])}
  give_up = saved.begin(_header(1), part, {"a", "b"}, done[0])
  saved.add_state("a", np.uint8([2]))
  assert not done[0].done()
  give_up()
  assert done[0].result(timeout=0) == 1
  _, parts = _newest(tmp_path)
  assert sorted(parts) == ["server", "worker a"]
  # The last state completes one, and an older promise writes nothing then.
  again = saved.begin(_header(2), part, {"a"}, done[1])
  give_up()
  assert not done[1].done()
  saved.add_state("a", np.uint8([3]))
  assert done[1].result(timeout=0) == 2
  # The next one is begun only when the one before it is written.
  saved.begin(_header(3), part, {"b"}, done[2])
  again()
  assert not done[2].done()
  saved.begin(_header(4), part, set())
  assert done[2].result(timeout=0) == 3
  (header, _) = _newest(tmp_path)
  assert header["header"]["updates"] == 4


# -- Shards.


class _Channel:
  """A shard that notes its commands."""

  def __init__(self):
    self.commands = []

  def ask(self, method, *commands):
    self.commands += [(method, *command) for command in commands]
    return True


def test_shards_are_told_in_the_order_of_the_coordinator():
  channels = [_Channel(), _Channel()]
  made = object.__new__(_server_shards.ShardedServer)
  made._links = [_server_shards._Link(channel) for channel in channels]
  server.GradientServer.__init__(
    made, optax.sgd(0.1), {"w": jnp.ones(2)}, server.message_plans(None, None),
    workers=("x", "y"),
  )  # fmt: skip
  made.leave("x")
  made._tell("discard", 3)
  assert made.finite
  told = [("do", "leave", ("x",)), ("do", "discard", (3,))]
  assert [channel.commands for channel in channels] == [told, told]


def _shard():
  made = object.__new__(_server_shards.Shard)
  made._lock = _server_shards.threading.Lock()
  made._next, made._ready, made._waiting = 0, {}, {}
  return made


def test_pull_of_a_given_task_is_answered_at_once():
  """It is answered without parameters if the task was taken back."""
  shard = _shard()
  shard._next, shard._ready = 4, {2: {"w": jnp.ones(2)}}
  early = shard.pull("x", 4)
  assert not early.done()
  header, payload = shard.pull("x", 2).result(timeout=0)
  assert header == {"there": True} and payload.nbytes == 8
  header, payload = shard.pull("x", 2).result(timeout=0)
  assert header == {"there": False} and payload.nbytes == 0
  shard.stop()
  assert early.result(timeout=0)[0] == {"there": False}


# -- Messages.


@pytest.mark.parametrize(
  ("message", "told"),
  [
    (b"text", "uint8 array of one dimension"),
    (np.zeros(12, np.int8), "uint8 array of one dimension"),
    (np.zeros((2, 12), np.uint8), "uint8 array of one dimension"),
    (_envelope.pack({"a": 1})[:-1], "says its header has"),
    (np.append(np.uint8([1]), np.zeros(8, np.uint8)), "no JSON"),
  ],
)
def test_malformed_message_is_refused_without_its_cause(message, told):
  with pytest.raises(_envelope.MalformedError, match=told) as caught:
    _envelope.unpack(message)
  assert caught.value.__cause__ is None


# -- A gradient worker.


@pytest.mark.parametrize("whole", [False, True])
def test_resumed_worker_sends_what_it_had_left(whole):
  codec = reducers.MessageCodec(codecs.TopK(k=1), reducers.ErrorFeedback())

  def make():
    return server.GradientWorker(
      _reference.loss, jnp.zeros(8), _reference.Samples(),
      server.message_plans(codec, None), number=0, num_workers=1,
    )  # fmt: skip

  def computed(worker, task):
    header = {
      "task": task, "more": {"start": 8 * task, "settled": -1}, "samples": 8,
      "push_plan": 0, "version": 0,
    }  # fmt: skip
    return worker.compute(header)[1]

  first, second, fresh = make(), make(), make()
  computed(first, 0)
  second.load(*first.save(whole=whole))
  found, wanted, other = (computed(x, 1) for x in (second, first, fresh))
  equal = lambda x, y: all(  # noqa: E731
    (np.asarray(a) == np.asarray(b)).all()
    for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True)
  )
  assert equal(found, wanted) and not equal(found, other)


def test_workers_of_other_seeds_draw_other_random_numbers():
  codec = reducers.MessageCodec(codecs.RandomK(k=2, shared=False))

  def drawn(seed):
    pair = server.GradientLearner(
      _reference.loss, optax.sgd(0.1), jnp.zeros(8), _reference.Samples(),
      workers=("x", "y"), push_codec=codec, seed=seed,
    )  # fmt: skip
    return [worker._stream for worker in pair.workers.values()]

  assert [drawn(seed) for seed in range(3)] == [[0, 1], [2, 3], [4, 5]]


# -- The core of a live server.


def _core(**parts):
  made = object.__new__(_server_core.ServerCore)
  for name, value in parts.items():
    setattr(made, name, value)
  return made


@pytest.mark.parametrize(
  ("delivery", "finished", "usable", "saves"),
  [
    (1, False, True, True), (None, False, True, False),
    (1, True, True, False), (1, False, False, False),
  ],
)  # fmt: skip
def test_server_saves_only_a_usable_state(delivery, finished, usable, saves):
  begun, done = [], concurrent.futures.Future()
  marks = types.SimpleNamespace(may_save=lambda: usable)
  core = _core(
    _began_s=delivery, finished=finished, marks=marks,
    _begin_checkpoint=begun.append,
  )  # fmt: skip
  core._on_save(types.SimpleNamespace(header={"done": done}))
  assert begun == ([done] if saves else [])
  assert done.done() != saves
  if not saves:
    assert done.result() == -1


@pytest.mark.parametrize(
  ("payload", "more", "size"),
  [(None, {}, None), (np.zeros(5, np.uint8), {}, 5), (None, {"size": 7}, 7)],
)
def test_message_without_bytes_travels_with_the_one_before(payload, more, size):
  reply = server.Reply("x", 3, 1, 8)
  sent, box = [], types.SimpleNamespace(name="x")
  core = _core(
    boxes={"x": box}, messages={}, _began_s=0.0, first_s=0.0,
    marks=types.SimpleNamespace(pulled_bytes=0),
    advance=lambda now_s: None,
    _links=types.SimpleNamespace(
      send=lambda *given, parts: sent.append((given[:3], parts))
    ),
  )  # fmt: skip
  task = types.SimpleNamespace(reply=reply, payload=payload, more=more)
  core._send(task, 1)
  assert sent == [(("pull", "x", size), None)]
  assert core.marks.pulled_bytes == (size or 0)


@pytest.mark.parametrize(
  ("unit", "positions"),
  [
    ("updates", [(3, 90, 9.0), (4, 0, 0.0)]),
    ("samples", [(9, 3, 9.0), (0, 4, 0.0)]),
    ("seconds", [(9, 90, 3.9), (0, 0, 4.0 - 1e-9)]),
  ],
)
def test_mark_is_due_at_its_own_unit(unit, positions):
  plan = server.LivePlan(workers=("x",), unit=unit, marks=(4,))
  marks = _live_marks.LiveMarks(server.EmptyServer(), plan)
  for (updates, samples, now_s), due in zip(
    positions, (False, True), strict=True
  ):
    delivery = types.SimpleNamespace(
      state=types.SimpleNamespace(version=updates), applied_samples=samples
    )
    assert marks.is_due(delivery, now_s) == due


def test_checkpoint_of_a_live_run_is_read_with_its_identity_alone(tmp_path):
  def made(**identity):
    plan = server.LivePlan(
      workers=("a",), checkpoints=str(tmp_path), identity=identity
    )
    return _live_marks.LiveMarks(server.EmptyServer(), plan)

  delivery = types.SimpleNamespace(
    state=types.SimpleNamespace(version=4), save=dict
  )
  made(seed=1).begin_checkpoint(delivery, 1.5, set(), None)
  assert made(seed=1).checkpoints.found[0]["updates"] == 4
  with pytest.raises(ValueError, match="seed"):
    made(seed=2)


def test_status_names_who_is_here_and_who_has_pushed():
  """A process that has pushed has started well, and may be lost again."""
  boxes = {
    name: types.SimpleNamespace(here=here, pushed=pushed)
    for name, here, pushed in (
      ("a", True, True),
      ("b", True, False),
      ("c", 0, 0),
    )
  }
  delivery = types.SimpleNamespace(
    state=types.SimpleNamespace(version=5, members={"a": 1, "b": 1}),
    applied_samples=40, expelled=lambda name: name == "c",
  )  # fmt: skip
  marks = types.SimpleNamespace(
    checkpoints=types.SimpleNamespace(found=({"updates": 2}, {})),
    records=[1, 2, 3],
  )
  made = object.__new__(server.LiveServer)
  made._lost, made._error = None, "none yet"
  made._core = core = types.SimpleNamespace(
    boxes=boxes, delivery=delivery, marks=marks, wall_s=1.5, finished=False
  )
  assert made.status() == {
    "now_s": 1.5, "here": ["a", "b"], "pushed": ["a"], "finished": False,
    "expelled": ["c"], "records": 3, "error": "none yet", "resumed": 2,
    "updates": 5, "samples": 40, "members": 2,
  }  # fmt: skip
  # It has not begun.
  core.delivery, marks.checkpoints.found = None, None
  zeros = dict.fromkeys(("updates", "samples", "members"), 0)
  assert made.status().items() >= (zeros | {"resumed": None}).items()
