"""The storm's measures, by hand; its runs need Ray and minutes."""

import pytest

from tests.experiments import _loading


def test_times_count_from_the_fault(monkeypatch):
  storm = _loading.load("storm_run", "storm/run.py", monkeypatch)
  faults = [
    {"kind": "SIGKILL", "worker": "a", "at_s": 1.0},
    {"kind": "SIGSTOP", "worker": "b", "at_s": 4.0},
    {"kind": "SIGCONT", "worker": "b", "at_s": 9.0},
    # Too short for the server to notice.
    {"kind": "SIGSTOP", "worker": "c", "at_s": 11.0},
    {"kind": "SIGCONT", "worker": "c", "at_s": 11.5},
  ]
  changes = [
    (1.25, 1, "left", "a", 2), (5.0, 4, "returned", "a", 3),
    (7.0, 6, "left", "b", 2), (9.5, 8, "returned", "b", 3),
  ]  # fmt: skip
  merges = [(x + 0.5, 2, 3) for x in range(13)]
  found = storm.measures(faults, {"changes": changes, "merges": merges})
  assert found["next_merge_s"] == [0.5, 0.5, 0.5]
  assert found["back_s"] == [4.0, 0.5]
  assert found["merge_gap_s"] == pytest.approx([1.0] * 12)
