"""Split backward passes: the same gradients, no work done twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.extend.core import primitives

from jdist import models, pipeline, training
from jdist.pipeline.runtime import _split_backward
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_WIDTH, _ROWS = 32, 8
_HEAVY = ("dot_general", "conv_general_dilated")


def _dense(params, x):
  for weights, bias in params:
    x = jnp.tanh(x @ weights + bias)
  return x, ()


def _residual(params, x):
  for weights, bias in params:
    x = x + jnp.tanh(x @ weights) @ weights.T + bias
  return x, ()


def _embedding(params, tokens):
  return _dense(params["layers"], params["table"][tokens])


class _Convolutions(nn.Module):
  """Convolutions with batch statistics, and calls that JAX makes itself."""

  @nn.compact
  def __call__(self, x):
    kind = {"dtype": x.dtype, "param_dtype": x.dtype}
    for _ in range(2):
      x = nn.Conv(8, (3, 3), use_bias=False, **kind)(x)
      x = nn.BatchNorm(use_running_average=False, **kind)(x)
      x = jax.nn.relu(x)
    return x


class _Transformer(nn.Module):
  @nn.compact
  def __call__(self, x):
    kind = {"dtype": x.dtype, "param_dtype": x.dtype}
    for _ in range(2):
      h = nn.LayerNorm(**kind)(x)
      x = x + nn.MultiHeadDotProductAttention(4, **kind)(h)
      h = nn.Dense(2 * _WIDTH, **kind)(nn.LayerNorm(**kind)(x))
      x = x + nn.Dense(_WIDTH, **kind)(nn.gelu(h))
    return x


def _layers(dtype, generator):
  return [
    (
      jnp.asarray(generator.normal(size=(_WIDTH, _WIDTH)) / 6, dtype),
      jnp.asarray(generator.normal(size=_WIDTH), dtype),
    )
    for _ in range(3)
  ]


def _stage(name, dtype=jnp.float32):
  """Returns a function with auxiliary outputs, its parameters and an input."""
  generator = np.random.default_rng(0)
  layers = _layers(dtype, generator)
  x = jnp.asarray(generator.normal(size=(_ROWS, _WIDTH)), dtype)
  if name == "dense":
    return _dense, layers, x
  if name == "jit":
    return jax.jit(_dense), layers, x
  if name == "checkpoint":
    return jax.checkpoint(_dense), layers, x
  if name == "residual, tied":
    return _residual, layers, x
  if name == "embedding":
    table = jnp.asarray(generator.normal(size=(16, _WIDTH)), dtype)
    tokens = jnp.asarray(generator.integers(0, 16, _ROWS), jnp.int32)
    return _embedding, {"table": table, "layers": layers}, tokens
  if name == "convolution, batch norm":
    model = _Convolutions()
    x = jnp.asarray(generator.normal(size=(2, 8, 8, 8)), dtype)
  else:
    model = _Transformer()
    x = x.reshape(2, 4, _WIDTH)
  variables = jax.jit(model.init)(jax.random.key(0), x)
  params = variables.pop("params")

  def apply(params, x):
    return model.apply(
      {"params": params} | variables, x, mutable=["batch_stats"]
    )

  return apply, params, x


_STAGES = (
  "dense",
  "jit",
  "checkpoint",
  "residual, tied",
  "embedding",
  "convolution, batch norm",
  "layer norm, attention",
)


def _split(apply, params, x):
  """Returns both parts, the whole, the residuals and a cotangent."""

  def forward(params, x):
    y, pull, aux = jax.vjp(apply, params, x, has_aux=True)
    leaves, structures["pull"] = jax.tree.flatten(pull)
    return y, leaves, aux

  def pull(residuals, cotangent):
    return jax.tree.unflatten(structures["pull"], residuals)(cotangent)

  structures = {}
  y, residuals, _ = jax.jit(forward)(params, x)
  cotangent = jnp.asarray(
    np.random.default_rng(1).normal(size=y.shape), y.dtype
  )
  parts = _split_backward.split_backward(pull, residuals, cotangent)
  return parts, pull, residuals, cotangent


@functools.cache
def _compiled(name, dtype=jnp.float32):
  """Returns each program's result and its FLOPs."""
  parts, pull, residuals, cotangent = _split(*_stage(name, dtype))

  def whole(residuals, cotangent):
    grads, gradient = pull(residuals, cotangent)
    return grads, None if name == "embedding" else gradient

  def run(function, *args):
    program = jax.jit(function).lower(*args).compile()
    return program(*args), (program.cost_analysis() or {}).get("flops", 0.0)

  both = run(whole, residuals, cotangent)
  first = run(parts.input_part, residuals, cotangent)
  kept = parts.prune(residuals, cotangent)
  return both, first, run(parts.weight_part, *kept, first[0][1])


