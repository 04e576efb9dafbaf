"""Shards of a server: each has a part of the parameters, one decides for all.

The coordinator runs the protocol and has no parameters.  A worker sends each
shard its part of a push, then notifies the coordinator, which has all shards
do the same in the same order: a version is that of every part.
"""

import collections
import concurrent.futures
import threading
from typing import Any

import numpy as np
import optax

from jdist.server import _messages
from jdist.server.gradients import (
  _division,
  _gradient_messages,
  _gradient_server,
  _learner,
  _merge,
)
from jdist.server.run import _run_marks
from jdist.server.runtime import _engine


class Shard:
  """A server of a part of the parameters, on the coordinator's commands."""

  def __init__(self, arguments: dict[str, Any]):
    self._learner = _gradient_server.GradientServer(**arguments)
    self._learner.prepare()
    self._lock, self._next = threading.Lock(), 0
    # Parameters by task, and the pulls that came before their task.
    self._ready: dict[int, Any] = {}
    self._waiting: dict[int, concurrent.futures.Future[_engine.Message]] = {}

  def do(self, *commands: tuple[str, tuple[Any, ...]]) -> Any:
    """Calls methods of the learner; returns what the last one does."""
    found = None
    with self._lock:
      for name, arguments in commands:
        found = getattr(self._learner, name)(*arguments)
        if name == "discard":
          self._ready.pop(arguments[0], None)
        elif name == "reply":
          task = arguments[0].task
          self._next = task + 1
          if found[1] is not None:
            self._ready[task] = found[1]
          if waiting := self._waiting.pop(task, None):
            waiting.set_result(self._part(task))
    return found

  def is_finite(self) -> bool:
    """Returns whether the part and its states are finite."""
    return _run_marks.is_finite(self._learner)

  def push(self, header: dict[str, Any], payload: np.ndarray) -> dict[str, Any]:
    """Takes a worker's part of a push."""
    task = header["task"]
    with self._lock:
      # One that is not out was taken back, and its push will be discarded.
      if task in self._learner.tasks:
        try:
          self._learner.push(task, header["more"], payload)
        except _learner.RefusedError as error:
          return {"wrong": error.reason}
    return {}

  def pull(
    self, worker: str, life: int
  ) -> "concurrent.futures.Future[_engine.Message]":
    """Returns the parameters of the task `life`, once it is given."""
    del worker
    future = concurrent.futures.Future[_engine.Message]()
    with self._lock:
      if life < self._next:
        future.set_result(self._part(life))
      else:
        self._waiting[life] = future
    return future

  def _part(self, task: int) -> _engine.Message:
    """Returns the parameters of a task, none if it was taken back."""
    found = self._ready.pop(task, None)
    payload = np.zeros(0, np.uint8)
    if found is not None:
      payload = _gradient_messages.bytes_of(found)
    return {"there": found is not None}, payload

  def stop(self) -> None:
    """Ends the pulls that wait."""
    for task, future in self._waiting.items():
      future.set_result(self._part(task))


class _Link:
  """The way from the coordinator to a shard, which keeps the order."""

  def __init__(self, channel: Any):
    self._channel = channel
    self._lost: Exception | None = None
    self._commands: collections.deque[Any] = collections.deque()
    self._thread = concurrent.futures.ThreadPoolExecutor(1)

  def tell(self, name: str, *arguments: Any) -> None:
    """Has a command done after those before, and does not wait for it."""
    if self._lost is not None:
      raise self._lost
    self._commands.append((name, arguments))
    self._thread.submit(self._flush)

  def _flush(self) -> None:
    # Commands that came while the shard answered are one message.
    commands = [self._commands.popleft() for _ in range(len(self._commands))]
    try:
      if commands and self._lost is None:
        self._channel.ask("do", *commands)
    except Exception as error:
      self._lost = error

  def ask(self, method: str, *arguments: Any) -> concurrent.futures.Future[Any]:
    """Returns a shard's answer, after the commands before it."""
    return self._thread.submit(self._channel.ask, method, *arguments)


