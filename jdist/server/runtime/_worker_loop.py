"""A worker's loop: pulls tasks, computes them in order, pushes the results.

Three threads: one waits for messages, one computes, one sends.  So the next
task may be on its way while a push travels.
"""

import contextlib
import dataclasses
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jdist import channel, cluster
from jdist.server.gradients import _gradient_messages, _learner
from jdist.server.runtime import _engine, _mailboxes, _server_shards

# Time between two attempts to reach a server that does not answer.
_AGAIN_S = 0.25
# Server and workers must have these in common.
versions = channel.package_versions


@dataclasses.dataclass(frozen=True)
class Pace:
  """Lengthens each task to the time that it takes on a modelled machine.

  A worker sleeps after it has computed until the modelled time has passed, so
  that equal machines show the speeds of a cluster's file.  Where computing
  itself takes longer, the excess is reported (`over_s`).

  Attributes:
    node: The machine, with its jitter and slow-downs.
    profile: The costs of a task at speed 1.
    seed: Seed of the jitter, which has the same draws as on the virtual clock.
  """

  node: cluster.Node
  profile: cluster.Profile
  seed: int = 0


class WorkerLoop:
  """Runs the worker loop until the server sends a stop message.

  Args:
    channel: The connection to the server.
    name: The worker's name.
    learner: The worker's learner, which has been prepared.
    depth: Number of tasks that it may have at once, `Protocol.depth`.
    pace: The modelled machine whose time tasks take; None computes at full
      speed.
    patience_s: Seconds to wait for a server that does not answer.
  """

  def __init__(
    self,
    channel: _engine.Channel,
    name: str,
    learner: _learner.WorkerLearner,
    *,
    depth: int,
    pace: Pace | None = None,
    patience_s: float = 120.0,
  ):
    self._channel, self._name, self._learner = channel, name, learner
    self._depth, self._pace, self._patience_s = depth, pace, patience_s
    self._random = None
    if pace is not None:
      # The virtual clock seeds its machines with the same text.
      self._random = random.Random(f"{pace.seed} {name}")
    self._fresh = True

  def run(self) -> None:
    """Runs until a stop message.

    Raises:
      LostServerError: If the server does not answer for `patience_s`.
      ValueError: If the server refuses this worker.
      Exception: Whatever the learner or the connection raises.
    """
    while True:
      receipt = self._hello()
      channel = self._channel
      if "shards" in receipt:
        channel = _server_shards.ShardedChannel(channel, receipt["shards"])
      session = _Session(channel, self._name, receipt, self._depth)
      # A restarted server gives a saved state to new processes only: this one
      # has a newer state than its checkpoint.
      self._fresh = False
      self._learner.restart()
      try:
        if self._work(session):
          return
      finally:
        session.close()

  def _hello(self) -> dict[str, Any]:
    until = time.monotonic() + self._patience_s
    header = {
      "kind": "hello",
      "worker": self._name,
      "versions": versions(),
      "shapes": getattr(self._learner, "shapes", None),
      "fresh": self._fresh,
    }
    while True:
      try:
        receipt = self._channel.push(header)
      except _engine.LostServerError:
        if time.monotonic() > until:
          raise
        time.sleep(_AGAIN_S)
        continue
      if "refused" in receipt:
        raise ValueError(receipt["refused"])
      return receipt

  def _work(self, session: "_Session") -> bool:
    """Does the tasks of a session; returns whether the server said stop."""
    while True:
      header, payload, arrived_s = session.inbox.get()
      kind = header["kind"]
      if kind in ("stop", "lost"):
        return kind == "stop"
      if kind == "failed":
        raise header["error"]
      if kind == "load":
        self._learner.load(header["notes"], payload)
      elif kind == "save":
        notes, state = self._learner.save()
        session.send("state", {"notes": notes}, state)
      elif kind == "rejoin":
        self._learner.restart()
      # A task of an earlier generation was taken back while it was on its way.
      elif header["generation"] == session.generation:
        self._do(session, header, payload, arrived_s)

  def _do(
    self,
    session: "_Session",
    header: dict[str, Any],
    payload: np.ndarray,
    arrived_s: float,
  ) -> None:
    start_s = time.monotonic()
    self._learner.receive(header, payload)
    more, found = self._learner.compute(header)
    out, more = _gradient_messages.sendable(found, more)
    over_s = self._wait(header, arrived_s, start_s)
    push = {
      "task": header["task"],
      "plan": header["push_plan"],
      "samples": header["samples"],
      "compute_s": time.monotonic() - start_s,
      "waited_s": start_s - arrived_s,
      "over_s": over_s,
      "more": more,
      # Peers fetch it, too, if workers merge.
      "shared": header.get("merges") is not None,
    }
    session.send("push", push, out)

  def _wait(
    self, header: dict[str, Any], arrived_s: float, start_s: float
  ) -> float:
    """Waits for the modelled end; returns the seconds by which it was late."""
    if self._pace is None or self._random is None:
      return 0.0
    node, profile = self._pace.node, self._pace.profile
    work_s = profile.compute_s(header["samples"], header["passes"])
    # As `Simulation` models a task, so that paced runs and the clock compare.
    encoded = (header["push_plan"] > 0) + ((header["pull_plan"] or 0) > 0)
    work_s += encoded * profile.seconds_per_encoding
    work_s *= node.draw(self._random)
    now_s = header["now_s"] + start_s - arrived_s
    left = start_s + node.end_s(now_s, work_s) - now_s - time.monotonic()
    if left <= 0:
      return -left
    time.sleep(left)
    return 0.0


