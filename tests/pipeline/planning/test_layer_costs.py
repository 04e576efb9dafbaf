"""Costs of layers, against counts by hand."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import models, pipeline
from jdist.pipeline.planning import _layer_costs

_BATCH = {"image": jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float32)}


def _mlp(abstract=True):
  return models.build(
    "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(32, 16),
    abstract=abstract,
  )  # fmt: skip


@pytest.mark.parametrize("source", ["compiled", "lowered"])
def test_costs_of_an_mlp_match_hand_counts(source):
  found = pipeline.layer_costs(
    _mlp().layers, _BATCH, source=source, flops_per_s=1.0
  )
  assert [x.name for x in found] == ["dense1", "dense2", "dense3"]
  assert [x.parameter_bytes for x in found] == [
    4 * (64 + 1) * 32, 4 * (32 + 1) * 16, 4 * (16 + 1) * 10,
  ]  # fmt: skip
  assert [x.output_bytes for x in found] == [4 * 4 * n for n in (32, 16, 10)]
  # Products make up the cost; biases and rectifiers add a little.
  for cost, one in zip(found, (64 * 32, 32 * 16, 16 * 10), strict=True):
    product = 2 * 4 * one
    first = cost.name == "dense1"
    assert 1 <= cost.forward_s / product < 1.2
    assert 1 <= cost.backward_s / product / (1 if first else 2) < 1.2
    # The first layer's input has no gradient.
    assert cost.weight_s == pytest.approx(
      product if cost.backward_s and not first else cost.backward_s, rel=0.2
    )
  # The input of 64 numbers and the rectifier's arrays are saved; parameters do
  # not count.
  assert 4 * 4 * 64 < found[0].saved_bytes <= 4 * 4 * (64 + 2 * 32)
  assert found[2].saved_bytes == 4 * 4 * 16


def test_slow_memory_adds_seconds():
  layers = _mlp().layers
  free = pipeline.layer_costs(layers, _BATCH, flops_per_s=1e12)
  slow = pipeline.layer_costs(layers, _BATCH, flops_per_s=1e12, bytes_per_s=1e3)
  # Each pass reads the parameters at least.
  for one, other in zip(free, slow, strict=True):
    assert other.forward_s > one.parameter_bytes / 1e3 > one.forward_s


def test_statistics_tokens_and_keys_are_supported():
  language = models.build(
    "transformer", input_shape=(6,), num_classes=11, num_layers=2, width=8,
    num_heads=2,
  )  # fmt: skip
  tokens = {"tokens": jnp.zeros((2, 6), jnp.int32)}
  found = pipeline.layer_costs(
    language.layers, tokens, inputs="tokens", source="lowered"
  )
  assert found[1] == dataclasses.replace(found[2], name=found[1].name)
  resnet = models.build(
    "resnet8", input_shape=(8, 8, 3), num_classes=10, abstract=True
  )
  image = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
  found = pipeline.layer_costs(
    resnet.layers[:2], {"image": image}, source="lowered"
  )
  assert all(x.backward_s > x.forward_s > 0 for x in found)

  def noisy(params, state, x, *, train, mask=None, key):
    return x * jax.random.normal(key, x.shape) * params, state

  layers = [
    models.Layer("noise", jnp.float32(2.0), {}, noisy),
    models.Layer("more", jnp.float32(2.0), {}, noisy),
  ]
  found = pipeline.layer_costs(
    layers, {"x": jnp.ones((4, 5))}, inputs="x", source="lowered"
  )
  assert all(x.forward_s > 0 and x.parameter_bytes == 4 for x in found)


def test_saved_bytes_are_those_of_inputs_and_not_of_the_batch():
  def masked(params, state, x, *, train, mask=None):
    return x * params * mask, state

  layers = [models.Layer(n, jnp.float32(2.0), {}, masked) for n in "ab"]
  batch = {"x": jnp.ones(4), "mask": jnp.ones(4)}
  found = pipeline.layer_costs(layers, batch, inputs="x", source="lowered")
  # They save their inputs, and neither the mask nor the parameters.
  assert [x.saved_bytes for x in found] == [4 * 4] * 2


def test_working_bytes_are_the_most_of_both_passes():
  def layer(params, state, x, *, train, mask=None):
    return (x @ params) ** 2, state

  own = models.Layer("a", jnp.ones((8, 64)), {}, layer)
  (found,) = pipeline.layer_costs([own], {"x": jnp.ones((4, 8))}, inputs="x")
  # The backward pass needs the gradient of the product, the forward pass none.
  assert found.working_bytes >= 4 * 4 * 64


def test_timed_layers_run_in_order():
  generator = np.random.default_rng(0)
  batch = {"image": generator.normal(size=(64, 8, 8, 1)).astype(np.float32)}
  found = pipeline.layer_costs(
    _mlp(False).layers, batch, source="timed", repeats=2
  )
  counted = pipeline.layer_costs(_mlp().layers, batch, source="lowered")
  for timed, each in zip(found, counted, strict=True):
    assert 0 < timed.forward_s < 60 and 0 < timed.backward_s < 60
    assert timed.weight_s <= timed.backward_s
    assert timed.saved_bytes == each.saved_bytes


def test_saved_bytes_leave_out_parameters_and_state():
  """The backward pass of x * s * w needs x * s, and w and s, which exist."""

  def scaled(params, state, x, *, train, mask=None):
    return x * state["s"] * params["w"], state

  image = {"image": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
  ones = jnp.ones((4, 8))  # Broadcasts would be arrays of their own.
  layer = models.Layer("a", {"w": ones}, {"s": ones}, scaled)
  first, after = pipeline.layer_costs(
    [layer, dataclasses.replace(layer, name="b")], image, source="lowered"
  )
  assert first.saved_bytes == after.saved_bytes == 4 * 4 * 8


class _Program:
  """A lowered program, which counts how often it is compiled."""

  def __init__(self, text, flops, listed=False):
    self.text, self.flops, self.listed, self.compiled = text, flops, listed, 0

  def as_text(self):
    return self.text

  def compile(self):
    self.compiled += 1
    return self

  def memory_analysis(self):
    return types.SimpleNamespace(temp_size_in_bytes=7)

  def cost_analysis(self):
    found = {"flops": self.flops, "bytes accessed": 8.0}
    return [found] if self.listed else found


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_program_takes_the_longer_of_arithmetic_and_memory(compiled, listed):
  costs, working = {}, 7 * compiled
  # At 2 operations and 4 bytes a second: 3 and 2 seconds, then 1 and 2.
  for text, flops, seconds in (("a", 6.0, 3.0), ("b", 2.0, 2.0)):
    program = _Program(text, flops, listed)
    found = _layer_costs._count(program, costs, (2.0, 4.0), compiled)
    assert found == (seconds, working) and program.compiled == compiled
  # An equal program is compiled once.
  again = _Program("a", 600.0)
  assert _layer_costs._count(again, costs, (2.0, 4.0), compiled) == (3, working)
  assert not again.compiled


@pytest.mark.parametrize("source", ["compiled", "lowered"])
def test_only_compiled_programs_show_their_temporaries(source):
  found = pipeline.layer_costs(_mlp().layers[:1], _BATCH, source=source)
  assert (found[0].working_bytes > 0) == (source == "compiled")


def test_timed_layers_take_turns_of_which_the_first_warms_up(monkeypatch):
  now, log = [0.0], []
  monkeypatch.setattr(
    _layer_costs, "time", types.SimpleNamespace(perf_counter=lambda: now[0])
  )

  def program(name, result, *seconds):
    took = iter(seconds)

    def run(*given):
      log.append(name)
      now[0] += next(took)
      return result

    return types.SimpleNamespace(compile=lambda: run)

  x, layer = jnp.ones(2), types.SimpleNamespace(params={}, state={})
  first, last = (
    types.SimpleNamespace(
      forward=program("F" + name, (x, [], {}), 100.0, 50.0, 1.0, 2.0, 9.0),
      backward=program("B" + name, x, 40.0, 3.0, 8.0, 4.0),
      towards_input=towards,
    )
    for name, towards in (
      ("0", None), ("1", program("I1", x, 30.0, 7.0, 5.0, 6.0))
    )
  )  # fmt: skip
  found = _layer_costs._timed([layer] * 2, [first, last], x, {}, None, 3)
  assert found == [[2.0, 4.0, 0.0], [2.0, 4.0, 6.0]]
  # Each forward pass runs before, to find what the layers pass on.
  assert log == ["F0", "F1", *["F0", "B0", "F1", "B1", "I1"] * 4]


def test_measured_part_that_takes_longer_than_the_whole_leaves_nothing(
  monkeypatch,
):
  seconds = [(1.0, 2.0, 3.0), (1.0, 5.0, 3.0)]
  monkeypatch.setattr(_layer_costs, "_timed", lambda *given: seconds)
  batch = {"image": np.ones((2, 8, 8, 1), np.float32)}
  layers = _mlp(False).layers[:2]
  found = pipeline.layer_costs(layers, batch, source="timed")
  assert [x.weight_s for x in found] == [0.0, 2.0]
