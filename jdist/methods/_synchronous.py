"""Synchronous SGD: every step averages the workers' gradients."""

import optax

from jdist import checks, collectives, reducers, transforms


def ssgd(
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Synchronous SGD: every step averages the workers' gradients.

  .. math:: w \leftarrow w + \mathrm{optimizer}(\tfrac1N \sum_i g_i)

  Args:
    optimizer: Any Optax optimizer.  It receives the workers' mean as `loss` and
      as `value`, for which 4 bytes more are sent if it uses them.  A line
      search uses `grad` and `value_fn`, which stay each worker's own, and is
      refused.
    axis: The axis of the workers: None, a name, or (inner, outer).
    compression: A compression of the mean; see `local_steps`.

  Returns:
    `chain(average_gradients(axis, compression), optimizer)`.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  return transforms.only_floats(
    optax.chain(
      transforms.average_gradients(axis, compression),
      # The optimizer must see one loss on all workers, or a plateau schedule
      # would drive their parameters apart.
      transforms.with_mean_loss(optimizer, axis),
    )
  )