@pytest.mark.parametrize("name", _STAGES)
def test_both_parts_match_the_whole_backward_pass(name):
  (wanted, _), ((gradient, _), _), (grads, _) = _compiled(name)
  _close((grads, gradient), wanted, 2e-6)


@pytest.mark.parametrize(
  "name",
  [
    # These take long to compile.
    pytest.param(x, marks=pytest.mark.slow)
    if x.startswith(("conv", "layer"))
    else x
    for x in _STAGES
  ],
)
def test_both_parts_match_to_twelve_digits_in_float64(name):
  # Flax initializes statistics in float32.
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    (wanted, _), ((gradient, _), _), (grads, _) = _compiled(name, jnp.float64)
    assert {x.dtype for x in jax.tree.leaves(wanted)} == {jnp.dtype("float64")}
    _close((grads, gradient), wanted, 1e-12)


def _close(found, wanted, tolerance):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  leaves = jax.tree.leaves(wanted)
  largest = max(float(jnp.abs(x).max()) for x in leaves)
  for a, b in zip(jax.tree.leaves(found), leaves, strict=True):
    # A softmax hides the bias of its keys, whose exact gradient is zero: all
    # that it holds is the rounding of terms as large as the other gradients.
    rounding = 4 * float(jnp.finfo(b.dtype).eps) * largest
    bound = tolerance * float(jnp.abs(b).max()) + rounding
    assert float(jnp.abs(a - b).max()) <= bound


@pytest.mark.parametrize("name", _STAGES)
def test_both_parts_cost_as_much_as_the_whole(name):
  (_, whole), (_, first), (_, second) = _compiled(name)
  assert first + second <= 1.1 * whole
  assert second < whole or name == "embedding"
  assert first < 0.75 * whole


def _heavy(function, *args):
  return _training.count_primitives(_HEAVY, function, *args)


@pytest.mark.parametrize(
  ("name", "counts"),
  [
    ("dense", (3, 3)),
    ("jit", (3, 3)),
    ("checkpoint", (3 + 3, 3)),  # It runs the forward pass again.
    ("residual, tied", (6, 6)),
    ("embedding", (0, 6)),
    ("convolution, batch norm", (2, 2)),
    # Each block has six projections and the two products of attention.
    ("layer norm, attention", (2 * 10, 2 * 6)),
  ],
)
def test_only_the_weight_part_multiplies_for_parameters(name, counts):
  parts, pull, residuals, cotangent = _split(*_stage(name))
  _, stash = parts.input_part(residuals, cotangent)
  found = (
    _heavy(parts.input_part, residuals, cotangent),
    _heavy(parts.weight_part, residuals, cotangent, stash),
  )
  assert found == counts
  assert sum(found) == _heavy(pull, residuals, cotangent)


def test_an_input_and_a_cotangent_of_each_layer_wait():
  parts, _, residuals, cotangent = _split(*_stage("dense"))
  _, stash = parts.input_part(residuals, cotangent)
  shape = (_ROWS, _WIDTH)
  assert [x.shape for x in stash] == [shape] * 3
  kept = jax.tree.leaves(parts.prune(residuals, cotangent))
  assert [x.shape for x in kept] == [shape] * 3


def test_cheap_value_is_computed_again_instead_of_waiting():
  def apply(w, x):  # The mean's cotangent is spread over all entries.
    return jnp.mean(x @ w), ()

  parts, pull, residuals, cotangent = _split(
    apply, jnp.ones((4, 4)), jnp.ones((2, 4))
  )
  gradient, stash = parts.input_part(residuals, cotangent)
  assert sum(x.nbytes for x in stash) == 4
  grads = parts.weight_part(*parts.prune(residuals, cotangent), stash)
  _close((grads, gradient), pull(residuals, cotangent), 1e-6)


def test_scan_over_layers_raises():
  def apply(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0], ()

  params, x = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
  with pytest.raises(ValueError, match=r"got a 'scan' that computes both\. Wr"):
    _split(apply, params, x)
  # Without a gradient of the input nothing is to be cut.
  parts, *_ = _split(lambda w, _: apply(w, x), params, jnp.arange(2))
  assert parts.input_part


