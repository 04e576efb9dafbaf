"""One optimizer under one method, against the method's equations.

The reference steps each worker by the plain optimizer, in JAX, and does what
the method says in NumPy; see `tests/oracle/_reference.py`.
"""

import functools
import pathlib
import traceback

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist import (
  checks,
  cluster,
  codecs,
  methods,
  reducers,
  server,
  transforms,
)
from jdist.transforms import intervals
from tests.optimizers import _table
from tests.oracle import _combination, _reference

WORKERS, INTERVAL, STEPS = 2, 3, 9
TOLERANCE = 1e-5
SCALES = jnp.concatenate([jnp.ones(2), jnp.full(6, 0.5)])  # Bias, kernel.
ROOT = pathlib.Path(checks.__file__).resolve().parent
TARGETS = np.random.default_rng(5).normal(size=(STEPS + 1, WORKERS, 8))
TARGETS = TARGETS.astype(np.float32)
FIRST, UNRAVEL = jax.flatten_util.ravel_pytree(_table.params())
PULL = 0.2


def ravel(tree):
  return jax.flatten_util.ravel_pytree(tree)[0]


def loss_of(tree, target):
  return 0.5 * jnp.sum(SCALES * (ravel(tree) - target) ** 2)


class RefusedError(Exception):
  """The library refused a combination, with this sentence."""


class PlainError(Exception):
  """Optax itself cannot take this step without further arguments."""


def run_cell(name, method, overlap):
  """Returns how far the library is from the equations, at most."""
  # Optax mixes dtypes.
  with jax.numpy_dtype_promotion("standard"):
    build = _table.OPTIMIZERS[name]
    try:
      found = library(build(), method, overlap)
    except (ValueError, TypeError, AttributeError) as error:
      frames = traceback.extract_tb(error.__traceback__)
      if ROOT in pathlib.Path(frames[-1].filename).parents:
        raise RefusedError(str(error)) from error
      expected(build, method, overlap)  # Raises it if Optax does so, too.
      raise
    wanted = expected(build, method, overlap)
  found, wanted = np.asarray(found, np.float64), np.asarray(wanted)
  return float(np.abs(found - wanted).max() / max(1, np.abs(wanted).max()))


# The library's runs.


def library(optimizer, method, overlap):
  if method == "server":
    return by_server(optimizer)
  late = {
    "at once": None,
    "late": transforms.Delayed(),
    "streamed": transforms.Delayed(stream=transforms.Stream(max_bytes=16)),
  }[overlap]
  if method == "msdpu" and overlap != "at once":
    late = {
      "late": transforms.Delayed(1, carry=None, after_step=None),
      "streamed": transforms.Delayed(
        carry=None, stream=transforms.Stream(max_bytes=16)
      ),
    }[overlap]
  axis = "worker"
  if method == "local_sgd":
    chain = jdist.local_sgd(optimizer, INTERVAL, axis=axis, overlap=late)
  elif method == "diloco":
    chain = jdist.diloco(optimizer, INTERVAL, 0.7, 0.9, axis=axis, overlap=late)
  elif method == "msdpu" and late is None:
    pull = transforms.pull_to_anchor(PULL, _combination.RATE)
    chain = transforms.local_steps(
      optax.chain(pull, optimizer), INTERVAL, axis=axis
    )
  elif method == "msdpu":
    chain = jdist.msdpu(
      optimizer, intervals.fixed(INTERVAL), _combination.RATE, axis=axis,
      correction=PULL, overlap=late,
    )  # fmt: skip
  elif overlap == "streamed":
    return by_update_first(
      transforms.update_first(optimizer, axis=axis, max_bytes=16)
    )
  else:
    reducer = reducers.compressed(codecs.TopK(k=1), wire="gather")
    compression = jdist.Compression(reducer, reducers.ErrorFeedback())
    chain = methods.ssgd(optimizer, axis=axis, compression=compression)
    if overlap == "late":
      chain = transforms.delay_gradients(chain, 1)
  return by_scan(chain)


