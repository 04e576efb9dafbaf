"""Parts of a live run, of which threads and processes show the sum alone."""

import concurrent.futures
import json
import queue
import threading
import time
import types

import numpy as np
import pytest

from jdist import server
from jdist.server import _driver
from jdist.server.gradients import _learner
from jdist.server.run import _run_marks
from jdist.server.runtime import (
  _delivery,
  _engine,
  _live_session,
  _mailboxes,
  _message_record,
  _server_core,
  _server_shards,
  _worker_loop,
)

pytest.importorskip("simpy")

_NONE = np.zeros(0, np.uint8)


# -- A session, on an engine that answers as it is told.


class _Engine:
  """Notes what it is asked; an answer may be an error, or one each time."""

  def __init__(self, **answers):
    self.answers, self.log = answers, []

  def ask(self, method, *given, **more):
    self.log.append((method, *given))
    found = self.answers.get(method)
    if isinstance(found, list):
      found = found.pop(0) if len(found) > 1 else found[0]
    if isinstance(found, Exception):
      raise found
    return found

  def poll(self):
    self.log.append(("poll",))

  def serve(self, *made):
    self.log.append(("serve", len(made)))

  def spawn(self, name, work):
    self.log.append(("spawn", name, work))

  def on_lost(self, function):
    self.log.append(("on_lost",))


class _Never:
  """Is asked whether to stop, and ends a test that asks for ever."""

  calls = 0

  def __call__(self):
    self.calls += 1
    assert self.calls < 1000
    return False


def _status(**more):
  return {
    "error": None, "finished": False, "here": [], "pushed": [], "expelled": [],
    "records": 0, "resumed": None, "updates": 0,
  } | more  # fmt: skip


def _session(engine, names="ab", **options):
  plan = server.LivePlan(
    workers=tuple(names), checkpoints=options.pop("folder", None)
  )
  works = {name: f"work of {name}" for name in names}
  return server.LiveSession(engine, None, works, plan, **options)


def _events(session):
  return [(x["kind"], x["worker"], x["reason"]) for x in session.events]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
  monkeypatch.setattr(_live_session, "_POLL_S", 0.0)


@pytest.mark.parametrize(
  ("answer", "update"),
  [(7, 7), (0, 0), (-1, None), (_engine.LostServerError("gone"), None)],
)
def test_session_says_which_update_was_saved(answer, update):
  assert _session(_Engine(save=answer)).save() == update


def test_session_counts_the_updates_of_its_last_status():
  session = _session(_Engine(status=_status(updates=5)))
  assert session.updates == 0
  session._ask_status()
  assert session.updates == 5


def test_session_that_stops_looks_at_nothing():
  engine = _Engine()
  assert _session(engine).advance(0, lambda: True) is None
  assert engine.log == []


def test_error_of_a_server_is_raised_where_the_run_is_watched():
  engine = _Engine(status=_status(error="It has failed."))
  with pytest.raises(ValueError, match="It has failed"):
    _session(engine)._ask_status()


def test_session_advances_to_a_mark_with_the_model_there():
  like = {"w": np.zeros(2, np.float32)}, {"m": np.zeros(1, np.float32)}
  snapshot = np.float32([1, 2, 3]).view(np.uint8)
  seen = []
  engine = _Engine(
    status=[_status(records=2), _status(records=3)],
    record_of=("mark", snapshot),
  )
  session = _session(engine, model=like, on_status=seen.append)
  mark, model = session.advance(2, _Never())
  assert mark == "mark" and model.params["w"].tolist() == [1, 2]
  assert model.model_state["m"].tolist() == [3] and model.opt_state == ()
  assert [x["records"] for x in seen] == [2, 3]
  assert engine.log == [
    ("poll",), ("status",), ("poll",), ("status",), ("record_of", 2)
  ]  # fmt: skip
  # It was lost with its process, or nothing evaluates it.
  assert session._model_of(_NONE) is None
  assert _session(engine)._model_of(snapshot) is None


def test_worker_that_was_away_is_back_once():
  engine, told = _Engine(status=_status(here=["a", "b"])), []
  session = _session(engine, on_event=told.append)
  session._away, session._gone = {"a", "b"}, {"b"}
  engine.answers["status"] = [
    _status(here=["b"]), _status(here=["a", "b"], records=1)
  ]  # fmt: skip
  engine.answers["record_of"] = "mark", _NONE
  session.advance(0, _Never())
  assert _events(session) == [("back", "a", "")] and told == session.events
  assert session._away == {"b"}


