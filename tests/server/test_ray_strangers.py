"""Sockets at which Ray listens during a run, and strangers at all of them."""

import contextlib
import socket
import subprocess
import sys

import pytest

from tests import _processes
from tests.server import test_ray_engine

OPEN = """
import sys
from jdist import server

def make_server(plan):
  protocol = server.BSP(batches=server.FixedBatches(1), timeout_s=60.0)
  return server.LiveServer(protocol, server.EmptyServer(1_000), plan)

def work(channel):
  server.WorkerLoop(channel, "a", server.EmptyWorker(), depth=1).run()

def on_status(status):
  if status["updates"] and not told:
    told.append(print("up", flush=True))
    sys.stdin.readline()

told = []
engine = server.RayEngine(1, cpus_per_worker=0.1)
try:
  session = server.LiveSession(
    engine, make_server, {"a": work}, server.LivePlan(workers=("a",)),
    on_status=on_status,
  )
  server.ServerRun(session).fit(20.0, "seconds")
  print(session.updates > 100, session.events)
finally:
  engine.stop()
"""


@test_ray_engine.needs_ray
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_open_ports_of_ray_are_those_that_its_page_names():
  """Strangers at all of them, while a run needs them, do not disturb it."""
  process = subprocess.Popen(
    [sys.executable, "-c", OPEN],
    env=_processes.environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == "up\n"
    found = _processes.listening(process.pid)
    with contextlib.ExitStack() as stack:
      for host, port in found:
        _disturb(stack, (_own_addresses()[0] if ":" in host else host, port))
      told, _ = process.communicate("on\n", timeout=120)
  finally:
    process.kill()
    process.communicate()
  assert (process.returncode, told) == (0, "True []\n")
  # RAY.md says so.  Where this fails, Ray has learned to listen at less.
  hosts = {host for host, _ in found}
  assert hosts & {"0.0.0.0", "::"}
  assert hosts <= {"0.0.0.0", "::", "127.0.0.1", *_own_addresses()}
  # There Ray would show metrics without a token.
  assert 44217 not in {port for _, port in found}


def _disturb(stack, address):
  for words in (
    b"\x1b[31mGET / HTTP/1.1\r\n\r\n", b"j", b"\xff" * 300_000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(5000),
  ):  # fmt: skip
    stranger = stack.enter_context(socket.create_connection(address, 10))
    with contextlib.suppress(OSError):
      stranger.sendall(words)


def _own_addresses():
  told = subprocess.run(["hostname", "-I"], capture_output=True, text=True)
  return told.stdout.split()
