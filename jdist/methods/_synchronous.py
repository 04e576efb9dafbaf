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
    optimizer: any Optax optimizer; as `loss` and as `value` it gets the
      workers' mean of what is given, for which 4 bytes more are sent where it
      uses that.  A line search, which uses `grad` and `value_fn` too, is
      refused: these stay each worker's own.
    axis: the workers' axis: None, a name, or (inner, outer).
    compression: how to take the mean by fewer bytes; see `local_steps`.

  Returns:
    `chain(average_gradients(axis, compression), optimizer)`.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  return transforms.only_floats(
    optax.chain(
      transforms.average_gradients(axis, compression),
      transforms.with_mean_loss(optimizer, axis),
    )
  )