def test_lost_worker_is_forgotten_and_then_started_again():
  engine = _Engine(status=_status())
  session = _session(engine)
  session._on_lost("a", "killed")
  assert engine.log == [
    ("status",), ("lost", "a"), ("spawn", "a", "work of a")
  ]  # fmt: skip
  assert _events(session) == [("lost", "a", "killed")]
  assert session._away == {"a"} and session._losses == {"a": 1}


def test_three_losses_without_a_push_are_forgiven():
  engine = _Engine(status=_status())
  session = _session(engine)
  for _ in range(3):
    session._on_lost("a", "killed")
  with pytest.raises(
    _engine.LostRunError, match=r"a was lost 4 times before it pushed any.*kil"
  ):
    session._on_lost("a", "killed")
  # A push forgives them all.
  session = _session(engine)
  for _ in range(3):
    session._on_lost("a", "killed")
  engine.answers["status"] = _status(pushed=["a"], records=1)
  engine.answers["record_of"] = "mark", _NONE
  session.advance(0, _Never())
  assert session._losses == {}


@pytest.mark.parametrize("survive", [False, True])
def test_others_may_continue_without_a_worker_whose_work_has_returned(survive):
  engine = _Engine(status=_status())
  session = _session(engine, survive=survive)
  if not survive:
    with pytest.raises(_engine.LostRunError, match=f"^a: {_engine.RETURNED}"):
      session._on_lost("a", _engine.RETURNED)
    return
  session._on_lost("a", _engine.RETURNED)
  assert engine.log[1:] == [("lost", "a")]
  assert _events(session) == [("gone", "a", _engine.RETURNED)]
  session._on_lost("a", _engine.RETURNED)  # It is known to be gone.
  assert len(session.events) == 1
  with pytest.raises(_engine.LostRunError):  # No worker is left.
    session._on_lost("b", _engine.RETURNED)


@pytest.mark.parametrize(
  ("status", "reason", "noted"),
  [
    (_status(finished=True), "killed", False),
    (_status(expelled=["a"]), _engine.RETURNED, False),
    (_status(expelled=["a"]), "killed", True),
    (_status(expelled=["b"]), "killed", True),
  ],
)
def test_workers_that_were_sent_home_are_no_loss(status, reason, noted):
  session = _session(_Engine(status=status))
  session._on_lost("a", reason)
  assert bool(session.events) == noted


def test_workers_are_waited_for_and_told_when_they_are_ready():
  told = []
  engine = _Engine(
    status=[_status(here=["b"]), _status(here=["a", "b"]), _status()]
  )
  session = _session(engine, "abc", on_event=told.append)
  session._gone = {"c"}
  session._wait_for(["a", "b", "c"], _Never())
  assert [(x["kind"], x["worker"]) for x in told] == [
    ("ready", "b"), ("ready", "a")
  ]  # fmt: skip
  assert session.events == []  # They are no events of the run.
  assert engine.log == [("poll",), ("status",)] * 2
  late = _session(_Engine(status=_status()), startup_s=0.0)
  with pytest.raises(_engine.LostRunError, match=r"^a, b did not connect"):
    late._wait_for(["b", "a"], _Never())
  late._wait_for(["a"], lambda: True)


def test_first_worker_is_ready_before_the_others_are_started():
  engine = _Engine(status=_status(here=["a", "b", "c"], resumed=3))
  session = _session(engine, "abc")
  plan = _run_marks.RunPlan(unit="updates", marks=(4,))
  assert session.begin(plan, _Never()) == 3
  assert [x for x in engine.log if x[0] != "status"] == [
    ("on_lost",), ("serve", 1), ("spawn", "a", "work of a"), ("poll",),
    ("spawn", "b", "work of b"), ("spawn", "c", "work of c"), ("poll",),
    ("start",),
  ]  # fmt: skip
  assert session._plan.marks == (4,) and session._plan.workers == tuple("abc")
  # Nothing is left to train, or SIGTERM has come: nothing is started.
  for answer, stops in ((_status(finished=True), False), (_status(), True)):
    engine = _Engine(status=answer)
    _session(engine).begin(plan, lambda stops=stops: stops)
    assert ("start",) not in engine.log
    spawned = [x for x in engine.log if x[0] == "spawn"]
    assert bool(spawned) == stops
  engine = _Engine(status=_engine.LostServerError("killed"))
  with pytest.raises(_engine.LostRunError, match="before the run began: kill"):
    _session(engine).begin(plan, _Never())


