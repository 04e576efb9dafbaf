"""Sync rules: how the anchor and the workers move at the end of a round.

A rule is a frozen dataclass of hyper-parameters with pure functions for one
worker.  It sends nothing: the round engine takes the one mean of a round,
exactly or by few bytes, now or while the next round is computed.

    correct            in every step: the gradient that the inner optimizer gets
    message            at a round's end: the tree whose mean is taken
    depart             what changes at the sender, before any mean is there
    move               the mean has arrived: the new anchor
    place              where this worker goes on from
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives
from jdist.transforms.local import _anchor

PyTree = Any


class Round(NamedTuple):
  """A round at its end, as a rule sees it; all for one worker.

  Attributes:
    anchor: the anchor, float32.
    local: the worker's parameters after its last step, float32.
    progress: where the round began less `local`: the pseudo-gradient, float32.
    params: the parameters before the last step, in their dtypes.
    inner: the inner optimizer's state.
    memory: the rule's own state.
    step: the number of the last local step, int32 scalar, from 0.
    optimizer: the inner optimizer.
    num_workers: N.
  """

  anchor: PyTree
  local: PyTree
  progress: PyTree
  params: PyTree
  inner: PyTree
  memory: PyTree
  step: jax.Array
  optimizer: optax.GradientTransformation
  num_workers: int


class SyncRule:
  """A rule for the end of a round of local steps.

  A message is `relative` where it is a difference to something that all workers
  know: few bytes suffice for it, and it may arrive late.  Else it may be what
  the rule needs itself, for instance the parameters, to save a rounding.

  Attributes:
    beside: whether the workers stay beside the anchor.  Their message is where
      they are, and not what they did.
    exact_parts: whether something else than the message is averaged, with
      every bit (`exact`); such a rule cannot be late.
  """

  beside: ClassVar[bool] = False
  exact_parts: ClassVar[bool] = False

  def init(self, anchor: PyTree) -> PyTree:
    """Returns the rule's first state, a NamedTuple of arrays or `()`."""
    del anchor
    return ()

  def correct(
    self, updates: PyTree, memory: PyTree, step: jax.Array
  ) -> tuple[PyTree, PyTree]:
    """Returns the gradients that the inner optimizer gets, and the state."""
    del step
    return updates, memory

  def message(self, end: Round, relative: bool) -> PyTree:
    """Returns the tree whose mean over the workers is taken."""
    del relative
    return end.progress

  def like(self, tree: PyTree) -> PyTree:
    """Returns the form of a relative message, for trees like the anchor."""
    return tree

  def progress_in(self, message: PyTree) -> PyTree:
    """Returns the pseudo-gradient in a relative message."""
    return message

  def exact(self, end: Round) -> PyTree:
    """Returns what else is averaged, with every bit; usually nothing."""
    del end
    return ()

  def depart(self, end: Round) -> PyTree:
    """Returns the rule's state once the message is on its way."""
    return end.memory

  def move(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    """Returns the round with the new `anchor`, `memory` and `inner`.

    Args:
      end: the round at its end.
      mean: the workers' mean of `message`, float32, equal on all workers.
      exact: their mean of `exact`; `()` where the mean is late.
      relative: as `message` was asked for.
    """
    raise NotImplementedError

  def place(self, before: Round, after: Round) -> PyTree:
    """Returns where this worker goes on from, float32; usually the anchor."""
    del before
    return after.anchor

  def settle(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    """Returns the round moved for good, by a mean after which all stop."""
    return self.move(end, mean, exact, relative)


class Average(SyncRule):
  r"""Local SGD's: the anchor becomes the mean of the parameters.

  .. math:: a \leftarrow \tfrac1N \sum_i w_i, \qquad w_i \leftarrow a
  """

  def message(self, end: Round, relative: bool) -> PyTree:
    """The parameters: by way of the progress they would be rounded twice."""
    return end.progress if relative else end.local

  def move(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    del exact
    if not relative:
      return end._replace(anchor=mean)
    anchor = jax.tree.map(jnp.subtract, end.anchor, mean)
    return end._replace(anchor=anchor)


class OuterStep(SyncRule):
  r"""DiLoCo's: the mean pseudo-gradient is fed to an outer optimizer.

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i (a - w_i)), \qquad
            w_i \leftarrow a

  Its schedules count rounds.

  Attributes:
    optimizer: any Optax optimizer; `optax.sgd(1.0)` is `Average` up to
      rounding.

  Source and departures: `methods.diloco`.
  """

  def __init__(self, optimizer: optax.GradientTransformation):
    optimizer = checks.check_optimizer("outer", optimizer)
    self.optimizer = collectives.for_workers(optimizer)

  def init(self, anchor: PyTree) -> PyTree:
    return self.optimizer.init(anchor)

  def move(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    del exact, relative
    updates, memory = self.optimizer.update(mean, end.memory, end.anchor)
    anchor = jax.tree.map(_anchor.moved, end.anchor, updates)
    return end._replace(anchor=anchor, memory=memory)


def as_rule(rule: Any) -> SyncRule:
  """Returns a sync rule; an Optax optimizer becomes the outer one."""
  if rule is None:
    return Average()
  if isinstance(rule, SyncRule):
    return rule
  if isinstance(rule, optax.GradientTransformation | optax.MultiSteps):
    return OuterStep(rule)
  raise ValueError(
    "`rule` must be a sync rule, an Optax optimizer for the outer step, or "
    f"None to average parameters, got {checks.show(rule)}. For DiLoCo write "
    "`rule=optax.sgd(0.7, momentum=0.9, nesterov=True)`."
  )
