"""Processes notice each other's ends over real sockets, without JAX."""

import contextlib
import inspect
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from jdist import channel, collectives, training
from jdist.collectives.processes import _lifeline
from tests import _processes

_PACKAGE = pathlib.Path(_lifeline.__file__).parents[2]
# This process joins, without importing the packages around the lifeline and so
# without JAX, and then obeys the words in the lines of its input.  Process 0
# stands for JAX's service: it answers what the others send to their address.
# Its time to wait begins once the process AWAITED has come.
_PROCESS = """
import importlib, json, os, pathlib, socket, sys, threading, types
folder, name = pathlib.Path(sys.argv[1]), "jdist"
for part in (".", "collectives", "processes"):
  folder, name = folder / part, f"{name}.{part}".rstrip(".")
  sys.modules[name] = types.ModuleType(name)
  sys.modules[name].__path__ = [str(folder)]
module = importlib.import_module(f"{name}._lifeline")
address, of, number, timeout_s, facts = sys.argv[2:]
def ended(error):
  print(type(error).__name__, error, flush=True)
  if "LINGERS" in os.environ:  # It exits when it hears another word.
    sys.stdin.readline()
  os._exit(4)
lifeline = module.Lifeline(address, int(of), int(number))
if awaited := os.environ.get("AWAITED"):
  wait_for = lifeline._changed.wait_for
  def wait(condition, timeout_s):
    wait_for(lambda: int(awaited) in lifeline._said[0])
    return wait_for(condition, timeout_s)
  lifeline._changed.wait_for = wait
try:
  target, bind = lifeline.join(float(timeout_s), json.loads(facts))
except (OSError, ValueError) as error:
  ended(error)
def connect(kind=socket.AF_UNIX):
  found = socket.socket(kind)
  found.connect(target.removeprefix("unix:"))
  return found
if bind is not None:
  server = socket.socket(socket.AF_UNIX)
  server.bind(bind.removeprefix("unix:"))
  server.listen()
  def serve():
    while True:
      connection, _ = server.accept()
      told = connection.makefile("rb").readline()
      connection.sendall(told.upper())
  threading.Thread(target=serve, daemon=True).start()
print("joined", flush=True)
print("run", module.channel.run_id(), flush=True)
kept = []
for line in sys.stdin:
  word = line.strip()
  if word == "talk":
    kept.append(connect())
    kept[-1].sendall(b"a word of more than seventeen letters\\n")
    print(kept[-1].makefile().readline(), end="", flush=True)
  elif word == "listen":
    print("heard", kept[-1].recv(100), flush=True)
  elif word.startswith("leave"):
    _, status, reason = word.split(maxsplit=2)
    lifeline.leave(int(status), reason)
    os._exit(int(status))
  elif word.startswith("agree"):
    try:
      lifeline.agree("the first step", {"state": word[6:]}, 10.0)
    except (TimeoutError, ValueError) as error:
      ended(error)
    print("agreed", flush=True)
  elif word == "end":
    sys.exit(0)
"""


class _Team:
  """Processes that are killed in the end."""

  def __init__(self, folder, sockets):
    self._sockets = sockets
    self.port = _processes.free_port()
    self.all = []
    self._script = folder / "process.py"
    self._script.write_text(_PROCESS)

  def start(
    self, number, of, *, address=None, timeout_s=60, facts="{}", **environment
  ):
    process = subprocess.Popen(
      [
        sys.executable, str(self._script), str(_PACKAGE),
        address or f"127.0.0.1:{self.port}", str(of), str(number),
        str(timeout_s), facts,
      ],
      env=os.environ
      | {"JDIST_SECRET": "a secret", channel.RUN_DIRECTORY: self._sockets}
      | environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )  # fmt: skip
    self.all.append(process)
    return process

  def join(self, of, **environment):
    started = [self.start(i, of, **environment) for i in range(of)]
    for process in started:
      assert process.stdout.readline() == "joined\n"
    assert len({process.stdout.readline() for process in started}) == 1
    return started


@pytest.fixture
def team(tmp_path):
  # The path of a socket must be short.
  with tempfile.TemporaryDirectory() as sockets:
    found = _Team(tmp_path, sockets)
    yield found
    for process in found.all:
      process.kill()
      process.communicate()


def _tell(process, word):
  process.stdin.write(f"{word}\n")
  process.stdin.flush()


def _end(process):
  """How a process ends, and the one line that it says of it."""
  status = process.wait(timeout=60)
  told = process.stderr.read()
  assert told.count("\n") == 1, told
  return status, told


