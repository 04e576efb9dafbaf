"""Costs of layers and stages."""

from jdist import pipeline


def test_a_stage_adds_its_layers_and_sends_what_the_last_one_makes():
  layers = [
    pipeline.LayerCost("a", 1.0, 2.0, 0.5, 0.25, 10, 8, 16),
    pipeline.LayerCost("b", 2.0, 5.0, None, 0.5, 20, 4, 32),
  ]
  stage = pipeline.stage_cost(layers, "both")
  assert stage == pipeline.LayerCost("both", 3.0, 7.0, 3.0, 0.75, 30, 4, 48)
  assert (stage.compute_s, stage.input_s) == (10.0, 4.0)
