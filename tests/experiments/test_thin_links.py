"""The thin links' measures, by hand; their runs need Ray, root and minutes."""

import pytest

from tests.experiments import _loading


def test_measures_count_waits_heartbeats_and_losses(monkeypatch):
  monkeypatch.syspath_prepend(_loading.FOLDER)
  _loading.enter("thin_links", monkeypatch)
  report = _loading.load("thin_report", "thin_links/report.py", monkeypatch)
  # Three steps of 1 s, the last of which waits for 2 s more.
  assert report.run.seconds_a_step([0.0, 5.0, 6.0, 7.0, 10.0], 1) == 5 / 3
  row = {
    "alone_s": [1.0, 1.0], "step_s": [2.0, 1.0], "hosts": [1, 0],
    "config": {"patience_s": 5.0, "interval": 4}, "events": ["lost"],
    "heartbeats_s": {"worker0": [0.1, 6.0], "worker1": [9.0]},
    "changes": [[0.0, 0, "joined", "a", 1], [1.0, 1, "left", "a", 0]],
  }  # fmt: skip
  assert report.kept(row) == 75.0
  assert report.ratio(row) == pytest.approx(1 / 3)
  # Only the heartbeats of the worker on host 1 count.
  assert report.beats(row) == ([0.1, 6.0], 1)
  assert report.lost(row) == 2
  # Rounds count with the waits before them: one of 4 s waits for 2 s.
  row["rounds_s"] = [[[1.0, 2.0]], [[1.0, 0.0]]]
  assert report.kept(row) == pytest.approx(100 * (4 / 6 + 1) / 2)
  assert report.waits(row) == pytest.approx(100 * (2 / 6) / 2)


def test_rounds_of_peers_are_compared_with_the_servers(monkeypatch):
  monkeypatch.syspath_prepend(_loading.FOLDER)
  _loading.enter("thin_links", monkeypatch)
  report = _loading.load("thin_report", "thin_links/report.py", monkeypatch)

  def row(peers, seconds, parameters):
    return {
      "config": {"peers": peers, "bits": 4, "rounds": 2, "workers": 4},
      "seed": 0, "commit": "0123456789ab", "rounds_s": seconds,
      "pulled_bytes": 16e6, "server_received": 6e6, "server_sent": 1e6,
      "parameters": parameters,
    }  # fmt: skip

  lines = report.of_peers([
    row(False, [8.0, 9.0, 12.0], "a"), row(True, [1.0, 3.0, 4.0], "a"),
    row(True, [9.0], "b"),
  ]).splitlines()  # fmt: skip
  cells = [[x.strip() for x in line.split("|")[1:-1]] for line in lines[2:]]
  assert [x[0] for x in cells] == ["by the server", "by peers", "by peers"]
  assert cells[1][3:7] == ["2", "3.00", "1.00 to 4.00", "3.00"]
  # Bytes of a round: to one of four workers, and all of the server's host.
  assert cells[1][7:10] == ["2.00", "3.00", "0.50"]
  assert [x[10] for x in cells] == ["yes", "yes", "**no**"]


def test_bytes_of_a_process_that_has_ended_since_are_counted(monkeypatch):
  nodes = _loading.load("thin_nodes", "thin_links/nodes.py", monkeypatch)
  # No process has this number: Linux has at most 2**22.
  line = (
    '0 0 10.0.0.2:5 10.0.0.1:6 users:(("a",pid=9999999,fd=3)) bytes_acked:7'
  )
  monkeypatch.setattr(nodes, "_told", lambda *_: line)
  assert nodes.connections() == [
    {"process": "", "near": 5, "far": 6, "sent": 7, "received": 0}
  ]
