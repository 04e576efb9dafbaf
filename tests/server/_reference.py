"""The law of a server and its workers in NumPy, driven by messages alone."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reducers, server
from jdist.reducers import _message_codec

ROWS = np.random.default_rng(0).normal(size=(64, 9)).astype(np.float32)
RATE, MOMENTUM = 0.05, 0.9


class Samples:
  """Rows of a regression in turn: eight features and a target each."""

  shared = True

  def batch(self, worker, start, count, *, size=None):
    size = size or count
    rows = ROWS[(start + np.arange(size)) % len(ROWS)]
    return {"rows": rows, "mask": (np.arange(size) < count).astype(np.float32)}


def loss(params, model_state, batch, key):
  x, y = batch["rows"][:, :8], batch["rows"][:, 8]
  errors = (x @ params - y) ** 2 / 2
  found = (errors * batch["mask"]).sum() / batch["mask"].sum()
  return found, (model_state, {})


class Reference:
  """Trains from zeros as the messages say, one sum after the other.

  What a codec makes of an array is taken from the codec, whose tests are its
  own; residuals, differences, local steps, weights and the optimizer are here.
  """

  def __init__(
    self, protocol, names, *, codec=None, plans=None, step=None, strength=0.0,
    nudge=0,
  ):  # fmt: skip
    # Another number changes the last bits of what is rounded.
    self.nudges = np.random.default_rng(nudge) if nudge else None
    self.protocol, self.names, self.step = protocol, names, step
    self.codecs, self.strength = server.message_plans(codec, plans), strength
    self.params = self.trace = np.zeros(8, np.float32)
    self.position, self.tasks, self.pushed = 0, {}, {}
    self.held, self.settled = {}, dict.fromkeys(names, -1)
    self.residual = dict.fromkeys(names, self.params)
    self.last = dict.fromkeys(names)
    self.sent = collections.Counter()

  def run(self, messages):
    """Returns the parameters after messages, each with its time."""
    state = self.protocol.init(self.names)
    for now_s, message in messages:
      if isinstance(message, server.Push) and message.task in state.tasks:
        self.compute(message.task)
      for action in self.protocol.receive(state, now_s, message):
        getattr(self, type(action).__name__.lower())(action)
    return self.params

  def decoded(self, kind, worker, plan, x):
    """What the receiver of a message has of x, its rounding included."""
    codec = getattr(self.codecs, kind)[plan]
    if codec is None:
      return x
    number = self.sent[kind, worker] + (self.names.index(worker) << 20)
    self.sent[kind, worker] += 1
    if self.nudges is not None:
      last_bits = 2e-7 * self.nudges.normal(size=x.shape)
      x = (x * (1 + last_bits)).astype(np.float32)
    codec = reducers.MessageCodec(codec.codec, None, codec.seed)
    state = _message_codec.MessageState(jnp.int32(number), ())
    return np.asarray(_round_trip(codec)(x, state))

  def reply(self, reply):
    worker, plan = reply.worker, reply.pull_plan
    if plan == 0:
      self.held[worker] = self.params
    elif plan is not None:
      missing = self.params - self.held[worker]
      sent = self.decoded("pull", worker, plan, missing)
      self.held[worker] = self.held[worker] + sent
    task = reply, self.position, self.held[worker], self.settled[worker]
    self.tasks[reply.task] = task
    self.position += reply.samples

  def compute(self, number):
    reply, start, held, settled = self.tasks[number]
    worker, point, velocity = reply.worker, held, np.zeros_like(held)
    last = self.last[worker]
    if self.step is not None and last is not None:
      task, version, gradient, before, velocity = last
      mu = self.step.momentum  # Nesterov's.
      if version != reply.version:
        velocity = (held - before + mu * velocity) / (1 + mu)
      if task > settled:
        point = held - (1 + mu) * self.step.rate * gradient + mu**2 * velocity
    rows = ROWS[(start + np.arange(reply.samples)) % len(ROWS)]
    x, y = rows[:, :8], rows[:, 8]
    gradient = x.T @ (x @ point - y) / reply.samples
    self.last[worker] = number, reply.version, gradient, held, velocity
    wanted = gradient + self.residual[worker]
    sent = self.decoded("push", worker, reply.push_plan, wanted)
    self.residual[worker] = wanted - sent
    self.pushed[number] = sent

  def apply(self, update):
    total = np.zeros_like(self.params)
    for number, weight in zip(update.tasks, update.weights, strict=True):
      g, (reply, _, held, _) = self.pushed.pop(number), self.tasks[number]
      g = g + self.strength * g * g * (self.params - held)
      total = total + weight * g
      self.settle(reply, number)
    self.trace = total + MOMENTUM * self.trace
    self.params = self.params - RATE * self.trace

  def discard(self, action):
    self.pushed.pop(action.task, None)
    self.settle(self.tasks[action.task][0], action.task)

  def settle(self, reply, number):
    self.settled[reply.worker] = max(self.settled[reply.worker], number)


_PROGRAMS = {}


def _round_trip(codec):
  """Compiles what a codec makes of an array, once for equal codecs."""

  @jax.jit
  def both(x, state):
    return codec.decode(codec.encode(x, state)[0], x)

  return _PROGRAMS.setdefault(codec, both)
