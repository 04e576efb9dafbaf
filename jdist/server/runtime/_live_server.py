"""The server of real workers: messages in, tasks out, links and timers."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import pathlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist import cluster
from jdist.server import _messages, _protocol
from jdist.server.runtime import (
  _delivery,
  _engine,
  _envelope,
  _message_record,
)
from jdist.storage import sealed_json

_log = logging.getLogger(__name__)
# Waits for workers' states when a checkpoint is made.
_SAVE_S = 5.0
# After so many refused pushes one after the other a worker is sent home.
_MAX_REFUSED = 3
_KEPT_CHECKPOINTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LivePlan:
  """Settings of a live server beside its protocol.

  Attributes:
    workers: the names of all, in the order of the data's numbers.
    machines: whose links messages take; none are modelled if None.
    samples: the run ends when so many are in updates, if given.
    updates: the same of updates.
    seconds: the same of wall seconds since the start.
    marks: numbers of samples at which a record is made.
    record: file for all messages, if any.
    checkpoints: directory, if any; a checkpoint at each mark.
    identity: what a checkpoint must have been made with.
    versions: of Python, JAX and jdist, which workers must have, too.
  """

  workers: tuple[str, ...]
  machines: cluster.Cluster | None = None
  samples: int | None = None
  updates: int | None = None
  seconds: float | None = None
  marks: tuple[float, ...] = ()
  record: str | None = None
  checkpoints: str | None = None
  identity: dict[str, Any] = dataclasses.field(default_factory=dict)
  versions: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Seat:
  """A worker as its server serves it.

  Attributes:
    life: of its process; messages of an earlier one are dropped.
    generation: goes up whenever its tasks were taken from it.
    mailbox: messages that it has not pulled; as many as it may have tasks, and
      words of control.
    waiting: its pull that waits.
    refused: pushes one after the other.
    here: whether its process lives, as far as is known.
  """

  life: int = 0
  generation: int = 0
  mailbox: collections.deque[np.ndarray] = dataclasses.field(
    default_factory=collections.deque
  )
  waiting: concurrent.futures.Future[np.ndarray] | None = None
  refused: int = 0
  here: bool = False


class _Item(NamedTuple):
  """A message in the inbox, and when it came."""

  at_s: float
  kind: str
  worker: str
  header: dict[str, Any]
  payload: np.ndarray


class LiveServer:
  """Runs a protocol for workers in other processes, in wall seconds.

  One thread hands messages to the protocol, one after the other; an engine's
  threads bring and fetch them.  Links are `cluster.Network`'s, the same as the
  virtual clock's, on a clock that follows the wall's: a message is handed over
  when the links of its way have carried its bytes, or when it really is here,
  if that is later.  Timers are on the same clock.

  Who is lost, or hangs longer than the protocol's `timeout_s`, leaves; what it
  had computed and not sent is lost, with the residual of its feedback, and its
  samples are not taken again (`lost_samples`).  Who returns is sent exact
  parameters.  A push that the learner refuses takes its worker's tasks from
  it, and is counted; after three one after the other the worker is sent home.

  A checkpoint is made at each mark: the protocol's state, the learner's arrays
  and positions, and the state of each worker as it is a few tasks later.  A
  server that begins in a directory with one goes on from the newest: updates
  since then are lost, and tasks that were out.

  Args:
    protocol: any.
    learner: the server's side of the gradients.
    plan: what else the run does.

  Raises:
    ValueError: when a checkpoint is of another run.
    ImportError: when SimPy is not installed.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    learner: _engine.ServerLearner,
    plan: LivePlan,
  ):
    try:
      import simpy
    except ImportError:
      raise ImportError(
        "Links in real time need SimPy: `pip install 'jdist[ray]'`."
      ) from None
    self.plan, self.learner = plan, learner
    self._began_s: float | None = None
    self._delivery: _delivery.Delivery | None = None
    self._protocol = protocol
    self._resumed = _newest(plan)
    first_s = self._resumed[0]["now_s"] if self._resumed else 0.0
    self._first_s = first_s
    self._environment = simpy.Environment(initial_time=first_s)
    topology = None if plan.machines is None else plan.machines.topology
    self._network = cluster.Network(self._environment, topology)
    self._has_links = topology is not None
    self._seats = {name: _Seat() for name in plan.workers}
    self._lives, self._lock = time.time_ns() // 1000, threading.Lock()
    bound = 2 * (protocol.depth + 2) * len(plan.workers) + 16
    self._inbox: queue.Queue[_Item] = queue.Queue(bound)
    self._recorder: _message_record.Recorder | None = None
    self._records: list[dict[str, Any]] = []
    self._snapshots: dict[int, np.ndarray] = {}
    self.pulled_bytes = self.pushed_bytes = 0
    self.busy_s = 0.0
    self.over_s: collections.Counter[str] = collections.Counter()
    self._states: dict[str, np.ndarray] = {}
    self._saving: _Saving | None = None
    self._error: str | None = None
    self.finished = False
    if hasattr(learner, "prepare"):
      learner.prepare()
    if self._resumed:
      self._load(*self._resumed)
    self._stopping = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="jdist-server", daemon=True
    )
    self._thread.start()

  # What an engine calls, from any thread.

  def push(self, message: np.ndarray) -> dict[str, Any]:
    """Takes a worker's message and returns a receipt."""
    header, payload = _envelope.unpack(message)
    kind, worker = header.get("kind"), header.get("worker")
    if worker not in self._seats:
      return {"refused": f"There is no worker {worker!r} in this run."}
    if kind == "hello":
      for name, wanted in self.plan.versions.items():
        found = header.get("versions", {}).get(name)
        if found != wanted:
          self._error = (
            f"Worker {worker!r} has {name} {found}, and the server {wanted}: "
            "install the same on every node."
          )
          return {"refused": self._error}
      with self._lock:
        self._lives += 1
        # From now on: what comes next may be a push of this life.
        life = self._seats[worker].life = self._lives
      header = header | {"life": life}
      self._put(_Item(time.monotonic(), kind, worker, header, payload))
      return {"life": life, "now_s": self.now_s}
    if header.get("life") != self._seats[worker].life:
      return {"refused": "stale"}
    self._put(_Item(time.monotonic(), str(kind), worker, header, payload))
    return {}

  def pull(
    self, worker: str, life: int
  ) -> "concurrent.futures.Future[np.ndarray]":
    """Returns what will be the next message to a worker."""
    future: concurrent.futures.Future[np.ndarray] = concurrent.futures.Future()
    item = _Item(
      time.monotonic(), "pull", worker, {"future": future, "life": life},
      np.zeros(0, np.uint8),
    )  # fmt: skip
    self._put(item)
    return future

  def lost(self, worker: str) -> None:
    """Takes note that a worker's process is gone."""
    seat = self._seats[worker]
    with self._lock:
      seat.life, seat.here = 0, False
    self._control("lost", worker)

  def start(self) -> None:
    """Begins with those who are here."""
    self._control("start", self.plan.workers[0])

  def finish(self) -> None:
    """Ends the run before its plan is done; workers are sent home."""
    self._control("finish", self.plan.workers[0])

  def stop(self) -> None:
    """Ends the run and the thread; workers are sent home."""
    self.finish()
    self._stopping.set()
    self._thread.join(timeout=10.0)

  def status(self) -> dict[str, Any]:
    """Returns where the run stands, in a form that JSON can hold."""
    found = {
      "now_s": self.now_s,
      "here": [name for name, seat in self._seats.items() if seat.here],
      "finished": self.finished,
      "records": len(self._records),
      "error": self._error,
      "resumed": None if self._resumed is None else self._resumed[0]["updates"],
      "updates": 0,
      "samples": 0,
      "members": 0,
    }
    if self._delivery is not None:
      found |= {
        "updates": self._delivery.state.version,
        "samples": self._delivery.applied_samples,
        "members": len(self._delivery.state.members),
      }
    return found

  def record_of(self, number: int) -> tuple[dict[str, Any], np.ndarray]:
    """Returns a mark's record, and the learner's snapshot there."""
    record = self._records[number]
    return record, self._snapshots.pop(number, np.zeros(0, np.uint8))

  def final(self) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the run in figures, and all arrays of the learner."""
    _, payload = self.learner.save()
    return self.summary(), payload

  def summary(self) -> dict[str, Any]:
    """Returns the run in figures, as `Simulation.summary`."""
    assert self._delivery is not None
    found = self._delivery.summary()
    return found | {
      "wall_s": self.ended_s,
      "samples_per_s": found["samples"] / max(self.ended_s, 1e-9),
      "utilisation": min(
        1.0,
        sum(x.compute_s for x in self._delivery.nodes.values())
        / max(len(self.plan.workers) * self.ended_s, 1e-9),
      ),
      "pulled_bytes": self.pulled_bytes,
      "pushed_bytes": self.pushed_bytes,
      "server_busy_s": self.busy_s,
      "over_s": dict(self.over_s),
    }

  @property
  def now_s(self) -> float:
    """Wall seconds since the start; a resumed run goes on from its mark."""
    if self._began_s is None:
      return self._first_s
    return self._first_s + time.monotonic() - self._began_s

  # The server's thread.

  ended_s = 0.0

  def _put(self, item: _Item) -> None:
    if self._stopping.is_set():
      if item.kind == "pull":
        item.header["future"].set_result(_word("stop"))
      return
    self._inbox.put(item)

  def _control(self, kind: str, worker: str) -> None:
    none = np.zeros(0, np.uint8)
    self._put(_Item(time.monotonic(), kind, worker, {}, none))

  def _run(self) -> None:
    try:
      while not self._stopping.is_set():
        self._step()
    except Exception as error:
      _log.exception("The server has failed.")
      self._error = f"The server has failed: {type(error).__name__}: {error}"
    finally:
      self._stopping.set()
      if self._recorder is not None:
        self._recorder.close()
      self._send_home()

  def _step(self) -> None:
    until = self._environment.peek() - self.now_s
    item = None
    with contextlib.suppress(queue.Empty):
      item = self._inbox.get(timeout=min(max(until, 0.0), 0.1))
    began = time.monotonic()
    if item is None:
      self._advance(self.now_s)
    else:
      if self._began_s is not None:
        self._advance(self._first_s + item.at_s - self._began_s)
      getattr(self, f"_on_{item.kind}")(item)
    self.busy_s += time.monotonic() - began

  def _advance(self, now_s: float) -> None:
    """Lets the clock of links and timers follow the wall's.

    Step by step: what happens may advance it further, and `run(until=...)`
    within another leaves events behind that stop all later ones.
    """
    environment = self._environment
    if now_s > environment.now:
      environment.timeout(now_s - environment.now)
      while environment.peek() <= now_s:
        environment.step()

  def _on_start(self, item: _Item) -> None:
    del item
    if self._began_s is not None:
      return
    here = [name for name, seat in self._seats.items() if seat.here]
    resumed = self._delivery is not None
    if self._delivery is None:
      self._delivery = self._new_delivery(here)
    if self.plan.record is not None and not resumed:
      self._recorder = _message_record.Recorder(
        self.plan.record, self.plan.workers, here
      )
    self._began_s = time.monotonic()
    if resumed:
      for worker in list(self._delivery.state.members):
        # Its tasks went with the server that gave them.
        self._delivery.hand_over(self._first_s, _messages.Leave(worker))
    if self.plan.seconds is not None:
      self._after(self.plan.seconds - self._first_s, self._finish)
    for name in here:
      if resumed:
        self._deliver(_messages.Join(name))
      self._deliver(_messages.Pull(name))

  def _new_delivery(self, here: Sequence[str]) -> _delivery.Delivery:
    names = self.plan.workers
    return _delivery.Delivery(self._protocol, self.learner, names, here)

  def _on_finish(self, item: _Item) -> None:
    del item
    self._finish()

  def _on_hello(self, item: _Item) -> None:
    seat = self._seats[item.worker]
    self._empty(seat)
    seat.here, seat.refused = True, 0
    seat.generation += 1
    state = self._states.pop(item.worker, None)
    if state is not None and item.header.get("fresh"):
      self._mail(item.worker, _word("load", state))
    if self.finished:
      self._mail(item.worker, _word("stop"))
    elif self._began_s is not None:
      self._deliver(_messages.Join(item.worker))
      self._deliver(_messages.Pull(item.worker))

  def _on_join(self, item: _Item) -> None:
    if not self.finished:
      self._deliver(_messages.Join(item.worker))
      self._deliver(_messages.Pull(item.worker))

  def _on_lost(self, item: _Item) -> None:
    seat = self._seats[item.worker]
    self._empty(seat)
    if self._began_s is not None and not self.finished:
      self._deliver(_messages.Leave(item.worker))

  def _on_pull(self, item: _Item) -> None:
    seat, future = self._seats[item.worker], item.header["future"]
    if item.header["life"] != seat.life:
      future.set_result(_word("stop"))
    elif seat.mailbox:
      future.set_result(seat.mailbox.popleft())
    else:
      seat.waiting = future

  def _on_state(self, item: _Item) -> None:
    if self._saving is not None:
      self._saving.states[item.worker] = np.array(item.payload)
      self._saving.owing.discard(item.worker)
      if not self._saving.owing:
        self._write_checkpoint()

  def _on_push(self, item: _Item) -> None:
    """Lets a push take its way; it is at the server once that is done."""
    size = len(item.payload)
    self.pushed_bytes += size
    if not self._has_links:
      self._take(item)
      return
    assert self.plan.machines is not None
    arrival = self._network.send(
      item.worker, self.plan.machines.server, size, kind="push"
    )
    arrival.callbacks.append(lambda _: self._take(item))

  def _take(self, item: _Item) -> None:
    seat, header = self._seats[item.worker], item.header
    if self.finished or header["life"] != seat.life:
      return
    assert self._delivery is not None
    push = _messages.Push(
      item.worker,
      int(header["task"]),
      int(header["samples"]),
      float(header["compute_s"]),
      float(header["waited_s"]),
    )
    self.over_s[item.worker] += header.get("over_s", 0.0)
    try:
      self._delivery.accept(push, header["more"], item.payload)
    except _engine.RefusedError as error:
      _log.warning("A push of %s is refused: %s", item.worker, error)
      seat.refused += 1
      seat.here = seat.refused < _MAX_REFUSED
      self._deliver(_messages.Leave(item.worker))
      if not seat.here:
        self._mail(item.worker, _word("stop"))
      return
    seat.refused = 0
    self._deliver(push, header["more"], item.payload)
    if item.worker in self._delivery.state.members:
      self._deliver(_messages.Pull(item.worker))

  def _deliver(
    self,
    message: _messages.Message,
    more: dict[str, Any] | None = None,
    payload: np.ndarray | None = None,
  ) -> None:
    """Hands a message to the protocol and does what it answers."""
    delivery = self._delivery
    assert delivery is not None
    if self.finished:
      return
    now = float(self._environment.now)
    before = set(delivery.state.members)
    if self._recorder is not None:
      self._recorder.message(now, message, more, payload)
    sent, timers = delivery.hand_over(now, message)
    if not isinstance(message, _messages.Join):
      for worker in before - set(delivery.state.members):
        self._take_tasks_of(str(worker))
    for each in sent:
      if self._recorder is not None:
        self._recorder.sent(each)
      self._send(each)
    for timer in timers:
      expired = _messages.Expired(timer.task)
      self._after(timer.after_s, self._deliver, expired)
    self._look_at_marks()

  def _take_tasks_of(self, worker: str) -> None:
    """Tells a worker that has left, should it live, to join again."""
    seat = self._seats[worker]
    seat.generation += 1
    seat.mailbox.clear()
    if seat.here:
      self._mail(worker, _word("rejoin", generation=seat.generation))

  def _send(self, sent: _delivery.SentTask) -> None:
    reply = sent.reply
    name, seat = str(reply.worker), self._seats[str(reply.worker)]
    header = reply._asdict() | {
      "kind": "task",
      "generation": seat.generation,
      "more": sent.more,
      "now_s": self.now_s,
    }
    message = _envelope.pack(header, sent.payload)
    if sent.payload is None or not self._has_links:
      size = 0 if sent.payload is None else len(sent.payload)
      self.pulled_bytes += size
      self._mail(name, message)
      return
    self.pulled_bytes += len(sent.payload)
    assert self.plan.machines is not None
    self._advance(self.now_s)
    generation = seat.generation
    arrival = self._network.send(
      self.plan.machines.server, name, len(sent.payload), kind="pull"
    )
    arrival.callbacks.append(lambda _: self._arrive(name, generation, message))

  def _arrive(self, name: str, generation: int, message: np.ndarray) -> None:
    if self._seats[name].generation == generation:
      self._mail(name, message)

  def _mail(self, name: str, message: np.ndarray) -> None:
    seat = self._seats[name]
    if seat.waiting is not None:
      waiting, seat.waiting = seat.waiting, None
      waiting.set_result(message)
    else:
      seat.mailbox.append(message)

  def _empty(self, seat: _Seat) -> None:
    seat.mailbox.clear()
    if seat.waiting is not None:
      seat.waiting.set_result(_word("stop"))
      seat.waiting = None

  def _after(self, seconds: float, function: Any, *args: Any) -> None:
    timeout = self._environment.timeout(max(seconds, 0.0))
    timeout.callbacks.append(lambda _: function(*args))

  # Marks, the end, checkpoints.

  def _look_at_marks(self) -> None:
    delivery, plan = self._delivery, self.plan
    assert delivery is not None
    samples = delivery.applied_samples
    while (
      len(self._records) < len(plan.marks)
      and samples >= plan.marks[len(self._records)]
    ):
      self._add_record()
    done = (
      (plan.samples is not None and samples >= plan.samples)
      or (plan.updates is not None and delivery.state.version >= plan.updates)
    )  # fmt: skip
    if done:
      self._finish()

  def _add_record(self) -> None:
    assert self._delivery is not None
    snapshot = getattr(self.learner, "snapshot", None)
    if snapshot is not None:
      self._snapshots[len(self._records)] = snapshot()
    self._records.append(
      {
        "updates": self._delivery.state.version,
        "now_s": float(self._environment.now),
        "pushed_bytes": self.pushed_bytes,
        "pulled_bytes": self.pulled_bytes,
        "staleness": dict(self._delivery.staleness),
        **self.learner.totals(),
      }
    )
    if self.plan.checkpoints is not None:
      self._begin_checkpoint()

  def _finish(self) -> None:
    if not self.finished:
      self.ended_s = float(self._environment.now)
      self.finished = True
      if self._saving is not None:
        self._write_checkpoint()
      self._send_home()

  def _send_home(self) -> None:
    for name in self._seats:
      self._mail(name, _word("stop"))

  def _begin_checkpoint(self) -> None:
    assert self._delivery is not None
    if self._saving is not None:
      self._write_checkpoint()
    notes, payload = self.learner.save()
    header = {
      "updates": self._delivery.state.version,
      "now_s": float(self._environment.now),
      "identity": self.plan.identity,
      "learner": notes,
      "records": self._records,
      "bytes": [self.pushed_bytes, self.pulled_bytes],
    }
    protocol = np.frombuffer(self._delivery.save(), np.uint8)
    owing = {
      str(name)
      for name in self._delivery.state.members
      if self._seats[str(name)].here
    }
    self._saving = _Saving(header, protocol, payload, owing)
    for name in owing:
      self._mail(name, _word("save"))
    saving = self._saving
    self._after(_SAVE_S, self._give_up_saving, saving)
    if not owing:
      self._write_checkpoint()

  def _give_up_saving(self, saving: "_Saving") -> None:
    if self._saving is saving:
      self._write_checkpoint()

  def _write_checkpoint(self) -> None:
    saving, self._saving = self._saving, None
    assert saving is not None and self.plan.checkpoints is not None
    parts = {"protocol": saving.protocol, "learner": saving.payload}
    parts |= {f"worker {name}": x for name, x in saving.states.items()}
    payload = np.concatenate(list(parts.values()))
    header = saving.header | {
      "parts": [[name, len(part)] for name, part in parts.items()],
      "hash": hashlib.sha256(payload.tobytes()).hexdigest(),
    }
    folder = pathlib.Path(self.plan.checkpoints)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"update_{header['updates']:010d}.jdist"
    sealed_json.write_whole(path, _envelope.pack(header, payload).tobytes())
    for old in sorted(folder.glob("update_*.jdist"))[:-_KEPT_CHECKPOINTS]:
      old.unlink()

  def _load(self, header: dict[str, Any], parts: dict[str, np.ndarray]) -> None:
    found = header["identity"]
    for name, value in self.plan.identity.items():
      if found.get(name) != value:
        raise ValueError(
          f"`checkpoints` are of another run: `{name}` is {found.get(name)!r} "
          f"there and {value!r} here. Take another directory."
        )
    self._delivery = self._new_delivery(())
    self._delivery.load(parts.pop("protocol").tobytes())
    self.learner.load(header["learner"], parts.pop("learner"))
    self._records = header["records"]
    self.pushed_bytes, self.pulled_bytes = header["bytes"]
    self._states = {
      name.removeprefix("worker "): state for name, state in parts.items()
    }


@dataclasses.dataclass
class _Saving:
  """A checkpoint that waits for the workers' states."""

  header: dict[str, Any]
  protocol: np.ndarray
  payload: np.ndarray
  owing: set[str]
  states: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def _word(
  kind: str, payload: np.ndarray | None = None, **more: Any
) -> np.ndarray:
  """Returns a word of control to a worker."""
  return _envelope.pack({"kind": kind} | more, payload)


def _newest(
  plan: LivePlan,
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
  """Returns the newest checkpoint that is whole, if there is one."""
  if plan.checkpoints is None:
    return None
  paths = sorted(pathlib.Path(plan.checkpoints).glob("update_*.jdist"))
  for path in reversed(paths):
    try:
      data = np.frombuffer(path.read_bytes(), np.uint8)
      header, payload = _envelope.unpack(data)
    except (OSError, _envelope.MalformedError):
      continue
    if hashlib.sha256(payload.tobytes()).hexdigest() != header.get("hash"):
      continue
    parts, start = {}, 0
    for name, size in header["parts"]:
      parts[name] = payload[start : start + size]
      start += size
    return header, parts
  return None
