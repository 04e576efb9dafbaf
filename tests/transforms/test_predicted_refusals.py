"""What cannot be predicted, or would not come together, is refused."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import methods, transforms
from tests.transforms._fronts import Cut, PARAMS, predict, THETA, whole


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"front": 0.1}, "`front` must be an Optax transformation"),
    ({"rest": 0.1}, "`rest` must be an Optax transformation"),
    ({"cut": {}}, r"`cut` must have `split\(tree\)` and `join"),
    ({"predict": None}, "`predict` must be a function of the predictor"),
    ({"predictor_params": "text"}, "`predictor_params` must be.* got 'text'"),
    ({"predictor_params": {"w": [{}, "text"]}}, r"got 'text' at 'w\.1'"),
    ({"axis": 1}, "`axis` must be None, a name"),
  ],
)
def test_wrong_predictions_raise(change, message):
  arguments = {
    "front": optax.sgd(0.1),
    "cut": Cut(),
    "predict": predict,
    "predictor_params": THETA,
    "axis": None,
  }
  with pytest.raises(ValueError, match=message):
    transforms.predict_rest(**(arguments | change))


def ones(front, **shapes):
  del front
  return {k: jnp.ones(shape) for k, shape in shapes.items()}


@pytest.mark.parametrize(
  ("predict", "message"),
  [
    (lambda _, f: ones(f, c=3), "leaf d is missing"),
    # They would be broadcast.
    (
      lambda _, f: ones(f, c=(), d=(3, 2)),
      r"leaf c is float\[\] and not.*3\]",
    ),
    (lambda _, f: ones(f, c=3, d=(1, 2)), r"leaf d is float\[1, 2\] and not"),
    (
      lambda _, f: ones(f, c=3, d=(3, 2), e=1),
      r"leaf e is float\[1\] and not missing",
    ),
    (
      lambda _, f: {"c": jnp.arange(3), "d": jnp.ones((3, 2))},
      r"leaf c is int32\[3\] and not float\[3\]",
    ),
    (
      lambda _, f: list(ones(f, c=3, d=(3, 2)).values()),
      "leaf c is missing",
    ),
    (lambda theta, f: {"c": theta[:2] * f["a"]}, "it fails: TypeError.*broad"),
  ],
)
def test_prediction_that_does_not_fit_is_refused_at_init(predict, message):
  optimizer = methods.mp2(optax.sgd(0.1), Cut(), predict, THETA, axis=None)
  with pytest.raises(
    ValueError, match=rf"`predict`.*`predictor_params`.*{message}.*was made for"
  ):
    optimizer.init(PARAMS)


class Alone:
  """Each part is a leaf."""

  split = staticmethod(lambda tree: (tree["a"], tree["c"]))
  join = staticmethod(lambda front, rest: {"a": front, "c": rest})


def test_parameters_of_another_predictor_are_refused_at_init():
  for theta in (THETA[:2], {"theta": THETA}):
    optimizer = methods.mp2(optax.sgd(0.1), Cut(), predict, theta, axis=None)
    with pytest.raises(ValueError, match=r"`predictor_params`.*it fails"):
      optimizer.init(PARAMS)
  optimizer = methods.mp2(
    optax.sgd(0.1), Alone, lambda theta, f: f[:2], THETA, axis=None
  )
  with pytest.raises(ValueError, match=r"its leaf is float\[2\]"):
    optimizer.init(PARAMS)
  # The rest may be of another floating type, for instance bfloat16.
  optimizer = methods.mp2(optax.sgd(0.1), Cut(), predict, THETA, axis=None)
  optimizer.init(jax.tree.map(jnp.bfloat16, PARAMS))


def refuse_or_init(front, axis="worker", rest=None):
  """The state's shapes on two workers."""
  optimizer = whole(front, axis, rest)
  both = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
  return jax.eval_shape(jax.vmap(optimizer.init, axis_name=axis), both)


def test_part_that_does_not_average_is_refused_where_there_are_workers():
  alone = optax.sgd(0.1, momentum=0.9)
  together = methods.ssgd(optax.sgd(0.1), axis="worker")
  with pytest.raises(ValueError, match=r"`front` must bring.*`ssgd\(front"):
    refuse_or_init(alone)
  with pytest.raises(ValueError, match=r"`rest` must bring.*`ssgd\(rest"):
    refuse_or_init(together, rest=alone)
  whole(alone, None, alone).init(PARAMS)


@pytest.mark.parametrize(
  "front",
  [
    methods.ssgd,
    lambda sgd, axis: optax.chain(
      optax.clip(1.0), transforms.average_gradients(axis), sgd
    ),
    lambda sgd, axis: optax.chain(sgd, transforms.average_gradients(axis)),
    lambda sgd, axis: transforms.local_steps(sgd, 2, axis=axis),
    lambda sgd, axis: methods.diloco(sgd, 2, axis=axis),
    lambda sgd, axis: methods.easgd(sgd, 2, axis=axis),
    lambda sgd, axis: transforms.fragment_steps(sgd, 2, 2, axis=axis),
    lambda sgd, axis: methods.powersgd(sgd, 1, axis=axis),
    lambda sgd, axis: methods.dgc(sgd, 0.5, axis=axis),
    lambda sgd, axis: transforms.update_first(sgd, axis=axis),
    lambda sgd, axis: transforms.delay_gradients(
      methods.ssgd(sgd, axis=axis), 1
    ),
    lambda sgd, axis: optax.apply_if_finite(methods.ssgd(sgd, axis=axis), 3),
    lambda sgd, axis: optax.inject_hyperparams(
      lambda rate: methods.ssgd(optax.sgd(rate), axis=axis)
    )(rate=0.1),
  ],
)
def test_any_averaging_front_is_accepted(front):
  state = refuse_or_init(front(optax.sgd(0.1), axis="worker"))
  assert state.anchor["c"].shape == (2, 3)


def test_update_without_parameters_is_refused():
  optimizer = methods.mp2(optax.sgd(0.1), Cut(), predict, THETA, axis=None)
  with pytest.raises(ValueError, match="`params` must be given to `update`"):
    optimizer.update(PARAMS, optimizer.init(PARAMS))
