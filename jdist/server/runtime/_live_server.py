"""The server of real workers: messages in, messages out, a thread between."""

import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from typing import Any

import numpy as np

from jdist import checks, signatures
from jdist.server import _protocol
from jdist.server.gradients import _division, _gradient_server, _learner
from jdist.server.run import _run_marks
from jdist.server.runtime import (
  _engine,
  _mailboxes,
  _server_core,
  _server_shards,
)

_log = logging.getLogger(__name__)
# A requested checkpoint is written within this time.
_SAVE_S = 15.0
# Messages that a worker may send after its hello; others are the engine's.
_FROM_WORKERS = ("push", "join", "state")


@signatures.checked
class LiveServer:
  """Runs a protocol for workers in other processes, in wall seconds.

  One thread hands messages to the protocol, one after the other; an engine's
  threads deliver and collect them.  Modelled links are the virtual clock's
  `cluster.Network`, on a clock that follows the wall's: a message is handed
  over when its links have carried its bytes, or when it is really received, if
  that is later.  Timers are on the same clock.

  A worker that is lost, or hangs longer than the protocol's `timeout_s`,
  leaves.  What it had computed and not sent is lost, with the residual of its
  feedback, and its samples are not taken again (`lost_samples`).  After a
  return it is sent exact parameters.  A push that the learner refuses is
  counted and takes its worker's tasks from it; after three refusals in a row
  the worker is stopped.

  A checkpoint is made at each mark: the protocol's state, the learner's arrays
  and positions, and the state of each worker a few tasks later.  A server that
  begins in a directory with checkpoints resumes from the newest one, without
  the updates since then and the tasks that were out.

  Raises:
    training.OtherRunError: If a checkpoint belongs to another run.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    learner: _learner.ServerLearner,
    plan: _run_marks.LivePlan,
  ):
    self.plan = plan
    if plan.shards > 1:
      if not isinstance(learner, _gradient_server.GradientServer):
        raise ValueError(
          "`shards` must be 1 unless the learner is a `server.GradientServer`, "
          f"got {plan.shards} for {checks.show(learner)}."
        )
      if plan.shard:
        parts = _division.divide(learner, plan.shards)
        self.shard = _server_shards.Shard(parts[plan.shard - 1])
        return
      learner = _server_shards.ShardedServer(learner, plan)
    self._core = _server_core.ServerCore(protocol, learner, plan)
    # Lives begin at the time of day, so that those of a restarted server are
    # later than all that it gave before.
    self._lives, self._lock = time.time_ns() // 1000, threading.Lock()
    # Enough for all tasks, pulls and control messages at once: an engine's
    # thread that waits here would hold up its other workers.
    bound = 2 * (protocol.depth + 2) * len(plan.workers) + 16
    self._inbox: queue.Queue[_server_core.Item] = queue.Queue(bound)
    self._busy_s = 0.0
    self._error: str | None = None
    self._lost: _engine.LostServerError | None = None
    self._stopping = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="jdist-server", daemon=True
    )
    self._thread.start()

  # What an engine calls, from any thread.

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    """Takes a worker's message and returns a receipt."""
    kind, worker = header.get("kind"), header.get("worker")
    if worker not in self._core.boxes:
      return {"refused": f"There is no worker {worker!r} in this run."}
    if kind == "hello":
      wanted, found = self.plan.versions, header.get("versions", {})
      if header.get("shapes"):  # A learner of a user's own may say none.
        wanted = wanted | getattr(self._core.learner, "shapes", {})
        found = found | header["shapes"]
      for name, own in wanted.items():
        if found.get(name) != own:
          refused = (
            f"Worker {worker!r} has {name} {found.get(name)}, and the server "
            f"{own}: take the same on every node."
          )
          # A worker that joins later does not end the run of the others.
          self._error = self._error if self._core.began else refused
          return {"refused": refused}
      with self._lock:
        self._lives += 1
        # Set here, not in the server's thread: the worker's next message may
        # be read before its hello has been handled.
        life = self._core.boxes[worker].life = self._lives
      header = header | {"life": life}
      self._put(kind, worker, header, payload)
      receipt = {"life": life, "now_s": self._core.wall_s}
      told = getattr(self._core.learner, "told", None)
      return receipt if told is None else receipt | {"shards": told}
    # A process that was replaced may push once more, after its successor.
    if header.get("life") != self._core.boxes[worker].life:
      return {"refused": "stale"}
    if kind not in _FROM_WORKERS:
      return {"refused": f"A worker sends {_FROM_WORKERS}, got {kind!r:.80}."}
    self._put(kind, worker, header, payload)
    return {}

  def pull(
    self, worker: str, life: int
  ) -> "concurrent.futures.Future[_engine.Message]":
    """Returns the next message to a worker, as soon as there is one."""
    future = concurrent.futures.Future[_engine.Message]()
    self._put("pull", worker, {"future": future, "life": life})
    return future

  def message(self, task: int) -> np.ndarray:
    """Returns the message of a push, for a worker whose peer has none."""
    found = self._core.messages.get(task)
    if found is None:
      raise _engine.LostServerError(f"Task {task} is merged and forgotten.")
    return found

  def lost(self, worker: str) -> None:
    """Marks a worker's process as lost."""
    box = self._core.boxes[worker]
    with self._lock:
      # At once, so that nothing of the lost process is taken from here on.
      box.life, box.here = 0, False
    self._put("lost", worker)

  def start(self) -> None:
    """Starts the run with the workers that have said hello."""
    self._put("start")

  def save(self) -> int:
    """Makes a checkpoint, and returns its update; -1 if none was made."""
    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    self._put("save", header={"done": done})
    return done.result(timeout=_SAVE_S)

  def finish(self) -> None:
    """Ends the run before its last mark, and stops the workers."""
    self._put("finish")

  def stop(self) -> None:
    """Ends the run and the thread, and stops the workers."""
    self.finish()
    self._stopping.set()
    self._thread.join(timeout=10.0)

  def status(self) -> dict[str, Any]:
    """Returns the progress of the run, in a form that JSON can hold."""
    core = self._core
    if self._lost is not None:
      raise self._lost
    found, delivery = core.marks.checkpoints.found, core.delivery
    state = None if delivery is None else delivery.state
    return {
      "now_s": core.wall_s,
      "here": [name for name, box in core.boxes.items() if box.here],
      "pushed": [name for name, box in core.boxes.items() if box.pushed],
      "finished": core.finished,
      "expelled": [x for x in core.boxes if delivery and delivery.expelled(x)],
      "records": len(core.marks.records),
      "error": self._error,
      "resumed": None if found is None else found[0]["updates"],
      "updates": 0 if state is None else state.version,
      "samples": 0 if delivery is None else delivery.applied_samples,
      "members": 0 if state is None else len(state.members),
    }

  def record_of(self, number: int) -> tuple[_run_marks.Mark, np.ndarray]:
    """Returns the figures of a mark, and the learner's snapshot there."""
    core = self._core
    snapshot = core.marks.snapshots.pop(number, np.zeros(0, np.uint8))
    return core.marks.records[number], snapshot

  def final(self) -> tuple[dict[str, Any], np.ndarray]:
    """Returns statistics of the run, and all arrays of the learner."""
    _, payload = self._core.learner.save()
    return self.summary(), payload

  def summary(self) -> dict[str, Any]:
    """Returns statistics of the run, as `Simulation.summary` does."""
    core = self._core
    assert core.delivery is not None
    found, wall_s = core.delivery.summary(), core.ended_s
    busy_s = sum(x.compute_s for x in core.delivery.nodes.values())
    whole_s = max(len(core.boxes) * wall_s, 1e-9)
    return found | {
      "wall_s": wall_s,
      "samples_per_s": found["samples"] / max(wall_s, 1e-9),
      "utilisation": min(1.0, busy_s / whole_s),
      "pulled_bytes": core.marks.pulled_bytes,
      "pushed_bytes": core.marks.pushed_bytes,
      "server_busy_s": self._busy_s,
      "over_s": dict(core.over_s),
    }

  # The server's thread.

  def _put(
    self,
    kind: str,
    worker: str = "",
    header: dict[str, Any] | None = None,
    payload: np.ndarray | None = None,
  ) -> None:
    header = header or {}
    if self._stopping.is_set():
      if kind == "pull":
        header["future"].set_result(_mailboxes.word("stop"))
      return
    payload = np.zeros(0, np.uint8) if payload is None else payload
    self._inbox.put(
      _server_core.Item(time.monotonic(), kind, worker, header, payload)
    )
    if self._stopping.is_set():  # Perhaps after the thread's last look.
      self._answer_pulls()

  def _answer_pulls(self) -> None:
    """Stops the workers whose pulls the thread has not taken."""
    with contextlib.suppress(queue.Empty):
      while True:
        item = self._inbox.get_nowait()
        if item.kind == "pull":
          item.header["future"].set_result(_mailboxes.word("stop"))

  def _run(self) -> None:
    try:
      while not self._stopping.is_set():
        self._step()
    except _learner.RefusedError as error:
      self._error = str(error)
    except _engine.LostServerError as error:
      # A shard is lost.  The workers wait for the servers to begin again.
      self._lost = error
      return
    except Exception as error:
      _log.exception("The server has failed.")
      self._error = f"The server has failed: {type(error).__name__}: {error}"
    self._stopping.set()
    self._answer_pulls()
    self._core.close()

  def _step(self) -> None:
    core, item = self._core, None
    with contextlib.suppress(queue.Empty):
      item = self._inbox.get(timeout=min(core.wait_s, 0.1))
    began = time.monotonic()
    core.advance(began if item is None else item.at_s)
    if item is not None:
      core.handle(item)
    self._busy_s += time.monotonic() - began
