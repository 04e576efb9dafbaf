"""Shards behind Ray's calls, in one process: all begin again if one is lost.

`test_ray_shards.py` kills a real actor.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import server
from jdist.server.runtime.ray_actors import _ray_access, _ray_actors
from tests.server import _live_runs, test_shards

pytest.importorskip("simpy")

SERVER = _ray_actors.SERVER


class TaskError(Exception):
  """An actor's method has failed."""

  @property
  def cause(self):
    return self.__cause__


class ActorError(Exception):
  """An actor is lost."""


class Actors:
  """Ray's calls: the methods of actors that share a loop."""

  exceptions = types.SimpleNamespace(
    RayTaskError=TaskError, RayActorError=ActorError,
    ObjectLostError=ActorError, GetTimeoutError=TimeoutError,
  )  # fmt: skip

  def __init__(self):
    self.loop, self.actors, self.calls = asyncio.new_event_loop(), {}, {}
    threading.Thread(target=self.loop.run_forever, daemon=True).start()

  def start(self, name):
    self.kill(name)
    self.actors[name], self.calls[name] = _ray_actors.ServerActor(), set()

  def kill(self, name):
    self.actors.pop(name, None)
    for call in self.calls.pop(name, ()):
      end(call.set_exception, ActorError("It was killed."))

  def get_actor(self, name):
    if name not in self.actors:
      raise ValueError(f"There is no actor {name}.")
    return Handle(self, name)

  def wait(self, calls, timeout):
    done, _ = concurrent.futures.wait(calls, timeout)
    return list(done), []

  def get(self, call, timeout=None):
    return call.result(timeout)


def end(how, found):
  """Ends a call, unless its actor was killed."""
  with contextlib.suppress(concurrent.futures.InvalidStateError):
    how(found)


class Handle:
  """What calls an actor's methods."""

  def __init__(self, ray, name):
    self.ray, self.name, self.actor = ray, name, ray.actors[name]

  def __getattr__(self, method):
    async def run(call, args):
      try:
        end(call.set_result, await getattr(self.actor, method)(*args))
      except Exception as error:
        failure = TaskError(str(error))
        failure.__cause__ = error
        end(call.set_exception, failure)

    def remote(*args):
      call = concurrent.futures.Future()
      if self.ray.actors.get(self.name) is not self.actor:
        call.set_exception(ActorError("It is dead."))
        return call
      self.ray.calls[self.name].add(call)
      asyncio.run_coroutine_threadsafe(run(call, args), self.ray.loop)
      return call

    return types.SimpleNamespace(remote=remote)


class ActorEngine(server.ThreadEngine):
  """Servers behind Ray's calls, and workers as threads."""

  def __init__(self, ray):
    super().__init__()
    self.ray, self.starts, self.victim = ray, 0, None

  def serve(self, make, *shards):
    self.starts += 1
    makes = {f"{SERVER}-{i + 1}": x for i, x in enumerate(shards)}
    for name, each in (makes | {SERVER: make}).items():
      self.ray.start(name)
      self.ray.get(self.ray.get_actor(name).serve.remote(each))

  def spawn(self, name, work):
    channel = _ray_actors._RayChannel()

    def run():
      # A worker of a run that was lost may still call when its test has ended.
      with contextlib.suppress(Exception):
        work(channel)

    threading.Thread(target=run, daemon=True).start()

  def ask(self, method, *args, timeout_s=60.0):
    try:
      call = self.ray.get_actor(SERVER).ask.remote(method, args)
      found = self.ray.get(call, timeout_s)
    except TaskError as error:
      raise error.cause from None
    if method == "status" and found["updates"] > 50 and self.victim:
      self.ray.kill(self.victim)
      self.victim = None
    return found

  def stop(self):
    self.ask("stop")


@pytest.mark.slow
@pytest.mark.parametrize("kept", (True, False))
def test_all_servers_begin_again_where_a_shard_is_lost(
  kept, tmp_path, monkeypatch
):
  ray = Actors()
  monkeypatch.setattr(_ray_access, "import_ray", lambda: ray)
  engine, plans = ActorEngine(ray), server.message_plans()
  engine.victim = f"{SERVER}-2"
  protocol = server.ASP(batches=server.FixedBatches(8))

  def make_server(plan):
    return server.LiveServer(protocol, test_shards.whole(plans), plan)

  def work(name, channel):
    learner = test_shards.worker(plans, name)
    server.WorkerLoop(channel, name, learner, depth=protocol.depth).run()

  train = functools.partial(
    _live_runs.run, engine, make_server,
    {name: functools.partial(work, name) for name in "xy"}, 300,
    plan=server.LivePlan(workers=("x", "y"), shards=2), every=50,
    model=(test_shards.PARAMS, {"mean": jnp.zeros(2)}),
  )  # fmt: skip
  if not kept:
    with pytest.raises(server.LostRunError, match="there are no checkpoints"):
      train()
    return
  found = []
  result = train(
    checkpoints=str(tmp_path), evaluate=lambda x: found.append(x) or {}
  )
  engine.stop()
  kinds = [(x["kind"], x["worker"]) for x in result.events]
  assert kinds == [("lost", "server"), ("back", "server")]
  assert engine.starts == 2 and result.summary["updates"] == 300
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[-1].params))
