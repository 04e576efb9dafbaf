"""Messages between the processes of a pipeline: raw bytes, sent in order."""

import contextlib
import enum
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist import channel, checks, signatures, states

# No message of a pipeline is larger than a device's memory.
_MAX_BODY = 1 << 40


class Kind(enum.IntEnum):
  """The content of a message."""

  OUTPUT = 1
  GRADIENT = 2
  METRICS = 3
  NORM = 4
  TIED = 5
  MOVED = 6
  AGREED = 7
  LAYERS = 8
  UPDATE = 9
  ANY = 10


class Tag(NamedTuple):
  """The identity of a message; a field that does not apply to it is 0."""

  kind: Kind
  stage: int = 0
  microbatch: int = 0
  iteration: int = 0

  def __str__(self) -> str:
    return (
      f"{self.kind.name.lower()} of micro-batch {self.microbatch}, iteration "
      f"{self.iteration}, for stage {self.stage}"
    )


@signatures.checked
class Peers(contextlib.AbstractContextManager["Peers"]):
  """Connections to the other processes of a pipeline.

  Arrays are sent as raw bytes: both sides know shapes and dtypes, and messages
  of another size are refused.  Nothing that is received is run or unpickled.
  For each other process a thread sends queued messages in order, so that a send
  returns at once, and another thread receives.

  Both sides prove that they know the token, as `jdist.channel` explains.

  Attributes:
    device: The number of this process.
    num_devices: The number of processes.
  """

  def __init__(
    self,
    device: signatures.NonNegativeInt,
    connections: dict[int, channel.Connection],
    *,
    timeout_s: signatures.PositiveFloat = 300.0,
  ):
    """Starts the threads; use `connect` to make an instance."""
    self.device, self.num_devices = device, len(connections) + 1
    self._connections, self._timeout_s = connections, timeout_s
    # Received messages that have not been asked for yet.  Several may have one
    # tag if the sender is a call ahead; they keep the order of sending.
    self._messages: dict[tuple[int, Tag], list[memoryview]] = {}
    self._changed = threading.Condition()
    self._gone: dict[int, str] = {}
    self._queues: dict[int, queue.SimpleQueue[Any]] = {
      other: queue.SimpleQueue() for other in connections
    }
    # Sending and receiving must not block each other: two processes that both
    # send a message larger than the socket's buffer would wait forever.
    self._senders, self._receivers = (
      [
        threading.Thread(
          target=work, args=(x,), daemon=True, name=f"{work.__name__}{x}"
        )
        for x in connections
      ]
      for work in (self._send_all, self._receive_all)
    )
    for thread in self._senders + self._receivers:
      thread.start()

  def __exit__(self, *error: object) -> None:
    self.close()

  @property
  def others(self) -> list[int]:
    """The numbers of the other processes."""
    return sorted(self._connections)

  def send(self, to: int, tag: Tag, tree: Any) -> None:
    """Queues a tree's arrays; they must not be changed afterwards."""
    self._check(to)
    self._queues[to].put((tag, jax.tree.leaves(tree)))

  def receive(self, source: int, tag: Tag, like: Any) -> Any:
    """Waits for a tree of NumPy's arrays.

    Raises:
      ConnectionError: If the sending process has ended.
      TimeoutError: If no message arrives within `timeout_s`.
      ValueError: If the message has another size.
    """
    leaves, structure = jax.tree.flatten(like)
    found = _arrays(self.receive_bytes(source, tag), leaves, source, tag)
    return jax.tree.unflatten(structure, found)

  def receive_bytes(self, source: int, tag: Tag) -> memoryview:
    """Waits for the bytes of a message."""
    key = source, tag
    deadline = time.monotonic() + self._timeout_s
    with self._changed:
      while key not in self._messages:
        # A message that has arrived is returned even if its sender has ended.
        self._check(source)
        left = deadline - time.monotonic()
        if left <= 0:
          raise TimeoutError(
            f"Device {self.device} has waited {self._timeout_s:g} s for device "
            f"{source}: {tag}. Look whether that process is stuck, or give a "
            "longer `timeout_s`."
          )
        self._changed.wait(left)
      waiting = self._messages[key]
      first = waiting.pop(0)
      if not waiting:
        del self._messages[key]
      return first

  def check_agreement(self, facts: Mapping[str, Any], number: int = 0) -> None:
    """Raises a ValueError unless all processes' calls of a number agree.

    The facts, values of JSON, are named if they differ.
    """
    own = json.dumps(facts).encode()
    found = self._exchange(Tag(Kind.AGREED, iteration=number), own)
    names = "the process of device {}".format
    for other, body in zip(self.others, found, strict=True):
      wrong = channel.disagreement(
        facts, json.loads(body), names(self.device), names(other)
      )
      if wrong:
        raise ValueError(wrong)

  def any(self, own: bool, number: int) -> bool:
    """Returns whether any process calls this with True, for one number."""
    found = self._exchange(Tag(Kind.ANY, iteration=number), bytes([own]))
    return bool(own or b"\x01" in found)

  def _exchange(self, tag: Tag, own: bytes) -> list[bytes]:
    """Sends bytes to all others, and returns theirs."""
    # All send before any receives.
    for other in self.others:
      self.send(other, tag, [np.frombuffer(own, np.uint8)])
    return [bytes(self.receive_bytes(other, tag)) for other in self.others]

  def close(self) -> None:
    """Sends all queued messages and closes the connections."""
    for other in self._queues:
      self._queues[other].put(None)
    # Senders end when their queues are empty; a receiver ends with its socket.
    for thread in self._senders:
      thread.join(timeout=self._timeout_s)
    for connection in self._connections.values():
      connection.close()
    for thread in self._receivers:
      thread.join(timeout=5.0)

  def _check(self, other: int) -> None:
    if other in self._gone:
      raise ConnectionError(
        f"Device {other} of the pipeline is gone: {self._gone[other]}. Start "
        "all processes again, from the last checkpoint."
      )

  def _lose(self, other: int, reason: str) -> None:
    with self._changed:
      self._gone.setdefault(other, reason)
      self._changed.notify_all()

  def _send_all(self, other: int) -> None:
    while True:
      job = self._queues[other].get()
      if job is None:
        return
      tag, arrays = job
      try:
        # NumPy waits here until the arrays are computed.  In the caller this
        # would keep it from dispatching the next action.
        parts = [_bytes(x) for x in arrays]
        self._connections[other].send(tag, parts)
      except Exception as error:
        self._lose(other, f"sending failed ({error})")
        return

  def _receive_all(self, other: int) -> None:
    reason = "it has closed the connection"
    try:
      while message := self._connections[other].receive():
        kind, *numbers = message.note
        with self._changed:
          tag = Tag(Kind(kind), *numbers)
          self._messages.setdefault((other, tag), []).append(message.body)
          self._changed.notify_all()
    except Exception as error:
      reason = f"receiving failed ({error})"
    self._lose(other, reason)


