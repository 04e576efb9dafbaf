"""Arguments are checked by the annotations of a function."""

import decimal
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import signatures


@signatures.checked
def taken(
  names: tuple[str, ...] = (),
  rates: tuple[float, ...] = (),
  parts: dict[str, decimal.Decimal] | None = None,
  rows: tuple[tuple[decimal.Decimal, ...], ...] = (),
):
  return names, rates, parts, rows


_ONE = decimal.Decimal(1)


@pytest.mark.parametrize(
  "given",
  [
    {"names": ["a", "b", 3]},
    {"names": [3, "a", "b"]},
    {"rates": [1.0, 2, "3"]},
    # Arrays of one class, of which one is no number.
    {"rates": [np.ones(()), np.ones(2)]},
    {"rates": [np.ones(2), np.ones(())]},
    {"parts": {"a": _ONE, "b": "2"}},
    {"parts": {"a": "2", "b": _ONE}},
    {"parts": {"a": _ONE, 2: _ONE}},
    {"rows": [[_ONE], [_ONE, 2]]},
    {"rows": [[2, _ONE], [_ONE]]},
  ],
)
def test_one_wrong_entry_is_refused(given):
  (name,) = given
  with pytest.raises(ValueError, match=f"`{name}` must be"):
    taken(**given)


def test_right_entries_are_taken():
  found = taken(["a", "b"], [1, 2.0, np.ones(())], {"a": _ONE}, [[], [_ONE]])
  assert found[0] == ["a", "b"] and found[3] == [[], [_ONE]]


def test_long_containers_ask_each_class_once():
  class Counting(type):
    asked = 0

    def __instancecheck__(cls, instance):
      Counting.asked += 1
      return super().__instancecheck__(instance)

  class Action(metaclass=Counting):
    pass

  def run(actions: tuple[Action, ...]):
    return len(actions)

  run.__annotations__ = {"actions": tuple[Action, ...]}
  checked = signatures.checked(run)
  other = type("Other", (Action,), {})
  assert checked([other() for _ in range(500)]) == 500
  assert Counting.asked <= 2


@signatures.checked
def plain(
  number: signatures.PositiveInt = 1,
  cuts: int | Sequence[int] = 1,
  *,
  rate: signatures.PositiveFloat = 0.5,
  path: str | None = None,
  function: Callable[[int], int] | None = None,
  rows: Iterable[int] = (),
  anything: object = None,
):
  del rate, path, function, rows
  return number, cuts, anything


@pytest.mark.parametrize(
  "given",
  [
    {"cuts": {1, 2}},
    {"cuts": iter([1, 2])},
    {"cuts": True},  # Python counts it as 1.
    {"cuts": [1, False]},
    {"rows": [True]},
    {"cuts": "12"},
    {"rows": dict.fromkeys("ab").keys()},
    {"rows": {"a", "b"}},
    {"rate": _ONE},
    {"number": np.array([2])},
    {"number": np.array(2.0)},
    {"rate": jax.random.key(0)},
    {"rate": 10**400},
    {"number": 2**63},
    {"path": "a\0b"},
    {"function": lambda: 1},
    {"function": lambda x, y: 1},
    {"function": int},
  ],
)
def test_unusable_value_is_refused(given):
  (name,) = given
  with pytest.raises(ValueError, match=f"`{name}` must be"):
    plain(**given)


def test_null_byte_of_a_text_is_named():
  with pytest.raises(ValueError, match="a string or None without null bytes"):
    plain(path="a\0b")


@pytest.mark.parametrize("two", [np.int64(2), np.array(2), jnp.int32(2)])
def test_integer_of_another_library_becomes_one_of_python(two):
  found = plain(two, cuts=two, anything=two)
  assert [type(x) for x in found] == [int, int, type(two)]
  assert found[:2] == (2, 2) and found[2] is two


def test_functions_of_optional_arguments_and_iterators_are_taken():
  for function in (lambda x, y=1: x, lambda *x: x, len, None):
    plain(function=function, rows=iter("ab"), cuts=range(3))


