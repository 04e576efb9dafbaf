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

  which is `predict_rest(local_steps(optimizer, interval), ...)`.  For other
  ways of training the front, such as `diloco` or `msdpu`, and for a residual
  by which the rest learns too, call `predict_rest`.

  Args:
    optimizer: of the front, each worker its own state; Adam in the paper.
    cut: where the network is cut, `jdist.prediction.published_cut(name)`.
    predict: the predictor, `jdist.prediction.Predictor.apply`.
    predictor_params: its trained parameters.
    interval: H, or a policy; 1 (default) as in the paper.
    axis: the workers' axis.
    compression: how to take the front's mean by fewer bytes.

  Returns:
    A transformation; `update` needs `params`, and `loss=` where the interval's
    policy does. `jdist.anchor` gives the whole network: evaluate on it.

  Raises:
    ValueError: when an argument is of another kind or out of its range; when
      the state is made, and `predict` does not give the rest of these
      parameters; at trace time, when `params`, or a needed `loss`, is missing
      or does not suit the cut.

  References:
    Model parameter prediction (MP²).  Departure: there a server predicts, and
    sends all parameters to the workers; here all workers predict the same, so
    that no rest travels in any direction.  `jdist.prediction.Exchange` is the
    published protocol.

  >>> class Halves:
  ...   split = staticmethod(lambda tree: (tree[0], tree[1]))
  ...   join = staticmethod(lambda front, rest: (front, rest))
  >>> optimizer = mp2(
  ...   optax.adam(1e-3), Halves, lambda theta, f: theta * f, 2.0, axis=None
  ... )
  """
  front = _local_sgd.in_rounds(
    optimizer, interval, axis, None, None, compression
  )
  return transforms.predict_rest(
    front, cut, predict, predictor_params, axis=axis
  )
