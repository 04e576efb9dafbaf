"""A segment's bookkeeping, without arrays."""

import types

import numpy as np
import pytest

from jdist.pipeline.processes import _segment
from jdist.pipeline.schedule._table import Action, Op

_ORDER = [
  Action(Op.FORWARD, 0, 0, 0), Action(Op.FORWARD, 0, 1, 0),
  Action(Op.BACKWARD_INPUT, 0, 0, 0), Action(Op.BACKWARD_WEIGHT, 0, 0, 0),
  Action(Op.UPDATE, 0, 0, 0), Action(Op.FORWARD, 0, 0, 1),
  Action(Op.BACKWARD_INPUT, 0, 1, 0), Action(Op.BACKWARD_WEIGHT, 0, 1, 0),
]  # fmt: skip


@pytest.mark.parametrize(
  ("recompute", "reads"),
  [
    # The last forward pass of each version, or the backward pass that runs it
    # again; a weight part has all that it needs.
    ("none", {(0, 0): 1, (0, 1): 5}), ("layers", {(0, 0): 1, (0, 1): 5}),
    ("stage", {(0, 0): 6, (0, 1): 5}),
  ],
)  # fmt: skip
def test_last_read_of_a_version(recompute, reads):
  made = object.__new__(_segment.Segment)
  versions = {action: int(action.iteration) for action in _ORDER}
  made._order, made._part = _ORDER, types.SimpleNamespace(
    programs={0: types.SimpleNamespace(recompute=recompute)},
    versions=types.SimpleNamespace(read=versions),
  )  # fmt: skip
  assert made._last_reads() == reads


def test_versions_are_freed_after_their_last_read():
  made = object.__new__(_segment.Segment)
  made._newest = {0: 3, 1: 0}
  made._params = {0: dict(enumerate("abcd")), 1: {0: "e"}}
  # No pass reads version 2, and none is freed that may become the next one.
  made._last_read = {(0, 0): 3, (0, 1): 5, (0, 3): 1}
  left = []
  for place in (2, 3, 5, 9):
    made._drop(place)
    left.append(sorted(made._params[0]))
  assert left == [[0, 1, 3], [1, 3], [3], [3]]
  assert made._params[1] == {0: "e"}


def test_timeline_begins_with_its_first_action():
  forward, backward, update = _ORDER[0], _ORDER[2], _ORDER[4]
  seconds = [
    np.array([[[12.0, 13.0], [13.0, 15.5]], [[20.0, 21.0], [21.0, 22.0]]]),
    np.array([[[11.0, 12.5]]]),
    np.zeros((0, 1, 2)),
  ]
  trace = _segment.make_trace(
    [[forward, backward], [forward], [update]], seconds
  )
  spans = [
    (x.resource, x.name, x.start_s, x.start_s + x.seconds, x.kind)
    for x in trace.spans
  ]
  assert spans == [
    ("device 0", str(forward), 1.0, 2.0, forward.op.kind),
    ("device 0", str(backward), 2.0, 4.5, backward.op.kind),
    ("device 0", str(forward), 9.0, 10.0, forward.op.kind),
    ("device 0", str(backward), 10.0, 11.0, backward.op.kind),
    ("device 1", str(forward), 0.0, 1.5, forward.op.kind),
  ]
