"""The part of a live server that its thread runs: the protocol's side."""

import collections
import concurrent.futures
import math
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jdist.server import _driver, _links, _messages, _protocol
from jdist.server.gradients import _learner
from jdist.server.run import _run_marks
from jdist.server.runtime import (
  _delivery,
  _live_marks,
  _mailboxes,
  _message_record,
)

# A checkpoint waits this long for the states of workers.
_SAVE_S = 5.0


class Item(NamedTuple):
  """A message in the inbox, of a worker or of the engine."""

  at_s: float  # Of its receipt, on the monotonic clock.
  kind: str
  worker: str
  header: dict[str, Any]
  payload: np.ndarray


class ServerCore:
  """Hands messages to the protocol and carries out its actions, in one thread.

  Its arguments and errors are those of `LiveServer`.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    learner: _learner.ServerLearner,
    plan: _run_marks.LivePlan,
  ):
    self.learner = learner
    self._protocol, self._plan = protocol, plan
    self.marks = _live_marks.LiveMarks(learner, plan)
    # A resumed run continues its clock.
    self.first_s = self.marks.checkpoints.first_s
    self._began_s: float | None = None
    self._environment = _driver.environment(self.first_s)
    self._links: _links.Links | None = None
    if plan.machines is not None and plan.machines.topology is not None:
      self._links = _links.Links(self._environment, plan.machines)
    self.boxes = {name: _mailboxes.Mailbox() for name in plan.workers}
    # The driver of protocol and learner, once the run has begun.
    self.delivery: _delivery.Delivery | None = None
    # Seconds by which computing took longer than modelled, by worker.
    self.over_s: collections.Counter[str] = collections.Counter()
    self.finished, self.ended_s = False, 0.0
    self._recorder: _message_record.Recorder | None = None
    # Tasks to be sent, each with the generation of its worker's mailbox.
    self._outbox = collections.deque[tuple[_delivery.SentTask, int]]()
    self._sending = False
    # If workers merge: the last messages, and what engines fetch them by.
    self.messages: dict[int, np.ndarray] = getattr(learner, "messages", {})
    self._handles: dict[int, Any] = {}
    if hasattr(learner, "prepare"):
      learner.prepare()
    if self.marks.checkpoints.found is not None:
      self.delivery = self._new_delivery([])
      self.marks.load(self.delivery)
      if self.marks.all_reached:
        # The run was killed after its last mark: nothing is left to train.
        self.finished, self.ended_s = True, self.first_s
    elif plan.record is not None:  # Refused before a worker is started.
      self._recorder = _message_record.Recorder(plan.record)

  # The clock: SimPy's, which follows the wall's.

  @property
  def began(self) -> bool:
    """Whether the run, and with it the clock, has begun."""
    return self._began_s is not None

  @property
  def wall_s(self) -> float:
    """Wall seconds since the start, of a resumed run from its mark on."""
    return self._at_s(time.monotonic())

  @property
  def now_s(self) -> float:
    """The time up to which all timers and links have been served."""
    return float(self._environment.now)

  @property
  def wait_s(self) -> float:
    """Seconds until a timer or a link is due."""
    return max(self._environment.peek() - self.wall_s, 0.0)

  def _at_s(self, monotonic_s: float) -> float:
    if self._began_s is None:
      return self.first_s
    return self.first_s + monotonic_s - self._began_s

  def advance(self, monotonic_s: float) -> None:
    """Serves all timers and links that were due by then.

    Step by step, as serving one may advance further: SimPy's `run(until=...)`
    within another leaves events behind that stop all later ones.
    """
    now_s, environment = self._at_s(monotonic_s), self._environment
    if now_s > environment.now:
      environment.timeout(now_s - environment.now)
      while environment.peek() <= now_s:
        environment.step()

  def _after(
    self, seconds: float, function: Callable[..., Any], *arguments: Any
  ) -> None:
    timeout = self._environment.timeout(max(seconds, 0.0))
    timeout.callbacks.append(lambda _: function(*arguments))

  # Messages.

  def handle(self, item: Item) -> None:
    """Handles a message by its kind."""
    getattr(self, f"_on_{item.kind}")(item)

  def _on_start(self, item: Item) -> None:
    del item
    # The engine may ask again after it has lost sight of the server.
    if self.began:
      return
    here = [name for name, box in self.boxes.items() if box.here]
    resumed = self.delivery is not None
    if self.delivery is None:
      self.delivery = self._new_delivery(here)
      if self._recorder is not None:
        self._recorder.begin(self._plan.workers, here)
    self._began_s = time.monotonic()
    if resumed:
      for worker in list(self.delivery.state.members):
        # Its tasks were lost with the server that gave them.
        self.delivery.deliver(_messages.Leave(worker), self.first_s)
        self.delivery.take_sent()
    if self._plan.unit == "seconds":
      for mark in self.marks.left:
        self._after(mark - self.first_s, self._look_at_marks)
    # All join before the first pull, which would open a round without the rest.
    for name in here if resumed else ():
      self._deliver(_messages.Join(name))
    for name in here:
      self._deliver(_messages.Pull(name))

  def _new_delivery(self, here: list[str]) -> _delivery.Delivery:
    names = self._plan.workers
    return _delivery.Delivery(self._protocol, self.learner, names, here)

  def _on_finish(self, item: Item) -> None:
    del item
    if self.began and not self.finished:
      self._add_record("it was finished")
    self._finish()

  def _on_hello(self, item: Item) -> None:
    box = self.boxes[item.worker]
    box.empty()
    if self._links is not None:
      self._links.connect(item.worker)
    box.here, box.pushed = True, False
    if self.delivery is not None:
      self.delivery.pardon(item.worker)
    # Tasks that are still on their way to the process before are dropped.
    box.generation += 1
    state = self.marks.checkpoints.states.pop(item.worker, None)
    if state is not None and item.header.get("fresh"):
      box.put(_mailboxes.word("load", state, notes={}))
    if self.finished:
      box.put(_mailboxes.word("stop"))
    elif self.began:
      self._on_join(item)

  def _on_join(self, item: Item) -> None:
    if not self.finished:
      self._deliver(_messages.Join(item.worker))
      self._deliver(_messages.Pull(item.worker))

  def _on_lost(self, item: Item) -> None:
    self.boxes[item.worker].empty()
    if self.began and not self.finished:
      self._deliver(_messages.Leave(item.worker))

  def _on_pull(self, item: Item) -> None:
    box = self.boxes[item.worker]
    box.pull(item.header["life"], item.header["future"])

  def _on_state(self, item: Item) -> None:
    self.marks.checkpoints.add_state(item.worker, item.payload)

  def _on_save(self, item: Item) -> None:
    done = item.header["done"]
    if self.began and not self.finished and self.marks.may_save():
      self._begin_checkpoint(done)
    else:
      done.set_result(-1)

  def _on_push(self, item: Item) -> None:
    """Takes a push once modelled links, if there are any, have carried it."""
    # Its parts may have gone to shards.
    size = item.header.get("size", len(item.payload))
    self.marks.pushed_bytes += size
    if self._links is None:
      self._take(item)
    else:
      self._links.send("push", item.worker, size, self._take, item)

  def _take(self, item: Item) -> None:
    box, header = self.boxes[item.worker], item.header
    # Links may have carried the push while its worker was lost.
    if self.finished or header["life"] != box.life:
      return
    assert self.delivery is not None
    box.pushed = True
    try:
      push = self._push_of(item)
      accepted = self.delivery.accept(push, header["more"], item.payload)
    except _learner.RefusedError as error:
      self.delivery.refuse(item.worker, -1, error)
      accepted = False
    if not accepted:
      box.here = not self.delivery.expelled(item.worker)
      self._deliver(_messages.Leave(item.worker))
      if not box.here:
        box.put(_mailboxes.word("stop"))
      if self.delivery.all_expelled and not self.finished:
        self._add_record("all workers were expelled")
        self._finish()
      return
    self.over_s[item.worker] += header.get("over_s", 0.0)
    if self.messages:
      self._handles[push.task] = header.get("handle", item.payload)
      self._handles = {task: self._handles[task] for task in self.messages}
    if push.task in self.delivery.state.tasks:
      self.delivery.nodes[item.worker].compute_s += push.compute_s
    self._deliver(push, header["more"], item.payload)
    if item.worker in self.delivery.state.members:
      self._deliver(_messages.Pull(item.worker))

  def _push_of(self, item: Item) -> _messages.Push:
    """Returns the push that a worker has sent, or refuses its header."""
    header, payload = item.header, item.payload
    try:
      kinds = isinstance(header["more"], dict), isinstance(payload, np.ndarray)
      number, samples = map(operator.index, (header["task"], header["samples"]))
      times = [float(header[x]) for x in ("compute_s", "waited_s")]
      known = all(0 <= x < math.inf for x in (*times, header.get("over_s", 0)))
      task = self.delivery and self.delivery.state.tasks.get(number)
      # More than it was given would outweigh the others in a mean.
      most = task.samples if task else samples
      if not (all(kinds) and known and 1 <= samples <= most):
        raise ValueError
      return _messages.Push(item.worker, number, samples, *times)
    except (KeyError, TypeError, ValueError):
      raise _learner.RefusedError(
        "header",
        "A push must say its task, samples and times, at most the samples of "
        f"its task, got {header}.",
      ) from None

  def _deliver(
    self,
    message: _messages.Message,
    more: dict[str, Any] | None = None,
    payload: np.ndarray | None = None,
  ) -> None:
    """Hands a message to the protocol, and sends the tasks that it gives."""
    delivery = self.delivery
    assert delivery is not None
    if self.finished:
      return
    now = self.now_s
    before = set(delivery.state.members)
    # Recorded before it is handed over, as a replay has to see it.
    if self._recorder is not None:
      self._recorder.message(now, message, more, payload)
    delivery.deliver(message, now)
    sent, timers = delivery.take_sent()
    # A worker that has joined has no old tasks in its mailbox.
    if not isinstance(message, _messages.Join):
      for worker in before - set(delivery.state.members):
        self.boxes[str(worker)].take_tasks()
    for each in sent:
      if self._recorder is not None and "size" not in each.more:
        self._recorder.sent(each.reply.task, each.payload)
      # Of now: a later message may take the task back before it is sent.
      generation = self.boxes[str(each.reply.worker)].generation
      self._outbox.append((each, generation))
    for timer in timers:
      expired = _messages.Expired(timer.task)
      self._after(timer.after_s, self._deliver, expired)
    self._send_tasks()
    self._look_at_marks()

  def _send_tasks(self) -> None:
    """Sends tasks in the order in which the protocol gave them.

    Sending moves the clock on, by which further messages may be delivered:
    their tasks must wait until those before them have been sent.
    """
    if self._sending:
      return
    self._sending = True
    try:
      while self._outbox:
        self._send(*self._outbox.popleft())
    finally:
      self._sending = False

  def _send(self, sent: _delivery.SentTask, generation: int) -> None:
    name = str(sent.reply.worker)
    box = self.boxes[name]
    header = sent.reply._asdict() | {"generation": generation}
    header |= {"more": sent.more, "now_s": self.wall_s}
    size = 0 if sent.payload is None else len(sent.payload)
    size, parts = sent.more.get("size", size), None
    # A learner of its own kind may send payloads all the same.
    if sent.reply.merges and self.messages:
      tasks = [task for merge in sent.reply.merges for task in merge.tasks]
      peers = [str(x) for merge in sent.reply.merges for x in merge.workers]
      header["messages"] = [self._handles[task] for task in tasks]
      sizes = [len(self.messages[task]) for task in tasks]
      parts = [x for x in zip(peers, sizes, strict=True) if x[0] != name]
      size = sum(part for _, part in parts)
    message = _mailboxes.word("task", sent.payload, **header)
    self.marks.pulled_bytes += size
    if self._links is None:
      self._arrive(box, generation, message)
      return
    # The transfer starts now, not when the message that caused it was sent.
    self.advance(time.monotonic())
    self._links.send(
      "pull", name, size or None, self._arrive, box, generation, message,
      parts=parts,
    )  # fmt: skip

  def _arrive(
    self, box: _mailboxes.Mailbox, generation: int, message: Any
  ) -> None:
    if box.generation == generation:
      box.put(message)

  # Marks, the end, checkpoints.

  def _look_at_marks(self) -> None:
    assert self.delivery is not None
    if self.finished:
      return
    while self.marks.is_due(self.delivery, self.now_s):
      self._add_record()
    if self.marks.all_reached:
      self._finish()

  def _add_record(self, ended: str | None = None) -> None:
    assert self.delivery is not None
    if self.marks.add(self.delivery, self.now_s, ended):
      self._begin_checkpoint()

  def _finish(self) -> None:
    if not self.finished:
      self.ended_s = self.now_s
      self.finished = True
      self.marks.checkpoints.write()
      self.close()

  def close(self) -> None:
    """Stops all workers."""
    for box in self.boxes.values():
      box.put(_mailboxes.word("stop"))

  def _begin_checkpoint(
    self, done: concurrent.futures.Future[int] | None = None
  ) -> None:
    assert self.delivery is not None
    # Workers save between two tasks. Their states are a few tasks later than
    # the server's, which a resumed run tolerates: it begins with exact pulls.
    members = map(str, self.delivery.state.members)
    owing = {name for name in members if self.boxes[name].here}
    give_up = self.marks.begin_checkpoint(
      self.delivery, self.now_s, owing, done
    )
    for name in owing:
      self.boxes[name].put(_mailboxes.word("save"))
    self._after(_SAVE_S, give_up)
