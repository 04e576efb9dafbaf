"""Costs of layers: their arithmetic, and their file."""

import dataclasses
import math

import jax
import pytest

from jdist import codecs, pipeline
from jdist.pipeline.planning import _costs

_ONE = pipeline.LayerCost(
  "one", forward_s=1.0, backward_s=4.0, weight_s=1.5, update_s=0.5,
  parameter_bytes=8.0, output_bytes=16.0, sent_share=0.25, saved_bytes=32.0,
  working_bytes=64.0,
)  # fmt: skip


def test_half_of_a_backward_pass_is_for_the_parameters():
  assert pipeline.LayerCost("a", backward_s=4.0).weight_s == 2.0
  assert (_ONE.compute_s, _ONE.input_s, _ONE.sent_bytes) == (5.0, 2.5, 4.0)


def test_step_and_parameters_do_not_depend_on_the_samples():
  found = dataclasses.asdict(_ONE.scaled(2.0))
  assert found == {
    "name": "one", "forward_s": 2.0, "backward_s": 8.0, "weight_s": 3.0,
    "update_s": 0.5, "parameter_bytes": 8.0, "output_bytes": 32.0,
    "sent_share": 0.25, "saved_bytes": 64.0, "working_bytes": 128.0,
  }  # fmt: skip


def test_stage_that_runs_twice_keeps_its_input_alone():
  found = dataclasses.asdict(_ONE.recomputed(2.0))
  assert found == dataclasses.asdict(_ONE) | {
    "backward_s": 5.0, "saved_bytes": 2.0, "working_bytes": 96.0
  }  # fmt: skip


def test_stage_adds_its_layers_and_sends_the_last_output():
  last = pipeline.LayerCost(
    "last", forward_s=2.0, backward_s=2.0, weight_s=2.0, update_s=0.25,
    parameter_bytes=1.0, output_bytes=3.0, sent_share=0.5, saved_bytes=5.0,
    working_bytes=7.0,
  )  # fmt: skip
  for layers, working in (([_ONE, last], 64.0), ([_ONE], 64.0), ([last], 7.0)):
    found = _costs.stage_cost(layers, "both")
    assert found.name == "both" and found.working_bytes == working
    for name in (
      "forward_s", "backward_s", "weight_s", "update_s", "parameter_bytes",
      "saved_bytes",
    ):  # fmt: skip
      assert getattr(found, name) == sum(getattr(x, name) for x in layers)
    assert found.output_bytes == layers[-1].output_bytes
    assert found.sent_share == layers[-1].sent_share


def test_codec_sends_its_bits_of_an_output():
  one = dataclasses.replace(_ONE, output_bytes=260.0, sent_share=1.0)
  # Half a byte each, and a scale of two bytes for each of two blocks.
  coded = one.coded(codecs.Quantize(4, 64))
  bits = codecs.Quantize(4, 64).num_bits
  assert coded.sent_bytes == pytest.approx(bits(_like(65)) / 8)
  assert dataclasses.replace(coded, sent_share=1.0) == one
  assert dataclasses.replace(one, output_bytes=0.0).coded(
    codecs.Quantize(4)
  ).sent_share == 1.0  # fmt: skip


def _like(size):
  return jax.ShapeDtypeStruct((size,), "float32")


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize(
  "name", [x.name for x in dataclasses.fields(pipeline.LayerCost)][1:]
)
def test_each_number_is_finite_and_not_negative(name, bad):
  with pytest.raises(ValueError, match=f"`{name}` must be fin.*for 'one'"):
    dataclasses.replace(_ONE, **{name: bad})


def test_weight_part_is_a_part():
  dataclasses.replace(_ONE, weight_s=4.0)
  with pytest.raises(ValueError, match=r"`weight_s` must be .*4.0.*got 4.5"):
    dataclasses.replace(_ONE, weight_s=4.5)


def _load(tmp_path, text):
  path = tmp_path / "costs.toml"
  path.write_text(text)
  return pipeline.load_costs(path)


def test_stages_of_a_file_have_their_names_or_numbers(tmp_path):
  first, last = _load(
    tmp_path,
    "[[stages]]\nforward_s = 1\nsaved_bytes = 2.5\n"
    "[[stages]]\nname = 'rear'\nbackward_s = 3\n",
  )
  assert first == pipeline.LayerCost(
    "stage 0", forward_s=1, saved_bytes=2.5
  )  # fmt: skip
  assert last == pipeline.LayerCost("rear", backward_s=3)


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "`stages` must be one"), ("stages = 3", "`stages` must be one"),
    ("stages = [1]", "`stages` must be one"), ("stages = []", "must be one"),
    ("x = 1\ny = 2\n[[stages]]\n", "alone, got 'x', 'y'"),
    ("[[stages]]\n[[stages]]\nforward = 1", "number 2 must .* forward = 1"),
    ("[[stages]]\nname = 1", "number 1 must have numbers .* name = 1"),
    ("[[stages]]\nforward_s = 'a'", "got forward_s = 'a'"),
    ("[[stages]]\nforward_s = true", "got forward_s = True"),
    ("[[stages]]\nforward_s = -1", "number 1: `forward_s` must be finite"),
    ("[[stages", "TOML"),
  ],
)  # fmt: skip
def test_wrong_file_is_refused_at_its_place(text, said, tmp_path):
  with pytest.raises(ValueError, match=said) as caught:
    _load(tmp_path, text)
  assert "costs.toml" in str(caught.value)
