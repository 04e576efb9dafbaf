"""The actions that a pipeline's tables are made of."""

import enum
from typing import NamedTuple


class Op(enum.IntEnum):
  """Work of a device on a micro-batch, or with its gradients.

  `BACKWARD` is the whole backward pass; a zero-bubble table has
  `BACKWARD_INPUT` and `BACKWARD_WEIGHT` in place of it.
  """

  IDLE = 0
  FORWARD = 1
  BACKWARD = 2
  BACKWARD_INPUT = 3
  BACKWARD_WEIGHT = 4
  UPDATE = 5

  @property
  def letter(self) -> str:
    """The letter of the text form: F, B, I, W or U, and a dot for none."""
    return ".FBIWU"[self]

  @property
  def kind(self) -> str:
    """The kind of its spans in a trace, which have a colour."""
    kinds = ("idle", "forward", "backward", "backward", "weight", "update")
    return kinds[self]


# Give a gradient to the stage in front.
GIVES_GRADIENT = (Op.BACKWARD, Op.BACKWARD_INPUT)
# Give gradients of a stage's parameters.
GIVES_WEIGHTS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


class Action(NamedTuple):
  """One entry of a table.

  Attributes:
    op: what is done.
    stage: of the model, from 0.
    microbatch: in its iteration, from 0; 0 for an update.
    iteration: from 0; one optimizer step of every stage.
  """

  op: Op
  stage: int
  microbatch: int = 0
  iteration: int = 0

  def __str__(self) -> str:
    """Returns `F2`, or `F2/1` in stage 1, of iteration 3 `F2/1@3`."""
    number = "" if self.op == Op.UPDATE else str(self.microbatch)
    where = f"/{self.stage}"
    when = f"@{self.iteration}" if self.iteration else ""
    return f"{self.op.letter}{number}{where}{when}"