class _Session:
  """The threads that pull and push, from a hello until the server is lost."""

  def __init__(
    self,
    channel: _engine.Channel,
    name: str,
    receipt: dict[str, Any],
    depth: int,
  ):
    self._channel, self._name = channel, name
    self._life = receipt["life"]
    self.generation: int | None = None
    # Received tasks and control messages.
    # Bounded: the protocol gives no more tasks than `depth` at once.
    self.inbox: queue.Queue[Any] = queue.Queue(depth + 8)
    self._outbox: queue.Queue[_engine.Message | None] = queue.Queue(depth)
    self._closed = threading.Event()
    for target in (self._pull, self._push):
      threading.Thread(
        target=self._guarded, args=(target,), daemon=True
      ).start()

  def send(
    self, kind: str, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> None:
    """Queues a message for the sender; waits while its queue is full."""
    header = {"worker": self._name, "life": self._life} | header
    message = _mailboxes.word(kind, payload, **header)
    # With a timeout: the sender may have lost the server and ended.
    while not self._closed.is_set():
      with contextlib.suppress(queue.Full):
        self._outbox.put(message, timeout=0.5)
        return

  def close(self) -> None:
    """Ends the threads after their present calls."""
    self._closed.set()
    with contextlib.suppress(queue.Full):
      self._outbox.put_nowait(None)

  def _guarded(self, target: Callable[[], None]) -> None:
    try:
      target()
    except _engine.LostServerError:
      self._tell("lost")
    # Without its thread a worker would wait for ever.
    except Exception as error:
      self._tell("failed", error=error)

  def _tell(self, kind: str, **more: Any) -> None:
    if not self._closed.is_set():
      self._closed.set()
      with contextlib.suppress(queue.Full):
        self.inbox.put((*_mailboxes.word(kind, **more), 0.0), timeout=5.0)

  def _pull(self) -> None:
    while not self._closed.is_set():
      header, payload = self._channel.pull(self._name, self._life)
      if header["kind"] == "rejoin":
        self.generation = header["generation"]
        # At once, not behind the computation: the server can then give new
        # tasks while the old one, whose push it will discard, is completed.
        join = {"kind": "join", "worker": self._name, "life": self._life}
        self._channel.push(join)
      elif self.generation is None and "generation" in header:
        self.generation = header["generation"]
      self.inbox.put((header, payload, time.monotonic()))
      if header["kind"] == "stop":
        return

  def _push(self) -> None:
    while not self._closed.is_set():
      message = self._outbox.get()
      if message is None:
        return
      receipt = self._channel.push(*message)
      if "refused" in receipt:
        # The server knows another process of this name by now. A new hello
        # finds out whether it still wants this one.
        self._tell("lost")
        return
