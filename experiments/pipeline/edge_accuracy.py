"""Coded messages between stages cost accuracy: digits, 4 stages.

    python experiments/pipeline/edge_accuracy.py

The same network, batches and rates with each code; rows go to
`results/edge_accuracy.jsonl`.
"""

import dataclasses
import functools
import pathlib
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
  learning_rate: float = 0.1
  codes: tuple[str, ...] = (
    "none", "int8 error", "int4", "int4 error", "int4 change", "int2",
    "int2 error", "int2 change",
  )  # fmt: skip
  """A codec, and error feedback or the change of a sample's output."""


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
  peers: pipeline.Peers, config: Config, seeds: tuple[int, ...]
) -> list[Any]:
  """Trains with every code and seed; returns the test accuracies."""
  train, test = data.load("digits"), data.load("digits", "test")
  images = train.normalize(train.images)
  found, steps = [], len(train) // config.batch_size
  part = config.batch_size // config.microbatches
  micro = {"image": images[:part], "label": train.labels[:part]}
  micro["index"] = np.zeros(part, np.int32)
  table = pipeline.make_table(config.table, config.stages, config.microbatches)
  rate = optax.cosine_decay_schedule(
    config.learning_rate, steps * config.epochs
  )
  for code in config.codes:
    process = None
    for seed in seeds:
      model = models.build(
        config.model, input_shape=train.input_shape, num_classes=10,
        seed=seed,
      )  # fmt: skip
      if process is None:
        process = pipeline.StageProcess(
          pipeline.cut_layers(model.layers, config.stages),
          training.label_loss, table, micro, peers=peers,
          **make_edges(code, len(train)),
        )  # fmt: skip
      state = process.init_state(
        optax.sgd(rate, momentum=0.9, nesterov=True), model.params, model.state,
        seed=seed,
      )  # fmt: skip
      random, losses = np.random.default_rng(seed), []
      for _ in range(config.epochs):
        order = random.permutation(len(train))[: steps * config.batch_size]
        for rows in order.reshape(steps, -1).astype(np.int32):
          batch = {"image": images[rows], "label": train.labels[rows]}
          state, [metrics] = process.run(state, [batch | {"index": rows}])
          losses.append(metrics["loss"])
      params, kept = process.gather(state)
      logits, _ = jax.jit(functools.partial(model.apply, train=False))(
        params, kept, test.normalize(test.images)
      )
      right = np.argmax(logits, -1) == test.labels
      found.append(
        (code, seed, float(right.mean()), losses[-steps:], process.edge_bytes)
      )
      if not peers.device:
        print(found[-1][:3], np.mean(losses[-steps:]), flush=True)
  return found


def main() -> None:
  """Trains, and keeps a row for each run."""
  config, seeds = Config(), (0, 1, 2)
  rows = []
  for code, seed, accuracy, losses, edge_bytes in launch.run_processes(
    config.stages, measure, config, seeds
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
