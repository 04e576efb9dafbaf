"""Compares twelve steps of four logical workers on the GPU and on the CPU.

    python experiments/gpu/agreement.py [--groups methods codecs]

Every method of the registry trains a small network; every transformation of
the tests' table moves a small tree; every codec and reducer of the tests'
tables and every feedback takes means: in float32 and in bfloat16.  The
cases are dealt among processes, each of which compiles in one thread, on the
GPU and on the CPU of the same machine (`JAX_PLATFORMS=cpu`), with products in
the highest precision.  A row
holds for each case the distance of the two results, divided by that which the
CPU has moved from the start (by the result's norm, for codecs and means).
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

import jdist
from jdist import codecs, methods, models, reducers, training

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"

_NUM_WORKERS, _NUM_STEPS = 4, 12
_DTYPES = ("float32", "bfloat16")
# Processes among which the cases of a group are dealt.
GROUPS = {"methods": 4, "transformations": 4, "codecs": 2, "reducers": 4}


def _team():
  return jdist.workers(_NUM_WORKERS, substrate="vmap")


def _flat(tree):
  """All leaves of floats as one vector of float64."""
  leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
  leaves = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
  parts = [x.astype(np.float64).ravel() for x in leaves]
  return np.concatenate(parts) if parts else np.zeros(0)


def _random(name):
  return np.random.default_rng(zlib.crc32(name.encode()))


def _method(name, dtype):
  """Parameters before and after training by a method of the registry."""
  team, shape = _team(), (8, 8, 1)
  model = models.build("mlp", input_shape=shape, num_classes=10, seed=0)
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), model.params)
  run = methods.Run(
    _NUM_STEPS, 0, lambda step: jnp.float32(0.05), interval=3, momentum=0.9
  )
  method = methods.registry[name]
  momentum = None if method.own_momentum else 0.9
  if name == "mp2":
    return None  # It needs a trained predictor.
  chain = method.build(optax.sgd(0.05, momentum), run, axis=team.axis)
  state = training.init_state(team, chain, params, model.state)
  loss = training.classification_loss(model.apply)
  step = team.jit(training.make_step(loss, chain, axis=team.axis))
  random = _random("batches")
  for _ in range(_NUM_STEPS):
    lead = (_NUM_WORKERS, 16)
    state, _ = step(state, team.place({
      "image": random.normal(size=(*lead, *shape)).astype(np.float32),
      "label": random.integers(0, 10, lead).astype(np.int32),
    }))  # fmt: skip
  return _flat(team.replicate(params)), _flat(state.params)


def _transformation(name, dtype):
  """Parameters before and after moving by elementwise gradients."""
  from tests.transforms import _running, _table

  team = _team()
  runner = _running.Runner(
    _table.TABLE[name].make(team.axis), team, dtype, bound=True
  )
  params, state = runner.begin()
  before, random = _flat(params), _random(name)
  for _ in range(_NUM_STEPS):
    target = jax.tree.map(
      lambda x: random.normal(size=x.shape).astype(x.dtype), params
    )
    loss = random.uniform(1, 2, _NUM_WORKERS).astype(np.float32)
    params, state = runner.step(params, state, *team.place((target, loss)))
  return before, _flat(params)


def _codec(name, dtype):
  """An array that is encoded and decoded, and nothing before it."""
  from tests.codecs import _table

  codec = _table.TABLE[name].codec
  x = jnp.asarray(_random(name).normal(size=(256, 160)), dtype)

  def run(x, key):
    payload, state = codec.encode(x, codec.init(x), key)
    return codec.decode(payload, state, x)

  return None, _flat(jax.jit(run)(x, jax.random.key(3)))


def _feedbacks():
  coarse = codecs.TopK(0.1)
  found = {
    f"{type(x).__name__} around {name}": reducers.Compression(codec, x)
    for name, codec in {"top": coarse, "int4": codecs.Quantize(4, 16)}.items()
    for x in (
      reducers.ErrorFeedback(),
      reducers.EF21(),
      reducers.MomentumCorrection(0.5),
    )
  }
  vote = reducers.MajorityVote()
  return found | {
    "Smoothing around a vote": reducers.Compression(
      vote, reducers.Smoothing(0.5)
    )
  }


def _reduction(name, dtype):
  """Means of twelve trees, one after the other."""
  from tests.reducers import _reducers

  team = _team()
  found = {k: reducers.Compression(v) for k, v in _lawful().items()}
  mean = jdist.average_gradients(team.axis, (found | _feedbacks())[name])
  trees = _reducers.make_tree(_NUM_WORKERS, _NUM_STEPS, dtype)
  first = jax.tree.map(lambda x: x[:, 0], trees)
  state = team.jit(mean.init)(team.place(first))
  step = team.jit(lambda g, s: mean.update(g, s, g))
  out = []
  for i in range(_NUM_STEPS):
    tree = jax.tree.map(lambda x, i=i: x[:, i], trees)
    updates, state = step(team.place(tree), state)
    out.append(_flat(updates))
  return None, np.concatenate(out)


def _lawful():
  from tests.reducers import _reducers

  # Without feedback an owner has nobody to leave its residual to.
  return {k: v for k, v in _reducers.LAWFUL.items() if "own_share" not in k}


def cases(group):
  """Returns the names of a group's cases, and the function that runs one."""
  from tests.codecs import _table as of_codecs
  from tests.transforms import _table as of_transformations

  return {
    "methods": lambda: (list(methods.registry), _method),
    "transformations": lambda: (
      list(of_transformations.TABLE),
      _transformation,
    ),
    "codecs": lambda: (list(of_codecs.TABLE), _codec),
    "reducers": lambda: ([*_lawful(), *_feedbacks()], _reduction),
  }[group]()