def by_scan(chain):
  """Parameters [steps, workers, 8] of an ordinary loop."""

  def one(targets):
    def step(carry, target):
      params, state = carry
      loss, grads = jax.value_and_grad(loss_of)(params, target)
      updates, state = chain.update(grads, state, params, loss=loss, value=loss)
      params = jdist.apply_updates(params, updates, state)
      return (params, state), ravel(params)

    params = _table.params()
    return jax.lax.scan(step, (params, chain.init(params)), targets)[1]

  program = jax.jit(jax.vmap(one, 1, 1, axis_name="worker"))
  return program(TARGETS[:STEPS])


def by_update_first(chain):
  """Its parameters are an update behind."""

  def one(targets):
    def step(carry, target):
      params, state = chain.begin(*carry)
      loss, grads = jax.value_and_grad(loss_of)(params, target)
      return (params, chain.hold(grads, state, loss=loss)), ravel(params)

    params = _table.params()
    return jax.lax.scan(step, (params, chain.init(params)), targets)[1]

  program = jax.jit(jax.vmap(one, 1, 1, axis_name="worker"))
  return program(TARGETS)[1:]


class Targets:
  """Each worker's target of each step, for a server of equal workers."""

  shared = False

  def batch(self, worker, start, count, *, size=None):
    step = start // count
    target = TARGETS[min(step, STEPS), worker]
    return {"x": np.stack([target] * (size or count))}


def by_server(optimizer):
  def loss(params, model_state, batch, key):
    del key
    return loss_of(params, batch["x"].mean(0)), (model_state, {})

  machines = cluster.workers([1.0] * WORKERS, jitter=0.0)
  pair = server.GradientLearner(
    loss, optimizer, _table.params(), Targets(), workers=machines.names
  )
  profile = cluster.Profile(seconds_per_sample=0.01, seconds_per_batch=0.02)
  protocol = server.BSP(batches=server.FixedBatches(1))
  run = server.Simulation(machines, protocol, profile, learner=pair)
  seen = []
  for step in range(1, STEPS + 1):
    run.run(updates=step)
    seen.append([ravel(pair.server.model.params)] * WORKERS)
  return seen


# The reference's.


class PlainInner:
  """The plain optimizer on every worker, whose state shows its positions."""

  def __init__(self, build, own_noise):
    optimizer = optax.with_extra_args_support(build())
    try:
      state = optimizer.init(_table.params())
    except AttributeError as error:
      raise PlainError(str(error)) from error
    self.state = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), state)
    if own_noise:
      self.state = jax.tree.map(_by_worker, self.state)
    self.kinds = jax.tree.leaves(_kinds(state, "moment"))

    def update(grads, state, params, loss):
      found, state = optimizer.update(
        UNRAVEL(grads), state, UNRAVEL(params), value=loss
      )
      return ravel(found), state

    self.program = _program(build, update)

  def update(self, g, w):
    try:
      found, self.state = self.program(
        jnp.asarray(g, jnp.float32), self.state, jnp.asarray(w, jnp.float32),
        jnp.asarray(self.losses, jnp.float32),
      )  # fmt: skip
    except (TypeError, ValueError, AttributeError) as error:
      raise PlainError(str(error)) from error
    return np.asarray(found, np.float64)

  def rest(self, w):
    """Distances of positions from the parameters, and sums, in rows."""
    rows = []
    for x, (kind, place) in self._places():
      x = np.asarray(x, np.float64).reshape(WORKERS, -1)
      rows.append(x - w[:, place] if kind == "position" else x)
    return np.concatenate(rows, 1) if rows else np.zeros((WORKERS, 0))

  def set_rest(self, rest, w):
    leaves, form = jax.tree.flatten(self.state)
    start = 0
    places = iter(self._places())
    for i, kind in enumerate(self.kinds):
      if kind == "moment":
        continue
      x, (_, place) = next(places)
      size = x[0].size
      value = rest[:, start : start + size]
      if kind == "position":
        value = value + w[:, place]
      leaves[i] = jnp.asarray(value.reshape(x.shape), x.dtype)
      start += size
    self.state = jax.tree.unflatten(form, leaves)

  def _places(self):
    places = [slice(0, 2), slice(2, 8)]  # Of bias and kernel.
    found, number = [], 0
    for x, kind in zip(jax.tree.leaves(self.state), self.kinds, strict=True):
      if kind != "moment":
        place = places[number % 2] if kind == "position" else None
        number += kind == "position"
        found.append((x, (kind, place)))
    return found


@functools.lru_cache(maxsize=2)
def _program(build, update):
  del build
  return jax.jit(jax.vmap(update))


