"""Optimizers in one program see the leaves that they need, or are refused."""

import jax
import optax
import pytest
from optax import contrib

import jdist
from jdist import pipeline, reducers, transforms
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_MICRO, _WORKERS = _training.MICRO, 2
_pipe = _training.one_program


def _train(pipe, chain, batches, workers=1):
  state, _ = _training.train(pipe, chain, batches, workers)
  return _training.split(pipe, state)[0]


def _unsplit(*args, **options):
  state, _ = _training.unsplit(*args, **options)
  return _training.of_worker(state)[0]


def _averaged(optimizer):
  return lambda axis: optax.chain(transforms.average_gradients(axis), optimizer)


def _power_sgd(axis):
  compression = reducers.Compression(
    reducers.PowerSGD(2), reducers.ErrorFeedback()
  )
  return jdist.ssgd(optax.sgd(0.1), axis=axis, compression=compression)


_OF_MATRICES = {
  "muon": _averaged(contrib.muon(0.05)),
  "lars": _averaged(optax.lars(0.05)),
  "mask": _averaged(
    optax.adamw(0.01, weight_decay=0.1, mask=lambda p: _mask(p))
  ),
}


@pytest.mark.parametrize(
  ("name", "table"),
  [
    ("muon", ("interleaved", 2, 2)),
    *(
      pytest.param(name, table, marks=pytest.mark.slow)
      for name, table in [
        ("muon", ("1f1b", 4, 4)),
        ("lars", ("interleaved", 2, 2)),
        ("lars", ("1f1b", 2, 2)),
        ("mask", ("interleaved", 2, 2)),
        ("mask", ("1f1b", 4, 4)),
      ]
    ),
  ],
  ids=str,
)
def test_equal_stages_accept_optimizers_of_whole_leaves(name, table):
  made, layers = pipeline.make_table(*table), small.layers()
  batches = small.batches(3, 1, _MICRO * made.num_microbatches)
  pipe = _pipe(layers, made)
  assert pipe._ticks.params.stacked
  # Muon mixes dtypes.
  with jax.numpy_dtype_promotion("standard"):
    found = _train(pipe, _OF_MATRICES[name], batches)
    wanted = _unsplit(
      layers, _OF_MATRICES[name], batches, made.num_microbatches
    )
  assert small.error(found, wanted) < 1e-5


@pytest.mark.slow
def test_power_sgd_factors_each_stages_own_matrices():
  table, layers = pipeline.make_table("interleaved", 2, 2), small.layers()
  batches = small.batches(3, _WORKERS, _MICRO * 2)
  found = _train(_pipe(layers, table), _power_sgd, batches, _WORKERS)
  wanted = _unsplit(layers, _power_sgd, batches, 2, _WORKERS)
  # The random first factors depend on a leaf's place, and three steps at rank
  # 2 of 8 do not make them equal.
  assert small.error(found, wanted) < 0.1


def _clipped(inner, most):
  return lambda axis: optax.chain(
    optax.clip_by_global_norm(most), transforms.average_gradients(axis), inner
  )


@pytest.mark.parametrize(
  ("table", "sizes", "tied"),
  [
    # By default a norm counts a tied leaf once, in packed stages.
    (("1f1b", 3, 2), small.SIZES, True),
    (("1f1b", 4, 2), small.UNLIKE, False),
    pytest.param(
      ("interleaved", 2, 2), small.SIZES, False, marks=pytest.mark.slow
    ),
    pytest.param(
      ("interleaved", 1, 2), small.UNLIKE, False, marks=pytest.mark.slow
    ),
  ],
  ids=["tied", "unlike", "interleaved", "one device"],
)
@pytest.mark.parametrize(
  "most", [0.05, pytest.param(1e3, marks=pytest.mark.slow)]
)
def test_clip_norm_matches_unsplit_model(table, sizes, tied, most):
  made = pipeline.make_table(*table)
  layers = small.tied_layers() if tied else small.layers(sizes)
  batches = small.batches(3, 1, _MICRO * made.num_microbatches, sizes)
  inner = optax.sgd(0.5, momentum=0.9)
  pipe = _pipe(layers, made, sizes, clip_norm=most)
  found = _train(pipe, _averaged(inner), batches)
  wanted = _unsplit(
    layers,
    _clipped(inner, most),
    batches,
    made.num_microbatches,
    loss=small.chain_loss(layers) if tied else None,
  )
  assert small.error(found, wanted) < 1e-5


@pytest.mark.slow
def test_late_gradient_is_clipped_when_it_is_complete():
  table = pipeline.ours(2, 2, window=2)
  pipe = _pipe(small.layers(), table, late_sends=False, clip_norm=0.05)
  batches = small.batches(6, 1, _MICRO * 2)
  inner = optax.sgd(0.5, momentum=0.9)
  found = _train(pipe, _averaged(inner), batches)
  wanted = _unsplit(
    small.layers(),
    lambda axis: transforms.delay_gradients(_clipped(inner, 0.05)(axis), 1),
    batches[: len(batches) - pipe.grid.behind + pipe.grid.delay],
    2,
  )
  assert small.error(found, wanted) < 1e-5


def _mask(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


_REFUSED = {
  "Muon": contrib.muon(0.1),
  "LARS": optax.lars(0.1),
  "LARS or LAMB": optax.chain(optax.identity(), optax.lamb(0.1)),
  "PowerSGD": _power_sgd("worker"),
  "a policy per leaf": jdist.ssgd(
    optax.sgd(0.1),
    axis="worker",
    compression=reducers.Compression(
      reducers.PerLeaf([reducers.Rule(reducers.Exact())])
    ),
  ),
  "a mask": optax.adamw(0.1, mask=_mask),
  "a partition of leaves": optax.partition({"a": optax.sgd(0.1)}, _mask),
  "Adafactor": optax.inject_hyperparams(optax.adafactor)(learning_rate=0.1),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_packed_stages_refuse_optimizers_of_whole_leaves(name):
  pipe = _pipe(
    small.layers(small.UNLIKE),
    pipeline.make_table("1f1b", 4, 4),
    small.UNLIKE,
  )
  alike = _pipe(small.layers(), pipeline.make_table("1f1b", 4, 4))
  tied = _pipe(small.tied_layers(), pipeline.make_table("1f1b", 3, 4))
  words = f"`inner` must act on each number alone.* got .*{name}"
  for packed in (pipe, tied):
    with pytest.raises(ValueError, match=words):
      packed.make_step(_REFUSED[name], axis="worker")
  # It is found at any place of a chain.
  with pytest.raises(ValueError, match=words):
    pipe.make_step(
      jdist.local_sgd(_REFUSED[name], 2, axis="worker"), axis="worker"
    )
  alike.make_step(_REFUSED[name], axis="worker")


@pytest.mark.parametrize(
  "optimizer",
  [
    optax.adamw(0.1),
    jdist.local_sgd(optax.sgd(0.1, momentum=0.9), 4, axis="worker"),
    transforms.predict_weights(optax.adam(0.1), 2),
    optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
  ],
  ids=["adamw", "local_sgd", "prediction", "several steps"],
)
def test_packed_stages_accept_elementwise_optimizers(optimizer):
  pipe = _pipe(
    small.layers(small.UNLIKE),
    pipeline.make_table("1f1b", 4, 4),
    small.UNLIKE,
  )
  pipe.make_step(optimizer, axis="worker")
