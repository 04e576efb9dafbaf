"""Connections: proofs of one key, whole messages, and strangers."""

import contextlib
import hmac
import socket
import struct
import threading
import time

import pytest

from jdist import channel
from jdist.channel import _connection


@pytest.fixture
def pair():
  """A connection that takes bodies of 8 bytes, and a bare socket to it."""
  listening = channel.listen()
  bare = socket.create_connection(listening.getsockname())
  connection = channel.Connection(listening.accept()[0], max_body=8)
  listening.close()
  yield connection, bare
  connection.close()
  bare.close()


def test_address_of_version_6_is_listened_at(monkeypatch):
  monkeypatch.setattr(
    socket, "create_server", lambda address, **given: (address, given["family"])
  )
  assert channel.listen("::1", 7) == (("::1", 7), socket.AF_INET6)
  assert channel.listen() == (("127.0.0.1", 0), socket.AF_INET)


def test_host_that_loses_power_is_noticed_within_ten_seconds(pair):
  connected = pair[0].socket
  assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
  assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
  probes = {
    name: connected.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    if hasattr(socket, name)  # Not all platforms have them.
  }
  wanted = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
  assert probes == {name: wanted[name] for name in probes}


def frame(magic=b"jdc1", words=2, size=0):
  return struct.pack("<4sIQ", magic, words, size)


@pytest.mark.parametrize(
  "head",
  [frame(magic=b"jdc0"), frame(words=2**24 + 1), frame(size=9)],
  ids=["other magic", "long note", "long body"],
)
def test_head_that_is_of_no_message_is_refused(pair, head):
  connection, bare = pair
  bare.sendall(head + b"{}")
  with pytest.raises(ValueError, match="is not a message"):
    connection.receive(time.monotonic() + 10)


def test_message_of_the_largest_size_is_whole(pair):
  connection, bare = pair
  bare.sendall(frame(size=8) + b"{}12345678")
  assert connection.receive() == ({}, b"12345678")


@pytest.mark.parametrize("rest", [b"", b"{", b"{}", b"{}1234567"])
def test_message_that_is_cut_off_is_no_message(pair, rest):
  connection, bare = pair
  bare.sendall(frame(size=8) + rest)
  bare.shutdown(socket.SHUT_WR)
  with pytest.raises(ConnectionError, match="within a message"):
    connection.receive()


def test_connection_that_is_closed_between_messages_ends(pair):
  connection, bare = pair
  bare.shutdown(socket.SHUT_WR)
  assert connection.receive() is None


@pytest.fixture
def listener():
  """A listener, its address, and an event of its first admission."""
  listening, admitted, kept = channel.listen(), threading.Event(), []

  def admit(_, connection):
    kept.append(connection)
    admitted.set()

  found = channel.Listener(listening, b"key", admit)
  yield found, listening.getsockname(), admitted
  for each in (found, *kept):
    each.close()


def answer_of(connected, ours):
  """Returns a listener's nonce and proof."""
  connected.settimeout(10)
  connected.sendall(b"jdc1" + ours)
  answer = b""
  while len(answer) < 64:
    answer += connected.recv(64)
  return answer[:32], answer[32:]


@pytest.mark.parametrize("side", [b"caller", b"called"])
def test_proof_of_the_listener_admits_no_caller(listener, side):
  """Without a key one can only send back the proof of the other side."""
  found, address, admitted = listener
  with socket.create_connection(address) as connected:
    ours = bytes(32)
    theirs, proof = answer_of(connected, ours)
    assert proof == hmac.digest(b"key", b"called" + ours + theirs, "sha256")
    connected.sendall(hmac.digest(b"key", side + ours + theirs, "sha256"))
    connected.sendall(frame() + b"{}")
    if side == b"caller":
      assert admitted.wait(10) and not found.refused
    else:
      assert not connected.recv(1)
      assert not admitted.is_set() and found.refused == 1


def test_recorded_proof_admits_no_second_caller(listener):
  """The bytes of an admitted caller, once more."""
  found, address, admitted = listener
  with socket.create_connection(address) as connected:
    theirs, _ = answer_of(connected, bytes(32))
    proof = hmac.digest(b"key", b"caller" + bytes(32) + theirs, "sha256")
    connected.sendall(proof + frame() + b"{}")
    assert admitted.wait(10)
  admitted.clear()
  with socket.create_connection(address) as connected:
    connected.settimeout(10)
    connected.sendall(b"jdc1" + bytes(32) + proof + frame() + b"{}")
    answer = b""
    with contextlib.suppress(ConnectionResetError):
      while part := connected.recv(100):
        answer += part
    assert len(answer) == 64 and answer[:32] != theirs
  assert not admitted.is_set() and found.refused == 1


def test_listener_with_another_key_is_not_told_the_first_message(listener):
  _, address, admitted = listener
  deadline = time.monotonic() + 10
  with pytest.raises(PermissionError, match="has another secret or token"):
    channel.call(address, b"other", deadline, "first", "Process 1")
  assert not admitted.is_set()


def test_process_that_closes_at_once_is_called_until_the_deadline():
  with channel.listen() as listening:
    address, closed = listening.getsockname(), []

    def close():
      with contextlib.suppress(OSError):
        while connected := listening.accept()[0]:
          connected.recv(100)
          connected.close()
          closed.append(connected)

    threading.Thread(target=close, daemon=True).start()
    deadline = time.monotonic() + 0.3
    with pytest.raises(
      TimeoutError, match=r"Process 1 did not .* within 0.3 s \(the connection"
    ):
      channel.call(address, b"key", deadline, "first", "Process 1")
    listening.shutdown(socket.SHUT_RDWR)
  assert len(closed) > 1


def test_oldest_of_too_many_strangers_is_dropped(listener, monkeypatch):
  monkeypatch.setattr(_connection, "_PENDING", 2)
  found, address, _ = listener
  strangers = [socket.create_connection(address) for _ in range(3)]
  strangers[0].settimeout(10)
  assert not strangers[0].recv(1)
  strangers[1].settimeout(0.05)
  with pytest.raises(TimeoutError):
    strangers[1].recv(1)
  assert found.refused == 1
  for stranger in strangers:
    stranger.close()


def test_stranger_that_says_nothing_is_dropped(listener, monkeypatch):
  assert _connection._PATIENCE_S == 10
  monkeypatch.setattr(_connection, "_PATIENCE_S", 0.05)
  with socket.create_connection(listener[1]) as stranger:
    stranger.settimeout(10)
    assert not stranger.recv(1)
  assert listener[0].refused == 1
