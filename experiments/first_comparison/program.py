"""The program of a method's rounds: many runs on one core, compiled once."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import protocol

import jdist
from jdist import collectives, data, models, transforms

PyTree = Any


class Point(NamedTuple):
  """A run of a program.

  Attributes:
    rate: the highest rate.
    seed: the seed of parameters, batches and, in tuning, of the images that are
      held out.
  """

  rate: float
  seed: int


class Digits:
  """The images of all runs, and a network for them."""

  def __init__(self) -> None:
    """Loads them; the test set stands behind the training set."""
    self.train, self.test = data.load("digits"), data.load("digits", "test")
    both = np.concatenate([self.train.images, self.test.images])
    self.images = self.train.normalize(jnp.asarray(both, jnp.float32))
    self.labels = jnp.asarray(
      np.concatenate([self.train.labels, self.test.labels])
    )
    self.apply = self.model(0).apply

  def model(self, seed: int) -> models.Model:
    """Builds the network with the initial parameters of a seed."""
    return models.build(
      "mlp", input_shape=self.train.input_shape, num_classes=10, seed=seed
    )

  def samples(self, purpose: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples of all steps, and those of evaluations.

    In tuning a tenth of the training set is held out, another one by each seed.
    """
    number = len(self.train)
    order, held = np.arange(number), number + np.arange(len(self.test))
    if purpose == "tuning":
      mixed = np.random.default_rng(seed).permutation(number)
      held, order = mixed[: number // 10], np.sort(mixed[number // 10 :])
    batches = data.Batches(
      self.train.select(order), protocol.WORKERS, protocol.BATCH_SIZE, seed=seed
    )
    drawn = [batches.indices(step) for step in range(protocol.STEPS)]
    return order[np.stack(drawn)].astype(np.int32), held.astype(np.int32)

  def loss(
    self, params: PyTree, samples: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss and the accuracy of samples."""
    labels = self.labels[samples]
    logits, _ = self.apply(params, {}, self.images[samples], train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


class Program:
  """Trains the points of a method with rounds of one kind."""

  def __init__(self, digits: Digits, method: str, first: int, delay: int):
    """Prepares it; the first run compiles."""
    self.digits, self.kind = digits, (method, first, delay)
    self._run = jax.jit(lambda given: jax.lax.map(self._run_one, given))

  def update(
    self, peak: Any, grads: PyTree, opt_state: PyTree, params: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Updates one worker."""
    optimizer = protocol.chain(*self.kind, peak)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return jdist.apply_updates(params, updates, opt_state), opt_state

  def _run_one(self, given: dict[str, Any]) -> tuple[jax.Array, ...]:
    """Runs a point; returns rounds, losses and accuracies of its marks."""
    peak, held = given["rate"], given["held"]
    optimizer = protocol.chain(*self.kind, peak)
    over = functools.partial(jax.vmap, axis_name=protocol.AXIS)
    shape = (protocol.WORKERS,)
    params = jax.tree.map(
      lambda x: jnp.broadcast_to(x, shape + x.shape), given["params"]
    )

    def step(state: PyTree, samples: jax.Array) -> tuple[PyTree, None]:
      params, opt_state = state
      grads = over(jax.grad(lambda *x: self.digits.loss(*x)[0]))(
        params, samples
      )
      update = functools.partial(self.update, peak)
      return over(update)(grads, opt_state, params), None

    def part(state: PyTree, samples: Any) -> tuple[PyTree, Any]:
      state, _ = jax.lax.scan(step, state, samples[1])
      params, opt_state = jax.tree.map(lambda x: x[0], state)
      anchor = transforms.evaluation_params(opt_state, params)
      rounds = transforms.rounds(opt_state, samples[0])
      return state, (rounds, *self.digits.loss(anchor, held))

    marks = protocol.STEPS // protocol.EVERY
    samples = given["samples"]
    parts = samples.reshape(marks, protocol.EVERY, *samples.shape[1:])
    steps = protocol.EVERY * jnp.arange(1, marks + 1)
    state = params, over(optimizer.init)(params)
    state, found = jax.lax.scan(part, state, (steps, parts))
    # The last message is still under way where means are late.
    params, _ = over(lambda p, s: transforms.drain(optimizer, s, p))(*state)
    end = self.digits.loss(jax.tree.map(lambda x: x[0], params), held)
    return *found, *end

  def run(self, purpose: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Runs points to their end, and returns what was measured of each."""
    drawn = [self.digits.samples(purpose, point.seed) for point in points]
    given = {
      "rate": np.float32([point.rate for point in points]),
      "samples": np.stack([x[0] for x in drawn]),
      "held": np.stack([x[1] for x in drawn]),
      "params": jax.tree.map(
        lambda *x: np.stack(x),
        *(self.digits.model(point.seed).params for point in points),
      ),
    }
    found = jax.tree.map(np.asarray, self._run(given))
    bytes_per_step, bytes_per_round = self.sent()
    held = given["held"].shape[1]
    return [
      {
        "accuracy": float(hit),
        "test_loss": float(loss) if np.isfinite(loss) else None,
        "steps": protocol.STEPS,
        "rounds": int(rounds[-1]),
        "sent_bytes": protocol.STEPS * bytes_per_step
        + int(rounds[-1]) * bytes_per_round,
        # A value for each mark; the last one includes all messages.
        "marks": {
          "held": held,
          "hits": np.rint(held * np.append(hits[:-1], hit))
          .astype(int)
          .tolist(),
          "rounds": rounds.tolist(),
        },
      }
      for rounds, _, hits, loss, hit in zip(*found, strict=True)
    ]

  @functools.cache  # noqa: B019
  def sent(self) -> tuple[float, float]:
    """Counts the bytes of a worker in a step, and at the end of a round."""
    params = self.digits.model(0).params

    def step(params: PyTree) -> PyTree:
      state = protocol.chain(*self.kind, 0.1).init(params)
      return self.update(0.1, params, state, params)

    found = collectives.traffic(
      step, params, axis=protocol.AXIS, num_workers=protocol.WORKERS
    )
    return found.bytes_per_step, found.bytes_per_round
