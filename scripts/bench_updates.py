"""Times updates of the virtual clock with gradients, in an older tree and here.

    python scripts/bench_updates.py COMMIT [--cases asp ssp] [--inline]

Two small perceptrons and a small convolutional net under the servers'
protocols, workers of four speeds.  A process of the older tree, another one of
it, whose ratio to the first is the noise, and one of this tree run each case in
turn, in blocks of as many updates.
Prints for each case the microseconds of an update, the lowest decile of the
blocks, as others may be at work; its ratio, and the median ratio of neighbours;
and whether both trees end with the same bits.  Run it alone: a thread that has
to be woken for each program costs more on busy cores.  With `--inline` no tree
has such a thread, as JAX then runs a CPU's programs in the calling one.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from typing import Any

_HIDDEN = {"small": 32, "large": 900}  # 2,410 and 67,510 parameters.
_SIZES = (*_HIDDEN, "convolutional")  # 28,864 parameters.
_PROTOCOLS = (
  "asp", "ssp", "bsp", "dbs", "h_ps", "compensation", "int4", "topk",
  "momentum", "decoupled",
)  # fmt: skip
_WORKERS = 4


def _simulation(case: str) -> Any:
  """Returns a simulation of a case, in the tree that is imported."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from jdist import cluster, codecs, data, reducers, server

  protocol, size = case.split("/")
  # The convolutional net sees each digit with pixels of 4 x 4.
  features, hidden, batch_size = 64, _HIDDEN.get(size, 64), 8
  rng = np.random.default_rng(0)
  shapes: dict[str, tuple[int, ...]] = {
    "a": (features, hidden), "b": (hidden,), "c": (hidden, 10), "d": (10,),
  }  # fmt: skip
  if size == "convolutional":
    batch_size = 32
    shapes |= {"a": (5, 5, 1, 6), "e": (5, 5, 6, 16), "f": (400, hidden)}
  params = {
    name: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32)
    for name, shape in shapes.items()
  }

  def loss_fn(params, model_state, batch, key):
    del key
    x = batch["image"] / 16.0
    if "e" in params:
      x = jnp.repeat(jnp.repeat(x, 4, axis=1), 4, axis=2)
      for name in "ae":
        x = jax.lax.conv_general_dilated(
          x, params[name], (1, 1), "VALID",
          dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        n, height, width, channels = x.shape
        x = (
          jax.nn.relu(x)
          .reshape(n, height // 2, 2, width // 2, 2, channels)
          .max((2, 4))
        )
      x = jax.nn.relu(x.reshape(len(x), -1) @ params["f"] + params["b"])
    else:
      x = jax.nn.relu(x.reshape(-1, features) @ params["a"] + params["b"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      x @ params["c"] + params["d"], batch["label"]
    )
    mask = batch.get("mask")
    loss = losses.mean() if mask is None else (losses * mask).sum() / mask.sum()
    return loss, (model_state, {})

  machines = cluster.workers([4.0, 3.0, 2.0, 1.0])
  samples = data.SampleStream(data.load("digits"), _WORKERS, seed=0)
  batches = server.FixedBatches(batch_size)
  message = getattr(reducers, "MessageCodec", None) or server.MessageCodec
  own = {
    "ssp": lambda: server.SSP(bound=3, batches=batches),
    "bsp": lambda: server.BSP(batches=batches),
    "dbs": lambda: server.dbs(4 * batch_size),
    "h_ps": lambda: server.h_ps(
      4 * batch_size, plans=server.fit_bit_plans(params)
    ),
    "decoupled": lambda: server.DecoupledDiLoCo(
      batches=batches, interval=4, fragments=2, ahead=2
    ),
  }
  feedback = reducers.ErrorFeedback()
  options: dict[str, Any] = {
    "compensation": {"compensation": 0.04},
    "int4": {"push_codec": message(codecs.Quantize(4), feedback)},
    "topk": {"push_codec": message(codecs.TopK(0.1), feedback)},
  }.get(protocol, {})
  optimizer = optax.sgd(0.05, momentum=0.9 if protocol == "momentum" else None)
  rule = own.get(protocol, lambda: server.ASP(batches=batches))()
  if protocol == "h_ps":
    options = {"plans": rule.plans}
  learner: Any
  if protocol == "decoupled":
    inner, outer = optax.sgd(0.05), optax.sgd(0.7, momentum=0.9)
    names = machines.names
    if hasattr(server, "FragmentLearner"):  # The older trees.
      learner = server.FragmentLearner(
        loss_fn, inner, params, samples, workers=names, outer=outer, fragments=2
      )
    else:
      learner = server.Pair(
        server.FragmentSyncer(params, workers=names, outer=outer, fragments=2),
        {
          name: server.FragmentRunner(
            loss_fn, inner, params, samples, number=i, num_workers=_WORKERS,
            fragments=2,
          )
          for i, name in enumerate(names)
        },
      )  # fmt: skip
  else:
    learner = server.GradientLearner(
      loss_fn, optimizer, params, samples, workers=machines.names, **options
    )
  profile = cluster.Profile(0.01, pull_bytes=1e4, push_bytes=1e4)
  return server.Simulation(machines, rule, profile, learner=learner)


def _serve() -> None:
  """Answers lines of a case and a number of updates by their seconds."""
  import jax

  if "--inline" in sys.argv:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
  runs: dict[str, Any] = {}
  for line in sys.stdin:
    case, count = json.loads(line)
    try:
      run = runs.setdefault(case, None) or _simulation(case)
    except (AttributeError, TypeError, ValueError) as error:
      print(json.dumps({"error": f"{error!r:.300}"}), flush=True)
      continue
    runs[case] = run
    began_s = time.perf_counter()
    run.run(updates=run.state.version + count)
    jax.block_until_ready(jax.tree.leaves(run.learner.model.params))
    taken_s = time.perf_counter() - began_s
    found = b"".join(
      bytes(memoryview(jax.device_get(x)).cast("B"))
      for x in jax.tree.leaves(run.learner.model.params)
    )
    digest = hashlib.sha256(found).hexdigest()
    print(json.dumps({"seconds": taken_s, "digest": digest}), flush=True)


class _Tree:
  """A process that runs the cases in a tree."""

  def __init__(self, root: pathlib.Path, *more: str):
    self._process = subprocess.Popen(
      [sys.executable, str(pathlib.Path(__file__).resolve()), "--serve", *more],
      env=os.environ | {"PYTHONPATH": str(root)}, cwd=root, text=True,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

  def run(self, case: str, count: int) -> dict[str, Any]:
    """Runs so many more updates of a case."""
    assert self._process.stdin is not None and self._process.stdout is not None
    self._process.stdin.write(json.dumps([case, count]) + "\n")
    self._process.stdin.flush()
    found: dict[str, Any] = json.loads(self._process.stdout.readline())
    return found

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait(timeout=60)


def main() -> None:
  """Runs all cases, and prints a line each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("commit", help="the older tree: a commit, or a folder")
  parser.add_argument("--cases", nargs="*", default=_PROTOCOLS)
  parser.add_argument("--sizes", nargs="*", default=_SIZES)
  parser.add_argument("--blocks", type=int, default=60)
  parser.add_argument("--updates", type=int, default=50, help="of a block")
  parser.add_argument("--inline", action="store_true", help="without a thread")
  options = parser.parse_args()
  import old_tree

  with contextlib.ExitStack() as stack:
    before = pathlib.Path(options.commit)
    if not before.is_dir():
      before = stack.enter_context(old_tree.checked_out(options.commit))
    roots = {"old": before, "again": before, "new": old_tree.ROOT}
    more = ["--inline"] if options.inline else []
    trees = {name: _Tree(root, *more) for name, root in roots.items()}
    for tree in trees.values():
      stack.callback(tree.close)
    for case in (f"{x}/{y}" for y in options.sizes for x in options.cases):
      first = {x: tree.run(case, options.updates) for x, tree in trees.items()}
      if any("error" in x for x in first.values()):
        print(case, first, flush=True)
        continue
      taken: dict[str, list[float]] = {name: [] for name in trees}
      for _ in range(options.blocks):
        for name in random.sample(list(trees), len(trees)):
          first[name] = trees[name].run(case, options.updates)
          taken[name].append(first[name]["seconds"] / options.updates)
      cut = {
        x: 1e6 * statistics.quantiles(y, n=10)[0] for x, y in taken.items()
      }
      pairs = {
        x: statistics.median(
          [b / a for a, b in zip(taken["old"], taken[x], strict=True)]
        )
        for x in ("again", "new")
      }
      equal = first["new"]["digest"] == first["old"]["digest"]
      print(
        f"{case:20s} old {cut['old']:6.0f} us, new {cut['new']:6.0f}; new/old "
        f"{cut['new'] / cut['old']:.2f} (of pairs {pairs['new']:.2f}), noise "
        f"{cut['again'] / cut['old']:.2f} (of pairs {pairs['again']:.2f}); "
        f"bits {'equal' if equal else 'differ'}",
        flush=True,
      )


if __name__ == "__main__":
  if "--serve" in sys.argv:
    _serve()
  else:
    main()
