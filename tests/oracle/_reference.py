"""The equations of every method in NumPy, in float64, all workers in rows.

Written from the papers and from the equations of the docstrings, for reading
rather than for speed: `w` has a row for each worker, `a` is the anchor.  None
of it imports the library.
"""

import dataclasses

import numpy as np

# Farther from a tie than rounding errors of a float32 run reach.
CLEAR = 2e-5


def rate(step):
  """The schedule of every inner optimizer: `optax.exponential_decay`."""
  return 0.04 * 0.8 ** (step / 4)


class Inner:
  """An inner optimizer; each row has moments of its own."""

  def __init__(self, name):
    self.name, self.count, self.first, self.second = name, 0, 0.0, 0.0

  def update(self, g, w):
    eta, name = rate(self.count), self.name
    self.count += 1
    if name == "clipped":
      norm = np.linalg.norm(g, axis=-1, keepdims=True)
      g = np.where(norm > 1, g / norm, g)
    if name in ("sgd", "clipped"):
      return -eta * g
    if name in ("momentum", "nesterov"):
      self.first = g + 0.9 * self.first
      return -eta * (g + 0.9 * self.first if name == "nesterov" else self.first)
    assert name == "adamw", name
    self.first = 0.9 * self.first + 0.1 * g
    self.second = 0.95 * self.second + 0.05 * g**2
    first = self.first / (1 - 0.9**self.count)
    second = self.second / (1 - 0.95**self.count)
    return -eta * (first / (np.sqrt(second) + 1e-2) + 0.05 * w)

  def reset(self):
    self.first, self.second = 0 * self.first, 0 * self.second

  def average(self):
    def mean(x):
      # SGD without momentum has no buffers.
      return np.broadcast_to(np.mean(x, 0), np.shape(x)) if np.ndim(x) else x

    self.first, self.second = mean(self.first), mean(self.second)


class Codec:
  """Encodes and decodes a leaf, and knows how near a tie it was."""

  def __init__(self, name):
    self.name = name
    self.margin = np.inf

  def __call__(self, x):
    if not x.any():
      return x
    if self.name == "int4":
      top = np.abs(x).max()
      level = 7 * x / top
      near = np.abs(np.abs(level - np.floor(level)) - 0.5).min()
      self.margin = min(self.margin, near / 7)
      return np.round(level) * top / 7
    if self.name == "top1":
      order = np.argsort(-np.abs(x), kind="stable")
      if len(x) > 1:
        high, low = np.abs(x[order[:2]])
        self.margin = min(self.margin, (high - low) / high)
      kept = np.zeros_like(x)
      kept[order[0]] = x[order[0]]
      return kept
    assert self.name == "sign", self.name
    self.margin = min(self.margin, np.abs(x).min() / np.abs(x).max())
    return np.where(x < 0, -1, 1) * np.abs(x).mean()


class Mean:
  """The workers' mean of messages [workers, size], through a compression.

  Args:
    codec: a name, or None for the exact mean.
    feedback: None, "error", "ef21", "momentum" or "smoothing".
    leaves: where the leaves stand in a message.
  """

  def __init__(self, codec, feedback, leaves):
    self.codec = None if codec in (None, "vote") else Codec(codec)
    self.vote, self.feedback, self.leaves = codec == "vote", feedback, leaves
    self.kept = self.momentum = self.estimate = 0.0
    self.vote_margin = np.inf

  @property
  def margin(self):
    return min(self.vote_margin, self.codec.margin if self.codec else np.inf)

  def __call__(self, x):
    if self.vote:
      self.kept = 0.5 * self.kept + 0.5 * x if self.feedback else x
      self.vote_margin = min(
        self.vote_margin, np.abs(self.kept).min() / np.abs(self.kept).max()
      )
      return np.where(np.where(self.kept < 0, -1, 1).sum(0) < 0, -1.0, 1.0)
    if self.codec is None:
      return x.mean(0)
    if self.feedback == "error":
      x = x + self.kept
    elif self.feedback == "ef21":
      x = x - self.kept
    elif self.feedback == "momentum":
      self.momentum = 0.5 * self.momentum + x
      x = self.kept + self.momentum
    sent = np.zeros_like(x)
    for worker, row in enumerate(x):
      for leaf in self.leaves:
        sent[worker, leaf] = self.codec(row[leaf])
    if self.feedback == "ef21":
      self.kept = self.kept + sent
      self.estimate = self.estimate + sent.mean(0)
      return self.estimate
    self.kept = x - sent
    if self.feedback == "momentum":
      for worker, row in enumerate(x):
        for leaf in self.leaves:
          # A leaf that was sent whole keeps its momentum.
          if not (sent[worker, leaf] == row[leaf]).all():
            self.momentum[worker, leaf][sent[worker, leaf] != 0] = 0
    return sent.mean(0)

  def exact(self, x):
    """The mean without a codec, with which residuals are sent, too."""
    if self.codec is not None and self.feedback == "error":
      x, self.kept = x + self.kept, 0.0
    return x.mean(0)