@pytest.mark.parametrize(("shards", "numbers"), [(1, [0]), (2, [0, 1, 2])])
def test_each_server_has_its_number_in_its_plan(shards, numbers):
  """The first one decides, and is 0."""
  made, plan = [], server.LivePlan(workers=("a",), shards=shards)
  engine = types.SimpleNamespace(
    serve=lambda *given: made.extend(given), on_lost=lambda function: None
  )
  session = server.LiveSession(engine, "make", {"a": "work"}, plan)
  session._serve()
  assert [x.func for x in made] == [_live_session._make] * len(numbers)
  assert [x.args[0] for x in made] == ["make"] * len(numbers)
  assert [x.args[1].shard for x in made] == numbers


def test_threads_have_the_server_and_its_shards():
  engine, channels = server.ThreadEngine(), []

  def make(name):
    return lambda channel: (
      channels.append(channel)
      or types.SimpleNamespace(
        ask=lambda method: f"{method} of {name}", name=name
      )
    )

  engine.serve(make("server"), make("one"), make("two"))
  assert [x.name for x in engine.shards] == ["one", "two"]
  assert engine.server.name == "server" and len(channels) == 3
  assert channels[-1].shard(2)._server.name == "two"


def test_lost_server_is_started_again_for_the_workers_that_are_here(tmp_path):
  engine = _Engine(status=_status(here=["b"]))
  session = _session(engine, folder=str(tmp_path))
  session._away = {"a"}
  session._serve_again("killed", _Never())
  assert engine.log == [("serve", 1), ("poll",), ("status",), ("start",)]
  assert _events(session) == [
    ("lost", "server", "killed"), ("back", "server", "")
  ]  # fmt: skip
  with pytest.raises(_engine.LostRunError, match=r"killed.*no checkpoints"):
    _session(engine)._serve_again("killed", _Never())
  # It may be lost again, three times.
  again = _engine.LostServerError("killed again")
  for losses in (2, 3):
    starts = [again] * 2 + [None] if losses == 2 else again
    engine = _Engine(status=_status(here=["a", "b"]), start=starts)
    session = _session(engine, folder=str(tmp_path))
    if losses == 3:
      with pytest.raises(_engine.LostRunError, match=r"lost 3 times.*again"):
        session._serve_again("killed", _Never())
    else:
      session._serve_again("killed", _Never())
      assert _events(session)[-1] == ("back", "server", "")
    assert [x[2] for x in _events(session)[:3]] == [
      "killed", "killed again", "killed again",
    ]  # fmt: skip


# -- The server's thread.


def _live(step):
  made, closed = object.__new__(server.LiveServer), []
  made._stopping, made._inbox = threading.Event(), queue.Queue()
  made._error = made._lost = None
  made._core = types.SimpleNamespace(close=lambda: closed.append(True))
  made._step = step
  return made, closed


def _pull_of(made):
  future = concurrent.futures.Future()
  made._put("pull", "a", {"future": future})
  return future


@pytest.mark.parametrize(
  ("error", "told", "ends"),
  [
    (_learner.RefusedError("nan", "It has a NaN."), "It has a NaN.", True),
    (
      RuntimeError("no memory"),
      "The server has failed: RuntimeError: no memory",
      True,
    ),
    # The workers wait for the servers to begin again.
    (_engine.LostServerError("a shard"), None, False),
  ],
)
def test_error_of_a_server_ends_its_workers(error, told, ends):
  def step():
    raise error

  made, closed = _live(step)
  future = _pull_of(made)
  made._run()
  assert made._error == told and closed == [True] * ends
  assert made._stopping.is_set() == future.done() == ends
  assert made._lost is (None if ends else error)
  if ends:
    assert future.result() == ({"kind": "stop"}, _mailboxes._NOTHING)


def test_server_takes_the_messages_of_its_workers_alone():
  made, _ = _live(None)
  made._core.boxes = {"a": types.SimpleNamespace(life=3)}
  refused = "There is no worker 'b' in this run."
  for kind in ("hello", "push", "join"):
    assert made.push({"kind": kind, "worker": "b"}) == {"refused": refused}
  assert "no worker None in" in made.push({"kind": "push"})["refused"]
  # The pushes are of a life before, or of none.
  for life in ({"life": 2}, {}):
    stale = made.push({"kind": "push", "worker": "a", **life})
    assert stale == {"refused": "stale"}
  own = {"worker": "a", "life": 3}
  assert "got 'save'" in made.push({"kind": "save", **own})["refused"]
  assert made._inbox.empty()
  for kind in ("push", "join", "state"):
    assert made.push({"kind": kind, **own}) == {}
  assert made._inbox.qsize() == 3


