"""Leases of a directory: by living runs, by dead ones, and at the same time."""

import json
import os
import subprocess
import sys
import types

import pytest

from jdist.storage import lease

# Claims a lease, says so or why not, and waits for its end.
_PROCESS = """
import pathlib, sys
from jdist.storage import lease
found = lease.Lease(pathlib.Path(sys.argv[1]), sys.argv[2])
try:
  found.claim()
except ValueError as error:
  print(error, flush=True)
else:
  print("claimed", flush=True)
  sys.stdin.readline()
"""


@pytest.fixture
def start(tmp_path):
  started = []

  def run(name):
    process = subprocess.Popen(
      [sys.executable, "-c", _PROCESS, str(tmp_path), name],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    started.append(process)
    return process

  yield run
  for process in started:
    process.kill()
    process.communicate()


def test_second_run_is_refused_until_the_first_has_ended(start, tmp_path):
  first = start("one")
  assert first.stdout.readline() == "claimed\n"
  refused = start("two")
  assert refused.stdout.readline().startswith(
    f"`directory` {tmp_path} is in use by run one (process {first.pid} on "
  )
  assert start("one").stdout.readline() == "claimed\n"
  first.communicate("end\n")


def test_killed_run_loses_its_lease_at_once(start, tmp_path):
  first = start("one")
  assert first.stdout.readline() == "claimed\n"
  # Its parent has not yet noticed the end, so that its number is still taken.
  first.kill()
  assert start("two").stdout.readline() == "claimed\n"
  assert json.loads((tmp_path / "lease.json").read_text())["run"] == "two"


def test_ended_run_leaves_no_lease(start, tmp_path):
  first = start("one")
  assert first.stdout.readline() == "claimed\n"
  first.communicate("end\n")
  assert not list(tmp_path.iterdir())


def test_one_of_many_runs_gets_an_empty_directory(start):
  told = [process.stdout.readline() for process in map(start, "abc")]
  assert told.count("claimed\n") == 1
  assert sum("is in use by run" in line for line in told) == 2


@pytest.fixture
def clock(monkeypatch):
  """Time that passes while a run waits for a lease, and others do `then`."""
  found = types.SimpleNamespace(now_s=0.0, then=lambda seconds: None)

  def sleep(seconds):
    found.now_s += seconds
    found.then(seconds)

  found.monotonic, found.sleep = lambda: found.now_s, sleep
  monkeypatch.setattr(lease, "time", found)
  return found


def test_leases_of_one_run_are_renewed_at_the_same_time(tmp_path, monkeypatch):
  """Threads that wrote one partial file moved it away under each other."""
  monkeypatch.setattr(lease, "_BEAT_S", 1e-4)
  leases = [lease.Lease(tmp_path, "one") for _ in range(4)]
  for found in leases:
    found.claim()
  for _ in range(300):
    again = lease.Lease(tmp_path, "one")
    again._write()
    again.check()
  for found in leases:
    found.release()


def _elsewhere(folder, beat):
  entry = {"run": "one", "machine": "another", "process": 1, "beat": beat}
  (folder / "lease.json").write_text(json.dumps(entry))


def test_silent_run_of_another_machine_loses_its_lease(clock, tmp_path):
  _elsewhere(tmp_path, 7)
  os.utime(tmp_path / "lease.json", (2**32, 2**32))  # Its clock is ahead.
  found = lease.Lease(tmp_path, "two")
  found.claim()
  waited_s = lease._PATIENCE_S + lease._SETTLE_S
  assert clock.now_s == pytest.approx(waited_s, abs=0.2)
  found.check()
  found.release()


def test_run_of_another_machine_keeps_its_lease(clock, tmp_path):
  def renew(seconds):
    if seconds < lease._SETTLE_S:
      _elsewhere(tmp_path, clock.now_s // lease._BEAT_S)

  clock.then = renew
  renew(0.0)
  with pytest.raises(ValueError, match="is in use by run one"):
    lease.Lease(tmp_path, "two").claim()
  assert clock.now_s == pytest.approx(lease._BEAT_S, abs=0.2)


def test_next_process_of_a_run_takes_over_its_lease(monkeypatch, tmp_path):
  # Otherwise others would find the process before it, which has ended.
  monkeypatch.setattr(lease, "_BEAT_S", 600.0)
  _elsewhere(tmp_path, 1)
  found = lease.Lease(tmp_path, "one")
  found.claim()
  entry = json.loads((tmp_path / "lease.json").read_text())
  assert (entry["run"], entry["process"]) == ("one", os.getpid())
  found.release()


def test_last_of_two_runs_that_find_a_dead_one_has_its_lease(clock, tmp_path):
  (tmp_path / "lease.json").write_text("{}")

  def settle(seconds):
    if seconds == lease._SETTLE_S:
      _elsewhere(tmp_path, 0)

  clock.then = settle
  with pytest.raises(ValueError, match="is in use by run one"):
    lease.Lease(tmp_path, "two").claim()
  assert json.loads((tmp_path / "lease.json").read_text())["run"] == "one"


def test_suspended_run_notices_that_it_has_lost_the_lease(
  monkeypatch, tmp_path
):
  monkeypatch.setattr(lease, "_BEAT_S", 600.0)  # It beats here.
  found = lease.Lease(tmp_path, "two")
  found.claim()
  _elsewhere(tmp_path, 1)
  with pytest.raises(ValueError, match="is in use by run one"):
    found.check()
  looks = iter((False, True))
  found._renew(types.SimpleNamespace(wait=lambda beat_s: next(looks)))
  found.release()
  # Neither the beat nor the release touches what another run has.
  assert json.loads((tmp_path / "lease.json").read_text())["run"] == "one"


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 10_000])
def test_unreadable_lease_is_one_of_a_dead_run(content, clock, tmp_path):
  (tmp_path / "lease.json").write_text(content)
  found = lease.Lease(tmp_path, "two")
  found.claim()
  found.release()


