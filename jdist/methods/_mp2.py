"""MP²: the front layers are trained and averaged, the others predicted."""

from typing import Any

import optax

from jdist import collectives, reducers, transforms
from jdist.methods import _local_sgd
from jdist.transforms import intervals


def mp2(
  optimizer: optax.GradientTransformation,
  cut: transforms.Splitter,
  predict: transforms.Predict,
  predictor_params: Any,
  interval: int | intervals.IntervalPolicy = 1,
  *,
  axis: collectives.Axis,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""MP²: the front layers are trained and averaged, the others predicted.

  With the front f of the network and a trained predictor,

  .. math:: f_i \leftarrow f + \mathrm{optimizer}(g_i), \qquad
            f \leftarrow \tfrac1N \sum_i f_i, \qquad
            r \leftarrow \mathrm{predict}(\theta, f)

  To train the front by another method, such as `diloco` or `msdpu`, or to train
  the rest by a residual, call `predict_rest`.

  Args:
    optimizer: The optimizer of the front, with a state of its own on each
      worker; Adam in the paper.
    cut: The cut of the network, `jdist.prediction.published_cut(name)`.
    predict: The predictor, `jdist.prediction.Predictor.apply`.
    predictor_params: The trained parameters of the predictor.
    interval: H, or a policy; 1 (default) as in the paper.
    axis: The axis of the workers.
    compression: A compression of the front's mean; see `local_steps`.

  Returns:
    A transformation; `update` needs `params`, and `loss=` if the interval's
    policy does.  `jdist.anchor` gives the whole network: evaluate on it.

  Raises:
    ValueError: If an argument is of another kind or out of its range; when the
      state is made, if `predict` does not give the rest of these parameters; at
      trace time, if `params`, or a needed `loss`, is missing or does not suit
      the cut.

  References:
    Model parameter prediction (MP²).  Departure: the paper's server predicts
    and sends all parameters to the workers; here all workers predict the same,
    and the rest is sent in neither direction.

  >>> class Halves:
  ...   split = staticmethod(lambda tree: (tree[0], tree[1]))
  ...   join = staticmethod(lambda front, rest: (front, rest))
  >>> optimizer = mp2(
  ...   optax.adam(1e-3), Halves, lambda theta, f: theta * f, 2.0, axis=None
  ... )
  """
  # The paper averages parameters and not gradients; for Adam these differ.
  front = _local_sgd.in_rounds(
    optimizer, interval, axis, None, None, compression
  )
  return transforms.predict_rest(
    front, cut, predict, predictor_params, axis=axis
  )
