"""The seconds in which both devices of one program compute, by hand."""

import pytest

from jdist import pipeline
from tests.experiments import _loading


@pytest.mark.parametrize(
  ("name", "expected_s"),
  [
    # Seven of nine backward ticks, of three seconds, are of both devices.
    ("gpipe", 21.0),
    # One device at a time.
    ("naive", 0.0),
  ],
)
def test_seconds_in_which_both_devices_compute(monkeypatch, name, expected_s):
  _loading.enter("pipeline", monkeypatch)
  program = _loading.load("one", "pipeline/one_program.py", monkeypatch)
  micro = 8 if name == "gpipe" else 1
  config = program.Config(kind="sleeping", devices=2, microbatches=micro)
  pipe = program.make_pipe(config, pipeline.make_table(name, 2, micro))
  costs = [pipeline.LayerCost(forward_s=1.0, backward_s=2.0)] * 2
  assert program.both_s(config, pipe, costs) == expected_s