def _kinds(x, kind):
  if isinstance(x, tuple) and hasattr(x, "_fields"):
    own = _table.POSITIONS.get(type(x).__name__, {})
    parts = (_kinds(getattr(x, f), own.get(f, kind)) for f in x._fields)
    return type(x)(*parts)
  children, form = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
  if len(children) == 1 and children[0] is x:
    return kind
  return jax.tree.unflatten(form, [_kinds(child, kind) for child in children])


def _by_worker(x):
  if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return x
  return jax.vmap(jax.random.fold_in)(x, jnp.arange(WORKERS))


def gradients(w, step):
  """Gradients and losses of all workers."""
  away = w - TARGETS[step].astype(np.float64)
  scales = np.asarray(SCALES, np.float64)
  return scales * away, 0.5 * (scales * away**2).sum(1)


def expected(build, method, overlap):
  """Parameters [steps, workers, 8] by the equations."""
  # Workers that take local steps draw noise of their own.
  inner = PlainInner(
    build, own_noise=method in ("local_sgd", "diloco", "msdpu")
  )
  w = np.stack([np.asarray(FIRST, np.float64)] * WORKERS)
  if method in ("topk_sgd", "server"):
    return _synchronous(inner, w, method, overlap)
  late = {
    "at once": None, "late": _reference.Late(), "streamed": _reference.Late(),
  }[overlap]  # fmt: skip
  if method == "msdpu" and overlap == "late":
    late = _reference.Late(steps=1, carry=None, after=None)
  elif method == "msdpu" and overlap == "streamed":
    late = _reference.Late(carry=None)
  rule = "average", {}
  if method == "diloco":
    rule = "outer", {"rate": 0.7, "momentum": 0.9}
  whole = np.concatenate([w, inner.rest(w)], 1)
  size, rest = w.shape[1], whole.shape[1] - w.shape[1]
  parts = [_rounds(whole, np.arange(size), rule, late)]
  if rest:  # Positions and sums are averaged, whatever the rule is.
    columns = size + np.arange(rest)
    parts.append(_rounds(whole, columns, ("average", {}), late))
  seen = []
  for step in range(STEPS):
    g, inner.losses = gradients(w, step)
    if method == "msdpu":
      share = PULL / (INTERVAL * _reference.rate(step))
      g = g + share * (w - parts[0].a)
    w = w + inner.update(g, w)
    whole = np.concatenate([w, inner.rest(w)], 1)
    before = whole.copy()
    for part in parts:
      part.after_step(whole, step)
    w = whole[:, :size].copy()
    if rest and (before != whole).any():
      inner.set_rest(whole[:, size:], w)
    seen.append(w)
  return np.stack(seen)


def _rounds(whole, columns, rule, late):
  return _reference.Rounds(
    whole, columns, [], rule, lambda step: INTERVAL, late, None, None
  )


def _synchronous(inner, w, method, overlap):
  """Mean gradients and losses, through top-k with feedback or exactly."""
  coded = method == "topk_sgd" and overlap != "streamed"
  leaves = [slice(0, 2), slice(2, 8)]
  mean = _reference.Mean("top1" if coded else None, "error", leaves)
  delay = int(coded and overlap == "late")
  pending, seen = [], []
  for step in range(STEPS):
    g, losses = gradients(w, step)
    pending.append(g)
    if len(pending) > delay:
      g = np.stack([mean(pending.pop(0))] * WORKERS)
      # A delayed gradient meets the present loss.
      inner.losses = [losses.mean()] * WORKERS
      w = w + inner.update(g, w)
    seen.append(w)
  return np.stack(seen)


def outcome(name, method, overlap):
  """Returns "right", "wrong: ..." or the sentence of a refusal."""
  try:
    error = run_cell(name, method, overlap)
  except RefusedError as refusal:
    return "Refused: " + _first_sentence(str(refusal))
  except PlainError as error:
    return "Not tried, plain Optax raises: " + _first_sentence(str(error))
  return "right" if error <= TOLERANCE else f"wrong: {error:.1e}"


def _first_sentence(text):
  # Browsers would take what stands in angle brackets for HTML.
  found = " ".join(text.split()).replace(".<locals>", "")
  return found.split(". ")[0].rstrip(".") + "."
