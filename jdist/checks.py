"""Checks of arguments, made once, at the public door.

An error names the argument, the rule, the value and the remedy.  Under
`optax.inject_hyperparams` a factory runs again inside jit with traced numbers,
which cannot be compared: continuous arguments pass, and structural ones, which
shape the program, are refused.
"""

import contextlib
import importlib
import importlib.util
import inspect
import math
import operator
import pathlib
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Errors show a longer value by its type.
_MAX_LETTERS = 100
# Programs count in int32.
_LARGEST = 2**31 - 1


def is_traced(value: Any) -> bool:
  """Returns whether a value is only known when the program runs."""
  return isinstance(value, jax.core.Tracer)


def show(value: Any) -> str:
  """Returns a value for an error; arrays and long values by their type.

  >>> show(0.1), show(np.zeros((9, 9))), show(optax.sgd(0.1))
  ('0.1', 'float64[9, 9]', 'a GradientTransformationExtraArgs')
  """
  text = repr(value)
  functions = isinstance(value, tuple) and any(map(callable, value))
  # The class `np.ndarray` has these attributes, too, but not as values.
  array = isinstance(getattr(value, "shape", None), tuple)
  long = functions or len(text) > _MAX_LETTERS or "\n" in text
  if array and hasattr(value, "dtype") and (long or value.shape):
    return f"{value.dtype}{list(value.shape)}"
  kind = type(value).__name__
  return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}" if long else text


def counted(number: float, noun: str) -> str:
  """Returns a number with its noun: "1 worker", "0 workers"."""
  return f"{str(number).removesuffix('.0')} {noun}{'s' * (number != 1)}"


def check_choice(
  name: str, value: Any, choices: tuple[Any, ...], remedy: str = ""
) -> None:
  """Raises a ValueError unless `value` is one of `choices`.

  >>> check_choice("wire", np.ones(2), ("sum", "gather"))
  Traceback (most recent call last):
  ValueError: `wire` must be 'sum' or 'gather', got float64[2].
  """
  # Comparing an array with text would give an array, hence the types first.
  if not any(isinstance(value, type(x)) and value == x for x in choices):
    *first, last = map(repr, choices)
    known = f"{', '.join(first)} or {last}" if first else last
    rule = f"`{name}` must be {known}, got {show(value)}. {remedy}"
    raise ValueError(rule.rstrip())


def check_type(
  name: str, value: Any, kind: type | UnionType, wanted: str
) -> None:
  """Raises a ValueError unless a value has a type; `wanted` describes it."""
  if not isinstance(value, kind):
    raise ValueError(f"`{name}` must be {wanted}, got {show(value)}.")


def check_function(
  name: str, value: Any, of: str, number: int, *, optional: bool = False
) -> None:
  """Raises a ValueError unless a value is a function of so many arguments."""
  if not (is_function(value, number) or (optional and value is None)):
    rule = f"`{name}` must be a function of {of}"
    rule += ", or None" if optional else ""
    raise ValueError(f"{rule}, got {show(value)}.")


def check_pair(name: str, found: Any, of: str) -> Any:
  """Returns what a user's function returned; a ValueError unless a pair."""
  # An array of two rows could be unpacked, too.
  if not isinstance(found, tuple | list) or len(found) != 2:
    raise ValueError(f"`{name}` must return {of}, got {show(found)}.")
  return found


def check_array(name: str, value: Any) -> Any:
  """Returns an array, or the shape of one; else raises a ValueError."""
  if not (hasattr(value, "shape") and hasattr(value, "dtype")):
    raise ValueError(f"`{name}` must be an array, got {show(value)}.")
  return value


def check_apply(name: str, value: Any, *also: str) -> None:
  """Raises a ValueError unless a function is a model's, with `train=`."""
  if not is_function(value, 3, "train", *also):
    named = " and ".join(f"`{x}=`" for x in ("train", *also))
    raise ValueError(
      f"`{name}` must be a function of params, state and inputs with {named}, "
      f"got {show(value)}. Let it ignore what it does not need, by `**_`."
    )


def is_function(value: Any, number: int | None = None, *named: str) -> bool:
  """Returns whether a value is a function of so many, and named, arguments."""
  # A class is callable, too, but calling it would build an instance.
  if not callable(value) or isinstance(value, type):
    return False
  with contextlib.suppress(ValueError):  # Some builtins have no signature.
    taken = inspect.signature(value)
    try:
      taken.bind(*[None] * (number or 0), **dict.fromkeys(named))
    except TypeError:
      return number is None
  return True


