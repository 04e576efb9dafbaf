"""Checks of arguments: what each refuses, in words that name the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import checks, signatures

# A check, what it refuses, and key words of the rule.
_REFUSED = (
  (
    lambda x: checks.check_real("x", x, "y"),
    (1j, [1, np.ones(1, "complex64")]),
    "real for y",
  ),
  (lambda x: checks.check_choice("x", x, ("a", "b")), ("c", 3), "'a' or 'b'"),
  (lambda x: checks.check_type("x", x, int, "a number"), ("c",), "a number"),
  (
    lambda x: checks.check_function("x", x, "y", 1),
    (None, 3, lambda: 1),
    "function of y",
  ),
  (
    lambda x: checks.check_function("x", x, "y", 1, optional=True),
    (3,),
    "or None",
  ),
  (lambda x: checks.check_list("x", x, "y"), (3, "ab", b"", {}), "list of y"),
  (
    lambda x: checks.check_structural("x", x, minimum=1),
    (0, 1.0, True, "1", None),
    "an int >= 1",
  ),
  (
    lambda x: checks.check_structural("x", x, minimum=1),
    (jnp.int32(2),),
    "a Python int, got an array.*static_args",
  ),
  (
    lambda x: checks.check_structural(
      "x", x, minimum=1, maximum=2, remedy="Do."
    ),
    (0, 3),
    r"an int from 1 to 2.* Do\.$",
  ),
  (
    lambda x: checks.check_int("x", x, 1),
    (0, 1.5, True, "1", None, np.ones(2)),
    "an int >= 1",
  ),
  (lambda x: checks.check_int("x", x, 1, 2, "Do."), (3,), r"to 2.* Do\.$"),
  (lambda x: checks.check_int("x", x, 1, 0), (0, 1), ">= 1, and none is poss"),
  (
    lambda x: checks.check_continuous("x", x, high=1),
    (-0.1, 1.1, np.nan),
    r"in \[0, 1\]",
  ),
  (
    lambda x: checks.check_continuous("x", x, open_low=True),
    (0,),
    r"in \(0, inf\]",
  ),
  (
    lambda x: checks.check_continuous("x", x),
    ("a", None, "0.5", b"1", np.array("1"), True, np.True_, jnp.array(True)),
    "a number in",
  ),
  (
    lambda x: checks.check_number("x", x),
    ("1", True, np.True_, None, np.inf, np.nan, 10**400, [0.5], -1),
    r"(finite number|in \[0, inf\])",
  ),
  (
    lambda x: checks.check_optimizer("x", x),
    (0.1, None),
    "an Optax transformation",
  ),
  (
    lambda x: checks.check_arrays("x", x),
    ({"a": "text"},),
    "tree of arrays, got 'text' at 'a'",
  ),
  (
    lambda x: checks.check_rate("x", x),
    (optax.sgd(0.1),),
    "schedule.* got a Gra",
  ),
)


@pytest.mark.parametrize("number", range(len(_REFUSED)))
def test_check_names_the_argument_and_the_rule(number):
  check, values, rule = _REFUSED[number]
  for value in values:
    with pytest.raises(ValueError, match=f"`x` must be {rule}|`x` .*{rule}"):
      check(value)


# The second is a function that does not show its arguments.
@pytest.mark.parametrize("update", [lambda grads: grads, {}.update])
def test_update_takes_gradients_state_and_parameters(update):
  wrong = optax.sgd(0.1)._replace(update=update)
  rule = r"`x\.update` must be a function of updates, state, params, got"
  with pytest.raises(ValueError, match=rule):
    checks.check_optimizer("x", wrong)


@pytest.mark.parametrize("value", [-1, 0.5, "a", True, 2**32, 2**63])
def test_seed_is_one_that_jax_takes(value):
  with pytest.raises(ValueError, match="`seed` must be an int from 0"):
    checks.check_seed(value)
  assert checks.check_seed(np.uint32(3)) == 3
  jax.random.key(checks.check_seed(2**32 - 1))


def test_numbers_of_numpy_become_those_of_python():
  number = checks.check_number("x", np.float32(0.5))
  count = checks.check_int("x", np.int64(2), 1)
  assert (type(number), type(count)) == (float, int)


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2)])
def test_integers_become_floats_where_a_number_is_continuous(value):
  assert isinstance(checks.check_continuous("x", value), float)


def test_traced_numbers_pass_and_structural_ones_do_not():
  @jax.jit
  def build(x):
    checks.check_continuous("x", x, high=1)
    checks.check_rate("x", x)
    return x

  assert build(7.0) == 7
  with pytest.raises(ValueError, match=r"`n` shapes the program.*'n'"):
    jax.jit(lambda n: checks.check_structural("n", n, minimum=1))(2)


def test_value_is_shown_by_its_type_where_that_is_shorter():
  assert checks.show("short") == "'short'"
  assert checks.show("x" * 200) == "a str"
  assert checks.show(np.zeros((3, 3))) == "float64[3, 3]"
  assert checks.show(jax.random.key(0)) == "key<fry>[]"
  assert checks.show(jnp.float32(2)).startswith("Array(2.")
  assert checks.show(np.float32) == "<class 'numpy.float32'>"
  assert checks.show(optax.adam(0.1)).startswith("a Gradient")


@pytest.mark.parametrize(
  ("kind", "least", "below"),
  [
    (signatures.PositiveInt, 1, 0),
    (signatures.NonNegativeInt, 0, -1),
    (signatures.PositiveFloat, 1e-30, 0.0),
    (signatures.NonNegativeFloat, 0.0, -1e-30),
    (signatures.Seed, 0, -1),
  ],
)
def test_annotation_has_its_range(kind, least, below):
  @signatures.checked
  def same(x: kind):
    return x

  assert same(least) == least
  with pytest.raises(ValueError, match="must be"):
    same(below)


@pytest.mark.parametrize(
  ("leaves", "rule"),
  [
    ({}, r"leaf a is missing and not float\[2\]"),
    ({"a": np.ones(3)}, r"leaf a is float\[3\] and not float\[2\]"),
    ({"a": np.ones(2, int)}, r"leaf a is int32\[2\] and not float\[2\]"),
    ({"a": np.ones(2), "b": 1.0}, r"leaf b is float\[\] and not missing"),
    ({"a": [np.ones(2)]}, r"leaf a is missing and not float\[2\]"),
  ],
)
def test_first_leaf_of_another_form_is_named(leaves, rule):
  like = {"a": jax.ShapeDtypeStruct((2,), "float32")}
  told = rf"^`x` must be y, but its {rule}\. Do\.$"
  with pytest.raises(ValueError, match=told):
    checks.check_form("`x` must be y", leaves, like, "Do.")
  checks.check_form("`x`", {"a": jnp.ones(2, "bfloat16")}, like)


def test_form_has_a_structure_and_exact_dtypes():
  with pytest.raises(ValueError, match=r"its structure is PyTreeDef.* and not"):
    checks.check_form("`x` is y", [1.0], (1.0,))
  with pytest.raises(ValueError, match=r"leaf is bfloat16\[\] and not float32"):
    checks.check_form("`x`", jnp.bfloat16(1), jnp.float32(1), exact=True)
  with pytest.raises(
    ValueError, match=r"`x` must be a tree of arrays, got 'a'"
  ):
    checks.check_form("`x` is y", "a", 1.0)


def test_all_that_is_missing_is_named_at_once():
  with pytest.raises(ImportError) as error:
    checks.check_extras(
      {"json": "none", "no_such_module": "data", "no.such": "plots"}
    )
  assert str(error.value) == (
    "`no_such_module`, `no.such` are needed here and not installed. Install "
    'what is missing: pip install ".[data,plots]" in the clone of jdist, or '
    "pip install no_such_module no"
  )


def test_noun_is_in_the_plural_unless_there_is_one():
  said = [checks.counted(x, "step") for x in (0, 1, 1.0, 2, 0.5, 10**6)]
  assert said == [
    "0 steps", "1 step", "1 step", "2 steps", "0.5 steps", "1000000 steps",
  ]  # fmt: skip
