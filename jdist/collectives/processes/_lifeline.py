"""Connections by which the processes of a run agree, and notice their ends.

JAX notices a dead process by missing heartbeats, after minutes.  If that is
process 0, whose service coordinates the others, its runtime aborts them with a
C++ stack trace.  Here every process keeps one idle connection to process 0.
The kernel closes it when the process ends, for any reason; each of the others
then prints one line that names the lost process, and exits.

    process 1 -- lifeline ------------------> port of the coordinator (hub)
    process 1 -- relay of its own -- bytes -> the same port -> JAX's service

JAX's own connections pass through the same port, authenticated like all, and
through a relay within each process, so that JAX's runtime sees none of them
close.  Its service and the relays listen at sockets in a directory of the
user's own, and at no port.
"""

import atexit
import contextlib
import errno
import os
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from jdist import channel
from jdist.collectives.processes import _stop_agreement

# EX_TEMPFAIL, as the watchdog's: the run can be started again, and resumes.
EXIT_STATUS = 75
# The time in which the other processes may exit with a status of their own:
# usually all of them have met the same error.
_GRACE_S = 8.0
# The time in which a lost process is noticed after a collective has failed.
_VERDICT_S = 5.0


class Lifeline:
  """The connections of one process, served by threads of their own."""

  def __init__(self, address: str, num_processes: int, process_id: int):
    """Prepares the connections to `host:port` of process 0 for `join`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
      raise ValueError(
        f"`coordinator_address` must be host:port, got {address!r}."
      )
    self._address = host.strip("[]"), int(port)
    self._num, self._id = num_processes, process_id
    self._key = channel.identity().key("lifeline")
    # In process 0, the hub: the others' connections and names.
    self._members: dict[int, channel.Connection] = {}
    self._names = {0: f"process 0 ({host})" if process_id else _own_name(0)}
    self._hub: channel.Connection | None = None
    self._goodbyes: set[int] = set()
    self._leaving = False
    # Facts that the others have said, by the number of the agreement and of the
    # process, and in the others the hub's answers.
    self._said: dict[int, dict[int, dict[str, Any]]] = {}
    self._answers: dict[int, dict[str, Any]] = {}
    self._agreements = 0
    self._changed = threading.Condition()
    self._agreement = _stop_agreement.StopAgreement(
      num_processes, process_id, self._send
    )
    # The launcher removes its directory even if this process is killed.
    parent = os.environ.get(channel.RUN_DIRECTORY) or tempfile.gettempdir()
    # A socket's path has at most 104 letters.
    parent = parent if len(parent) < 70 else "/tmp"
    self._folder = tempfile.mkdtemp(prefix="jdist-", dir=parent)
    atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
    self._service = f"{self._folder}/service"

  def join(
    self, timeout_s: float, facts: Mapping[str, Any] | None = None
  ) -> tuple[str, str | None]:
    """Connects to all other processes, and compares facts with them.

    It returns the addresses for JAX: that of its service, and in process 0 the
    one at which its service listens.  Errors are those of `start_processes`.
    """
    if self._id == 0:
      self._listener = channel.Listener(self._listen(), self._key, self._admit)
    else:
      self._connect(timeout_s)
    said = {"`num_processes`": self._num, **(facts or {})}
    self.agree("the start", said, timeout_s)
    atexit.register(self.leave, 0)
    service = f"unix:{self._service}"
    return service, service if self._id == 0 else None

  def agree(
    self, subject: str, facts: Mapping[str, Any], timeout_s: float
  ) -> None:
    """Waits until all processes call this, as `collectives.agree` explains."""
    number, self._agreements = self._agreements, self._agreements + 1
    if self._id:
      assert self._hub is not None
      self._hub.send({"agree": number, "facts": dict(facts)})
      with self._changed:
        # Process 0 gives up first, and says who is missing.
        self._changed.wait_for(lambda: number in self._answers, timeout_s + 10)
        answer = self._answers.pop(
          number, {"error": f"process 0 did not come to {subject}."}
        )
    else:
      answer = self._compare(number, subject, dict(facts), timeout_s)
      self._send({"agreed": number, "run": channel.run_id(), **answer})
    if error := answer.get("error"):
      # All processes end now, each by this error, and none is lost.
      self._leaving = True
      raise (ValueError if answer.get("wrong") else TimeoutError)(error)
    if self._id:
      channel.adopt(answer["run"])

  def await_verdict(self) -> None:
    """Waits until this process is ended, if another one has died."""
    # A collective fails before the lifeline knows which process was lost.
    threading.Event().wait(_VERDICT_S)

  def leave(self, status: int, reason: str = "") -> None:
    """Announces that this process exits; after an error the others exit, too.

    After status 1, an unexpected error, they exit at once.
    """
    if not self._leaving:
      self._leaving = True
      self._send({"goodbye": self._id, "status": status, "reason": reason})
    shutil.rmtree(self._folder, ignore_errors=True)

  def stops_after(self, step: int, wanted: bool) -> bool:
    """Returns whether all processes stop after this step.

    Once one of them wants to stop, each reports the last step for which it has
    asked, and waits until all know the highest.  They stop one step later.
    Every process asks for each step, in order.
    """
    if wanted:
      self._agreement.want()
    return self._agreement.stops_after(step)

  # Methods of process 0.

  def _listen(self) -> socket.socket:
    host, port = self._address
    try:
      return channel.listen(_bound(host), port)
    except OSError as error:
      reason = os.strerror(error.errno or 0).lower()
      told = (
        f"`coordinator_address` must be a port of this machine that is free, "
        f"but {host}:{port} cannot be listened at: {reason}. "
      )
      if error.errno == errno.EADDRINUSE:
        raise OSError(
          f"{told}Wait until the program there has ended, or take another port."
        ) from error
      raise ValueError(f"{told}Give an address of this machine.") from None

  def _admit(self, hello: Any, connection: channel.Connection) -> None:
    """Serves another process, or its relay, until it ends."""
    if "relay" in hello:
      with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as to:
        to.connect(self._service)
        _relay(connection.socket, to)
      connection.close()
      return
    number, name = int(hello["process"]), str(hello["name"])
    with self._changed:
      wrong = None
      if not 0 < number < self._num:
        wrong = (
          f"`process_id` must be from 0 to {self._num - 1}, as process 0 was "
          f"given {self._num} processes, got {number} of {name}."
        )
      elif number in self._names:
        wrong = (
          f"`process_id` must be different everywhere, got {number} of "
          f"{self._names[number]} and of {name}."
        )
      else:
        self._members[number], self._names[number] = connection, name
    if wrong is not None:
      connection.send({"agreed": 0, "error": wrong, "wrong": True})
      return
    self._watch(number, connection)

  def _compare(
    self, number: int, subject: str, facts: dict[str, Any], timeout_s: float
  ) -> dict[str, Any]:
    """Collects the others' facts, and returns the answer to all."""
    others, found = set(range(1, self._num)), dict[int, str]()
    with self._changed:
      said = self._said.setdefault(number, {})

      def settled() -> bool:
        for process in said.keys() - found.keys():
          found[process] = channel.disagreement(
            facts, said[process], "process 0", f"process {process}"
          )
        return others <= said.keys() or any(found.values())

      self._changed.wait_for(settled, timeout_s)
      if any(found.values()):
        # Those that are still on their way should end by the same error.
        self._changed.wait_for(lambda: others <= said.keys(), _GRACE_S)
      del self._said[number]
    for process in sorted(found):
      if found[process]:
        return {"error": found[process], "wrong": True}
    if missing := sorted(others - said.keys()):
      host, port = self._address
      strangers = self._listener.refused
      turned = f" {strangers} connections without the secret of the run were "
      return {
        "error": f"of {self._num} processes {', '.join(map(str, missing))} did "
        f"not come to {subject} at {host}:{port} within {timeout_s:g} s."
        f"{turned + 'refused.' if strangers else ''} Start every process with "
        "the same address and its own number."
      }
    return {}

  def _lose_later(self, number: int, note: dict[str, Any]) -> None:
    # Status 1 is an unexpected error, which the others do not share.
    time.sleep(0.0 if note["status"] == 1 else _GRACE_S)
    reason = f": {note['reason']}" if note["reason"] else ""
    self._lose(number, f"has ended with status {note['status']}{reason}")

  def _lose(self, number: int, how: str) -> None:
    lost = f"{self._names.get(number, f'process {number}')} {how}"
    if self._id == 0:
      self._send({"lost": lost})
    self._end(lost)

  # Methods of the other processes.

  def _connect(self, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    hello = {"process": self._id, "name": _own_name(self._id)}
    self._hub = channel.call(
      self._address, self._key, deadline, hello, "process 0"
    )
    threading.Thread(
      target=self._watch, args=(0, self._hub), daemon=True
    ).start()
    relay = socket.socket(socket.AF_UNIX)
    relay.bind(self._service)
    relay.listen()
    threading.Thread(target=self._relay, args=(relay,), daemon=True).start()

  def _relay(self, listening: socket.socket) -> None:
    while True:
      own, _ = listening.accept()
      with contextlib.suppress(OSError):
        deadline = time.monotonic() + 10.0
        other = channel.call(
          self._address, self._key, deadline, {"relay": self._id}, "process 0"
        )
        # The end of the connection is not passed on to JAX, because the
        # lifeline reports the death of process 0.
        threading.Thread(
          target=_relay, args=(own, other.socket), daemon=True,
          kwargs={"both_ends": False},
        ).start()  # fmt: skip

  # Methods of all processes.

  def _watch(self, number: int, connection: channel.Connection) -> None:
    """Receives notes of another process until it ends."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
      while message := connection.receive():
        self._take(number, message.note)
    if number not in self._goodbyes:
      self._lose(number, "has died")

  def _take(self, number: int, note: dict[str, Any]) -> None:
    if "stop" in note:
      self._agreement.take(number, note)
    elif "goodbye" in note:
      self._goodbyes.add(number)
      if note["status"]:
        threading.Thread(
          target=self._lose_later, args=(number, note), daemon=True
        ).start()
    elif "lost" in note:
      self._end(note["lost"])
    else:
      with self._changed:
        if "agree" in note:
          said = self._said.setdefault(int(note["agree"]), {})
          said[number] = note["facts"]
        else:
          self._answers[note["agreed"]] = note
          self._leaving |= "error" in note
        self._changed.notify_all()

  def _send(self, note: dict[str, Any]) -> None:
    receivers = list(self._members.values())
    if self._hub is not None:
      receivers.append(self._hub)
    for receiver in receivers:
      with contextlib.suppress(OSError):
        receiver.send(note)

  def _end(self, lost: str) -> None:
    if self._leaving:
      return
    self._leaving = True
    command = " ".join(shlex.join(sys.orig_argv).split())
    # Another host's name might hold escape codes of a terminal.
    lost = "".join(x if x.isprintable() else "?" for x in lost)
    # It is written at once, so that no other line is printed inside it.
    message = (
      f"jdist: {lost}; this process ends, too, with status {EXIT_STATUS}. To "
      f"resume from the last checkpoint, start all again: {command}\n"
    )
    with contextlib.suppress(Exception):
      sys.stdout.flush()
    with contextlib.suppress(OSError):
      os.write(2, message.encode())
    shutil.rmtree(self._folder, ignore_errors=True)
    # The main thread waits in a collective, which sys.exit cannot interrupt.
    os._exit(EXIT_STATUS)


def _own_name(number: int) -> str:
  return f"process {number} ({socket.gethostname()}, pid {os.getpid()})"


def _bound(host: str) -> str:
  """Returns the address to listen at for the address that others call."""
  with contextlib.suppress(OSError):
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    # Some systems give their own name to the loopback interface, where other
    # machines, for which the name means another address, could not reach it.
    own = host.startswith(("127.", "localhost"))
    if str(found).startswith("127.") and not own:
      return ""
  return host


def _relay(
  own: socket.socket, other: socket.socket, *, both_ends: bool = True
) -> None:
  """Copies bytes both ways until `own` ends, or either one with `both_ends`."""

  def copy(source: socket.socket, to: socket.socket, ends: bool) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        to.sendall(data)
    if ends:
      for each in (own, other):
        with contextlib.suppress(OSError):
          each.shutdown(socket.SHUT_RDWR)

  back = threading.Thread(
    target=copy, args=(other, own, both_ends), daemon=True
  )
  back.start()
  copy(own, other, True)
