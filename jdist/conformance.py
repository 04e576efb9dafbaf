"""Laws that every part keeps: a codec, a method, a model and others.

The tests of this package call `check` for its own parts, and those of another
package for theirs.
"""

import dataclasses
import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jdist import (
  cluster,
  codecs,
  data,
  methods,
  models,
  pipeline,
  reducers,
  server,
  transforms,
)

_SHAPES = ((), (0,), (1,), (7,), (256,), (3, 171))
# This makes a full block of 256 and a short one, and is no multiple of 5 or 8.
_SIZE = 283
_SIZES = ((1, 1), (1, 4), (2, 1), (2, 8), (3, 5), (4, 4), (4, 8), (8, 16))


def check(part: Any, *, sees_all: bool = True, within: float = 1.3) -> None:
  """Checks the laws of a part, each in small cases.

  - A codec's packed bytes are `num_bits`, for arrays of several shapes and
    dtypes, and decode to the array's shape and dtype; its states have no array
    of size zero; it gives the same under `jit` and `vmap`; finite entries stay
    finite, and others stay visible; it compares by its settings.
  - A method of two workers takes steps towards the targets of both; its state
    has no array of size zero, and the workers agree on their anchor to the bit.
  - A sync rule, an outer optimizer, or a feedback around two bits, keeps the
    laws of a method with rounds.
  - A reducer gives all workers one mean, to the bit, in the tree's dtypes; an
    unsent entry is missing in a worker's `own_share`, or in the residuals of
    owners; its state has no array of size zero.
  - A model has equal parameters for equal seeds, logits of the right shape and
    finite gradients; when it is evaluated, no sample depends on another one.
  - A data set has samples in both splits, of one shape and as many classes; it
    is the same each time, and its mean and deviation are those of the images.
  - A protocol, on a virtual clock whose machines fail and return, makes updates
    for ever, keeps the members that are there, and repeats itself.
  - A table of each size that it takes has all actions, in an order that can
    run, within its window of versions, and is equal to its text.

  Args:
    part: A `codecs.Codec`, `methods.Method`, `transforms.SyncRule`, optimizer
      of Optax, `reducers.Reducer` or `Feedback`, `server.Protocol` or
      `pipeline.TableEntry`; a model's class or function of `input_shape,
      num_classes, *, rngs`; or a data set's function of "train" or "test".
    sees_all: Whether a codec must show each entry that is not finite; those
      that send random entries do not.
    within: The largest distance of a method's anchor from the middle of the
      targets, 2 and 4, after 120 steps from 0 with a learning rate of 0.1.

  Raises:
    AssertionError: If a law is broken; names it.

  >>> check(codecs.Sign())
  """
  if isinstance(part, codecs.Codec):
    _check_codec(part, sees_all)
  elif isinstance(part, methods.Method):
    _check_method(part, within)
  elif isinstance(part, server.Protocol):
    _check_protocol(part)
  elif isinstance(part, pipeline.TableEntry):
    _check_table(part)
  elif isinstance(part, transforms.SyncRule | optax.GradientTransformation):
    rounds = functools.partial(transforms.local_steps, rule=part)
    _check_method(methods.Method("", rounds), within)
  elif isinstance(part, reducers.Feedback):
    packed = reducers.Compression(codecs.Quantize(2), part)
    rounds = functools.partial(transforms.local_steps, compression=packed)
    _check_method(methods.Method("", rounds), within)
  elif isinstance(part, reducers.Reducer):
    _check_reducer(part)
  elif callable(part):
    made: Any = getattr(part, "func", part)
    # NNX hides the arguments of a constructor behind its metaclass.
    made = vars(made)["__init__"] if isinstance(made, type) else made
    model = "rngs" in inspect.signature(made).parameters
    (_check_model if model else _check_dataset)(part)
  else:
    kind = type(part).__name__
    raise ValueError(f"`part` must be of a kind of `Args`, got a {kind}.")


def _hold(law: Any, text: str) -> None:
  if not law:
    raise AssertionError(text)


