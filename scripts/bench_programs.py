"""Runs the compiled steps of an older tree and of this one in one process.

    python scripts/bench_programs.py COMMIT

Two processes differ by a few per cent even with one tree.  Each tree therefore
exports the steps of `bench_overhead.py` (`jax.export`, which needs the package
flatbuffers), and one process compiles each of them twice and runs the four in
turn, in blocks of one round in a random order.  It prints the median of new
over old, and, as the noise, of old over old and new over new.  Run it alone.
"""

import argparse
import functools
import os
import pathlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

_INTERVAL = 8
_TOLD = "told"


def _export(path: str) -> None:
  """Writes the steps of the tree that is imported, with what they start on."""
  import bench_overhead

  from jdist import models, training, transforms

  shape = (32, 32, 3)
  model = models.build("resnet8", input_shape=shape, num_classes=10, seed=0)
  random = np.random.default_rng(0)
  batch = {
    "image": random.normal(size=(32, *shape)).astype(np.float32),
    "label": random.integers(0, 10, 32).astype(np.int32),
  }
  batch_leaves, batch_tree = jax.tree.flatten(batch)
  loss = training.classification_loss(model.apply)
  found = {}
  for name, chain in bench_overhead._chains(_INTERVAL).items():
    step = training.make_step(loss, chain, axis=None)
    state = training.TrainState(
      step=np.zeros((), np.int32),
      params=model.params,
      opt_state=jax.jit(chain.init)(model.params),
      model_state=model.state,
      key=np.asarray(jax.random.key_data(jax.random.key(0))),
    )
    leaves, tree = jax.tree.flatten(state)
    steps = [step]
    if name.endswith(_TOLD):  # One continues the round and one ends it.
      steps = []
      for ends in (False, True):
        told: dict[str, Any] = {"round_ends": ends}
        if hasattr(transforms, "Control"):  # Since the control is one object.
          told = {"control": transforms.Control(round_ends=ends)}
        steps.append(functools.partial(step, **told))

    def flat(leaves, batch_leaves, step, tree=tree):
      state, metrics = step(
        jax.tree.unflatten(tree, leaves),
        jax.tree.unflatten(batch_tree, batch_leaves),
      )
      return jax.tree.leaves(state), jax.tree.leaves(metrics)

    found[name] = (
      [
        jax.export.export(
          jax.jit(functools.partial(flat, step=each), donate_argnums=0)
        )(leaves, batch_leaves).serialize()
        for each in steps
      ],
      [np.asarray(x) for x in leaves],
      [np.asarray(x) for x in batch_leaves],
    )
  pathlib.Path(path).write_bytes(pickle.dumps(found))


def _compiled(entry: Any) -> Any:
  """Compiles a tree's steps, in a round and at its end, and its inputs."""
  steps, leaves, batch = entry
  # Copies: the first step donates them.
  leaves = [jax.numpy.array(x, copy=True) for x in leaves]
  batch = [jax.device_put(x) for x in batch]
  found = [
    jax.jit(jax.export.deserialize(step).call, donate_argnums=0)
    .lower(leaves, batch)
    .compile()
    for step in steps
  ]
  return [found[0], found[-1], leaves, batch]


def _times(trees: dict[str, Any], blocks: int) -> dict[str, list[float]]:
  """Returns seconds a step by program and block, all programs in turn."""
  programs = {label: _compiled(entry) for label, entry in trees.items()}
  order = np.random.default_rng(0)
  times: dict[str, list[float]] = {label: [] for label in programs}
  for turn in range(blocks + 1):
    for label in order.permutation(list(programs)):
      on, end, leaves, batch = programs[label]
      started_s = time.perf_counter()
      for i in range(_INTERVAL):
        leaves, metrics = (end if i == _INTERVAL - 1 else on)(leaves, batch)
        jax.block_until_ready(metrics)
      programs[label][2] = leaves
      if turn:  # The first block warms up.
        times[label].append((time.perf_counter() - started_s) / _INTERVAL)
  return times


def _exported(tree: pathlib.Path, folder: str, name: str) -> Any:
  path = str(pathlib.Path(folder) / name)
  inherited = os.environ.get("PYTHONPATH", "")
  paths = [str(tree), str(tree / "scripts"), inherited]
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    "JAX_PLATFORMS": "cpu",
  }
  # By its text, so that the folder of this file is not searched first.
  code = f"import runpy; runpy.run_path({__file__!r})['_export']({path!r})"
  command = [sys.executable, "-c", code]
  subprocess.run(command, cwd=tree, env=environment, check=True)
  # Written a moment ago, by the line above.
  return pickle.loads(pathlib.Path(path).read_bytes())


def main() -> None:
  import old_tree  # Not where an older tree runs this file.

  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("commit")
  parser.add_argument("--blocks", type=int, default=30)
  parser.add_argument("--names", nargs="+", help="steps, by default all")
  parser.add_argument("--output", help="a file of rows to append to")
  options = parser.parse_args()
  with (
    old_tree.checked_out(options.commit) as before,
    tempfile.TemporaryDirectory() as folder,
  ):
    old = _exported(before, folder, "old")
    new = _exported(old_tree.ROOT, folder, "new")
  report = {}
  for name in options.names or [n for n in new if n in old]:
    trees = {
      "old": old[name],
      "new": new[name],
      "old again": old[name],
      "new again": new[name],
    }
    times = _times(trees, options.blocks)

    def ratio(over: str, under: str, times: Any = times) -> float:
      pairs = zip(times[over], times[under], strict=True)
      return statistics.median(a / b for a, b in pairs)

    compared = [
      ratio(n, o) for n in ("new", "new again") for o in ("old", "old again")
    ]
    noise = [ratio("old again", "old"), ratio("new again", "new")]
    noise += [1 / each for each in noise]
    report[name] = {
      "step_s": statistics.median(times["old"]),
      "new_over_old": statistics.median(compared),
      "least": min(compared),
      "most": max(compared),
      "noise_least": min(noise),
      "noise_most": max(noise),
    }
    found = report[name]
    print(
      f"{name:22s} {1e3 * found['step_s']:6.1f} ms, new/old "
      f"{found['new_over_old']:.3f} ({found['least']:.3f} to "
      f"{found['most']:.3f}), the same program again "
      f"{found['noise_least']:.3f} to {found['noise_most']:.3f}",
      flush=True,
    )
  if options.output is not None:
    from jdist import training

    config = {k: v for k, v in vars(options).items() if k != "output"}
    row = training.make_row(config, 0, bench="programs", ratios=report)
    training.append_rows(options.output, [row])


if __name__ == "__main__":
  main()