def call(name: str, function: Callable[[str], Any], word: str) -> Any:
  """Calls a user's function; a ValueError names the argument if it fails.

  >>> call("order", int, "a/kernel")
  Traceback (most recent call last):
  ValueError: `order` must take 'a/kernel', but raised ValueError: invalid ...
  """
  try:
    return function(word)
  except Exception as error:
    raise ValueError(
      f"`{name}` must take {word!r}, but raised {type(error).__name__}: "
      f"{error}."
    ) from error


def check_list(name: str, value: Any, of: str) -> list[Any]:
  """Returns an iterable as a list; text and mappings raise a ValueError."""
  with contextlib.suppress(TypeError):
    if not isinstance(value, str | bytes | Mapping):
      return list(value)
  raise ValueError(f"`{name}` must be a list of {of}, got {show(value)}.")


def check_distinct(name: str, values: Any, kind: str = "values") -> None:
  """Raises a ValueError unless there are one or more different values."""
  if not len(values) or len(set(values)) < len(values):
    rule = f"`{name}` must be one or more different {kind}"
    raise ValueError(f"{rule}, got {show(values)}.")


def check_structural(
  name: str, value: Any, *, minimum: int, remedy: str = "", **limits: Any
) -> int:
  """Returns an integer that shapes a program as a Python int."""
  if isinstance(value, jax.Array):
    raise ValueError(
      f"`{name}` shapes the program and must be a Python int, got an array. "
      "Under `optax.inject_hyperparams` name it in `static_args`: "
      f"`static_args=({name!r},)`."
    )
  number = check_int(name, value, minimum, remedy=remedy, **limits)
  # Only a number beyond int32 is refused with the limit of int32 as the rule.
  return check_int(name, number, minimum, _LARGEST, remedy)


def set_structural(owner: Any, name: str, **limits: Any) -> None:
  """Checks an integer field of a frozen dataclass; makes it a Python int."""
  value = check_structural(name, getattr(owner, name), **limits)
  object.__setattr__(owner, name, value)


def check_int(
  name: str,
  value: Any,
  minimum: int,
  maximum: float | None = None,
  remedy: str = "",
) -> int:
  """Returns an integer of Python or NumPy in a range, as a Python int."""
  number: Any = None
  most = 2**63 - 1 if maximum is None else maximum
  with contextlib.suppress(TypeError):
    number = operator.index(value)
  # Python counts True as 1.
  known = number is not None and not isinstance(value, bool)
  if not (known and minimum <= number <= most):
    above = maximum in (None, math.inf) and abs(number or 0) < most
    rule = f">= {minimum}" if above else f"from {minimum} to {most}"
    rule = rule if minimum <= most else f">= {minimum}, and none is possible"
    message = f"`{name}` must be an int {rule}, got {show(value)}. {remedy}"
    raise ValueError(message.rstrip())
  return number


# Modules whose package has another name on the index.
_PACKAGES = {
  "PIL": "pillow",
  "orbax": "orbax-checkpoint",
  "sklearn": "scikit-learn",
  "tensorflow_datasets": "tensorflow-datasets",
  "vl_convert": "vl-convert-python",
}


