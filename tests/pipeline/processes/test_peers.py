"""Connections between processes: tokens, messages and failures."""

import concurrent.futures
import contextlib
import select
import socket
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from jdist import channel, pipeline
from jdist.channel import _connection
from jdist.pipeline.processes import _peers
from tests.pipeline.processes._threads import in_threads, TOKEN

_TAG = _peers.Tag(_peers.Kind.OUTPUT, 1, 2, 3)


def test_arrays_are_received_with_the_same_bits_in_any_order():
  arrays = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(-0.0, ml_dtypes.bfloat16),
    np.zeros((0, 4), np.int32),
    np.arange(8).reshape(2, 4).T,
  ]
  later = _TAG._replace(iteration=4)

  def work(peers):
    if peers.device == 0:
      peers.send(1, _TAG, arrays)
      peers.send(1, later, [np.ones(2)])
      return None
    second = peers.receive(0, later, [np.zeros(2)])
    return second, peers.receive(0, _TAG, arrays)

  _, (second, found) = in_threads(2, work)
  np.testing.assert_array_equal(second[0], np.ones(2))
  for a, b in zip(found, arrays, strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def test_messages_with_one_tag_keep_the_order_of_sending():
  def work(peers):
    if peers.device == 0:
      for i in range(3):
        peers.send(1, _TAG, [np.float32(i)])
      peers.send(1, _TAG._replace(iteration=4), [np.float32(3)])
      return None
    # Messages keep their order, so all have arrived with the last one.
    last = peers.receive(0, _TAG._replace(iteration=4), [np.float32(0)])
    found = [peers.receive(0, _TAG, [np.float32(0)]) for _ in range(3)]
    return [float(x) for (x,) in [*found, last]]

  assert in_threads(2, work)[1] == [0, 1, 2, 3]


def test_send_returns_before_the_array_is_computed(monkeypatch):
  # The array is larger than any socket's buffer.
  big = np.zeros(32 << 20, np.uint8)
  sent, computed = threading.Barrier(2, timeout=60), threading.Event()
  bytes_of = _peers._bytes

  def wait_for(x):
    assert computed.wait(60)
    return bytes_of(x)

  monkeypatch.setattr(_peers, "_bytes", wait_for)

  def work(peers):
    other = 1 - peers.device
    peers.send(other, _TAG, [big])
    sent.wait()
    computed.set()
    peers.receive(other, _TAG, [big])

  in_threads(2, work)


def _connect(device, addresses, token, listener, connect_s=60.0):
  return pipeline.connect(
    device, addresses, token, listener=listener, connect_s=connect_s
  )


def test_wrong_token_raises():
  listener = channel.listen()
  addresses = [listener.getsockname()[:2], ("127.0.0.1", 1)]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    called = pool.submit(_connect, 0, addresses, "right", listener)
    with pytest.raises(
      PermissionError, match=r"Device 0 at .* another secret.*JDIST_SECRET"
    ):
      _connect(1, addresses, "wrong", channel.listen())
    # The called process keeps waiting for one that knows the token.
    with _connect(1, addresses, "right", channel.listen()), called.result():
      pass


def test_missing_process_is_named():
  listener = channel.listen()
  addresses = [listener.getsockname()[:2], ("127.0.0.1", 1)]
  with pytest.raises(TimeoutError, match=r"Devices \[1\] have not connected"):
    _connect(0, addresses, TOKEN, listener, 0.05)


def test_stranger_does_not_disturb_the_connection():
  listeners = [channel.listen() for _ in range(2)]
  addresses = [x.getsockname()[:2] for x in listeners]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first = pool.submit(_connect, 0, addresses, TOKEN, listeners[0])
    with socket.create_connection(addresses[0]) as noise:
      noise.sendall(b"GET / HTTP/1.1\r\n" * 10)
      with contextlib.suppress(ConnectionResetError):
        assert noise.recv(1) == b""
    with (
      _connect(1, addresses, TOKEN, listeners[1]) as other,
      first.result() as peers,
    ):
      peers.send(1, _TAG, [np.float32(3)])
      assert other.receive(0, _TAG, [np.float32(0)])[0] == 3


def test_addresses_are_learned_from_the_first_process(monkeypatch):
  listener = channel.listen()
  addresses = [listener.getsockname()[:2], ("", 0), ("", 0)]
  listeners = [listener, None, None]

  def work(device):
    with _connect(device, addresses, TOKEN, listeners[device]) as peers:
      for other in peers.others:
        peers.send(other, _TAG, [np.float32(device)])
      like = [np.float32(0)]
      return [float(peers.receive(x, _TAG, like)[0]) for x in peers.others]

  heard, listen = [], channel.listen

  def noted(host, port):
    heard.append(host)
    return listen(host, port)

  monkeypatch.setattr(channel, "listen", noted)
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    assert [*pool.map(work, range(3))] == [[1, 2], [0, 2], [0, 1]]
  # No other machine reaches them where it does not reach the first process.
  assert heard == ["127.0.0.1"] * 2


@pytest.mark.parametrize("words", [b"jdc1", b""])
def test_slow_strangers_do_not_delay_the_connection(words, monkeypatch):
  """A byte now and then, or none, must not hold the loop that accepts."""
  # For longer than the others wait.
  monkeypatch.setattr(_connection, "_PATIENCE_S", 600.0)
  listeners = [channel.listen() for _ in range(2)]
  addresses = [x.getsockname()[:2] for x in listeners]
  with contextlib.ExitStack() as stack:
    for _ in range(100):
      slow = stack.enter_context(socket.create_connection(addresses[0]))
      slow.sendall(words)
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))
    futures = [
      pool.submit(_connect, i, addresses, TOKEN, listeners[i]) for i in range(2)
    ]
    for future in futures:
      stack.enter_context(future.result())


