"""Declarations of states, the law of each leaf, and the dtype of its values.

Training loops, checkpoints and drains read them from a state, a NamedTuple of
arrays, and need no table of types:

    @states.declare(shared=("step",), drains=True)
    class DelayState(NamedTuple):
      step: jax.Array
      pending: PyTree

The law of a leaf states how workers treat it:

    iterate    a position: it moves with the worker's parameters, and its
               distance from them is averaged at the end of a round
    moment     each worker's own, as the momenta of an optimizer
    statistic  averaged at the end of a round, as those of batch normalization
    random     a key, which is folded by the worker's number
    counter    equal on all workers, and never averaged
    constant   equal on all workers; it may be infinite, as a mask is
"""

import collections
import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from jdist import checks

_T = TypeVar("_T", bound=type)
PyTree = Any
Law = Literal["iterate", "moment", "statistic", "random", "counter", "constant"]
LAWS: tuple[str, ...] = typing.get_args(Law)

# Fields of Optax's states whose law cannot be seen from their dtype.  All other
# floats are moments: every state of Optax 0.2.8 was read.  MADGRAD and COCOB
# compute positions from sums of gradients, so that a round averages these, too:
# with sums of its own a worker would undo the round in its next step.
_OPTAX: Mapping[str, Mapping[str, Law]] = {
  "ScheduleFreeState": {
    "b1": "constant", "weight_sum": "counter", "max_lr": "counter",
    "z": "iterate",
  },
  "MadgradState": {
    "grad_sum_sq": "statistic", "s": "statistic", "x0": "iterate",
  },
  "COCOBState": {
    "init_particles": "iterate", "cumulative_gradients": "statistic",
    "scale": "statistic", "subgradients": "statistic", "reward": "statistic",
  },
  "SAMState": {"cache": "iterate"},
  "InjectStatefulHyperparamsState": {"hyperparams": "constant"},
  # They measure the distance from where training began, which stays there.
  "MechanicState": {"x0": "constant"},
  "ProdigyState": {"params0": "constant"},
  "DoGState": {"init_params": "constant"},
  "DoWGState": {"init_params": "constant"},
  "ScaleByDistanceOverGradientsState": {"init_params": "constant"},
}  # fmt: skip


def declare(
  *,
  shared: Iterable[str] = (),
  rounds: bool = False,
  drains: bool = False,
  averages: bool = False,
  update_pending: bool = False,
  streams: bool = False,
  laws: Mapping[str, Law] | None = None,
  evaluates: str | None = None,
) -> Callable[[_T], _T]:
  """Declares the properties of a state, as attributes of its class.

  The declared state of a wrapper around a method with rounds also declares that
  the wrapper passes the method's updates on unchanged.

  Args:
    shared: Fields that are equal on all workers, so that a checkpoint stores
      them once.  Nested states with a declaration declare their own fields.
    rounds: Whether the state has a `clock`, an `anchor` at which rounds end,
      and `kept`, the worker's intended distance from the anchor.
    drains: Whether the transformation takes `Control(drain=True)`.
    averages: Whether the transformation makes the workers' updates equal.
    update_pending: Whether the last step's update is applied in the next step.
    streams: Whether a message is sent in parts, some in every step.
    laws: The laws of fields which `find_laws` would not infer.
    evaluates: The field with the parameters to evaluate, for instance an
      average of iterates; see `jdist.evaluation_params`.

  >>> from typing import NamedTuple
  >>> @declare(shared=("step",))
  ... class State(NamedTuple):
  ...   step: int
  >>> State.shared
  frozenset({'step'})
  """
  shared = frozenset(shared)
  flags: dict[str, Any] = {
    "shared": shared,
    "rounds": rounds,
    "drains": drains,
    "averages": averages,
    "update_pending": update_pending,
    "streams": streams,
  }
  named = {} if laws is None else laws
  _check_laws(named.values())
  if laws is not None or evaluates is not None:
    # They alone say nothing about workers that are equal, or about rounds.
    alone = {"field_laws": named, "evaluates": evaluates}
    flags = alone | (flags if any(flags.values()) else {})
  given: dict[str, Iterable[str]] = {
    "shared": shared,
    "laws": named,
    "evaluates": () if evaluates is None else (evaluates,),
  }

  def decorate(state: _T) -> _T:
    # A typing error would silently store a leaf once per worker.
    for what, fields in given.items():
      unknown = {*fields} - {*getattr(state, "_fields", ())}
      if unknown:
        raise ValueError(
          f"`{what}` must name fields of {state.__name__}, got "
          f"{sorted(unknown)}."
        )
    for name, value in flags.items():
      # A class may define one of them as a property instead.
      if name not in vars(state):
        setattr(state, name, value)
    return state

  return decorate


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Laws:
  """Laws of leaves that replace those which `find_laws` infers, without arrays.

  A state keeps them, so that all that read it agree.

  Attributes:
    named: Names of leaves, or of trees around them, and their laws.
  """

  named: tuple[tuple[str, Law], ...] = ()