def test_run_whose_process_is_no_more_loses_its_lease(clock, tmp_path):
  """By its number nothing runs here, so that there is no beat to wait for."""
  entry = lease.Lease(tmp_path, "one")._entry() | {"process": 2**30}
  (tmp_path / "lease.json").write_text(json.dumps(entry))
  found = lease.Lease(tmp_path, "two")
  found.claim()
  assert clock.now_s == lease._SETTLE_S
  found.release()


def test_living_run_of_an_unknown_machine_beats(monkeypatch, tmp_path):
  """Nothing but the beat says that such a run lives, as in a container."""
  monkeypatch.setattr(lease, "_PATIENCE_S", 60.0)
  monkeypatch.setattr(lease, "_BEAT_S", 0.1)
  monkeypatch.setattr(lease, "_machine", lambda: "")
  found = lease.Lease(tmp_path, "one")
  found.claim()
  with pytest.raises(ValueError, match="is in use by run one"):
    lease.Lease(tmp_path, "two").claim()
  found.release()


def test_lease_that_is_given_back_meanwhile_is_taken_at_once(clock, tmp_path):
  _elsewhere(tmp_path, 7)
  clock.then = lambda seconds: (tmp_path / "lease.json").unlink()
  found = lease.Lease(tmp_path, "two")
  found.claim()
  assert clock.now_s < 1
  found.release()


def test_lease_that_has_vanished_is_written_again(monkeypatch, tmp_path):
  monkeypatch.setattr(lease, "_BEAT_S", 600.0)  # It beats here.
  found = lease.Lease(tmp_path, "one")
  found.claim()
  (tmp_path / "lease.json").unlink()
  found.check()
  looks = iter((False, True))
  found._renew(types.SimpleNamespace(wait=lambda beat_s: next(looks)))
  assert json.loads((tmp_path / "lease.json").read_text())["beat"] == 1
  found.release()
