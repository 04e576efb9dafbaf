"""Refusals of wrong paths and directories: an argument and its rule."""

from jdist import prediction
from jdist.storage import (
  array_files,
  hashes,
  json_lines,
  numbered_files,
  sealed_json,
)
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


@_refusals.table(
  *(
    (name, lambda call=call, wrong=wrong: call(wrong), "a path")
    for wrong in (None, 3)
    for name, call in (
      ("path", hashes.hash_file),
      ("folder", hashes.hash_files),
      ("path", lambda x: json_lines.append(x, [1])),
      ("path", json_lines.read),
      ("path", lambda x: json_lines.write(x, [1])),
      ("path", lambda x: sealed_json.read(x, form=1)),
      ("path", lambda x: sealed_json.write(x, 1, form=1)),
      ("folder", lambda x: numbered_files.find(x, "step_")),
      ("directory", lambda x: array_files.save_arrays(x, {}, {"what": "x"})),
    )
  ),
  ("arrays", lambda: array_files.tree_of(None, {}), "each entry an array, got"),
  ("body", lambda: array_files.save_arrays("x", {}, None), "a dict, got None"),
)
def test_what_is_no_path_is_refused(argument, call, rule):
  _refusals.check(argument, call, rule)