def exceptions(
  tree: PyTree, given: Mapping[str, Law] | None = None
) -> Laws | tuple[()]:
  """Returns the laws of a model's state that its types do not show.

  Args:
    tree: The model's first state.  A float that is infinite at the beginning,
      as a mask of an attention, is a constant.
    given: Laws by the names of leaves, or of trees around them ("norm.mask",
      "norm"), as a user gives them; they come before the inferred ones.

  >>> exceptions({"mask": jnp.array([0.0, -jnp.inf]), "mean": jnp.zeros(2)})
  Laws(named=(('mask', 'constant'),))
  """
  if not isinstance(given, Mapping | None):
    raise ValueError(
      "`laws` must be a dict from names of leaves to their laws, or None, got "
      f"{given!r}. For instance: laws={{'mask': 'constant'}}."
    )
  given = dict(given or {})
  _check_laws(given.values())
  named = checks.named_leaves(tree)
  for name in given:
    if not any(_holds(name, leaf) for leaf in named):
      raise ValueError(
        f"`laws` must name leaves of the state, got {name!r}. Its leaves are "
        f"{', '.join(named) or 'none'}."
      )
  for name, leaf in named.items():
    own = [law for key, law in given.items() if _holds(key, name)]
    if own and not _suits(own[-1], leaf):
      raise ValueError(
        f"`laws` must suit their leaves, got {own[-1]!r} for "
        f"{checks.show(leaf)} at {name!r}. Means are of floats, keys "
        "('random') typed or uint32; others are 'counter' or 'constant'."
      )
    if not own and _is_infinite(leaf):
      given[name] = "constant"
  return Laws(tuple(given.items())) if given else ()


def find_laws(
  tree: PyTree, floats: Law = "moment", laws: Laws | tuple[()] = ()
) -> PyTree:
  """Returns the law of every leaf, a tree of texts like the given one.

  The class of a state declares it, or else the dtype shows it: typed
  keys, and raw ones that are called so, are random, and integers count.

  Args:
    tree: The state of an optimizer or of a model, or its shapes.
    floats: The law of real and complex numbers that nothing declares:
      "moment" for optimizers, "statistic" for models.
    laws: Exceptions by name.

  >>> find_laws({"key": jax.random.key(0), "mean": jnp.zeros(2)}, "statistic")
  {'key': 'random', 'mean': 'statistic'}
  """
  checks.check_choice("floats", floats, LAWS)
  found: list[Law] = list(_walk(tree, None, "", floats))
  if laws != ():
    checks.check_type("laws", laws, Laws, "of `states.exceptions`")
    for number, name in enumerate(checks.named_leaves(tree)):
      for key, law in typing.cast(Laws, laws).named:
        found[number] = law if _holds(key, name) else found[number]
  return jax.tree.unflatten(jax.tree.structure(tree), found)


def evaluated_field(kind: type) -> str | None:
  """Returns the field of a state's class by which parameters are evaluated."""
  schedule_free = kind.__name__ == "ScheduleFreeState" and hasattr(kind, "b1")
  return "z" if schedule_free else getattr(kind, "evaluates", None)


