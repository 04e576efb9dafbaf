"""Refusals of what is no directory: an argument and its rule."""

from jdist import prediction
from jdist.storage import array_files
from tests import _refusals
from tests.prediction import _tiny
from tests.prediction._fits import fit_predictor

CUTS = [_tiny.cut()]


@_refusals.table(
  *(
    ("directory", lambda call=call, wrong=wrong: call(wrong), rule)
    for wrong, rule in (
      (3, "a path"),
      (b"bytes", "a path"),
      (__file__, "a directory"),
    )
    for call in (
      lambda x: prediction.Collector(x, _tiny.alone(), CUTS, (1, 2)),
      prediction.ParameterSet,
      lambda x: array_files.save_arrays(x, {}, {"what": "x"}),
      lambda x: array_files.load_arrays(x, what="x"),
      prediction.load_predictor,
      lambda x: fit_predictor(directory=x),
    )
  ),
)
def test_invalid_directories_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
