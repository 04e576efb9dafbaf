"""Coded messages between stages cost accuracy: digits and a text, 4 stages.

    python experiments/pipeline/edge_accuracy.py digits
    python experiments/pipeline/edge_accuracy.py text [FILE]

FILE is the text where Tiny Shakespeare is not prepared; its last tenth is for
testing.

The same network, batches and rates with each code; rows go to
`results/edge_accuracy.jsonl`.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import launch
import numpy as np
import optax

from jdist import codecs, data, models, pipeline, reducers, training

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "edge_accuracy.jsonl"


@dataclasses.dataclass(frozen=True)
class Config:
  """A run and its codes."""

  model: str = "resnet8"
  stages: int = 4
  table: str = "1f1b"
  microbatches: int = 4
  batch_size: int = 64
  epochs: int = 8
  dataset: str = "digits"
  steps: int | None = None
  """The batches of an epoch; by default all."""

  learning_rate: float = 0.1
  codes: tuple[str, ...] = (
    "none", "int8 error", "int4", "int4 error", "int4 change", "int2",
    "int2 error", "int2 change",
  )  # fmt: skip
  """A codec, and error feedback or the change of a sample's output."""


PRESETS = {
  "digits": Config(),
  "text": Config(
    model="transformer", dataset="tiny_shakespeare", batch_size=32, epochs=1,
    steps=60, microbatches=2, learning_rate=3e-3,
    codes=("none", "int8", "int4"),
  ),
}  # fmt: skip


def load(config: Config, source: str) -> tuple[Any, Any, dict[str, Any]]:
  """Returns all samples for training and testing, and a model's arguments."""
  if config.model == "transformer":
    sets = [
      data.load_text(source, x, window_length=64) for x in ("train", "test")
    ]
    arrays = [dict(x.batch(np.arange(len(x)))) for x in sets]
    sizes = {"num_classes": 256, "width": 32, "num_heads": 2}
  else:
    sets = [data.load(source, x) for x in ("train", "test")]
    arrays = [
      {"image": sets[0].normalize(x.images), "label": x.labels} for x in sets
    ]
    sizes = {"num_classes": 10}
  return *arrays, {"input_shape": sets[0].input_shape, **sizes}


def make_edges(code: str, num_samples: int) -> dict[str, Any]:
  """Returns the arguments of a process."""
  name, _, way = code.partition(" ")
  if name == "none":
    return {}
  feedback = reducers.ErrorFeedback() if way else None
  message = reducers.MessageCodec(codecs.Quantize(int(name[3:])), feedback)
  samples = ("index", num_samples) if way == "change" else None
  return {"edges": message, "edge_samples": samples}


def measure(
  peers: pipeline.Peers, config: Config, source: str, seeds: tuple[int, ...]
) -> list[Any]:
  """Trains with every code and seed; returns the test accuracies."""
  train, test, sizes = load(config, source)
  inputs, labels = train
  total, found = len(train[inputs]), []
  steps = config.steps or total // config.batch_size
  part = config.batch_size // config.microbatches
  micro = {name: x[:part] for name, x in train.items()}
  micro["index"] = np.zeros(part, np.int32)
  table = pipeline.make_table(config.table, config.stages, config.microbatches)
  rate = optax.cosine_decay_schedule(
    config.learning_rate, steps * config.epochs
  )
  for code in config.codes:
    process = None
    for seed in seeds:
      model = models.build(config.model, seed=seed, **sizes)
      if process is None:
        process = pipeline.StageProcess(
          pipeline.cut_layers(model.layers, config.stages),
          training.label_loss, table, micro, peers=peers, inputs=inputs,
          **make_edges(code, total),
        )  # fmt: skip
      optimizer = optax.sgd(rate, momentum=0.9, nesterov=True)
      if config.model == "transformer":
        optimizer = optax.adam(rate)
      state = process.init_state(
        optimizer, model.params, model.state, seed=seed
      )
      random, losses = np.random.default_rng(seed), []
      for _ in range(config.epochs):
        order = random.permutation(total)[: steps * config.batch_size]
        for rows in order.reshape(steps, -1).astype(np.int32):
          batch = {name: x[rows] for name, x in train.items()}
          state, [metrics] = process.run(state, [batch | {"index": rows}])
          losses.append(metrics["loss"])
      params, kept = process.gather(state)
      logits, _ = jax.jit(functools.partial(model.apply, train=False))(
        params, kept, test[inputs]
      )
      right = np.argmax(logits, -1) == test[labels]
      found.append(
        (code, seed, float(right.mean()), losses[-steps:], process.edge_bytes)
      )
      if not peers.device:
        print(found[-1][:3], np.mean(losses[-steps:]), flush=True)
  return found


def main() -> None:
  """Trains, and keeps a row for each run."""
  name, *given = *sys.argv[1:], *["digits"][len(sys.argv) - 1 :]
  config, seeds = PRESETS[name], (0, 1, 2)
  source = given[0] if given else config.dataset
  rows = []
  for code, seed, accuracy, losses, edge_bytes in launch.run_processes(
    config.stages, measure, config, source, seeds
  )[0]:
    rows.append(
      training.make_row(
        dataclasses.asdict(config), seed, code=code, accuracy=accuracy,
        train_loss=float(np.mean(losses)), edge_bytes=edge_bytes,
      )
    )  # fmt: skip
  training.append_rows(RESULTS, rows)


if __name__ == "__main__":
  main()
