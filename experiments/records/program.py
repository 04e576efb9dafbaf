"""The program of a method: many runs at once on one device."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ladder
import numpy as np
import optax

import jdist

PyTree = Any
Row = dict[str, Any]
# The parts of a text, int32 characters, and the number of different ones.
Text = tuple[np.ndarray, np.ndarray, int]


class Program:
  """Trains the points of one method, all at once, on one device."""

  def __init__(
    self,
    setting: ladder.Setting,
    method: ladder.Method,
    text: Text,
    size: int,
  ):
    """Compiles a part of a run of `size` points."""
    self.setting, self.method, self.size = setting, method, size
    train, validation, self.vocabulary = text
    self.train = jnp.asarray(train)
    length = setting.length
    windows = (len(validation) - 1) // length
    # As many windows as fit, each character predicted once.
    at = np.arange(windows)[:, None] * length + np.arange(length + 1)
    self.windows = jnp.asarray(validation[at])
    self.apply = ladder.build(setting, self.vocabulary, abstract=True).apply
    self.start = jax.jit(self._vmapped(self._start_one, (0, None)))
    self._compiled: Any = None

  def _vmapped(self, function: Any, over_workers: tuple[Any, ...]) -> Any:
    """Maps a function of a point and of one worker over points and workers."""
    one = jax.vmap(function, (None, *over_workers), axis_name=ladder.AXIS)
    return jax.vmap(one, (0, *(0 if x is not None else None
                               for x in over_workers)))  # fmt: skip

  def _start_one(
    self, point: ladder.Point, params: PyTree, _: None
  ) -> tuple[PyTree, PyTree]:
    optimizer = ladder.chain(self.method, self.setting, point)
    return params, optimizer.init(params)

  def _loss(self, params: PyTree, windows: jax.Array) -> jax.Array:
    logits, _ = self.apply(params, {}, windows[:, :-1], train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, windows[:, 1:]
    )
    return losses.mean()

  def _gradient(
    self, point: ladder.Point, params: PyTree, step: jax.Array, text: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    key = jax.random.fold_in(jax.random.key(point.seed), step)
    key = jax.random.fold_in(key, jax.lax.axis_index(ladder.AXIS))
    size, length = self.setting.batch_size, self.setting.length
    first = jax.random.randint(key, (size, 1), 0, len(text) - length)
    windows = text[first + jnp.arange(length + 1)]
    return jax.value_and_grad(self._loss)(params, windows)

  def _part(
    self, points: Any, state: PyTree, steps: jax.Array, ends: jax.Array,
    text: jax.Array, windows: jax.Array,
  ) -> tuple[PyTree, jax.Array, jax.Array]:  # fmt: skip
    """Runs steps; returns the state, and the losses of each point."""
    gradient = self._vmapped(self._gradient, (0, None, None))

    def update(end: bool) -> Any:
      step = functools.partial(ladder.update, self.method, self.setting, end)
      return lambda state, grads: self._vmapped(step, (0, 0, 0))(
        points, *state, grads
      )

    def step(state: PyTree, now: Any) -> tuple[PyTree, jax.Array]:
      number, end = now
      losses, grads = gradient(points, state[0], number, text)
      if not self.method.rounds:
        state = update(True)(state, grads)
      else:
        # The predicate is one for all points, so that means are not taken in
        # other steps.
        state = jax.lax.cond(end, update(True), update(False), state, grads)
      return state, losses.mean(1)

    state, losses = jax.lax.scan(step, state, (steps, ends))
    anchors = jax.vmap(lambda one: jdist.anchor(one[1], one[0]))(
      jax.tree.map(lambda x: x[:, 0], state)
    )
    found = jax.vmap(lambda params: self._loss(params, windows))(anchors)
    return state, losses.mean(0), found

  def run(self, points: Sequence[ladder.Point], ends: np.ndarray) -> list[Row]:
    """Runs points to the end, and returns what was measured of each."""
    # The last point fills the program up.
    given = [*points, *[points[-1]] * (self.size - len(points))]
    stacked = ladder.Point(*map(np.asarray, zip(*given, strict=True)))
    each = [_first_params(self.setting, self.vocabulary, p.seed) for p in given]
    params = jax.tree.map(
      lambda *x: np.broadcast_to(
        np.stack(x)[:, None], (len(x), self.setting.workers, *x[0].shape)
      ),
      *each,
    )
    state = self.start(stacked, params, None)
    marks, curves = self.setting.marks, []
    steps = np.arange(self.setting.steps).reshape(marks, -1)
    ends = ends.reshape(marks, -1)
    if self._compiled is None:
      began = time.perf_counter()
      self._compiled = jax.jit(self._part, donate_argnums=1).lower(
        stacked, state, steps[0], ends[0], self.train, self.windows
      ).compile()  # fmt: skip
      print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    for part, last in zip(steps, ends, strict=True):
      state, *losses = self._compiled(
        stacked, state, part, last, self.train, self.windows
      )
      curves.append((int(part[-1]) + 1, *map(np.asarray, losses)))
    seconds = time.perf_counter() - began
    return [
      {
        "val_loss": float(curves[-1][2][i]),
        "curve": [
          {"step": step, "train_loss": float(a[i]), "val_loss": float(b[i])}
          for step, a, b in curves
        ],
        "program_s": seconds,
        "program_runs": self.size,
      }
      for i in range(len(points))
    ]


@functools.cache
def _first_params(
  setting: ladder.Setting, vocabulary: int, seed: int
) -> PyTree:
  model = ladder.build(setting, vocabulary, seed=seed)
  return jax.tree.map(np.asarray, model.params)
