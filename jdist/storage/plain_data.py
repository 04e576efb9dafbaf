"""Dataclasses, tuples and containers as JSON values, and back.

A file holds numbers, text, lists and objects, and never the name of a type.
The reader says which type it expects, and every value is compared with that
type's annotations before anything is built.
"""

import collections
import dataclasses
import functools
import types
import typing
from collections.abc import Hashable
from typing import Any

import numpy as np

_SCALARS = (str, int, float, bool, types.NoneType)


class PlainDataError(ValueError):
  """A JSON value does not fit the type that was expected of it."""


def to_plain(value: Any) -> Any:
  """Returns a value as JSON can hold it, for `from_plain` to read.

  Dataclasses, named tuples and mappings with text for keys become objects,
  other mappings lists of pairs, and sequences lists.

  >>> to_plain({3: (1, "a")})
  [[3, [1, 'a']]]
  """
  if isinstance(value, np.generic):
    value = value.item()
  if type(value) in _SCALARS:
    return value
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {x: to_plain(getattr(value, x)) for x in _fields(type(value))}
  if hasattr(value, "_asdict"):
    value = value._asdict()
  if isinstance(value, dict) and all(isinstance(key, str) for key in value):
    return {key: to_plain(each) for key, each in value.items()}
  if isinstance(value, dict):
    # Keys of JSON objects are text: the key 3 would come back as "3".
    return [[to_plain(k), to_plain(v)] for k, v in value.items()]
  if isinstance(value, list | tuple | collections.deque):
    return [to_plain(x) for x in value]
  raise ValueError(
    f"`value` must hold numbers, text, dataclasses and containers alone to be "
    f"saved as JSON, got a {type(value).__name__}. Arrays are saved by "
    "`array_files`."
  )


def from_plain(plain: Any, kind: Any, name: str = "value") -> Any:
  """Returns the value that `to_plain` was given.

  Args:
    plain: A JSON value, which is not trusted.
    kind: The expected type: a dataclass, a NamedTuple, a TypedDict, a container
      with its element types, a scalar, or a union of those.  `Hashable` stands
      for text or an int, and `Any` for every JSON value as it is.
    name: The value's name in errors.

  Raises:
    PlainDataError: If a value is not of its type.

  >>> from_plain([[3, [1, "a"]]], dict[int, tuple[int, str]])
  {3: (1, 'a')}
  """
  if kind is Any:
    return plain
  if kind is Hashable:
    kind = str | int
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin in (types.UnionType, typing.Union):
    return _from_union(plain, args, name)
  if kind in (None, *_SCALARS):
    # Some programs write 1.0 as 1; and Python counts True as an int.
    allowed = {float: (int, float), None: (types.NoneType,)}.get(kind, (kind,))
    _check(type(plain) in allowed, name, kind)
    return plain
  if origin in (list, tuple, collections.deque):
    _check(isinstance(plain, list), name, kind)
    if origin is tuple and args[-1] is not ...:
      _check(len(plain) == len(args), name, kind)
    else:
      args = args[:1] * len(plain)
    typed = enumerate(zip(plain, args, strict=True))
    return origin(from_plain(x, of, f"{name}[{i}]") for i, (x, of) in typed)
  if origin in (dict, collections.Counter):
    # A Counter names the type of its keys alone.
    key, value = args if len(args) == 2 else (*args, int)
    pairs = list(plain.items()) if isinstance(plain, dict) else plain
    is_pairs = isinstance(pairs, list) and all(
      isinstance(x, list | tuple) and len(x) == 2 for x in pairs
    )
    _check(is_pairs, name, kind)
    return origin(
      {
        from_plain(k, key, f"{name}'s key"): from_plain(
          v, value, f"{name}[{k}]"
        )
        for k, v in pairs
      }
    )
  return _from_object(plain, kind, name)


def _from_union(plain: Any, kinds: tuple[Any, ...], name: str) -> Any:
  errors = []
  # JSON does not say which alternative was written; they differ in their types.
  for kind in kinds:
    try:
      return from_plain(plain, kind, name)
    except PlainDataError as error:
      errors.append(error)
  # The first alternative is the value proper, as in `int | None`.
  raise errors[0]


def _from_object(plain: Any, kind: Any, name: str) -> Any:
  hints = _fields(kind)
  _check(isinstance(plain, dict), name, kind)
  if differs := sorted(hints.keys() ^ plain.keys()):
    raise PlainDataError(
      f"`{name}` must have the fields of a {kind.__name__}, but "
      f"{'lacks' if differs[0] in hints else 'has'} {differs[0]!r}."
    )
  return kind(
    **{x: from_plain(plain[x], hints[x], f"{name}.{x}") for x in hints}
  )


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
  """Returns the annotated types of the fields that a type is built from."""
  hints = typing.get_type_hints(kind)
  if not dataclasses.is_dataclass(kind):
    return hints
  # A class variable has an annotation, too, and is no field.
  return {x.name: hints[x.name] for x in dataclasses.fields(kind)}


def _check(fits: bool, name: str, kind: Any) -> None:
  if not fits:
    expected = getattr(kind, "__name__", kind) if kind in _SCALARS else kind
    raise PlainDataError(f"`{name}` must be a {expected} there, and is not.")
