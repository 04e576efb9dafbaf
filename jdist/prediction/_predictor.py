"""The predictor: a network that maps the front of another one to its rear."""

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import traverse_util

from jdist import checks, signatures, states
from jdist.prediction import _cut
from jdist.states import PyTree

Params = dict[str, Any]
DenseFrom = Literal["flatten", "hidden"]

_GRID = 8
_NUM_CELLS = _GRID * _GRID
_NUM_CHANNELS = 8
_NUM_SQUEEZED = 2
_NUM_BLOCKS = 3


@signatures.explained
@dataclasses.dataclass(frozen=True)
class Predictor:
  """Predicts the layers behind a cut; made by `predictor`.

  It is plain data, with pure functions of one worker's parameters.

  Attributes:
    cut: The cut of the network whose rear is predicted.
    rank: The number of outer products in a predicted convolution.
    grid: 8 for an input [8, 8, channels], 1 for [1, 1, channels].
    dense_from: "flatten" if dense layers are decoded from the 8 features,
      "hidden" if they are decoded from a dense layer of 64 behind them.
  """

  cut: _cut.Cut
  rank: int
  grid: int
  dense_from: DenseFrom

  @property
  def num_channels(self) -> int:
    """The smallest C for which [grid, grid, C] holds the front."""
    return -(-self.cut.num_front // self.grid**2)

  @property
  def num_params(self) -> int:
    """The number of trained parameters."""
    return sum(math.prod(shape) for shape in self._shapes().values())

  def __repr__(self) -> str:
    return (
      f"Predictor({self.cut!r}, rank={self.rank}, grid={self.grid}, "
      f"dense_from={self.dense_from!r}: {self.num_params:,} parameters)"
    )

  def init(self, key: jax.Array) -> Params:
    """Draws the first parameters, a nested dict of float32 arrays.

    Weights are normal with deviation 0.1, within two deviations; biases 0.1.
    """
    _check_key(key)
    shapes = self._shapes()
    # One draw for all arrays: each shape would compile a program.
    draw = 0.1 * jax.random.truncated_normal(
      key, -2.0, 2.0, (self.num_params,), jnp.float32
    )
    values, start = {}, 0
    for path, shape in shapes.items():
      if path[-1] == "bias":
        values[path] = jnp.full(shape, 0.1, jnp.float32)
      else:
        values[path] = draw[start : start + math.prod(shape)].reshape(shape)
      start += math.prod(shape)
    return traverse_util.unflatten_dict(values)

  def apply(self, params: Params, front: PyTree) -> PyTree:
    """Predicts the rear, for `Cut.join`.

    Args:
      params: Parameters with the structure of `init`.
      front: The front of one worker's parameters, or all of them.

    Raises:
      ValueError: If the front does not fit the cut, or the parameters are of
        another predictor; it names the first leaf that differs.
    """
    return self.apply_vector(params, self.cut.flatten_front(front))

  def apply_vector(self, params: Params, vector: jax.Array) -> PyTree:
    """Predicts the rear from a flat front, float32 [num_front]."""
    self.cut.check_vector("front", vector)
    self.check_params(params)
    features = self._features(params, vector)
    convs = dense = features
    if "hidden" in params:
      convs = jax.nn.relu(_dense(params["hidden"], features))
      convs = convs.reshape(_NUM_CELLS, self.rank)
    if "hidden_dense" in params:
      dense = jax.nn.relu(_dense(params["hidden_dense"], features))
    # All layers of a kind share the features; only the last product is their
    # own, which keeps the predictor small next to the predicted network.
    parts = []
    for layer in self.cut.rear:
      kernel = params["layers"][layer.name]["kernel"]
      flat = (dense if layer.is_dense else convs) @ kernel
      # A convolution is decoded in rows of 64 cells, the last one too long.
      parts.append(flat.reshape(-1)[: layer.size])
    return self.cut.unflatten_rear(jnp.concatenate(parts))

  def check_params(self, params: Params) -> None:
    """Raises a ValueError unless the parameters are of this predictor."""
    checks.check_form(
      f"`params` must be of {self!r}",
      params,
      jax.eval_shape(self.init, jax.random.key(0)),
      "Take the parameters that were trained with this predictor.",
    )

  def _features(self, params: Params, vector: jax.Array) -> jax.Array:
    """Returns the 8 features of a front."""
    # Each of the three pools halves the grid, and a grid of 1 stays.
    grid, num_channels = self.grid, self.num_channels
    # The front fills the grid in its flat order, with zeros at the end.
    missing = grid * grid * num_channels - vector.size
    x = jnp.pad(vector.astype(jnp.float32), (0, missing))
    x = x.reshape(1, grid, grid, num_channels)
    for number in range(1, _NUM_BLOCKS + 1):
      block = params[f"block{number}"]
      x = jax.lax.conv_general_dilated(
        x, block["conv"]["kernel"], (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
      )  # fmt: skip
      x = jax.nn.relu(x + block["conv"]["bias"].reshape(1, 1, 1, -1))
      # Channel attention: one weight for each channel, from its mean.
      weights = jax.nn.relu(_dense(block["squeeze"], jnp.mean(x, (0, 1, 2))))
      weights = jax.nn.sigmoid(_dense(block["excite"], weights))
      x = x * weights.reshape(1, 1, 1, -1)
      window = (1, 2, 2, 1)
      x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, window, window, "SAME"
      )
    return x.reshape(_NUM_CHANNELS)

  def _shapes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns the shape of every array by its path."""
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {}

    def add(*path: str, sizes: tuple[int, ...]) -> None:
      shapes[*path, "kernel"] = sizes
      shapes[*path, "bias"] = sizes[-1:]

    widths = [self.num_channels] + [_NUM_CHANNELS] * _NUM_BLOCKS
    for i, pair in enumerate(itertools.pairwise(widths)):
      block = f"block{i + 1}"
      add(block, "conv", sizes=(3, 3, *pair))
      add(block, "squeeze", sizes=(_NUM_CHANNELS, _NUM_SQUEEZED))
      add(block, "excite", sizes=(_NUM_SQUEEZED, _NUM_CHANNELS))
    num_features = _NUM_CHANNELS
    # The hidden layers exist only if a layer of their kind is predicted.
    kinds = {layer.is_dense for layer in self.cut.rear}
    if False in kinds:
      add("hidden", sizes=(_NUM_CHANNELS, _NUM_CELLS * self.rank))
    if True in kinds and self.dense_from == "hidden":
      num_features = _NUM_CELLS
      add("hidden_dense", sizes=(_NUM_CHANNELS, num_features))
    for layer in self.cut.rear:
      shapes["layers", layer.name, "kernel"] = (
        (num_features, layer.size)
        if layer.is_dense
        else (self.rank, -(-layer.size // _NUM_CELLS))
      )
    return shapes


@signatures.checked
def predictor(
  cut: _cut.Cut,
  rank: signatures.PositiveInt = 1,
  *,
  grid: signatures.PositiveInt | None = None,
  dense_from: DenseFrom | None = None,
) -> Predictor:
  """Makes the published predictor for a cut.

  The input is the front as x = [8, 8, C].  Three blocks

    x <- relu(conv3x3(x) + b)                 C -> 8, 8 -> 8, 8 -> 8
    x <- x * sigmoid(V relu(U mean(x)))       8 -> 2 -> 8, per channel
    x <- max over 2x2                         8x8 -> 4x4 -> 2x2 -> 1x1

  leave 8 features f.  A convolution of n parameters (kernel, bias and
  normalization) is the outer product of a shared factor and its own one,

    a = relu(A f + c) [64, rank],   layer = (a @ w)[:n],   w [rank, n / 64]

  and a dense layer of n parameters is `D g`, with g = f or g = relu(B f + d)
  [64].

  Args:
    cut: A cut from `cut` or `published_cut`.
    rank: The number of outer products in a sum; default 1, as published.
    grid: 8 for an input [8, 8, C], padded with zeros if 64 does not divide the
      front, or 1 for [1, 1, C].  Default 8 if 64 divides it, else 1, which
      among the authors' networks only LeNet has, [1, 1, 2572].  With one pixel
      the first convolution has 72 weights for each entry of the front, 64 of
      which multiply zeros: pass 8 for large fronts.
    dense_from: "flatten" for g = f, "hidden" for the layer of 64.  Default
      "flatten" if one dense layer is predicted, as for the ResNets, else
      "hidden", as for VGG and AlexNet.

  Returns:
    The predictor: `init(key) -> params`, `apply(params, front) -> rear`.

  >>> from jdist import prediction
  >>> predictor = prediction.predictor(prediction.published_cut("resnet18"))
  >>> predictor.num_channels, predictor.num_params
  (2901, 277420)

  References:
    MP², model parameter prediction, the authors' predictor, without
    normalization of inputs and outputs.  Reconstruction: pooling keeps a single
    pixel; the dense layers of channel attention and the shared ones have
    biases, which begin at 0.1 as those of convolutions; LeNet's dense layers
    are decoded as VGG's; all dense layers share one layer of 64, with a
    rectifier; fronts and layers are padded to multiples of 64.  Departure:
    `rank` above 1.
  """
  # The authors' networks have fronts of a multiple of 64 but for LeNet.
  if grid is None:
    grid = _GRID if cut.num_front % _NUM_CELLS == 0 else 1
  checks.check_choice("grid", grid, (1, _GRID))
  if dense_from is None:
    num_dense = sum(layer.is_dense for layer in cut.rear)
    dense_from = "flatten" if num_dense <= 1 else "hidden"
  return Predictor(cut, rank, grid, dense_from)


def _dense(params: Params, x: jax.Array) -> jax.Array:
  return x @ params["kernel"] + params["bias"]


def _check_key(value: Any) -> None:
  """Raises a ValueError unless `value` is a random key."""
  words = getattr(value, "dtype", None) == jnp.uint32 and jnp.ndim(value) == 1
  if not (words or states.is_key(value)):
    raise ValueError(
      f"`key` must be a random key, got {checks.show(value)}. Make one with "
      "`jax.random.key(seed)`."
    )
