"""Files that a push enters, from a worker's task to the merged model."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_UPDATES = 5


def trace_push(tree: pathlib.Path) -> dict[str, Any]:
  """Follows a push through a tree's library, with real threads.

  Counted is every call of a Python function of the library, lambdas and
  comprehensions included, in the threads that carry the push: the worker's, its
  sender's, and the server's.  A *hop* is a call that enters another file than
  the call before; the first call is one, too.

  Returns:
    `{"files": [...], "hops": n}`, files by their paths below jdist/.

  Raises:
    RuntimeError: when the run fails.
  """
  answer = subprocess.run(
    [sys.executable, str(pathlib.Path(__file__).resolve())],
    cwd=tree,
    env={**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  if answer.returncode:
    raise RuntimeError(f"Following a push failed:\n{answer.stderr}")
  found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
  return found


def _follow() -> dict[str, Any]:
  """Trains with one worker, and returns what its last push has entered."""
  import jax.numpy as jnp
  import numpy as np
  import optax

  import jdist
  from jdist import server

  package = pathlib.Path(jdist.__file__).resolve().parent
  # By thread, the file and the name of each function that is called.
  calls: dict[int, list[tuple[str, str]]] = {}

  def record(frame: Any, event: str, _: Any) -> None:
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(f"{package}/"):
      file = pathlib.Path(path).relative_to(package).as_posix()
      own = calls.setdefault(threading.get_ident(), [])
      own.append((file, frame.f_code.co_name))

  class Samples:
    shared = True

    def batch(
      self, worker: int, start: int, count: int, *, size: int | None = None
    ) -> Any:
      return {"mask": np.ones(size or count, np.float32)}

  def loss(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
    return (params**2).sum() * batch["mask"].mean(), (model_state, {})

  params, plans = jnp.ones(3), server.message_plans()
  learner = server.GradientServer(optax.sgd(0.1), params, plans, workers=("a",))
  engine = server.ThreadEngine()

  def work(channel: Any) -> None:
    worker = server.GradientWorker(
      loss, params, Samples(), plans, number=0, num_workers=1, sizes=[4]
    )
    worker.prepare()
    server.WorkerLoop(channel, "a", worker, depth=1).run()

  # All threads are followed from their start.
  threading.setprofile(record)
  live = server.LiveServer(
    server.ASP(batches=server.FixedBatches(4)),
    learner,
    server.LivePlan(workers=("a",), unit="updates", marks=(_UPDATES,)),
  )
  engine.serve(lambda channel: live)
  engine.spawn("a", work)
  _wait_for(lambda: live.status()["here"])
  live.start()
  _wait_for(lambda: live.status()["finished"])
  threading.setprofile(None)
  engine.stop()
  # By the last push all programs are compiled: no call is one of tracing.
  way = [
    *_last_way(calls, "_worker_loop.py:_do", "_worker_loop.py:send"),
    *_last_way(calls, "_engine.py:push", "_live_server.py:_put"),
    *_last_way(calls, "_server_core.py:_on_push", "_merge.py:narrowed"),
  ]
  files = [file for file, _ in way]
  return {
    "files": sorted(set(files)),
    "hops": sum(1 for _ in itertools.groupby(files)),
    "calls": [f"{file}:{name}" for file, name in way],
  }


def _last_way(
  calls: dict[int, list[tuple[str, str]]], first: str, last: str
) -> list[tuple[str, str]]:
  """Returns a thread's calls from the last one of `first` on to `last`."""
  for own in calls.values():
    names = [f"{pathlib.PurePath(file).name}:{name}" for file, name in own]
    if first in names and last in names:
      end = len(names) - names[::-1].index(last)
      begin = end - 1 - names[:end][::-1].index(first)
      return own[begin:end]
  raise RuntimeError(f"No thread has called `{first}` and then `{last}`.")


def _wait_for(condition: Callable[[], Any]) -> None:
  while not condition():
    time.sleep(0.01)


if __name__ == "__main__":
  print(json.dumps(_follow()))