def test_scan_without_parameters_runs_in_the_input_part():
  def apply(w, x):
    x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x), None), x @ w, None, length=3)
    return x, ()

  parts, pull, residuals, cotangent = _split(
    apply, jnp.ones((4, 4)), jnp.ones((2, 4))
  )
  gradient, stash = parts.input_part(residuals, cotangent)
  grads = parts.weight_part(*parts.prune(residuals, cotangent), stash)
  _close((grads, gradient), pull(residuals, cotangent), 1e-6)


def _network(name):
  """Returns abstract layers, the key of their inputs, and a micro-batch."""
  if name == "resnet20":
    built = models.build(
      name, input_shape=(32, 32, 3), num_classes=10, abstract=True
    )
    shapes = {"image": (8, 32, 32, 3), "label": (8,)}
  else:
    built = models.build(
      "transformer",
      input_shape=(16,),
      num_classes=32,
      num_layers=1,
      width=32,
      tied=True,
      abstract=True,
    )
    shapes = {"tokens": (8, 16), "targets": (8, 16)}
  batch = {
    k: jax.ShapeDtypeStruct(x, "float32" if k == "image" else "int32")
    for k, x in shapes.items()
  }
  return built.layers, next(iter(shapes)), batch


@pytest.mark.parametrize(
  "name", [pytest.param("resnet20", marks=pytest.mark.slow), "transformer"]
)
def test_both_parts_in_one_program_cost_as_much_as_the_whole(name):
  layers, inputs, microbatch = _network(name)
  stages = pipeline.cut_layers(layers, 3)
  pipe = pipeline.OneProgram(
    stages,
    training.label_loss,
    pipeline.make_table("zb_h1", 3, 6),
    microbatch,
    inputs=inputs,
  )
  actions, model = pipe._ticks._actions, pipe._model
  key = jax.eval_shape(lambda: jax.random.key(0))
  given = (stages[1].params, model.between[0], stages[1].state, microbatch, key)
  parts = actions._split(1, given, model.between[1])
  _, stash = jax.eval_shape(parts.input_part, given, model.between[1])

  def flops(function, *rest):
    args = (given, model.between[1], *rest)
    program = jax.jit(function).lower(*args).compile()
    return program.cost_analysis()["flops"]

  whole = flops(lambda *x: actions._pull(1, *x))
  first, second = flops(parts.input_part), flops(parts.weight_part, stash)
  # The input part runs the forward pass, as the whole pass does.
  assert first + second <= 1.02 * whole
  assert 0.25 * whole < second < 0.4 * whole
  sizes = [
    sum(x.size * x.dtype.itemsize for x in actions._stash_shapes(s))
    for s in range(3)
  ]
  flight = jax.eval_shape(pipe._ticks.start)
  for stash, slots in (
    (flight.stash, pipe.grid.stash_slots), (flight.stashed, 1)
  ):  # fmt: skip
    assert sum(x.size * x.dtype.itemsize for x in stash.values()) == (
      slots * max(sizes)
    )


def test_zero_bubble_in_one_program_multiplies_as_often_as_1f1b():
  def products(name):
    made = pipeline.make_table(name, 2, 4)
    pipe = _training.one_program(small.layers(), made)
    team, optimizer = _training.team_of(pipe), _training.momentum("worker")
    state = pipe.init_state(team, optimizer)
    step = _training.compiled_step(pipe, team, optimizer, state)
    batch = team.place(small.batches(1, 1, 4 * _training.MICRO)[0])
    return _heavy(step, state, batch)

  assert products("zb_h1") == products("1f1b")


