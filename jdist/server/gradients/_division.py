"""The division of a server's parameters into parts, and of their messages."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, signatures, states, transforms
from jdist.server.gradients import _gradient_messages
from jdist.states import PyTree

# The part to which each piece of a message belongs, and its bytes.
Places = list[tuple[int, int]]


@signatures.checked
def divide(learner: Any, count: signatures.PositiveInt) -> list[dict[str, Any]]:
  """Returns arguments of servers with a part of the parameters each.

  A part is of whole leaves, in the order of the tree; the parts have about
  equal bytes, and the last one has the batch statistics.  Together such servers
  make the same updates and messages as one, to the bit.  The learner is a
  `GradientServer` at its beginning.

  Raises:
    ValueError: If a part would have no leaf, or the optimizer's update of a
      leaf depends on other leaves.
  """
  if not hasattr(learner, "part"):
    got = checks.show(learner)
    raise ValueError(f"`learner` must be a `server.GradientServer`, got {got}.")
  params, model_state = learner.model.params, learner.model.model_state
  sizes = np.array([x.nbytes for x in jax.tree.leaves(params)])
  # A leaf belongs to the part in which its middle byte is.
  middles, steps = np.cumsum(sizes) - sizes / 2, np.arange(count) / count
  cuts = [*map(int, np.searchsorted(middles, sizes.sum() * steps)), len(sizes)]
  pairs = list(itertools.pairwise(cuts))
  if not all(first < end for first, end in pairs):
    raise ValueError(
      f"`shards` must leave each a tensor, got {count} for {len(sizes)} "
      f"tensors, one of {sizes.max() / sizes.sum():.0%} of the bytes: none is "
      "divided. Take fewer."
    )
  found = [learner.part(*pair, {}) for pair in pairs]
  found[-1]["model_state"] = model_state
  whole = _first_update(found[0]["optimizer"], params)
  own = (_first_update(x["optimizer"], x["params"]) for x in found)
  same = itertools.chain.from_iterable(own)
  if not all(map(np.allclose, whole, same)):
    raise ValueError(
      "`optimizer` must update each tensor by its gradient alone with `shards`,"
      " got one that updates a part of them otherwise, as one with "
      "`clip_by_global_norm` does. Clip by tensor, or take one server."
    )
  return found


def _first_update(optimizer: Any, params: PyTree) -> list[jax.Array]:
  """Returns an optimizer's first update, of small tensors in place of these."""
  small = jax.tree.map(lambda x: jnp.ones((2,) * x.ndim, x.dtype), params)

  @jax.jit
  def first(one: jax.Array) -> PyTree:
    # So large that a norm that is limited reduces them.
    grads = jax.tree.map(lambda x: 1e3 * x, small)
    return transforms.lenient(optimizer).update(
      grads, optimizer.init(small), small, loss=one, value=one
    )[0]

  return jax.tree.leaves(first(jnp.float32(1.0)))


def places(
  codec: _gradient_messages.Codec, model: Any, found: list[dict[str, Any]]
) -> Places:
  """Returns where the pieces of a message, one for each leaf, belong."""
  counts = [len(jax.tree.leaves(x["params"])) for x in found]
  owners = np.repeat(np.arange(len(found)), counts).tolist()
  kinds, tail = _gradient_messages.layout(codec, *model)
  # A codec's message has an entry for each leaf in each of its lists.
  groups = [jax.tree.leaves(kinds)] if codec is None else kinds
  pieces = [
    (owner, states.num_bytes(leaf))
    for group in groups
    for owner, leaf in zip(owners, group, strict=True)
  ]
  return [*pieces, (len(found) - 1, states.num_bytes(tail))]


def split(message: np.ndarray, where: Places) -> list[np.ndarray]:
  """Returns the parts of a message's bytes."""
  pieces = _pieces(message, [size for _, size in where])
  found: list[list[np.ndarray]] = [[] for _ in range(where[-1][0] + 1)]
  for (owner, _), piece in zip(where, pieces, strict=True):
    found[owner].append(piece)
  return list(map(np.concatenate, found))


def join(found: list[np.ndarray], where: Places) -> np.ndarray:
  """Returns the message of its parts."""
  pieces = [
    iter(_pieces(part, [size for owner, size in where if owner == number]))
    for number, part in enumerate(found)
  ]
  return np.concatenate([next(pieces[owner]) for owner, _ in where])


def _pieces(message: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
  return np.split(message, np.cumsum(sizes)[:-1])