class Rule:
  """A sync rule: what is sent, how the anchor moves, where workers stand."""

  apart = False

  def __init__(self, name, settings, a, workers):
    self.name, self.set, self.n = name, settings, workers
    self.v = np.zeros_like(a)
    # Of control variates.
    self.c, self.own = np.zeros_like(a), np.zeros((workers, len(a)))
    self.rates, self.corrections = 0.0, 0.0
    self.last_rate = None
    self.apart = name in ("elastic", "pulled anchor")

  def correct(self, g, step):
    if self.name != "control variates":
      return g
    self.rates += rate(step)
    self.corrections = self.corrections + rate(step) * self.c
    return g - self.own + self.c

  def message(self, progress):
    if self.name != "control variates":
      return progress
    change = (progress - self.corrections) / self.rates
    self.own = self.own + change
    self.rates, self.corrections = 0.0, 0.0
    return np.concatenate([progress, change], 1)

  def move(self, a, mean, step):
    """The new anchor, by the mean message: a difference from the anchor."""
    if self.name == "average":
      return a - mean
    if self.name == "outer":
      self.v = self.set["momentum"] * self.v + mean
      return a - self.set["rate"] * (self.set["momentum"] * self.v + mean)
    if self.name == "elastic":
      return a - self.set["rate"] * mean
    if self.name == "pulled anchor":
      self.v = self.set["momentum"] * self.v - mean
      return a + self.v
    if self.name == "slow momentum":
      gamma = rate(step)
      self.v = self.set["momentum"] * self.v + mean / gamma
      return a - self.set["rate"] * gamma * self.v
    mean, change = np.split(mean, 2)
    self.c = self.c + change
    return a - self.set["rate"] * mean

  def place(self, w, old, new):
    """Where workers that keep a distance from the anchor stand."""
    if self.name == "elastic":
      return w - self.set["rate"] / self.n * (w - old)
    return (1 - self.set["pull"]) * w + self.set["pull"] * new


@dataclasses.dataclass
class Late:
  """An overlap: None for a mean at the round's end."""

  steps: int | None = None
  carry: float | None = 1.0
  mix: float | None = None
  after: int | None = 0


