"""The storm's measures, by hand, and its cuts; runs need Ray and minutes."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys

import pytest

from tests.experiments import _loading

CUT = """
import os, socket, sys, threading
sys.path.insert(0, sys.argv[1])
import links
links.enter()
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
near.settimeout(60.0)

def sent():
  far.sendall(b"x")
  try:
    return near.recv(1)
  except TimeoutError:
    return None

cuts = links.Cuts()
found = [sent()]
cuts.cut("a", os.getpid())
near.settimeout(0.3)
found.append(sent())
cuts.heal("a")
near.settimeout(60.0)
found += [near.recv(1), sent()]
print(found)
"""


# This user's files, but neither root's number nor its rights.
ANYBODY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
NAMESPACE = (*ANYBODY, "unshare", "--user", "--map-root-user", "true")


def _possible(command):
  with contextlib.suppress(OSError):
    return not subprocess.call(command, stderr=subprocess.DEVNULL)
  return False


@pytest.mark.skipif(
  os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip"
)
@pytest.mark.parametrize("user", ["root", "anybody"])
def test_cut_delays_what_is_sent(user, tmp_path):
  command = (sys.executable,)
  if user == "anybody":
    if not _possible(NAMESPACE):
      pytest.skip("needs namespaces for all users")
    command = (*ANYBODY, *command)
  program = tmp_path / "program.py"
  program.write_text(CUT)
  told = subprocess.run(
    (*command, str(program), str(_loading.FOLDER / "storm")), timeout=300,
    capture_output=True, text=True,
  )  # fmt: skip
  assert told.stdout.strip() == "[b'x', None, b'x', b'x']", told.stderr


def test_times_count_from_the_fault(monkeypatch):
  _loading.enter("storm", monkeypatch)
  storm = _loading.load("storm_run", "storm/run.py", monkeypatch)
  faults = [
    {"kind": "SIGKILL", "worker": "a", "at_s": 1.0},
    {"kind": "SIGSTOP", "worker": "b", "at_s": 4.0},
    {"kind": "SIGCONT", "worker": "b", "at_s": 9.0},
    # Too short for the server to notice.
    {"kind": "SIGSTOP", "worker": "c", "at_s": 11.0},
    {"kind": "SIGCONT", "worker": "c", "at_s": 11.5},
    {"kind": "cut", "worker": "d", "at_s": 11.75},
    {"kind": "SIGKILL", "worker": "a", "at_s": 12.75},
  ]
  changes = [
    (1.25, 1, "left", "a", 2), (5.0, 4, "returned", "a", 3),
    (7.0, 6, "left", "b", 2), (9.5, 8, "returned", "b", 3),
  ]  # fmt: skip
  merges = [(x + 0.5, 2, 3) for x in range(13)]
  found = storm.measures(faults, {"changes": changes, "merges": merges})
  assert found["next_merge_s"] == [0.5, 0.5, 0.5, 0.75]
  # The last kill's worker is away when the run ends.
  assert found["back_s"] == {
    "SIGKILL": [4.0, None], "SIGCONT": [0.5], "heal": []
  }  # fmt: skip
  assert found["short"] == 1
  # One more fault before a return, which the first one then counts through.
  stop = {"kind": "SIGSTOP", "worker": "b", "at_s": 9.25}
  told = [x[2] for x in storm.returns([*faults, stop], changes)]
  assert told == [False, True, False, False]
  assert found["merge_gap_s"] == pytest.approx([1.0] * 12)


def test_absences_on_the_clock_are_the_storms_faults(monkeypatch):
  """A worker is away once at a time, and as often as workers of processes."""
  _loading.enter("storm", monkeypatch)
  storm = _loading.load("storm_absences", "storm/absences.py", monkeypatch)
  preset = storm.PRESETS["storm"]
  away = storm.outages(preset, 3)
  assert storm.outages(preset, 3) == away != storm.outages(preset, 4)
  assert list(away) == [f"worker{i}" for i in range(8)]
  for own in away.values():
    for one, after in itertools.pairwise(own):
      assert one.end_s < after.start_s
  found = [x for own in away.values() for x in own]
  kills = [x for x in found if x.end_s - x.start_s == 10.0]
  # 125 faults an hour for 55 minutes, of which 4 % are too short.
  assert 85 < len(found) < 140 and 20 < len(kills) < 50
  assert min(x.start_s for x in found) > preset.calm_s
  calm = storm.PRESETS["undisturbed"]
  assert not any(storm.outages(calm, 3).values())