def test_message_to_a_server_that_has_stopped_is_answered_or_dropped():
  made, _ = _live(None)
  made._stopping.set()
  assert _pull_of(made).result(timeout=0)[0] == {"kind": "stop"}
  made._put("hello", "a")
  assert made._inbox.empty()
  # It may stop just before the message is there.
  looks = iter([False, True])
  made._stopping = types.SimpleNamespace(is_set=lambda: next(looks))
  assert _pull_of(made).result(timeout=0)[0] == {"kind": "stop"}


def test_run_begins_once_and_has_no_work_after_its_end():
  asp = server.ASP(batches=server.FixedBatches(4))
  core = _server_core.ServerCore(
    asp, server.EmptyServer(100), server.LivePlan(workers=("a", "b"))
  )

  def handle(kind, worker="", **header):
    core.handle(_server_core.Item(0.0, kind, worker, header, _NONE))

  def words(name):
    return [header["kind"] for header, _ in core.boxes[name].messages]

  handle("hello", "a", life=1)
  handle("start")
  began_s = core._began_s
  # The engine asks again if it has lost sight of the server.
  handle("start")
  assert core._began_s == began_s and words("a") == ["task"]
  assert [*core.delivery.state.members] == ["a"]  # The other has not come yet.
  handle("finish")
  assert words("a") == ["task", "stop"] and core.finished
  # A push that its links have carried by now is counted nowhere.
  handle(
    "push", "a", life=0, task=0, samples=4, compute_s=1.0, waited_s=0.0,
    over_s=2.0, more={},
  )  # fmt: skip
  assert not core.over_s and core.delivery.nodes["a"].compute_s == 0.0
  handle("hello", "b", life=1)
  assert words("b")[-1] == "stop" and "task" not in words("b")
  handle("join", "a")
  assert words("a") == ["task", "stop"]


def test_seconds_of_a_push_that_comes_twice_count_once():
  asp = server.ASP(batches=server.FixedBatches(4))
  core = _server_core.ServerCore(
    asp, server.EmptyServer(100), server.LivePlan(workers=("a",))
  )
  header = {"life": 0, "task": 0, "samples": 4, "compute_s": 1.0}
  header |= {"waited_s": 0.0, "more": {}}
  for kind in ("hello", "start", "push", "push"):
    core.handle(_server_core.Item(0.0, kind, "a", header, _NONE))
  assert core.delivery.state.discarded == {"repeated": 1}
  assert core.delivery.nodes["a"].compute_s == 1.0


def test_checkpoint_does_not_wait_for_ever_for_a_worker(tmp_path):
  core = _server_core.ServerCore(
    server.ASP(), server.EmptyServer(100),
    server.LivePlan(workers=("a",), checkpoints=str(tmp_path)),
  )  # fmt: skip
  done = concurrent.futures.Future()
  for kind in ("hello", "start", "save"):
    core.handle(_server_core.Item(0.0, kind, "a", {"done": done}, _NONE))
  for seconds in (4.9, 5.1):
    core.advance(core._began_s + seconds)
    assert done.done() == (seconds > 5)
  assert done.result() == 0 and [*tmp_path.glob("update_0000000000")]


def test_pull_of_a_worker_that_is_lost_before_the_start_ends():
  core = _server_core.ServerCore(
    server.ASP(), server.EmptyServer(100), server.LivePlan(workers=("a",))
  )
  future = concurrent.futures.Future()
  for kind in ("hello", "pull", "lost"):
    header = {"life": 0, "future": future}
    core.handle(_server_core.Item(0.0, kind, "a", header, _NONE))
  assert future.result(timeout=0)[0] == {"kind": "stop"}


@pytest.mark.parametrize("reached", [True, False])
def test_run_that_was_killed_after_its_last_mark_is_finished(
  reached, monkeypatch
):
  marks = types.SimpleNamespace(
    checkpoints=types.SimpleNamespace(found=({"now_s": 7.0},), first_s=7.0),
    load=lambda delivery: None, all_reached=reached,
  )  # fmt: skip
  monkeypatch.setattr(
    _server_core._live_marks, "LiveMarks", lambda *given: marks
  )
  core = _server_core.ServerCore(
    server.ASP(batches=server.FixedBatches(4)), server.EmptyServer(100),
    server.LivePlan(workers=("a", "b")),
  )  # fmt: skip
  assert core.finished == reached
  assert core.ended_s == (7.0 if reached else 0.0)