def run_group(group, path, share, most=None):
  """Runs a share of a group's cases on this process' device and saves them."""
  found = {}
  names, run = cases(group)
  for name in names[:most][share :: GROUPS[group]]:
    for dtype in _DTYPES:
      try:
        with jax.default_matmul_precision("highest"):
          result = run(name, dtype)
      except Exception as error:  # A row says so; the others still run.
        print(f"{group} {name} {dtype}: {error!r}", file=sys.stderr)
        found[f"{name}|{dtype}|error"] = np.asarray(repr(error)[:300])
        continue
      if result is not None:
        before, after = result
        found[f"{name}|{dtype}|after"] = after
        if before is not None:
          found[f"{name}|{dtype}|before"] = before
  np.savez(path, **found)


def read(folder, group, platform):
  """Returns the arrays of all shares of a group, by case."""
  found = {}
  for path in sorted(folder.glob(f"{group}-*-{platform}.npz")):
    found |= dict(np.load(path))
  return found


def compare(group, gpu, cpu):
  """Returns a row's results, and where a case failed on either device."""
  found = []
  names = [x[: -len("|after")] for x in cpu if x.endswith("|after")]
  for case in names:
    name, dtype = case.split("|")
    told = {"group": group, "case": name, "dtype": dtype}
    if f"{case}|after" not in gpu:
      error = gpu.get(f"{case}|error", "its process ended")
      found.append(told | {"error": str(error)})
      continue
    here, there = cpu[f"{case}|after"], gpu[f"{case}|after"]
    before = cpu.get(f"{case}|before", 0.0)
    moved = np.linalg.norm(here - before)
    apart = np.linalg.norm(here - there)
    found.append(told | {
      "relative": float(apart / moved) if moved else float(apart),
      "share_apart": float(np.mean(here != there)),
      "finite": bool(np.isfinite(there).all()),
    })  # fmt: skip
  failed = [x for x in cpu if x.endswith("|error")]
  return found + [
    {"group": group, "case": x, "error": str(cpu[x])} for x in failed
  ]


def _start(group, share, folder, platform, most):
  environment = dict(os.environ, JAX_PLATFORMS=platform)
  # Small products need no search for the fastest kernel, and several processes
  # share the GPU's memory.
  flags = environment.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
  environment |= {
    "XLA_FLAGS": flags,
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  path = folder / f"{group}-{share}-{platform or 'gpu'}.npz"
  command = [sys.executable, __file__, "--one", group, "--share", str(share),
             "--save", str(path)]  # fmt: skip
  if most is not None:
    command += ["--most", str(most)]
  return subprocess.Popen(command, env=environment)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--groups", nargs="+", default=list(GROUPS),
                      choices=list(GROUPS))  # fmt: skip
  parser.add_argument("--most", type=int, help="cases of a group, to try it")
  parser.add_argument("--output", default=_RESULTS / "agreement.jsonl")
  parser.add_argument("--one", choices=list(GROUPS), help=argparse.SUPPRESS)
  parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--save", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.one:
    run_group(options.one, options.save, options.share, options.most)
    return
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    started = [
      _start(group, share, folder, platform, options.most)
      for group in options.groups
      for share in range(GROUPS[group])
      for platform in ("", "cpu")
    ]
    for process in started:
      process.wait()
    for group in options.groups:
      gpu, cpu = (read(folder, group, name) for name in ("gpu", "cpu"))
      results = compare(group, gpu, cpu)
      row = training.make_row(
        {"steps": _NUM_STEPS, "workers": _NUM_WORKERS}, 0,
        part="agreement", group=group, cases=results,
      )  # fmt: skip
      training.append_rows(options.output, [row])
      errors = [x for x in results if "error" in x]
      worst = max((x.get("relative", 0) for x in results), default=0)
      print(f"{group}: {len(results)} cases, {len(errors)} failed, "
            f"relative difference up to {worst:.2g}")  # fmt: skip


if __name__ == "__main__":
  main()