# Each operation turns [3, 1] numbers, integers or flags into these.
_ONCE = {
  "abs": lambda a, i, m: lax.abs(a),
  "add": lambda a, i, m: lax.add(a, a),
  "add_any": lambda a, i, m: primitives.add_jaxvals_p.bind(a, a),
  "and": lambda a, i, m: lax.bitwise_and(i, i),
  "broadcast_in_dim": lambda a, i, m: lax.broadcast_in_dim(
    a, (3, 1, 2), (0, 1)
  ),
  "concatenate": lambda a, i, m: lax.concatenate([a, a], 0),
  "convert_element_type": lambda a, i, m: lax.convert_element_type(
    a, jnp.bfloat16
  ),
  "copy": lambda a, i, m: primitives.copy_p.bind(a),
  "cos": lambda a, i, m: lax.cos(a),
  "div": lambda a, i, m: lax.div(a, a),
  "eq": lambda a, i, m: lax.eq(a, a),
  "erf": lambda a, i, m: lax.erf(a),
  "exp": lambda a, i, m: lax.exp(a),
  "exp2": lambda a, i, m: lax.exp2(a),
  "expm1": lambda a, i, m: lax.expm1(a),
  "ge": lambda a, i, m: lax.ge(a, a),
  "gt": lambda a, i, m: lax.gt(a, a),
  "integer_pow": lambda a, i, m: lax.integer_pow(a, 3),
  "iota": lambda a, i, m: lax.iota(jnp.int32, 3),
  "is_finite": lambda a, i, m: lax.is_finite(a),
  "le": lambda a, i, m: lax.le(a, a),
  "log": lambda a, i, m: lax.log(a),
  "log1p": lambda a, i, m: lax.log1p(a),
  "logistic": lambda a, i, m: lax.logistic(a),
  "lt": lambda a, i, m: lax.lt(a, a),
  "max": lambda a, i, m: lax.max(a, a),
  "min": lambda a, i, m: lax.min(a, a),
  "mul": lambda a, i, m: lax.mul(a, a),
  "ne": lambda a, i, m: lax.ne(a, a),
  "neg": lambda a, i, m: lax.neg(a),
  "not": lambda a, i, m: lax.bitwise_not(i),
  "or": lambda a, i, m: lax.bitwise_or(i, i),
  "pad": lambda a, i, m: lax.pad(a, np.float32(0), [(0, 1, 0), (0, 0, 0)]),
  "pow": lambda a, i, m: lax.pow(a, a),
  "reshape": lambda a, i, m: lax.reshape(a, (1, 3)),
  "rev": lambda a, i, m: lax.rev(a, (0,)),
  "rsqrt": lambda a, i, m: lax.rsqrt(a),
  "select_n": lambda a, i, m: lax.select_n(m, a, a),
  "sign": lambda a, i, m: lax.sign(a),
  "sin": lambda a, i, m: lax.sin(a),
  "slice": lambda a, i, m: lax.slice(a, (0, 0), (2, 1)),
  "sqrt": lambda a, i, m: lax.sqrt(a),
  "square": lambda a, i, m: lax.square(a),
  "squeeze": lambda a, i, m: lax.squeeze(a, (1,)),
  "sub": lambda a, i, m: lax.sub(a, a),
  "tanh": lambda a, i, m: lax.tanh(a),
  "transpose": lambda a, i, m: lax.transpose(a, (1, 0)),
  # It is no cheap one.
  "cumsum": lambda a, i, m: lax.cumsum(a),
}  # fmt: skip


@pytest.mark.parametrize("name", _ONCE)
def test_cheap_value_is_computed_again_where_its_operands_wait(name):
  def pulled(a, i, m):
    v = _ONCE[name](a, i, m)
    return v, a, i, v.astype(jnp.float32).sum()

  a = jnp.ones((3, 1))
  traced = jax.make_jaxpr(pulled)(a, a.astype(int), a > 0).jaxpr
  v, a, i, gradient = traced.outvars
  assert traced.eqns[0].primitive.name == name
  first, second, waiting = _split_backward._cut(traced, [v, a, i], [gradient])
  assert (v in waiting) == (name == "cumsum")
  assert len(second) == (name != "cumsum") and len(first) == len(traced.eqns)


def test_value_that_is_smaller_than_its_operand_waits():
  def pulled(a):
    v = lax.slice(a, (0,), (2,))
    return v, v.sum()

  traced = jax.make_jaxpr(pulled)(jnp.ones(3)).jaxpr
  v, gradient = traced.outvars
  _, second, waiting = _split_backward._cut(traced, [v], [gradient])
  assert waiting == {v} and not second


def test_functions_are_evaluated_with_their_constants():
  constant = jnp.arange(3.0)
  closed = jax.make_jaxpr(lambda x: 2 * x + constant)(1.0)
  assert [x.tolist() for x in closed.consts] == [[0.0, 1.0, 2.0]]
  (found,) = _split_backward.evaluate(closed, [1.0])
  assert found.tolist() == [2.0, 3.0, 4.0]
