"""Processes of launched runs: who may speak to them, and who trains with them.

A run of two processes trains for as long as its strangers need.
"""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from tests import _processes

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_TRAIN = (
  "--dataset", "synthetic", "--workers", "2", "--batch-size", "64", "--model",
  "mlp", "--method", "ssgd", "--evaluate-every-epochs", "1000",
)  # fmt: skip


def _start(*words):
  return subprocess.Popen(
    [sys.executable, "-m", "jdist", *words],
    cwd=_ROOT,
    env=_processes.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _row(folder):
  row = json.loads((folder / "rows.jsonl").read_text())
  return {name: row[name] for name in ("accuracy", "test_loss", "train_loss")}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_strangers_on_all_sockets_change_no_bit_of_a_run(tmp_path):
  words = "launch", "-n", "2", "--", "train", *_TRAIN, "--steps", "600"
  rows = []
  for disturbed in (False, True):
    folder = tmp_path / str(disturbed)
    process = _start(*words, "--output", str(folder))
    try:
      if disturbed:
        _disturb(process)
      out, error = process.communicate(timeout=300)
    finally:
      process.kill()
      process.wait()
    assert process.returncode == 0, out + error
    assert "\x1b" not in error
    rows.append(_row(folder))
  assert rows[0] == rows[1]


def _disturb(process):
  own = socket.gethostbyname(socket.gethostname())
  # Gloo listens once the processes communicate, at the address of the host's
  # name: the channel of process 0, and one of Gloo in each process.
  addresses = []
  end_s = time.monotonic() + 200
  while len(addresses) < 3:
    assert process.poll() is None and time.monotonic() < end_s
    time.sleep(0.05)
    with contextlib.suppress(OSError):
      addresses = _processes.listening(process.pid)
  assert len(addresses) == 3
  assert {host for host, _ in addresses} <= {"127.0.0.1", own}
  # Nothing but the channel listens before Gloo does, so that JAX's service has
  # no port.
  with contextlib.ExitStack() as stack:
    for address in addresses:
      for words in (
        b"\x1b[31mGET / HTTP/1.1\r\n\r\n", b"j", b"jdc1" + bytes(96),
        b"\xff" * 100_000,
        b'jdist lifeline 1\n{"process": 1, "of": 2, "name": "stranger"}\n'
        b'{"goodbye": 1, "status": 1, "reason": "\x1b[31mstranger"}\n',
      ):  # fmt: skip
        connected = stack.enter_context(socket.create_connection(address))
        with contextlib.suppress(OSError):
          connected.sendall(words)
    time.sleep(1)


@pytest.mark.parametrize(
  ("options", "told"),
  [
    (("--seed", "1"), "`--seed` is 0 in process 0 and 1 in process 1."),
    (("--learning-rate", "0.2"), "`--learning-rate` is"),
  ],
)
def test_processes_with_other_options_do_not_train(options, told, tmp_path):
  port = _processes.free_port()
  started = [
    _start(
      "train", *_TRAIN, "--steps", "10", "--output", str(tmp_path / str(i)),
      "--coordinator-address", f"127.0.0.1:{port}", "--num-processes", "2",
      "--process-id", str(i), *(options if i else ()),
    )
    for i in range(2)
  ]  # fmt: skip
  for process in started:
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert error.startswith("jdist: error: all processes of a run must agree")
    assert told in error and error.count("\n") == 1
  assert not any(tmp_path.rglob("rows.jsonl"))


@pytest.mark.slow
def test_process_that_is_late_at_its_first_step_joins(tmp_path):
  """It comes later than gloo would wait, 30 s."""
  late = (
    "import sys, time; from jdist import cli; "
    "from jdist.training.loop import _training_run as t; "
    "do, n = t.TrainingRun.dispatch, []\n"
    "def dispatch(*x):\n"
    "  if not n:\n    n.append(time.sleep(120))\n"
    "  return do(*x)\n"
    "t.TrainingRun.dispatch = dispatch\nsys.exit(cli.main(sys.argv[1:]))"
  )
  port = _processes.free_port()
  started = [
    subprocess.Popen(
      [
        sys.executable, *(("-c", late) if i else ("-m", "jdist")), "train",
        *_TRAIN, "--steps", "10", "--output", str(tmp_path),
        "--coordinator-address", f"127.0.0.1:{port}", "--num-processes", "2",
        "--process-id", str(i),
      ],
      cwd=_ROOT,
      env=_processes.environment(),
    )
    for i in range(2)
  ]  # fmt: skip
  assert [process.wait(timeout=600) for process in started] == [0, 0]