def import_extra(module: str, extra: str) -> Any:
  """Imports a module of an extra; an ImportError names what to install."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f"`{module}` is needed here, and importing it failed ({error}). "
      f"{install({module: extra})}"
    ) from error


def check_extras(needed: Mapping[str, str]) -> None:
  """Raises one ImportError for missing modules, given the extra of each."""
  missing = dict(needed)
  for module in needed:
    # `find_spec` imports nothing but the parents, one of which may be missing.
    with contextlib.suppress(ModuleNotFoundError):
      if importlib.util.find_spec(module) is not None:
        del missing[module]
  if missing:
    several = "are" if len(missing) > 1 else "is"
    raise ImportError(
      f"{', '.join(f'`{name}`' for name in missing)} {several} needed here and "
      f"not installed. {install(missing)}"
    )


def install(needed: Mapping[str, str]) -> str:
  """Returns the commands that install missing modules.

  >>> install({"sklearn": "data", "orbax.checkpoint": "checkpoints"})
  'Install what is missing: pip install ".[data,checkpoints]" in the clone of
  jdist, or pip install scikit-learn orbax-checkpoint'
  """
  extras = ",".join(dict.fromkeys(needed.values()))
  tops = dict.fromkeys(name.split(".")[0] for name in needed)
  packages = " ".join(_PACKAGES.get(name, name) for name in tops)
  return (
    f'Install what is missing: pip install ".[{extras}]" in the clone of '
    f"jdist, or pip install {packages}"
  )


def read_text(
  path: pathlib.Path, parse: Callable[[str], Any] = str, form: str = "text"
) -> Any:
  """Reads a text file; another file raises a ValueError that names it."""
  try:
    return parse(path.read_text("utf-8-sig"))
  # Parsers pass on errors of too many digits and of too deep brackets.
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"`path` must be a {form} file in UTF-8, got {path}: {error}."
    ) from None


def check_seed(value: Any) -> int:
  """Returns a seed as a Python int."""
  # `jax.random.key` cuts a seed to 32 bits: 2**32 would give the key of 0.
  remedy = "JAX would use only 32 bits of a larger one."
  return check_int("seed", value, 0, 2**32 - 1, remedy=remedy)


def check_continuous(
  name: str,
  value: Any,
  *,
  low: float = 0.0,
  high: float = float("inf"),
  open_low: bool = False,
  open_high: bool = False,
) -> Any:
  """Raises a ValueError unless a number lies in [low, high], or between them.

  Traced values pass: they are hyper-parameters under
  `optax.inject_hyperparams`.  Ints are returned as floats.
  """
  if is_traced(value):
    return value
  within = f"{'[('[open_low]}{low:g}, {high:g}{'])'[open_high]}"
  if not is_scalar(value):
    raise ValueError(
      f"`{name}` must be a number in {within}, got {show(value)}."
    )
  number = float(value)
  # A NaN compares as false, so it is refused, too.
  above = number > low if open_low else number >= low
  if not (above and (number < high if open_high else number <= high)):
    raise ValueError(f"`{name}` must be in {within}, got {value}.")
  # An int would be traced as int32, and types of updates would follow it.
  return number if isinstance(value, int | np.integer) else value


def is_number(value: Any) -> bool:
  """Returns whether a value is a real number of Python or an array of one."""
  if isinstance(value, int | float):
    return isinstance(value, float) or abs(value) < 2**1023
  # It may be traced. Random keys have no kind, and bfloat16 has that of a void.
  kind = getattr(getattr(value, "dtype", None), "kind", None)
  return kind in ("b", "i", "u", "f", "V") and np.ndim(value) == 0


def is_scalar(value: Any) -> bool:
  """Returns whether a value is a number, and no bool, which Python counts."""
  kind = getattr(getattr(value, "dtype", None), "kind", None)
  return is_number(value) and not isinstance(value, bool) and kind != "b"


def check_number(name: str, value: Any, **bounds: Any) -> float:
  """Returns a finite number in bounds, see `check_continuous`, as a float."""
  known = is_scalar(value) and not is_traced(value)
  if not known or not math.isfinite(value):
    raise ValueError(f"`{name}` must be a finite number, got {show(value)}.")
  return float(check_continuous(name, float(value), **bounds))


def check_optimizer(
  name: str, value: Any
) -> optax.GradientTransformationExtraArgs:
  """Returns an Optax transformation, converting an `optax.MultiSteps`.

  >>> check_optimizer("inner", optax.MultiSteps(optax.sgd(0.1), 2)).init(0.0)
  MultiStepsState(...)
  """
  if isinstance(value, optax.MultiSteps):
    # Its own `gradient_transformation()` drops extra arguments as `value=`.
    return optax.GradientTransformationExtraArgs(value.init, value.update)
  if not isinstance(value, optax.GradientTransformation):
    raise ValueError(
      f"`{name}` must be an Optax transformation, for instance "
      f"`optax.sgd(0.1)`, got {show(value)}."
    )
  try:  # Arguments by name, as of `contrib.momo`, are left to a call.
    inspect.signature(value.update).bind_partial(None, None, None)
  except (TypeError, ValueError):
    rule = f"`{name}.update` must be a function of updates, state, params"
    raise ValueError(f"{rule}, got {show(value.update)}.") from None
  return value


def check_arrays(
  name: str, tree: Any, *, shapes: bool = True, keys: bool = True
) -> None:
  """Raises a ValueError that names the first leaf that is not an array."""
  for leaf, value in named_leaves(tree, name).items():
    abstract = isinstance(value, jax.ShapeDtypeStruct)
    dtype = getattr(value, "dtype", float)
    key = not keys and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    known = (abstract and shapes) or isinstance(value, jax.Array | float)
    if known and not key:
      continue  # This case is common, and each trace makes the check.
    check_bits(name, value, leaf)
    with contextlib.suppress(TypeError):
      jax.eval_shape(lambda x: x, value)
      if not (abstract or key):
        continue
    raise ValueError(
      f"`{name}` must be a tree of {'arrays' if keys else 'numbers'}, got "
      f"{'the shape of ' * (abstract and not key)}"
      f"{show(value)}{f' at {leaf!r}' if leaf else ''}."
    )


def check_some(name: str, tree: Any) -> None:
  """Raises a ValueError for a tree without arrays, or of empty ones alone."""
  if not any(map(np.size, jax.tree.leaves(tree))):
    raise ValueError(f"`{name}` must have a filled array, got {show(tree)}.")


def check_bits(name: str, value: Any, leaf: str = "", of: str = "iu") -> None:
  """Raises a ValueError for numbers, or integers, cut to 32 bits by JAX."""
  cut = isinstance(value, int) and abs(value) > _LARGEST
  if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in of:
    kept = jax.dtypes.canonicalize_dtype(value.dtype)
    other = (value.astype(kept) != value) & (value == value)  # No NaN.
    cut = kept != value.dtype and bool(other.any())
  if cut:
    raise ValueError(
      f"`{name}` must hold numbers of 32 bits, got {show(value)}"
      f"{f' at {leaf!r}' if leaf else ''}. Make it a float32, or let JAX keep "
      "64 bits by `jax_enable_x64`."
    )


def check_real(name: str, tree: Any, of: str) -> None:
  """Raises a ValueError that names the first complex leaf."""
  for leaf, value in named_leaves(tree).items():
    if jnp.iscomplexobj(value):
      raise ValueError(
        f"`{name}` must be real for {of}, got {jnp.result_type(value)}"
        f"{f' at {leaf!r}' if leaf else ''}. Put the optimizer into "
        "`optax.contrib.split_real_and_imaginary(...)`."
      )


def check_gradients(name: str, tree: Any) -> None:
  """Raises a ValueError that names the first leaf of type float0."""
  for leaf, value in named_leaves(tree).items():
    if getattr(value, "dtype", None) == jax.dtypes.float0:
      raise ValueError(
        f"`{name}` must be gradients of floats, got float0 at {leaf!r}, which "
        "is JAX's type for an integer's gradient. Put the whole chain into "
        "`transforms.only_floats(...)`."
      )


def check_rate(name: str, value: Any) -> Any:
  """Returns a positive number or a schedule, integers as floats."""
  if isinstance(value, tuple) and any(map(callable, value)):
    raise ValueError(
      f"`{name}` must be a positive number or a schedule, a function of the "
      f"step, got {show(value)}. Give an interval policy as `interval`, and "
      "the learning rate in place of an optimizer."
    )
  if not callable(value) or isinstance(value, type):
    # JAX refuses a Python int that does not fit into int32.
    most = float(_LARGEST) if isinstance(value, int) else math.inf
    return check_continuous(name, value, open_low=True, high=most)
  check_function(name, value, "the step", 1)
  return value


def named_leaves(tree: Any, name: str = "tree") -> dict[str, Any]:
  """Returns the leaves of a tree, which errors call `name`, by their paths.

  >>> named_leaves({"a": {"b": 1}, "c": (2,)})
  {'a.b': 1, 'c.0': 2}
  """
  found: dict[str, Any] = {}
  try:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
  except ValueError as error:
    raise ValueError(
      f"`{name}` must have dicts whose keys can be sorted, got {show(tree)}: "
      f"{error} Let all keys of a dict be texts."
    ) from error
  for path, leaf in leaves:
    key = jax.tree_util.keystr(path, simple=True, separator=".")
    # The key "a.b" has the name of a nested one.
    found[jax.tree_util.keystr(path) if key in found else key] = leaf
  return found


def check_form(
  rule: str, tree: Any, like: Any, remedy: str = "", exact: bool = False
) -> None:
  """Raises a ValueError unless a tree has another's leaves, shapes and types.

  All floats count as one type unless types must be `exact`.  The `rule` is the
  beginning of the error, which names the tree in backticks.
  """
  check_arrays(rule.split("`")[1], tree)

  def described(leaf: Any) -> str:
    dtype = jnp.result_type(leaf)
    one = not exact and jnp.issubdtype(dtype, jnp.floating)
    return f"{'float' if one else dtype}{list(jnp.shape(leaf))}"

  theirs, ours = (
    {f"leaf {key}".rstrip(): described(x) for key, x in leaves.items()}
    for leaves in map(named_leaves, (tree, like))
  )
  names = [*ours, *theirs, "structure"]
  for words, one in ((theirs, tree), (ours, like)):
    words["structure"] = str(jax.tree.structure(one))
  for key in names:
    given, wanted = theirs.get(key, "missing"), ours.get(key, "missing")
    if given != wanted:
      text = f"{rule}, but its {key} is {given} and not {wanted}."
      raise ValueError(f"{text} {remedy}".rstrip())