class ShardedServer(_gradient_server.GradientServer):
  """The coordinator's learner: counts, and commands the shards."""

  # No parameters are here, and none of their messages.
  decoded = True

  def __init__(self, whole: Any, plan: Any):
    none = whole.part(0, 0, {}) | {"optimizer": optax.identity()}
    super().__init__(**none)
    self.shapes = whole.shapes
    found = _division.divide(whole, plan.shards)
    # Workers split and join messages by it.
    self.told: dict[str, Any] = {"whole": plan.record is not None}
    for name in ("push", "pull"):
      self.told[name] = [
        _division.places(codec, (whole.model.params, whole.model.model_state),
                         found)
        for codec in getattr(whole.plans, name)
      ]  # fmt: skip
    self._links = [_Link(plan.channel.shard(i + 1)) for i in range(plan.shards)]

  def prepare(self) -> None:
    """Does nothing: the shards compile."""

  def _tell(self, name: str, argument: Any) -> None:
    for link in self._links:
      link.tell(name, argument)

  def _ask(self, method: str, *arguments: Any) -> list[Any]:
    found = [link.ask(method, *arguments) for link in self._links]
    return [x.result() for x in found]

  def reply(self, reply: _messages.Reply) -> tuple[dict[str, Any], Any]:
    """Has the shards send parameters, of which it returns the size."""
    more, _ = super().reply(reply)
    if reply.pull_plan is not None:
      more["size"] = sum(x for _, x in self.told["pull"][reply.pull_plan])
    self._tell("reply", reply)
    return more, None

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Counts a push that the shards have taken."""
    if "wrong" in more:
      text = "A shard has refused its part of a push."
      raise _learner.RefusedError(str(more["wrong"]), text)
    super().push(task, more, _merge.Pushed(self.model.params, {}))

  def apply(self, update: _messages.Apply) -> None:
    """Has the shards make an update."""
    super().apply(update)
    self._tell("apply", update)

  def discard(self, task: int) -> None:
    """Drops a task, here and in the shards."""
    super().discard(task)
    self._tell("discard", task)

  def leave(self, worker: _messages.Worker) -> None:
    """Has the shards forget what a worker holds."""
    super().leave(worker)
    self._tell("leave", worker)

  @property
  def finite(self) -> bool:
    """Returns whether the parts and their states are finite."""
    return all(self._ask("is_finite"))

  def snapshot(self) -> np.ndarray:
    """Returns the bytes of all parameters and the batch statistics."""
    return np.concatenate(self._ask("do", ("snapshot", ())))

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns its own state and that of the shards."""
    found = [super().save(whole=whole), *self._ask("do", ("save", ()))]
    parts = [(notes, len(payload)) for notes, payload in found]
    return {"parts": parts}, np.concatenate([x for _, x in found])

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned, here and in the shards."""
    (own, at), *others = notes["parts"]
    super().load(own, payload[:at])
    for link, (own, size) in zip(self._links, others, strict=True):
      link.tell("load", own, payload[at : at + size])
      at += size


class ShardedChannel:
  """A worker's connections to the coordinator and to all shards.

  Args:
    channel: The connection to the coordinator.
    told: What its receipt says about parts of messages.
  """

  def __init__(self, channel: Any, told: dict[str, Any]):
    self._channel, self._told = channel, told
    num = told["push"][0][-1][0] + 1
    self._shards = [channel.shard(i + 1) for i in range(num)]
    self._threads = concurrent.futures.ThreadPoolExecutor(2 * num)

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    """Sends a push's parts to the shards, and then its notes; see `Channel`."""
    if header["kind"] != "push" or payload is None:
      return self._channel.push(header, payload)
    parts = _division.split(payload, self._told["push"][header["plan"]])
    calls = [
      self._threads.submit(shard.push, header, part)
      for shard, part in zip(self._shards, parts, strict=True)
    ]
    more = dict(header["more"])
    for call in calls:
      more |= call.result()
    # A recording has whole messages, which one server can replay.
    whole = payload if self._told["whole"] else None
    header = header | {"more": more, "size": len(payload)}
    return self._channel.push(header, whole)

  def pull(self, worker: str, life: int) -> _engine.Message:
    """Returns the next message, a task's with all parts; see `Channel`."""
    while True:
      header, payload = self._channel.pull(worker, life)
      if header["kind"] != "task" or header["pull_plan"] is None:
        return header, payload
      calls = [
        self._threads.submit(shard.pull, worker, header["task"])
        for shard in self._shards
      ]
      found = [call.result() for call in calls]
      # A task may be taken back while its message is on the way.
      if all(head["there"] for head, _ in found):
        where = self._told["pull"][header["pull_plan"]]
        return header, _division.join([part for _, part in found], where)