@pytest.mark.parametrize("killed", [0, 1])
def test_other_processes_name_the_dead_one_and_exit(killed, team):
  started = team.join(3)
  begun_s = time.monotonic()
  started[killed].send_signal(signal.SIGKILL)
  for number, process in enumerate(started):
    if number == killed:
      continue
    status, told = _end(process)
    assert status == 75
    assert told.startswith(f"jdist: process {killed} (")
    assert "has died; this process ends, too, with status 75" in told
    assert "start all again: " in told
    if killed:
      assert f"pid {started[killed].pid}" in told
  # It takes about a second; 15 are documented.
  assert time.monotonic() - begun_s < 15


def test_process_that_fails_says_why(team):
  started = team.join(3)
  _tell(started[2], "leave 1 its disk is full")
  for process in started[:2]:
    status, told = _end(process)
    assert status == 75
    assert "has ended with status 1: its disk is full;" in told


def test_processes_with_equal_errors_keep_their_status(team):
  # Each process has a few seconds to end by itself.
  started = team.join(2)
  _tell(started[0], "leave 3 diverged")
  assert started[0].wait(timeout=60) == 3
  _tell(started[1], "leave 3 diverged")
  assert started[1].wait(timeout=60) == 3
  assert started[1].stderr.read() == ""


def test_finished_process_is_not_reported(team):
  started = team.join(3)
  for number in (1, 0, 2):
    _tell(started[number], "end")
    assert started[number].wait(timeout=60) == 0
  assert [process.stderr.read() for process in started] == [""] * 3


def test_jax_traffic_uses_the_same_port(team):
  started = team.join(2)
  for _ in range(2):
    _tell(started[1], "talk")
    assert started[1].stdout.readline() == (
      "A WORD OF MORE THAN SEVENTEEN LETTERS\n"
    )


def test_jax_does_not_see_its_service_end(team):
  # JAX's runtime would abort the process before it can report the reason.
  started = team.join(2)
  _tell(started[1], "talk")
  started[1].stdout.readline()
  _tell(started[1], "listen")
  started[0].kill()
  assert _end(started[1])[0] == 75
  assert started[1].stdout.read() == ""


@pytest.mark.parametrize(
  ("starts", "told"),
  [
    (
      [(1, 2)],
      "TimeoutError process 0 did not answer at 127.0.0.1:{port} within 1 s",
    ),
    (
      [(0, 3), (2, 3)],
      "TimeoutError of 3 processes 1 did not come to the start at 127.0.0.1:"
      "{port} within 1 s",
    ),
    (
      [(0, 3), (2, 4)],
      "ValueError all processes of a run must agree, but `num_processes` is 3 "
      "in process 0 and 4 in process 2",
    ),
    ([(0, 3), (3, 4)], "ValueError `process_id` must be from 0 to 2"),
  ],
)
def test_mismatched_processes_are_refused(starts, told, team):
  late = "within 1 s" in told  # Of the first.
  awaited = {"AWAITED": str(starts[1][0])} if late and starts[1:] else {}
  processes = [
    team.start(*starts[0], timeout_s=1 if late else 60, **awaited),
    *(team.start(*start) for start in starts[1:]),
  ]
  assert processes[-1].wait(timeout=60) == 4
  assert processes[-1].stdout.read().startswith(told.format(port=team.port))


def test_processes_with_other_facts_are_named(team):
  facts = ['{"`--seed`": 0, "jax": "1"}', '{"`--seed`": 1, "jax": "1"}']
  started = [team.start(i, 3, facts=facts[i == 2]) for i in range(3)]
  for process in started:
    assert process.wait(timeout=60) == 4
    assert process.stdout.read() == (
      "ValueError all processes of a run must agree, but `--seed` is 0 in "
      "process 0 and 1 in process 2. Start all of them with the same options "
      "and versions.\n"
    )
    assert process.stderr.read() == ""


def test_late_process_is_awaited_and_other_states_are_refused(team):
  started = team.join(2)
  _tell(started[0], "agree same")
  time.sleep(0.5)
  assert started[0].poll() is None
  _tell(started[1], "agree same")
  assert [x.stdout.readline() for x in started] == ["agreed\n"] * 2
  for number, process in enumerate(started):
    _tell(process, f"agree {number}")
  for process in started:
    assert process.wait(timeout=60) == 4
    assert (
      'but state is "0" in process 0 and "1" in pro' in process.stdout.read()
    )


@pytest.mark.parametrize("last", [0, 1])
def test_refused_process_may_end_long_after_the_others(last, team):
  started = team.join(2, LINGERS="1")
  for number, process in enumerate(started):
    _tell(process, f"agree {number}")
  for process in started:
    assert "ValueError" in process.stdout.readline()
  first = started[1 - last]
  _tell(first, "end")
  assert first.wait(timeout=60) == 4
  time.sleep(0.5)  # The other one sees that, and does not call it lost.
  assert started[last].poll() is None
  _tell(started[last], "end")
  assert started[last].wait(timeout=60) == 4
  assert started[last].stderr.read() == ""