@signatures.explained
class Meter:
  """A class whose methods check what they are given only after they failed."""

  def read(self, seconds: float, tree=None, like: jax.Array | None = None):
    return seconds * 2 + sum(x.size for x in jax.tree.leaves(tree))

  def take(self, x: jax.Array, names: Sequence[signatures.PositiveInt] = ()):
    if not names:
      raise ValueError("`names` must not be empty.")
    return x.size, {}["own error"]


@pytest.mark.parametrize(
  ("call", "rule"),
  [
    (lambda m: m.read("a", 3.0), "`seconds` must be a number, got 'a'"),
    (lambda m: m.read(1.0, tree={"w": "b"}), "`tree` must be an array, got"),
    (lambda m: m.take(None, [1]), "`x` must be an array, got None"),
    (lambda m: m.take(np.ones(2), [0]), "`names` must be an int >= 1, got 0"),
    (lambda m: m.take(np.ones(2)), "`names` must not be empty."),
  ],
)
def test_failed_method_names_the_wrong_argument(call, rule):
  with pytest.raises(ValueError, match=re.escape(rule)):
    call(Meter())


def test_right_arguments_leave_results_and_errors_alone():
  assert Meter().read(0.5, tree=[np.ones(3)]) == 4.0
  with pytest.raises(KeyError, match="own error"):
    Meter().take(np.ones(2), [1])
  with pytest.raises(TypeError, match="missing 1 required"):
    Meter().read()


class Part(signatures.Explained):
  def read(self, key: str, *, number: int = 1):
    return {"a": 1}[key] * number

  def stop(self):
    raise NotImplementedError


class Given:
  def more(self, key: str):
    return {}[key]


class Own(Given, Part):
  """A user's class, of which one base is not of this library."""


def test_right_arguments_that_do_not_fit_are_all_named():
  rule = (
    "`read` must take arguments that fit each other, got `self` .*`key` 'b'"
  )
  with pytest.raises(ValueError, match=rule) as info:
    Own().read("b")
  assert isinstance(info.value.__cause__, KeyError)
  with pytest.raises(ValueError, match="`more` must take"):
    Own().more("b")
  with pytest.raises(NotImplementedError):
    Own().stop()
  with pytest.raises(KeyError):
    signatures.plain(Own.more)(Own(), "b")
  with pytest.raises(ValueError, match="`key` must be a string, got 1"):
    Own().read(1)


def test_every_entry_of_a_list_is_checked():
  @signatures.checked
  def run(sizes: Sequence[signatures.PositiveInt]):
    return sizes

  assert run([1, 2]) == [1, 2]
  with pytest.raises(ValueError, match="`sizes` must be an int >= 1, got 0"):
    run([1, 0])
  with pytest.raises(ValueError, match="`sizes` must be a list of ints, got 1"):
    run(1)


def test_error_describes_the_entries_of_a_container():
  @signatures.checked
  def run(
    laws: Mapping[str, Literal["a", "b"]] | None = None,
    nodes: Sequence[decimal.Decimal] = (),
    pair: tuple[decimal.Decimal, str] = (_ONE, ""),
    parts: Mapping[str, int] | None = None,
  ):
    del laws, nodes, pair, parts

  laws = re.escape("a dict, each entry 'a' or 'b', or None, got {'m': 'c'}")
  with pytest.raises(ValueError, match=f"`laws` must be {laws}"):
    run(laws={"m": "c"})
  with pytest.raises(ValueError, match="a list, each entry a `Decimal`, got"):
    run(nodes=[1])
  # A long list is not shown, but its first entry is.
  with pytest.raises(ValueError, match="`Decimal`, got entries such as 1"):
    run(nodes=[1] * 300)
  with pytest.raises(ValueError, match="`pair` must be a list, got"):
    run(pair=[1, ""])
  with pytest.raises(ValueError, match="a dict of ints or None, got"):
    run(parts={"a": 1.5})


def test_none_is_taken_before_another_type_that_fits_anything():
  @signatures.checked
  def run(outer: signatures.Optimizer | None = None):
    return outer

  assert run(outer=None) is None
  with pytest.raises(ValueError, match="`outer` must be an Optax"):
    run(outer=3)