def _check_codec(codec: codecs.Codec, sees_all: bool) -> None:
  def run(x: Any, key: Any) -> Any:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    payload, state = codec.encode(x, codec.init(like), key)
    return payload, codec.decode(payload, state, like), state

  same = type(codec)(**vars(codec))
  _hold(codec == same and hash(codec) == hash(same), "equal settings are equal")
  key, granule = jax.random.key(0), codec.granule()
  for shape, dtype in itertools.product(_SHAPES, (jnp.float32, jnp.bfloat16)):
    like = jax.ShapeDtypeStruct(shape, dtype)
    payload, found, state = jax.eval_shape(run, like, key)
    sent = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(payload))
    told = -(-codec.num_bits(like) // 8)
    _hold(sent == told, f"{like} is {told} bytes by `num_bits`, {sent} packed")
    _hold((found.shape, found.dtype) == (shape, dtype), f"{like} is {found}")
    full = not like.size or all(x.size for x in jax.tree.leaves(state))
    _hold(full, "no array of a state has size zero")
    part = jax.ShapeDtypeStruct((max(like.size, 1) * granule,), dtype)
    whole = dtype != jnp.float32 or codec.num_bits(part) % 8 == 0
    _hold(whole, "parts of a granule are whole bytes")
  xs = np.random.default_rng(0).normal(size=(3, _SIZE)).astype(np.float32)
  keys = jax.random.split(key, 3)
  compiled = jax.jit(run).lower(xs[0], key).compile()
  rows = jax.jit(jax.vmap(run))(xs, keys)
  for i in range(3):
    both = jax.tree.map(lambda x, i=i: x[i], rows), compiled(xs[i], keys[i])
    for row, one in zip(*map(jax.tree.leaves, both), strict=True):
      _hold((row.shape, row.dtype) == (one.shape, one.dtype), "`vmap` keeps it")
      equal = np.allclose(np.float32(row), np.float32(one), 1e-6, 1e-7)
      _hold(equal, "`vmap` gives the results of a loop")
  ends = np.where(np.arange(_SIZE) % 2, 1, -1) * np.finfo(np.float32).max
  for x in (ends, np.abs(ends), np.where(np.arange(_SIZE) % 5, xs[0], ends)):
    found = compiled(np.float32(x), key)[1]
    _hold(np.isfinite(found).all(), "entries of 3e38 stay finite: clip them")
  for value in (np.nan, -np.nan, np.inf, -np.inf) if sees_all else ():
    for place in (0, 131, _SIZE - 1):
      found = compiled(np.where(np.arange(_SIZE) == place, value, xs[0]), key)
      _hold(not np.isfinite(found[1][place]), f"{value} stays visible")


def _check_method(method: methods.Method, within: float) -> None:
  run = methods.Run(120, 4, optax.constant_schedule(0.1), interval=3)
  start = {str(shape): jnp.zeros(shape) for shape in (3, (2, 2), (), 5)}
  chain = method.build(optax.sgd(0.1), run, axis="worker")

  def train(target: jax.Array) -> Any:
    def step(carry: Any, _: None) -> Any:
      w, state = carry
      loss = sum(jnp.mean((x - target) ** 2) for x in w.values())
      gradients = jax.tree.map(lambda x: x - target, w)
      updates, state = chain.update(gradients, state, w, loss=loss)
      return (transforms.apply_updates(w, updates, state), state), None

    carry = start, chain.init(start)
    w, state = jax.lax.scan(step, carry, length=run.num_steps)[0]
    return transforms.anchor(state, w), state

  # Their middle is the target of both.
  two = jax.jit(jax.vmap(train, axis_name="worker"))
  anchors, state = two(jnp.array([2.0, 4.0]))
  _hold(all(x.size for x in jax.tree.leaves(state)), "no state has size zero")
  for x in jax.tree.leaves(anchors):
    _hold(np.array_equal(x[0], x[1]), "workers agree on the anchor to the bit")
    _hold(np.all(abs(x - 3) <= within), f"anchors come near to 3, got {x[0]}")


def _check_reducer(reducer: reducers.Reducer) -> None:
  rng, number = np.random.default_rng(0), 3
  shapes = {"a": (number, _SIZE), "b": (number, 4, 5), "c": (number,)}
  tree = {x: rng.normal(size=y).astype(np.float32) for x, y in shapes.items()}

  def run(own: Any) -> Any:
    state = reducer.init(own, "worker")
    found = reducer.reduce(own, state, jax.random.key(0), "worker")
    return found, reducer.flush(found.state, own, "worker")[0]

  found, owned = jax.jit(jax.vmap(run, axis_name="worker"))(tree)
  full = all(x.size for x in jax.tree.leaves(found.state))
  _hold(full, "no state has size zero")
  for name, own in tree.items():
    mean, shares = np.asarray(found.mean[name]), found.own_share[name]
    form = (own.shape, own.dtype)
    _hold((mean.shape, mean.dtype) == form, "a mean is like its tree")
    _hold((mean == mean[0]).all(), "workers have one mean, to the bit")
    kept = mean[0] + owned[name][0]
    equal = np.allclose(number * kept, np.sum(shares, 0), 1e-4, 1e-4)
    _hold(equal or not reducer.averages, "the mean is that of the own shares")


def _check_model(factory: Any) -> None:
  rng, classes = np.random.default_rng(0), 10
  tokens = getattr(factory, "takes_tokens", False)
  shape = (16,) if tokens else (32, 32, 3)
  made = (factory(shape, classes, rngs=nnx.Rngs(0)) for _ in range(2))
  model, same = map(models.functional, made)
  draw = functools.partial(rng.integers, classes) if tokens else rng.normal
  inputs = draw(size=(4, *shape)).astype("int32" if tokens else "float32")
  pairs = zip(*map(jax.tree.leaves, (model.params, same.params)), strict=True)
  equal = all(np.array_equal(x, y) for x, y in pairs)
  _hold(equal, "equal seeds give equal parameters")

  def loss(params: Any) -> Any:
    logits, _ = model.apply(params, model.state, inputs, train=True)
    return jnp.mean(jnp.square(logits - 1)), logits

  gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(model.params)
  wanted = (4, *shape[: int(tokens)], classes)
  _hold(logits.shape == wanted, f"logits are {wanted}, got {logits.shape}")
  finite = all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
  _hold(finite, "gradients are finite")
  apply: Any = jax.jit(functools.partial(model.apply, train=False))
  apply = functools.partial(apply, model.params, model.state)
  alone = np.allclose(apply(inputs)[0][:1], apply(inputs[:1])[0], 1e-3, 1e-4)
  _hold(alone, "no sample that is evaluated depends on another one")


def _check_dataset(load: Any) -> None:
  train, test, again = load("train"), load("test"), load("train")
  for found in (train, test):
    known = isinstance(found, data.Dataset | data.TextDataset)
    _hold(known and len(found), "both splits are data sets with samples")
    for name in ("input_shape", "num_classes", "mean", "std"):
      same = getattr(found, name, None) == getattr(train, name, None)
      _hold(same, f"both splits have the same `{name}`")
  rows = np.arange(len(train))
  pairs = zip(*(x.batch(rows).values() for x in (train, again)), strict=True)
  _hold(all(np.array_equal(x, y) for x, y in pairs), "each time it is the same")
  if isinstance(train, data.Dataset):
    images = train.normalize(train.images)
    near = np.abs(images.mean((0, 1, 2))) < 0.1, images.std((0, 1, 2)) < 1.1
    _hold(np.all(near), "mean and deviation are those of the train split")


def _check_table(entry: pipeline.TableEntry) -> None:
  made = 0
  for stages, microbatches in _SIZES:
    try:
      table = entry.factory(stages, microbatches)
    except ValueError:  # Some tables need a multiple of the stages.
      continue
    made += 1
    report = pipeline.check_table(table)
    _hold(sorted(table) == sorted(table.expected()), "each action occurs once")
    least = 1 if table.weights != "delayed" else max(report.versions)
    _hold(least <= table.window, "versions stay within the window")
    text = pipeline.format_table(table)
    _hold(pipeline.parse_table(text) == table, "a table is equal to its text")
  _hold(made, f"a table takes one of {_SIZES} stages and micro-batches")


def _check_protocol(protocol: server.Protocol) -> None:
  away = cluster.Outage
  machines = cluster.Cluster((
    cluster.Node("a", jitter=0.2),
    cluster.Node("b", outages=(away(3.2, 3.4), away(7.1, 20.0))),
    cluster.Node("c", jitter=0.1, outages=(away(11.0),)),
    cluster.Node("d", outages=(away(0.0, 5.0),)),
  ))  # fmt: skip

  def run(seconds: float) -> server.Simulation:
    costs = cluster.Profile(seconds_per_sample=1 / 64)
    found = server.Simulation(machines, protocol, costs)
    found.run(seconds=seconds)
    return found

  early, late, again = run(40.0), run(120.0), run(120.0)
  states = dataclasses.asdict(late.state), dataclasses.asdict(again.state)
  _hold(states[0] == states[1], "equal messages have equal answers")
  _hold(late.events == again.events, "equal messages have equal answers")
  _hold(set(late.state.members) == {"a", "b", "d"}, "those that are there stay")
  _hold(late.state.version > early.state.version, "no worker waits for ever")
  tasks = len(late.state.tasks)
  _hold(tasks <= 3 * protocol.depth, "tasks of workers that left end")
