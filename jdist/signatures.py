"""Checks of arguments by the annotations of a public function or class."""

import contextlib
import functools
import inspect
import operator
import os
import pathlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks

# Checks that an annotation adds, of a range for instance, raise their errors.
PositiveInt: TypeAlias = Annotated[
  int, functools.partial(checks.check_int, minimum=1)
]
NonNegativeInt: TypeAlias = Annotated[
  int, functools.partial(checks.check_int, minimum=0)
]
Seed: TypeAlias = Annotated[int, lambda _, x: checks.check_seed(x)]
# Finite numbers.
PositiveFloat: TypeAlias = Annotated[
  float, functools.partial(checks.check_number, open_low=True)
]
NonNegativeFloat: TypeAlias = Annotated[float, checks.check_number]
Fraction: TypeAlias = Annotated[
  float, functools.partial(checks.check_number, high=1.0, open_low=True)
]
# Numbers that may be traced, or infinite.
UnitFloat: TypeAlias = Annotated[
  Any, functools.partial(checks.check_continuous, high=1.0)
]
PositiveScalar: TypeAlias = Annotated[
  Any, functools.partial(checks.check_continuous, open_low=True)
]
Rate: TypeAlias = Annotated[Any, checks.check_rate]


def _check_dtype(name: str, value: Any) -> None:
  """Raises a ValueError unless a value is a dtype of floats, or names one."""
  with contextlib.suppress(TypeError):
    if value is not None and jnp.issubdtype(jnp.dtype(value), jnp.floating):
      return
  raise ValueError(
    f"`{name}` must be a dtype of floats such as 'bfloat16', got "
    f"{checks.show(value)}."
  )


Dtype: TypeAlias = Annotated[Any, _check_dtype]
Apply: TypeAlias = Annotated[Callable[..., Any], checks.check_apply]
Optimizer: TypeAlias = Annotated[
  optax.GradientTransformation, checks.check_optimizer
]
# A tree of arrays, possibly None.
Arrays: TypeAlias = Annotated[
  Any, functools.partial(checks.check_arrays, shapes=False)
]
# The same without random keys.
Numbers: TypeAlias = Annotated[
  Any, functools.partial(checks.check_arrays, shapes=False, keys=False)
]
# A tree of arrays, or of their shapes alone.
Shapes: TypeAlias = Annotated[Any, checks.check_arrays]
_Door = typing.TypeVar("_Door", bound=Callable[..., Any])
_WORDS: dict[Any, str] = {
  Any: "a value",
  int: "an int",
  float: "a number",
  str: "a string",
  bool: "True or False",
  os.PathLike: "a path",
  pathlib.Path: "a path",
  NoneType: "None",
  Callable: "a function",
} | dict.fromkeys((np.ndarray, jax.Array), "an array")
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct | jax.Array)
# Arguments that are trees of arrays, or of their shapes, in all modules.
_TREES = ("tree", "like", "params")
_MISFITS = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
_SEVERAL: dict[Any, str] = {int: "ints", float: "numbers", str: "strings"}


def checked(door: _Door) -> _Door:
  """Returns a function or class that checks its arguments by annotations.

  An argument of another type, or one that a check of its annotation refuses,
  raises a ValueError that names it. The body checks rules that an annotation
  cannot express, such as one of two arguments.  A class with a constructor of
  its own needs its own decorator, and its methods need `explained`.

  >>> @checked
  ... def wait(seconds: PositiveFloat, names: tuple[str, ...] = ()) -> float:
  ...   return seconds
  >>> wait(1), wait(0.5, ["a"])
  (1, 0.5)
  >>> wait(1.0, "a")
  Traceback (most recent call last):
  ValueError: `names` must be a list of strings, got 'a'.
  >>> wait(0)
  Traceback (most recent call last):
  ValueError: `seconds` must be in (0, inf], got 0.0.
  """
  if isinstance(door, type):
    setattr(door, "__init__", checked(vars(door)["__init__"]))  # noqa: B010
    return door
  names = list(inspect.signature(door).parameters)
  # Read at the first call, when every module is imported.
  hints = functools.cache(
    lambda: typing.get_type_hints(door, include_extras=True)
  )

  @functools.wraps(door)
  def call(*args: Any, **options: Any) -> Any:
    known = hints()

    def one(name: str, value: Any) -> Any:
      return _check(name, value, known.get(name, Any))

    first = map(one, names, args)
    named = {name: one(name, value) for name, value in options.items()}
    return door(*first, *args[len(names) :], **named)

  return typing.cast(_Door, call)