# A pipeline of one process has no connections.
ALONE = Peers(0, {})


@signatures.checked
def connect(
  device: signatures.NonNegativeInt,
  addresses: Sequence[tuple[str, int]],
  token: str | bytes,
  *,
  listener: socket.socket | None = None,
  connect_s: signatures.PositiveFloat = 60.0,
  timeout_s: signatures.PositiveFloat = 300.0,
) -> Peers:
  """Connects the processes of a pipeline.

  Args:
    device: The number of this process, from 0.
    addresses: The host and port of each process, the same list everywhere.  A
      port 0 stands for any: the other processes learn it, and the host, from
      the first one.
    token: A secret that all processes know; a connection without it is closed.
    listener: An open socket at this process's address; by default it is opened
      here.
    connect_s: The time within which all processes must connect.
    timeout_s: The longest time to wait for a message later.

  Raises:
    PermissionError: If another process has another token.
    TimeoutError: If not all processes have connected.
    ConnectionError: If the first process has ended before all have connected.
  """
  remedy = "It is the place of this process in `addresses`."
  checks.check_int("device", device, 0, len(addresses) - 1, remedy)
  secret = token.encode() if isinstance(token, str) else bytes(token)
  if not secret:
    raise ValueError(
      "`token` must not be empty. Draw one with `secrets.token_hex()` and give "
      "it to every process."
    )
  deadline = time.monotonic() + connect_s
  if listener is None:
    host, port = addresses[device]
    listener = channel.listen(host or _own_host(addresses[0], deadline), port)
  identity, where = channel.Identity("", secret), list(addresses)
  # Each key names the called device, which shows where addresses are swapped.
  keys = [identity.key(f"pipeline {x}") for x in range(len(addresses))]
  found: dict[int, channel.Connection] = {}
  changed = threading.Condition()

  def admit(first: Any, connection: channel.Connection) -> None:
    other, port = first
    with changed:
      if other in range(device + 1, len(addresses)) and other not in found:
        found[other] = connection
        # The others reach a process where it is seen by this one.
        if not where[other][1]:
          where[other] = connection.socket.getpeername()[0], port
        changed.notify()
        return
    connection.close()

  own = device, listener.getsockname()[1]
  learns = not all(port for _, port in addresses)
  listening = channel.Listener(
    listener, keys[device], admit, max_body=_MAX_BODY
  )
  try:
    # The process with the larger number of two calls the other.
    for other in range(device):
      called = channel.call(
        where[other], keys[other], deadline, own, f"Device {other}",
        max_body=_MAX_BODY,
      )  # fmt: skip
      with changed:
        found[other] = called
      if learns and not other:
        if (frame := called.receive(deadline)) is None:
          raise ConnectionError("Device 0 of the pipeline ended at the start.")
        where = [(host, port) for host, port in frame.note]
    with changed:
      others = set(range(len(addresses))) - {device}
      left = deadline - time.monotonic()
      if not changed.wait_for(lambda: others == found.keys(), left):
        raise TimeoutError(
          f"Devices {sorted(others - found.keys())} have not connected to "
          f"device {device} within {connect_s:g} s. Look whether their "
          "processes run, and whether they reach "
          f"{addresses[device][0]}:{own[1]}."
        )
    if learns and not device:  # Now all ports are known here.
      for connection in found.values():
        connection.send(where)
  except BaseException:
    for connection in found.values():
      connection.close()
    raise
  finally:
    listening.close()
  return Peers(device, found, timeout_s=timeout_s)