def test_swapped_addresses_raise():
  listeners = [channel.listen() for _ in range(3)]
  addresses = [x.getsockname()[:2] for x in listeners]
  swapped = [addresses[1], addresses[0], addresses[2]]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    called = [
      pool.submit(_connect, i, addresses, TOKEN, listeners[i]) for i in range(2)
    ]
    with pytest.raises(PermissionError, match=r"Device 0 at .* another secret"):
      _connect(2, swapped, TOKEN, listeners[2])
    # The others wait for one that has the right addresses.
    with _connect(2, addresses, TOKEN, channel.listen()):
      for each in called:
        each.result().close()


def test_second_process_of_a_number_is_turned_away():
  listeners = [channel.listen() for _ in range(2)]
  addresses = [*(x.getsockname()[:2] for x in listeners), ("127.0.0.1", 1)]
  with (
    concurrent.futures.ThreadPoolExecutor(3) as pool,
    contextlib.ExitStack() as stack,
  ):
    first = pool.submit(_connect, 0, addresses, TOKEN, listeners[0])
    identity = channel.Identity("", TOKEN.encode())
    until = time.monotonic() + 60

    def call(device):
      made = channel.call(
        addresses[device], identity.key(f"pipeline {device}"), until, (2, 0),
        f"Device {device}", max_body=8,
      )  # fmt: skip
      return stack.enter_context(contextlib.closing(made))

    same = [call(0) for _ in range(2)]
    # Only one of them is closed: that whose thread came second.
    (closed,), _, _ = select.select([x.socket for x in same], [], [], 60)
    kept, other = sorted(same, key=lambda x: x.socket is closed)
    assert other.receive(until) is None
    second = pool.submit(_connect, 1, addresses, TOKEN, listeners[1])
    call(1)
    peers = stack.enter_context(first.result())
    stack.enter_context(second.result())
    peers.send(2, _TAG, [np.float32(3)])
    assert kept.receive(until).note == [*_TAG]


def test_receive_raises_at_once_if_the_sender_has_ended():
  def work(peers):
    if peers.device == 1:
      return None  # The end of its thread closes the connection.
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="Device 1 of the pipeline is go"):
      peers.receive(1, _TAG, [np.zeros(2)])
    return time.monotonic() - begin

  assert in_threads(2, work)[0] < 30  # Of 60.


def test_message_is_received_after_its_sender_has_ended():
  def work(peers):
    if peers.device == 1:
      peers.send(0, _TAG, [np.float32(7)])
      return None
    time.sleep(0.3)
    return float(peers.receive(1, _TAG, [np.float32(0)])[0])

  assert in_threads(2, work)[0] == 7.0


def test_timeout_names_the_missing_message():
  done = threading.Event()

  def work(peers):
    if peers.device == 1:
      done.wait(60)
      return
    with pytest.raises(TimeoutError, match=r"0\.2 s for device 1: output"):
      peers.receive(1, _TAG, [np.zeros(2)])
    done.set()

  in_threads(2, work, timeout_s=0.2)


def test_message_of_another_size_raises():
  def work(peers):
    if peers.device == 1:
      peers.send(0, _TAG, [np.zeros(3)])
      peers.receive(0, _TAG, [np.zeros(1)])
      return
    with pytest.raises(ValueError, match="24 bytes where 16 were expected"):
      peers.receive(1, _TAG, [np.zeros(2)])
    peers.send(1, _TAG, [np.zeros(1)])

  in_threads(2, work)