def is_key(x: Any) -> bool:
  """Returns whether an array is a typed key of random numbers."""
  dtype = getattr(x, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_words(leaf: Any) -> Any:
  """Returns the words of a typed key, which files and NumPy can hold."""
  if is_key(leaf) and isinstance(leaf, jax.ShapeDtypeStruct):
    return jax.eval_shape(jax.random.key_data, leaf)
  return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_key(words: Any, like: Any) -> jax.Array:
  """Undoes `key_words`, given the leaf or its shape."""
  if not is_key(like):
    return jnp.asarray(words)
  return jax.random.wrap_key_data(words, dtype=like.dtype)


def fold_key(key: jax.Array, number: jax.typing.ArrayLike) -> jax.Array:
  """Folds a number into a key, typed or raw, or into each key of an array."""
  keys = key if is_key(key) else jax.random.wrap_key_data(key)
  fold = jax.vmap(jax.random.fold_in, (0, None))
  found = fold(keys.reshape(-1), number).reshape(keys.shape)
  return found if is_key(key) else jax.random.key_data(found)


def fold_keys(tree: PyTree, number: jax.typing.ArrayLike) -> PyTree:
  """Folds a worker's number into the random leaves of a state."""
  return jax.tree.map(
    lambda x, law: fold_key(x, number) if law == "random" else x,
    tree, find_laws(tree),
  )  # fmt: skip


def unknown_floats(tree: PyTree) -> list[int]:
  """Returns the numbers of the float leaves whose law is unknown."""
  laws = _walk(tree, None, "", "moment", unknown="unknown")
  return [number for number, law in enumerate(laws) if law == "unknown"]


def field_laws(kind: type) -> Mapping[str, Law] | None:
  """Returns the laws that a state's class declares; None if it is unknown."""
  declared: Mapping[str, Law] | None = vars(kind).get("field_laws")
  if isinstance(declared, Mapping):
    return declared
  if kind.__module__.partition(".")[0] == "optax":
    return _OPTAX.get(kind.__name__, {})
  return {} if is_declared(kind) else None


def is_declared(kind: type) -> bool:
  """Returns whether `declare` states which fields of a class are shared."""
  # Fields of a user's own NamedTuple may have this name, too.
  return isinstance(getattr(kind, "shared", None), frozenset)


def _walk(
  x: Any,
  law: Any,
  name: str,
  floats: Law,
  unknown: Any = None,
  equal: bool = False,
) -> Iterator[Any]:
  """Yields the laws of a tree's leaves, in their order.

  Floats that stand in no known state have the law `unknown`, if it is given.
  Keys must be `equal` on all workers in shared fields and behind a mean.
  """
  children, _ = jax.tree_util.tree_flatten_with_path(
    x, is_leaf=lambda y: y is not x
  )
  kind: Any = type(x)
  fields = field_laws(kind)
  unknown = unknown if fields is None else None
  shared = kind.shared if is_declared(kind) else ()
  equal, chain = equal or _is_mean(x), kind in (tuple, collections.OrderedDict)
  for path, child in children:
    if not path:
      found = _law_of(x, law, name, unknown or floats)
      yield "constant" if equal and found == "random" else found
      continue
    key = jax.tree_util.keystr(path, simple=True, separator=".")
    own = (fields or {}).get(key, law)
    yield from _walk(child, own, key, floats, unknown, equal or key in shared)
    parts = jax.tree.leaves(child, is_leaf=_is_mean) if chain else ()
    equal = equal or any(map(_is_mean, parts))


def _is_mean(state: Any) -> bool:
  return getattr(type(state), "averages", False) is True


def _law_of(x: Any, law: Any, name: str, floats: Any) -> Any:
  dtype = jnp.result_type(x)
  if is_key(x):
    return law if law == "constant" else "random"
  if law is not None:
    return law
  if jnp.issubdtype(dtype, jnp.inexact):
    return floats
  called = "key" in name or "rng" in name
  words = 4 if "rbg" in jax.config.jax_default_prng_impl else 2
  raw = dtype == jnp.uint32 and jnp.shape(x)[-1:] == (words,)
  return "random" if raw and called else "counter"


def _suits(law: Law, leaf: Any) -> bool:
  if law in ("counter", "constant"):
    return True
  if law == "random":
    return bool(_law_of(leaf, None, "key", "moment") == "random")
  return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _holds(name: str, leaf: str) -> bool:
  """Returns whether a name is that of a leaf, or of a tree that holds it."""
  return leaf == name or leaf.startswith(f"{name}.")


def _is_infinite(leaf: Any) -> bool:
  if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
    return False
  inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
  return bool(inexact and jnp.isinf(leaf).any())


def _check_laws(given: Iterable[Any]) -> None:
  for law in given:
    checks.check_choice("laws", law, LAWS)


def wide_dtype(dtype: Any) -> Any:
  """Returns float32 for narrower floats, and any other dtype as it is.

  Anchors, residuals and sums over workers or micro-batches have this dtype:
  small steps would vanish in the rounding of a narrower one.

  >>> wide_dtype(jnp.bfloat16), wide_dtype(jnp.int8)
  (dtype('float32'), dtype('int8'))
  """
  dtype = jnp.dtype(dtype)
  # Integers are counts, and float64 must not become narrower.
  narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if narrow else dtype


def wide(x: jax.Array) -> jax.Array:
  """Casts an array to at least float32, see `wide_dtype`."""
  return x if x.dtype.itemsize >= 4 else x.astype(wide_dtype(x.dtype))


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """Casts an array so that a cast back shows the rounding error."""
  # XLA's GPU compiler removes a cast to fewer bits and back, so that a residual
  # would be zero.  It keeps an explicit rounding, which would flush the
  # denormals of float16.
  if not all(jnp.issubdtype(one, jnp.floating) for one in (x.dtype, dtype)):
    return x.astype(dtype)
  kind, own = jnp.finfo(dtype), jnp.finfo(x.dtype)
  if kind.nmant < own.nmant:
    exact = jax.lax.reduce_precision(x, kind.nexp, kind.nmant)
    small = kind.nexp < own.nexp and jnp.abs(x) < kind.smallest_normal.astype(
      x.dtype
    )
    x = jnp.where(small, x, exact)
  return x.astype(dtype)


def wide_like(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array with its `wide_dtype`."""
  return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype))


def num_bytes(tree: PyTree) -> int:
  """Returns the bytes of a tree of arrays or of their shapes."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