def explained(kind: _Door, whole: bool = False) -> _Door:
  """Returns a function, or a class of methods, that names what it fails on.

  Methods that are called for every message or in every trace cannot check all
  their arguments.  If a public one raises another error than a ValueError with
  a name in backticks, the first argument is named that its annotation, or a
  check of it, refuses; or with `whole` all of them, if each is right alone.
  """
  if not isinstance(kind, type):
    return typing.cast(_Door, _explained(kind, True))
  for name in dir(kind):  # A base of a user's class may not be of jdist.
    method = inspect.getattr_static(kind, name)
    if name.startswith("_") or hasattr(method, "plain"):
      continue
    # A wrapper is of `checked`, or of another module.
    if isinstance(method, classmethod):
      whole_of = _explained(method.__func__, whole)
      setattr(kind, name, classmethod(whole_of))
    elif hasattr(method, "__wrapped__"):
      method.plain = method
    elif inspect.isfunction(method):
      setattr(kind, name, _explained(method, whole))
  return kind


# Returns a method without its explanation, for callers in every trace.
plain: Callable[[Any], Any] = operator.attrgetter("plain")


class Explained:
  """A base of classes, users' ones included, whose methods are explained."""

  def __init_subclass__(cls) -> None:
    super().__init_subclass__()
    explained(cls, whole=True)


def _explained(method: Callable[..., Any], whole: bool) -> Callable[..., Any]:
  """Returns a method that checks its arguments once it has failed."""

  @functools.wraps(method)
  def call(*args: Any, **options: Any) -> Any:
    try:
      return method(*args, **options)
    except Exception as error:
      named = isinstance(error, ValueError | IndexError) and "`" in str(error)
      if not named:
        hints = typing.get_type_hints(method, include_extras=True)
        names = inspect.signature(method).parameters
        given = dict(zip(names, args, strict=False)) | options
        for name, value in given.items():
          hint = hints.get(name, Any)
          checks.named_leaves(value, name)
          if hint in _ARRAYS:
            checks.check_array(name, value)
          elif name in _TREES:
            for leaf in jax.tree.leaves(value):
              checks.check_array(name, leaf)
          elif not checks.is_traced(value):
            _check(name, value, hint)
        # JAX's own errors about a program derive from these, and stay.
        own = type(error).__module__ == "builtins"
        if whole and own and isinstance(error, _MISFITS):
          shown = (f"`{x}` {checks.show(y)}" for x, y in given.items())
          said = str(error).partition("\n")[0]
          raise ValueError(
            f"`{method.__name__}` must take arguments that fit each other, got "
            f"{', '.join(shown)}: {said}."
          ) from error
      raise

  setattr(call, "plain", method)  # noqa: B010
  return call


def _check(name: str, value: Any, hint: Any) -> Any:
  """Returns a checked value: an integer, also of an array, as a Python int."""
  kind, of = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind is Annotated:
    kind = of[0]
    for check in of[1:]:
      check(name, value)
  elif not _fits(value, hint):
    wanted, got = _words(hint), checks.show(value)
    if wanted.startswith(got):  # The container is right, and an entry is not.
      got = f"entries such as {checks.show(next(iter(value)))}"
    if isinstance(value, str) and "\0" in value:
      wanted += " without null bytes"
    raise ValueError(f"`{name}` must be {wanted}, got {got}.")
  elif kind in (typing.Union, UnionType):
    # None stands last, and `Any` would fit it, too.
    return _check(name, value, next(x for x in of[::-1] if _fits(value, x)))
  elif of and typing.get_origin(of[0]) is Annotated:
    for entry in value:
      _check(name, entry, of[0])
  return operator.index(value) if kind is int else value