def _own_host(address: tuple[str, int], deadline: float) -> str:
  """Returns this machine's address on its way to another one."""
  while time.monotonic() < deadline:
    # A cluster may not know the name of the other one yet.
    with contextlib.suppress(OSError):
      found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)
      family, kind, _, _, where = found[0]
      with socket.socket(family, kind) as way:
        way.connect(where)  # It sends nothing.
        return str(way.getsockname()[0])
    time.sleep(0.1)
  return ""


def _bytes(x: Any) -> memoryview:
  # NumPy has no buffer format for bfloat16, so the array is viewed as bytes.
  array = np.ascontiguousarray(np.asarray(x))
  return array.reshape(-1).view(np.uint8).data


def _arrays(
  body: memoryview, like: Sequence[Any], source: int, tag: Tag
) -> list[np.ndarray]:
  # The bytes carry no types: the receiver knows what it must get.
  sizes = list(map(states.num_bytes, like))
  if sum(sizes) != len(body):
    raise ValueError(
      f"Device {source} has sent {len(body)} bytes where {sum(sizes)} were "
      f"expected: {tag}. All processes must be given the same stages, "
      "micro-batch and dtypes."
    )
  found, start = [], 0
  for x, size in zip(like, sizes, strict=True):
    part = np.frombuffer(body[start : start + size], np.uint8)
    found.append(part.view(x.dtype).reshape(x.shape))
    start += size
  return found
