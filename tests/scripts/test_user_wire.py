"""The switch in user space: when packets arrive, and which are dropped."""

import sys

import pytest

from tests.experiments import _loading
from tests.scripts import test_slow_network

user_wire = _loading.alone("user_wire", "../scripts/user_wire.py")


def test_packets_wait_for_both_links_and_a_full_queue_drops_them():
  links = user_wire.Links([1000.0, 500.0, None], delay_s=0.01, queue_s=0.35)
  # 100 bytes take 0.1 s of the up-link, and then 0.2 s of the down-link.
  assert links.arrival_s(0.0, 100, 0, 1) == pytest.approx(0.31)
  assert links.arrival_s(0.0, 100, 0, 1) == pytest.approx(0.51)
  assert links.arrival_s(0.0, 100, 0, 1) == pytest.approx(0.71)
  # It leaves the up-link at 0.4 s, and the down-link is busy until 0.7 s.
  assert links.arrival_s(0.0, 100, 0, 1) == pytest.approx(0.91)
  # This one would wait there from 0.5 s to 0.9 s.
  assert links.arrival_s(0.0, 100, 0, 1) is None
  # Other directions have queues of their own.
  assert links.arrival_s(0.0, 100, 1, 0) == pytest.approx(0.31)
  assert links.arrival_s(2.0, 100, 2, 2) == pytest.approx(2.01)


_TRIP = """
import os, socket, statistics, threading, time
host = int(os.environ["JDIST_PROCESS"])
if host == 0:
  server = socket.create_server(("10.77.0.1", 5000))
  first, _ = server.accept()
  second, _ = server.accept()
  def sink():
    while first.recv(1 << 16): pass
  threading.Thread(target=sink, daemon=True).start()
  while second.recv(1): second.sendall(b"x")
else:
  while True:  # The server may start later.
    try:
      bulk = socket.create_connection(("10.77.0.1", 5000))
      break
    except ConnectionRefusedError:
      time.sleep(0.1)
  ask = socket.create_connection(("10.77.0.1", 5000))
  ask.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  def fill():
    while True: bulk.sendall(bytes(100_000))
  threading.Thread(target=fill, daemon=True).start()
  trips = []
  for _ in range(12):
    began = time.monotonic()
    ask.sendall(b"x"); ask.recv(1)
    trips.append(time.monotonic() - began)
    time.sleep(0.2)
  print("middle", statistics.median(trips), flush=True)
  os._exit(0)
"""


def test_small_message_waits_in_the_queue_of_a_bulk():
  """One second at most of a queue, and less than a tenth of it without."""
  if not test_slow_network.can() or not user_wire.possible():
    pytest.skip("needs root, network namespaces, tun devices, Python 3.12")
  # Not the longest: a full queue may drop the small message, too, and TCP sends
  # it again a second later.
  middle = []
  for queue in ((), ("--queue-ms", "1000")):
    done = test_slow_network.run(
      "--hosts", "2", "--rate", "10mbit", "--timeout-s", "60", *queue, "--",
      sys.executable, "-c", _TRIP, timeout_s=120,
    )  # fmt: skip
    assert "middle" in done.stdout, done.stderr
    middle.append(float(done.stdout.split()[-1]))
  assert middle[0] < 0.3 < middle[1] < 2.0, middle