def test_missing_process_ends_an_agreement(team):
  started = team.join(2)
  _tell(started[0], "agree same")
  assert started[0].wait(timeout=60) == 4
  assert (
    started[0]
    .stdout.read()
    .startswith(
      "TimeoutError of 2 processes 1 did not come to the first step at "
    )
  )


@pytest.mark.parametrize(
  "other", [{"JDIST_SECRET": "another"}, {"JDIST_RUN_ID": "another"}]
)
def test_process_of_another_run_is_refused(other, team):
  first = team.start(0, 2)
  stranger = team.start(1, 2, **other)
  assert stranger.wait(timeout=60) == 4
  assert "PermissionError process 0 at 127.0.0.1" in stranger.stdout.read()
  team.start(1, 2)
  assert first.stdout.readline() == "joined\n"


def _noise(address):
  """What strangers send, by name."""
  hello = b"jdc1" + bytes(32)
  yield "garbage", b"GET / HTTP/1.1\r\n" * 1000
  yield "lost", b'jdist lifeline 1\n{"lost": "\x1b[31mstranger"}\n'
  yield "unproved", hello + bytes(32) + b'{"goodbye": 0, "status": 1}'
  yield "oversized", hello + b"jdc1" + b"\xff" * 12
  # The proof of process 0 itself, sent back to it.
  with socket.create_connection(address) as connected:
    connected.sendall(hello)
    yield "reflected", hello + connected.makefile("rb").read(64)[32:]


def test_strangers_change_nothing_and_are_refused(team):
  started = team.join(2)
  address = "127.0.0.1", team.port
  with contextlib.ExitStack() as stack:
    for _ in range(200):
      stack.enter_context(socket.create_connection(address)).sendall(b"j")
    for _, words in _noise(address):
      connected = stack.enter_context(socket.create_connection(address))
      connected.settimeout(60)
      with contextlib.suppress(ConnectionError):
        connected.sendall(words)
        while connected.recv(1000):
          pass
    _tell(started[1], "talk")
    assert started[1].stdout.readline() == (
      "A WORD OF MORE THAN SEVENTEEN LETTERS\n"
    )
  for process in started:
    _tell(process, "agree same")
  assert [x.stdout.readline() for x in started] == ["agreed\n"] * 2
  for process in started:
    _tell(process, "end")
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""


def test_missing_process_is_told_with_the_number_of_strangers(team):
  waiting = team.start(0, 2, timeout_s=5)
  for _ in range(2):
    connected = None
    while connected is None:
      assert waiting.poll() is None
      with contextlib.suppress(ConnectionRefusedError):
        connected = socket.create_connection(("127.0.0.1", team.port))
    with connected:
      connected.sendall(b"GET / HTTP/1.1\r\n" * 1000)
      # It is closed once it is counted.
      with contextlib.suppress(ConnectionError):
        connected.recv(1)
  assert waiting.wait(timeout=60) == 4
  assert (
    "within 5 s. 2 connections without the secret of the run were refused. "
    "Start every process"
  ) in waiting.stdout.read()


def test_taken_port_is_told_from_wrong_address(team):
  with socket.create_server(("127.0.0.1", team.port)):
    taken = team.start(0, 2)
    assert taken.wait(timeout=60) == 4
  assert taken.stdout.read().startswith("OSError ")
  wrong = team.start(0, 2, address=f"192.0.2.1:{team.port}")
  assert wrong.wait(timeout=60) == 4
  assert "Give an address of this machine" in wrong.stdout.read()


def test_process_may_join_as_late_as_it_may_begin():
  """A machine that is late at the start is awaited as at its first step."""
  waits = [
    inspect.signature(x).parameters["timeout_s"].default
    for x in (
      collectives.start_processes, collectives.agree, training.Trainer,
    )
  ]  # fmt: skip
  assert waits == [900.0] * 3


def test_duplicate_process_number_is_refused(team):
  team.start(0, 3)
  twice = [team.start(2, 3), team.start(2, 3)]
  while all(process.poll() is None for process in twice):
    time.sleep(0.01)
  (refused,) = (process for process in twice if process.poll() is not None)
  assert refused.stdout.read().startswith(
    "ValueError `process_id` must be different everywhere, got 2 of process 2 ("
  )


@pytest.mark.parametrize("address", ["nowhere", ":12", "host:", "host:99999"])
def test_address_without_host_or_port_raises(address):
  with pytest.raises(ValueError, match="must be host:port, got"):
    _lifeline.Lifeline(address, 2, 1)


def test_unknown_host_name_is_reported(team):
  process = team.start(1, 2, address="no.such.invalid:1234", timeout_s=1)
  assert process.wait(timeout=60) == 4
  assert "process 0 did not answer at no.such.invalid:1234" in (
    process.stdout.read()
  )
