"""The interfaces' counts against ours, by hand; their runs need root."""

import pytest

from tests.experiments import _loading


def row(name, said, counted, packets):
  return {
    "name": name, "said": said, "config": {"hosts": 2},
    "counts": {"bytes": counted, "packets": packets},
  }  # fmt: skip


def test_headers_of_packets_are_subtracted(monkeypatch):
  monkeypatch.syspath_prepend(_loading.FOLDER)
  _loading.enter("advise", monkeypatch)
  report = _loading.load("wire_report", "advise/report.py", monkeypatch)
  one = row("ssgd", {"num_bits": 10_000, "traced": 10_000}, 11_320, 10)
  assert report.over(one) == pytest.approx((0.132, 0.066))
  other = row("edge", {"edge_bytes": 1_000}, 1_066, 1)
  said = report.wire_verdict([one, other])
  assert "differ by 0.0000 % at most" in said
  assert "6.60 to 13.20 % more" in said and "6.60 % at most, of ssgd" in said
  last = report.wire_table([one, other]).splitlines()[-1]
  assert last == "| edge | 2 | 1.0 | 1.1 | 1 | 6.60 | 0.00 |"
