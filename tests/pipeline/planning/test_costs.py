"""Costs of layers and stages."""

import pytest

from jdist import pipeline


def test_a_stage_adds_its_layers_and_sends_what_the_last_one_makes():
  layers = [
    pipeline.LayerCost("a", 1.0, 2.0, 0.5, 0.25, 10, 8, 16),
    pipeline.LayerCost("b", 2.0, 5.0, None, 0.5, 20, 4, 32),
  ]
  stage = pipeline.stage_cost(layers, "both")
  assert stage == pipeline.LayerCost("both", 3.0, 7.0, 3.0, 0.75, 30, 4, 48)
  assert (stage.compute_s, stage.input_s) == (10.0, 4.0)


@pytest.mark.parametrize(
  ("wrong", "words"),
  [
    ({"forward_s": -1.0}, "`forward_s` must be finite and not negative"),
    ({"output_bytes": float("nan")}, "`output_bytes` must be finite"),
    ({"backward_s": 1.0, "weight_s": 2.0}, "`weight_s` must be at most"),
  ],
)
def test_wrong_costs_are_refused(wrong, words):
  with pytest.raises(ValueError, match=words):
    pipeline.LayerCost(**wrong)


def test_a_stage_needs_a_layer():
  with pytest.raises(ValueError, match="`layers` must be one at least"):
    pipeline.stage_cost([])
