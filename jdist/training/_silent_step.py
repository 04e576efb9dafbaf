"""The error of a step that leaves several workers apart."""


def silent_step_error(argument: str, num_workers: int) -> ValueError:
  """Makes the error of a step or optimizer that never communicates."""
  return ValueError(
    f"`{argument}` must bring the workers together, but of {num_workers} "
    "workers nothing of their gradients or parameters is ever sent: each would "
    "train a model of its own. Make it by a method with the workers' axis, for "
    "instance `jdist.ssgd(optimizer, axis=workers.axis)`, or pass "
    "`independent=True` if that is meant."
  )
