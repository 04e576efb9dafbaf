"""Traces one update of some methods and prints which files it enters.

    python scripts/trace_updates.py
    python scripts/trace_updates.py --runs

What is traced is `optimizer.update` followed by `jdist.apply_updates`, of two
arrays and four workers under vmap, by `jax.make_jaxpr`.  What is counted
is every call of a Python function of the library's files, lambdas and
comprehensions included.  A *hop* is a call that enters another file than the
call before; the first call is one, too.  Python 3.12 calls no comprehensions
and counts up to 2 hops fewer than Python 3.11.

Prints one JSON object: for each method the number of `hops` and the `files`,
by their paths below jdist/.  With `--runs` it counts instead how often a run of
30 steps traces the loss, with rounds that a conditional ends and that the host
ends.  The library is the one that `import jdist` finds.
"""

import itertools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist import codecs, collectives, training, transforms
from jdist.transforms import intervals

_PACKAGE = pathlib.Path(jdist.__file__).resolve().parent
_INTERVAL, _RATE, _AXIS = 8, 0.1, "worker"
_STEPS = 30


def _cases() -> dict[str, Callable[[], Any]]:
  """Returns what makes the optimizer of each case."""
  from jdist import methods, reducers

  sgd = optax.sgd(_RATE, momentum=0.9)

  def compression(bits: int) -> Any:
    reducer = reducers.compressed(codecs.Quantize(bits))
    return reducers.Compression(reducer, reducers.ErrorFeedback())

  def msdpu(**options: Any) -> Any:
    stream = transforms.Stream()
    return methods.msdpu(
      sgd,
      intervals.fixed(_INTERVAL),
      _RATE,
      axis=_AXIS,
      overlap=transforms.Delayed(carry=None, stream=stream),
      **options,
    )

  return {
    "local_sgd": lambda: methods.local_sgd(sgd, _INTERVAL, axis=_AXIS),
    "diloco": lambda: methods.diloco(sgd, _INTERVAL, axis=_AXIS),
    "diloco int4 + feedback": lambda: methods.diloco(
      sgd, _INTERVAL, axis=_AXIS, compression=compression(4)
    ),
    "msdpu streamed": msdpu,
    "msdpu streamed int8 + feedback": lambda: msdpu(compression=compression(8)),
    "slow_mo int4 + feedback": lambda: methods.slow_mo(
      sgd, _INTERVAL, _RATE, axis=_AXIS, compression=compression(4)
    ),
  }


def _entered_files(function: Callable[[], Any]) -> list[str]:
  """Returns the file of each call of a function of the library, in order."""
  files = []

  def record(frame: Any, event: str, _: Any) -> None:
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(f"{_PACKAGE}/"):
      files.append(pathlib.Path(path).relative_to(_PACKAGE).as_posix())

  sys.setprofile(record)
  try:
    function()
  finally:
    sys.setprofile(None)
  return files


def _trace_update(optimizer: Any) -> list[str]:
  """Returns the files that a traced update enters, in order."""

  def step(params: Any, state: Any) -> Any:
    # Only the shapes matter: parameters do for gradients.
    updates, state = optimizer.update(params, state, params)
    return jdist.apply_updates(params, updates, state), state

  # Large enough for a codec: small leaves travel with every bit.
  params = {"bias": jnp.zeros((4, 4)), "kernel": jnp.zeros((4, 256, 256))}
  state = jax.eval_shape(jax.vmap(optimizer.init, axis_name=_AXIS), params)
  step = jax.vmap(step, axis_name=_AXIS)
  # The first trace fills the library's own caches, so that no case's figures
  # depend on the cases before it; JAX's must be empty for both.
  jax.clear_caches()
  jax.make_jaxpr(step)(params, state)
  jax.clear_caches()
  return _entered_files(lambda: jax.make_jaxpr(step)(params, state))


def _count_traces(optimizer: Any, **options: Any) -> int:
  """Returns how often a run traces the loss."""
  traces: list[None] = []

  def loss(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
    del key
    traces.append(None)
    return jnp.sum(params["kernel"] ** 2) * batch.mean(), (model_state, {})

  team = collectives.workers(2, substrate="vmap")
  params = {"bias": jnp.zeros((4, 4)), "kernel": jnp.ones((4, 256, 256))}
  step = training.make_step(loss, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, params)

  def batches(begin: int) -> Any:
    return itertools.repeat(np.ones((2, 1), np.float32), _STEPS - begin)

  training.Trainer(team, step, **options).fit(state, batches, _STEPS)
  return len(traces)


def _traces_of_runs(cases: dict[str, Callable[[], Any]]) -> dict[str, int]:
  """Returns the traces of each case's run, by who ends its rounds."""
  ssgd = jdist.ssgd(optax.sgd(_RATE), axis=_AXIS)
  found = {"ssgd": _count_traces(ssgd)}
  for name, make in cases.items():
    if "streamed" not in name:
      for host in (False, True):
        key = f"{name}, rounds ended by {'the host' if host else 'conditional'}"
        found[key] = _count_traces(make(), host_rounds=host)
  return found


def main() -> None:
  cases = _cases()
  if "--runs" in sys.argv:
    print(json.dumps(_traces_of_runs(cases)))
    return
  found = {}
  for name, make in cases.items():
    files = _trace_update(make())
    hops = sum(1 for _ in itertools.groupby(files))
    found[name] = {"hops": hops, "files": sorted(set(files))}
  print(json.dumps(found))


if __name__ == "__main__":
  main()