class Rounds:
  """Local steps of some columns, synchronized in rounds."""

  def __init__(self, w, columns, leaves, rule, interval, late, codec, feedback):
    self.columns, self.late = columns, late
    self.a = w[0, columns].copy()
    self.rule = Rule(*rule, self.a, len(w))
    self.interval_at, self.length, self.begun = interval, interval(0), 0
    # A message of control variates is twice as long.
    if rule[0] == "control variates":
      size = len(self.a)
      leaves = leaves + [slice(x.start + size, x.stop + size) for x in leaves]
    self.mean = Mean(codec, feedback, leaves)
    self.start = np.broadcast_to(self.a, (len(w), len(self.a)))
    self.flight, self.delays, self.taken = None, False, 0
    self.ended = self.applied = self.moved = False

  def correct(self, g, step):
    g[:, self.columns] = self.rule.correct(g[:, self.columns], step)

  def is_late(self):
    """Whether the message of the present round is applied late."""
    if self.late is None or self.late.steps == 0:
      return False
    if self.late.after is not None:
      return self.begun >= self.late.after
    # From the first round of two steps, or of three times what is late.
    steps = self.late.steps or 1
    self.delays |= self.length >= (2 if steps == 1 else 3 * steps)
    return self.delays

  def after_step(self, everything, step):
    w, late = everything[:, self.columns], self.late
    self.taken += 1
    self.moved = False
    self.ended = self.taken == self.length
    self.applied = self.ended and not self.is_late()
    within = self.flight is not None and late.steps is not None
    if within and self.taken >= min(late.steps, self.length):
      w, self.applied = self.arrive(w, step), True
    if self.ended:
      w = self.end(w, step)
      self.begun, self.taken = step + 1, 0
      self.length = self.interval_at(step + 1)
    everything[:, self.columns] = w

  def arrive(self, w, step):
    """Within a round: the late mean moves the anchor and the workers."""
    old, progress = self.a, self.start - w
    self.a = self.rule.move(old, self.mean(self.flight), step)
    self.flight, self.moved = None, True
    if self.rule.apart:
      return self.rule.place(w, old, self.a)
    self.start = np.broadcast_to(self.a, w.shape)
    if self.late.mix is not None:
      return self.late.mix * w + (1 - self.late.mix) * self.a
    return self.a - progress

  def end(self, w, step):
    rule, late, old = self.rule, self.late, self.a
    if not self.is_late():
      message = rule.message(old - w)
      self.a, self.moved = rule.move(old, self.mean(message), step), True
      self.start = np.broadcast_to(self.a, w.shape)
      if rule.apart:
        return rule.place(w, old, self.a)
      if late is not None and late.steps == 0:
        return late.mix * w + (1 - late.mix) * self.a
      return self.start
    progress = self.start - w
    message = rule.message(progress)
    if self.flight is not None:
      self.a, self.moved = rule.move(old, self.mean(self.flight), step), True
    if rule.apart:
      if late.steps is None:
        w = rule.place(w, old, self.a)
      message = self.a - w
    elif late.mix is None:
      carry = 1 / len(w) if late.carry is None else late.carry
      w = self.a - carry * progress
    self.flight, self.start = message, w
    return w

  def drain(self, w, step):
    """The anchor after everything that was begun; exact, not compressed."""
    rule, w = self.rule, w[:, self.columns]
    progress = self.start - w
    if self.flight is not None:
      self.a = rule.move(self.a, self.mean.exact(self.flight), step)
    if rule.apart:
      if rule.name == "elastic":
        mean = self.mean.exact(self.a - w)
        return self.a - len(w) / (len(w) + 1) * mean
      # All workers' present positions are on their way at a round's end.
      if self.taken or self.late is None:
        return rule.move(self.a, self.mean.exact(self.a - w), step)
    if not self.taken:
      return self.a
    message = self.mean.exact(rule.message(progress))
    return rule.move(self.a, message, step)


class LocalSteps:
  """Local steps: one or several fragments, each with rounds of its own."""

  def __init__(self, w, inner, pull, parts):
    self.w, self.inner, self.pull, self.parts = w, Inner(inner), pull, parts
    self.step = 0

  @property
  def anchor(self):
    a = np.zeros(self.w.shape[1])
    for part in self.parts:
      a[part.columns] = part.a
    return a

  @property
  def margin(self):
    return min(part.mean.margin for part in self.parts)

  def update(self, g):
    g, part = g.copy(), self.parts[0]
    for x in self.parts:
      x.correct(g, self.step)
    if self.pull is not None:
      kind, strength = self.pull
      if kind == "pull":
        strength = strength / (part.length * rate(self.step))
      g = g + strength * (self.w - self.anchor)
    self.w = self.w + self.inner.update(g, self.w)
    for x in self.parts:
      x.after_step(self.w, self.step)
    if part.moved and part.rule.name == "slow momentum":
      buffers = part.rule.set["buffers"]
      if buffers == "reset":
        self.inner.reset()
      elif buffers == "average":
        self.inner.average()
    self.step += 1

  @property
  def synchronized(self):
    """Whether the last step ended a round of all parameters.

    Fragments count it when the mean of the last of them is applied.
    """
    last = self.parts[-1]
    return last.ended if len(self.parts) == 1 else last.applied

  def drained(self):
    a = np.zeros(self.w.shape[1])
    for part in self.parts:
      # At the rate of the last step that was taken.
      a[part.columns] = part.drain(self.w, self.step - 1)
    return a


class Synchronous:
  """The mean gradient of every step, some steps late."""

  synchronized = True

  def __init__(self, w, inner, codec, feedback, leaves, late=0, held=False):
    self.w, self.inner, self.late = w, Inner(inner), late
    self.mean = Mean(codec, feedback, leaves)
    self.pending, self.held = [], held

  @property
  def anchor(self):
    return self.w[0]

  @property
  def margin(self):
    return self.mean.margin

  def update(self, g):
    self.pending.append(g)
    if not self.held and len(self.pending) > self.late:
      self.apply()

  def apply(self):
    mean = np.broadcast_to(self.mean(self.pending.pop(0)), self.w.shape)
    self.w = self.w + self.inner.update(mean, self.w)

  def begin(self):
    """With `held` an update waits for the next step, which begins with it."""
    if self.held and self.pending:
      self.apply()

  def drained(self):
    while self.pending:
      self.apply()
    return self.w[0]