@pytest.mark.parametrize(
  ("began", "finished"), [(True, False), (True, True), (False, False)]
)
def test_run_that_is_finished_early_keeps_what_it_has(began, finished):
  made, log = object.__new__(_server_core.ServerCore), []
  made._began_s, made.finished = 1.5 if began else None, finished
  made._add_record, made._finish = log.append, lambda: log.append("end")
  made._on_finish(None)
  assert log == ["it was finished"] * (began and not finished) + ["end"]


def test_recording_needs_a_file_that_can_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  path = tmp_path / "file" / "record"
  with pytest.raises(ValueError, match=r"`record` must be .*another path"):
    _message_record.Recorder(path)
  # A run does not go on with the remains of another one.
  path = tmp_path / "new" / "record"
  for _ in range(2):
    _message_record.Recorder(path).sent(3, None)
  assert len(path.read_text().splitlines()) == 1


# -- A worker.


class _Learner(server.EmptyWorker):
  def __init__(self):
    super().__init__()
    self.log = []

  def restart(self, *, lost=False):
    self.log.append("restart")

  def load(self, notes, payload):
    self.log.append(("load", notes, payload))

  def save(self, *, whole=False):
    self.log.append("save")
    return {"n": 1}, "state"


@pytest.mark.parametrize("end", ["stop", "lost", "failed"])
def test_worker_does_what_it_is_told_in_order(end, monkeypatch):
  learner, sent = _Learner(), []
  loop = server.WorkerLoop(None, "a", learner, depth=1)
  monkeypatch.setattr(
    loop, "_do", lambda session, header, *_: learner.log.append(header["task"])
  )
  session = types.SimpleNamespace(
    inbox=queue.Queue(), generation=2, send=lambda *given: sent.append(given)
  )
  for header, payload in (
    ({"kind": "load", "notes": {"n": 0}}, "payload"),
    ({"kind": "task", "generation": 1, "task": 3}, _NONE),
    ({"kind": "task", "generation": 2, "task": 4}, _NONE),
    ({"kind": "save"}, _NONE),
    ({"kind": "rejoin", "generation": 2}, _NONE),
    ({"kind": end, "error": RuntimeError("no memory")}, _NONE),
  ):
    session.inbox.put((header, payload, 0.0))
  if end == "failed":
    with pytest.raises(RuntimeError, match="no memory"):
      loop._work(session)
  else:
    assert loop._work(session) == (end == "stop")
  assert learner.log == [
    ("load", {"n": 0}, "payload"), 4, "save", "restart"
  ]  # fmt: skip
  assert sent == [("state", {"notes": {"n": 1}}, "state")]


def test_worker_begins_anew_with_each_session():
  class Losing:
    hellos = 0

    def push(self, header, payload=None):
      self.hellos += 1
      return {"life": 1} if self.hellos < 3 else {"refused": "done"}

    def pull(self, name, life):
      raise _engine.LostServerError

  learner = _Learner()
  with pytest.raises(ValueError, match="done"):
    server.WorkerLoop(Losing(), "a", learner, depth=1).run()
  assert learner.log == ["restart"] * 2


@pytest.mark.parametrize(
  ("error", "told"),
  [(_engine.LostServerError("gone"), "lost"), (OSError("broken"), "failed")],
)
def test_thread_that_ends_tells_its_worker_once(error, told):
  session = object.__new__(_worker_loop._Session)
  session._closed, session.inbox = threading.Event(), queue.Queue()

  def target():
    raise error

  for _ in range(2):
    session._guarded(target)
  header, _, _ = session.inbox.get_nowait()
  assert header["kind"] == told and session.inbox.empty()
  assert header.get("error") is (error if told == "failed" else None)
  assert session._closed.is_set()