def _fits(value: Any, hint: Any) -> bool:
  """Returns whether a value has a type; True if the annotation is too vague."""
  kind, of = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind is Annotated:
    return _fits(value, of[0])
  if kind in (typing.Union, UnionType):
    return any(_fits(value, x) for x in of)
  if kind is typing.Literal:
    return any(type(value) is type(x) and value == x for x in of)
  if kind is Callable:
    number = len(of[0]) if of and isinstance(of[0], list) else None
    return checks.is_function(value, number)
  if kind is float:
    return checks.is_scalar(value)
  if kind is int:
    with contextlib.suppress(TypeError):
      return operator.index(value) is not None and not isinstance(value, bool)
    return False
  if kind is bool:
    return isinstance(value, bool | np.bool_)
  if kind is Any or not isinstance(kind, type):
    return True
  if getattr(kind, "_is_protocol", False):
    needed = getattr(kind, "__protocol_attrs__", ())
    return all(hasattr(value, name) for name in needed)
  module = kind.__module__.split(".")[0]
  if module in ("jax", "numpy", "optax"):
    # Either library's arrays are taken, and an `optax.MultiSteps`.
    return True
  if kind is str:  # No name of a file, and no other one, has a null byte.
    return isinstance(value, str) and "\0" not in value
  if module not in ("builtins", "collections") or kind is bytes:
    return isinstance(value, kind)
  return _entries_fit(value, kind, of)


def _entries_fit(value: Any, kind: type, of: tuple[Any, ...]) -> bool:
  """Returns whether the entries of a container have their types."""
  if issubclass(kind, Mapping):
    return isinstance(value, Mapping) and all(
      _all_fit(entries, wanted)
      for entries, wanted in zip((value, value.values()), of, strict=False)
    )
  if not issubclass(kind, Iterable):
    return isinstance(value, kind)
  # A list serves as a tuple, and the letters of a string as neither.
  if isinstance(value, str | bytes | Mapping) or not isinstance(
    value, Iterable
  ):
    return False
  if hasattr(value, "dtype") and not np.ndim(value):
    return False
  # They cannot be indexed, and an iterator can be read only once.
  if issubclass(kind, Sequence) and isinstance(
    value, Iterator | set | frozenset
  ):
    return False
  length = getattr(value, "__len__", None)
  if not of or isinstance(value, jax.Array) or length is None:
    return True
  if kind is tuple and of[-1] is not Ellipsis:
    return length() == len(of) and all(map(_fits, value, of))
  return _all_fit(value, of[0])


def _all_fit(entries: Iterable[Any], hint: Any) -> bool:
  """Returns whether all entries have a type."""
  if isinstance(hint, type):
    # A schedule has thousands of actions: entries of a class fit alike, unless
    # they are arrays, so that one of each class is looked at.
    entries = {
      id(x) if hasattr(x, "dtype") else type(x): x for x in entries
    }.values()
  return all(_fits(x, hint) for x in entries)


def _words(hint: Any) -> str:
  """Describes the values of a type, as errors name them."""
  kind, of = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind is Annotated:
    return _words(of[0])
  if kind in (typing.Union, UnionType, typing.Literal):
    one = repr if kind is typing.Literal else _words
    *first, last = dict.fromkeys(map(one, of))
    comma = "," * any(", each" in x for x in first)
    return f"{', '.join(first)}{comma} or {last}" if first else last
  if kind is Callable and of and isinstance(of[0], list):
    return f"a function of {' and '.join(map(_words, of[0]))}"
  if kind in _WORDS:
    return _WORDS[kind]
  room, name = kind.__module__.split("."), kind.__name__
  if room[0] in ("builtins", "collections"):
    if not issubclass(kind, Iterable):
      return kind.__name__.lower()  # "hashable", for instance.
    name = "dict" if issubclass(kind, Mapping) else "list"
    one = of[-1] if name == "dict" and of else (*of, Any)[0]
    # An annotated type has its own one as the origin.
    if several := _SEVERAL.get(getattr(one, "__origin__", one)):
      return f"a {name} of {several}"
    vague = one is Any or (kind is tuple and of[-1] is not Ellipsis)
    return f"a {name}" if vague else f"a {name}, each entry {_words(one)}"
  return f"a `{'.'.join((*room[1:2], name))}`{vars(kind).get('made_by', '')}"
