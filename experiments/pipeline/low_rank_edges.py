"""The error that a code of low rank would leave at edges.

    python experiments/pipeline/low_rank_edges.py digits
    python experiments/pipeline/low_rank_edges.py text [FILE]

The networks of `edge_accuracy.py`, trained for some steps on one device.  Of
what crosses each cut, a matrix [samples and places, channels], the best factors
that are as large as its codes in 4 bits are found by a singular value
decomposition: no power iteration is closer.  Rows go to
`results/low_rank_edges.jsonl`.
"""

import dataclasses
import pathlib
import sys
from typing import Any

import edge_accuracy
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import codecs, models, pipeline, training

RESULTS = (
  pathlib.Path(__file__).resolve().parent / "results/low_rank_edges.jsonl"
)
_STEPS = 100
_CODEC = codecs.Quantize(4)


def errors(x: Any) -> dict[str, float]:
  """Returns the relative errors of both codes, and the rank of equal bytes."""
  matrix = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
  like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  rank = int(_CODEC.num_bits(like) / 32 / sum(matrix.shape))
  found = _CODEC.decode(_CODEC.encode(x)[0], (), like)
  values = np.linalg.svd(matrix, compute_uv=False)
  return {
    "rank": rank,
    "channels": matrix.shape[1],
    "low_rank": float(np.sqrt(np.sum(values[rank:] ** 2) / np.sum(values**2))),
    "int4": float(jnp.linalg.norm(found - x) / jnp.linalg.norm(x)),
  }


def main() -> None:
  """Trains on one device, and keeps a row for each cut and direction."""
  config = edge_accuracy.PRESETS[sys.argv[1]]
  source = (*sys.argv[2:], config.dataset)[0]
  train, _, sizes = edge_accuracy.load(config, source)
  inputs = next(iter(train))
  model = models.build(config.model, seed=0, **sizes)
  params, state = model.params, model.state
  optimizer = optax.adam(3e-3)

  def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    y, state = model.apply(params, state, batch[inputs], train=True)
    return training.label_loss(y, batch)[0], state

  @jax.jit
  def step(params: Any, state: Any, kept: Any, batch: Any) -> Any:
    grads, state = jax.grad(loss, has_aux=True)(params, state, batch)
    updates, kept = optimizer.update(grads, kept, params)
    return optax.apply_updates(params, updates), state, kept

  kept, random = optimizer.init(params), np.random.default_rng(0)
  for _ in range(_STEPS):
    rows = random.integers(len(train[inputs]), size=config.batch_size)
    batch = {name: x[rows] for name, x in train.items()}
    params, state, kept = step(params, state, kept, batch)
  stages = pipeline.cut_layers(model.layers, config.stages)
  found, x = [], batch[inputs]
  for number, stage in enumerate(stages[:-1]):
    x, _ = stage.apply(params, state, x, train=True)

    def rest(x: Any, after: Any = stages[number + 1 :]) -> jax.Array:
      for other in after:
        x, _ = other.apply(params, state, x, train=True)
      return training.label_loss(x, batch)[0]

    for what, value in (("output", x), ("gradient", jax.grad(rest)(x))):
      found.append(
        training.make_row(
          dataclasses.asdict(config), 0, cut=number, what=what, steps=_STEPS,
          **errors(value),
        )
      )  # fmt: skip
      print(config.dataset, number, what, errors(value), flush=True)
  training.append_rows(RESULTS, found)


if __name__ == "__main__":
  main()