@pytest.mark.parametrize("refused", [True, False])
def test_refused_push_tells_its_worker_that_the_server_is_lost(refused):
  """The server knows another process of this name: a hello finds out."""
  session, pushed = object.__new__(_worker_loop._Session), []
  session._closed, session.inbox = threading.Event(), queue.Queue()
  session._outbox = queue.Queue()
  for message in (("one", 1), ("two", 2), None):
    session._outbox.put(message)
  answer = {"refused": "It is not you."} if refused else {}
  session._channel = types.SimpleNamespace(
    push=lambda *given: pushed.append(given) or answer
  )
  session._push()
  assert pushed == [("one", 1), ("two", 2)][: 1 if refused else 2]
  assert session.inbox.empty() is not refused
  assert not refused or session.inbox.get()[0]["kind"] == "lost"


def test_push_has_the_times_and_the_place_of_its_task(monkeypatch):
  loop = server.WorkerLoop(None, "a", server.EmptyWorker(), depth=1)
  clock, sent = iter([20.0, 22.5]), []
  monkeypatch.setattr(
    _worker_loop, "time",
    types.SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep),
  )  # fmt: skip
  monkeypatch.setattr(loop, "_wait", lambda *given: 0.25)
  monkeypatch.setattr(
    loop._learner, "compute", lambda header: ({"loss": 1.0}, None)
  )
  session = types.SimpleNamespace(send=lambda *given: sent.append(given))
  header = {"task": 7, "push_plan": 1, "samples": 8, "merges": ()}
  loop._do(session, header, _NONE, 17.0)
  ((kind, push, _),) = sent
  assert kind == "push" and push == {
    "task": 7, "plan": 1, "samples": 8, "compute_s": 2.5, "waited_s": 3.0,
    "over_s": 0.25, "more": {"loss": 1.0}, "shared": True,
  }  # fmt: skip


def test_words_of_control_go_to_the_coordinator_alone():
  asked = []
  made = object.__new__(_server_shards.ShardedChannel)
  made._channel = types.SimpleNamespace(
    push=lambda *given: asked.append(given) or {"life": 3}
  )
  header = {"kind": "hello"}
  assert made.push(header) == {"life": 3} and asked == [(header, None)]


def test_counts_of_a_server_are_the_same_after_json():
  def make():
    asp = server.ASP(batches=server.FixedBatches(4))
    return _delivery.Delivery(asp, server.EmptyServer(), ("a", "b"), ["a"])

  made, names = make(), {
    "state", "nodes", "staleness", "refused", "lost_samples", "_tasks",
    "applied_samples", "pushed_bytes", "pulled_bytes",
  }  # fmt: skip
  made.state.version, made.nodes["a"].compute_s = 6, 2.0
  for node in made.nodes.values():
    node.iteration_s = 0.5
  made.staleness[3], made.refused["nan"] = 2, 1
  made.lost_samples, made.applied_samples = 5, 7
  made.pushed_bytes, made.pulled_bytes = 8.0, 9.0
  made._tasks[4] = _driver.TaskGiven("a", 8, 1.5)
  saved, again = json.loads(json.dumps(made.save())), make()
  assert saved.keys() == names
  for wrong in ([], saved | {"more": 1}, {}):
    with pytest.raises(ValueError, match="`driver` must be an object of"):
      again.load(wrong)
  again.load(saved)
  for name in names:
    assert getattr(again, name) == getattr(made, name) != getattr(make(), name)


def test_push_of_another_workers_task_does_not_reach_the_learner(monkeypatch):
  asp = server.ASP(batches=server.FixedBatches(4))
  learner, pushed = server.EmptyServer(), []
  monkeypatch.setattr(learner, "push", lambda task, *_: pushed.append(task))
  made = _delivery.Delivery(asp, learner, ("a", "b"), ["a"])
  made.deliver(server.Pull("a"))
  (task,) = made.state.tasks
  for worker, number in (("b", task), ("a", task + 1)):
    assert made.accept(server.Push(worker, number, 4, 1.0), {}, b"bytes")
  assert not pushed
  assert made.accept(server.Push("a", task, 4, 1.0), {}, b"bytes")
  assert pushed == [task]


def test_message_for_all_workers_is_copied_once():
  asp = server.ASP(batches=server.FixedBatches(4))
  made = _delivery.Delivery(asp, server.EmptyServer(), ("a", "b"), ["a"])
  # A tree is copied into bytes, which bytes themselves are not.
  one, other = ([np.arange(3, dtype=np.uint8)] for _ in range(2))
  for payload in (one, one, other, None):
    made.send("reply", {}, payload)
  sent, _ = made.take_sent()
  first, second, third, none = (x.payload for x in sent)
  assert first is second and none is None
  assert third is not first and third.tolist() == first.tolist() == [0, 1, 2]
