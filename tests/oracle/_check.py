"""Runs a combination through the library and through the reference."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile

import jax
import numpy as np

from jdist import collectives, training, transforms
from tests.oracle import _combination, _model, _reference

TOLERANCES = {"float32": 3e-5, "float64": 1e-6, "bfloat16": 0.06}
# So many steps are compared at least, before a codec's rounding is near a tie.
LEAST_STEPS = 6


class NearTieError(Exception):
  """The data bring a codec near a tie, which rounding errors may decide."""


def check(one, folder=None):
  """Raises an AssertionError where the library differs from the reference.

  Each of several processes checks all workers, and they share the folder of
  checkpoints.
  """
  for attempt in range(20):
    data = dataclasses.replace(one, data=attempt)
    try:
      with data.precision():
        return compare(data, folder)
    except NearTieError:
      continue
    except Exception as error:
      error.add_note(f"{data}\nRepeat it: python -m tests.oracle {one.seed}\n")
      raise
  raise AssertionError(f"No data without ties in 20 attempts: {one}")


def team_of(one):
  if one.substrate == "none":
    return collectives.workers(1, substrate="none")
  if one.substrate == "several":
    mesh = collectives.make_mesh((2,), ("worker",))
    return collectives.workers(one.workers, mesh=mesh)
  kind = "shard_map" if one.substrate == "processes" else one.substrate
  return collectives.workers(one.workers, substrate=kind)


def compare(one, folder=None):
  """Compares every step of one run, and what is evaluated at its end."""
  team = team_of(one)
  run = Run(one, team, one.optimizer(team.axis))
  if one.resume is None:
    seen = run.train()
  else:
    with contextlib.ExitStack() as stack:
      if folder is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
      seen = run.train(pathlib.Path(folder, f"{one.seed}-{one.data}"))
    assert_same_bits(seen[-1], run.train()[-1])
  expected = Expected(one)
  for step, state in enumerate(seen):
    expected.advance(step, state)
    if expected.margin < _reference.CLEAR:
      if step < LEAST_STEPS:
        raise NearTieError
      return len(seen)
    expected.compare(step, state)
  expected.compare_masks(seen[-1])
  expected.compare_evaluated(run.evaluated())
  return len(seen)


class Run:
  """The library's run; `last` is the state on the devices."""

  def __init__(self, one, team, optimizer):
    self.one, self.team, self.optimizer = one, team, optimizer
    self.step = training.make_step(
      _model.loss_fn,
      optimizer,
      axis=team.axis,
      weighted=one.weighted,
      accumulate=one.accumulate,
    )
    self.parts = (1, 2, 4) if one.stream and one.loop != "device" else ()
    self.trainer = training.Trainer(team, self.step, stream_steps=self.parts)
    self.programs = functools.cache(self._program)
    self.last = None

  def _program(self, control):
    step = self.step
    if control is not None:
      step = functools.partial(step, control=control)
    return self.team.jit(step, donate_argnums=0 if self.one.donate else ())

  def first(self):
    one, passes = self.one, self.one.steps * self.one.accumulate
    state = _model.first_state(
      one.samples // one.accumulate, passes, one.statistics
    )
    return training.init_state(
      self.team, self.optimizer, one.first_params(), state, seed=one.seed
    )

  def train(self, folder=None):
    """Returns the states after all steps; with a folder it stops and resumes.

    The steps before the resume come from the interrupted run.
    """
    loop = self.by_trainer if self.one.loop == "trainer" else self.by_hand
    if folder is None:
      return loop(None, self.one.steps)
    with training.Checkpoints(folder, self.team) as checkpoints:
      seen = loop(checkpoints, self.one.resume)
    with training.Checkpoints(folder, self.team) as checkpoints:
      return seen + loop(checkpoints, self.one.steps)

  def by_trainer(self, checkpoints, steps):
    seen = []

    def evaluate(state):
      seen.append(self.read(state))
      return {}

    def batches(start):
      for step in range(start, self.one.steps):
        yield self.batch(step)

    self.last, _ = self.trainer.fit(
      self.first(), batches, steps, evaluate=evaluate, evaluate_every=1,
      checkpoints=checkpoints,
    )  # fmt: skip
    return seen

  def by_hand(self, checkpoints, steps):
    state, start, seen = self.first(), 0, []
    if checkpoints is not None:
      restored = checkpoints.restore(state)
      if restored is not None:
        start, state, _ = restored
    host = None
    if self.one.loop == "host":
      host = training.RoundHost(
        self.team, state.opt_state, stream_steps=self.parts
      )
    for step in range(start, steps):
      control = host.control() if host else None
      batch = self.team.place(self.batch(step))
      state, metrics = self.programs(control)(state, batch)
      if host:
        host.follow(state.opt_state)
      loss = self.team.gather(metrics["loss"])
      seen.append(self.read(state) | {"loss": np.asarray(loss)})
    if checkpoints is not None:
      checkpoints.save(steps, state)
    self.last = state
    return seen

  def read(self, state):
    """Copies of what a run shows, because a step may take the memory."""
    anchor = transforms.anchor(state.opt_state, state.params)
    found = {
      "params": state.params,
      "anchor": anchor,
      "model": state.model_state,
    }
    found = self.team.gather(found)
    return jax.tree.map(lambda x: np.array(x, copy=True), found)

  def batch(self, step):
    """Returns the rows of the workers in this process."""
    rows = list(self.team.local_workers)
    return {k: v[rows] for k, v in self.one.batch(step).items()}

  def evaluated(self):
    """What an `Evaluator` evaluates: after a drain, for half of the seeds."""
    drains = self.one.seed % 2 or self.one.method == "update_first"
    evaluator = training.Evaluator(
      self.team,
      _model.classify,
      [_model.labelled(self.one.batch(step)) for step in (98, 99)],
      optimizer=self.optimizer if drains else None,
    )
    params, statistics = evaluator.model(self.last)
    found = {"params": params, "model": statistics}
    metrics = evaluator(self.last)
    return drains, jax.tree.map(np.asarray, found), metrics


class Expected:
  """The reference's run, which takes dropout masks from the library's."""

  def __init__(self, one):
    self.one, self.reference = one, one.reference()
    # Scales of codecs are float32, whatever the parameters are.
    coded = one.codec not in (None, "exact")
    self.tolerance = TOLERANCES["float32" if coded else one.dtype]
    first = _model.first_state(1, 1, np.float64)
    self.statistics = [
      {k: first[k] for k in _model.STATISTICS} for _ in range(one.workers)
    ]
    self.losses, self.shown = [], None

  @property
  def margin(self):
    return self.reference.margin

  def advance(self, step, seen):
    one, reference, batch = self.one, self.reference, self.one.batch(step)
    if hasattr(reference, "begin"):
      reference.begin()
    counts = batch["mask"].sum(1)
    shares = counts / max(counts.mean(), 1e-9)
    gradients, self.losses = [], []
    for worker, w in enumerate(reference.w):
      own = {k: v[worker] for k, v in batch.items()}
      before = self.statistics[worker]
      drawn = seen["model"]["drawn"][worker]
      loss, gradient, after = self.micro_batches(w, before, own, drawn, step)
      if one.weighted:
        gradient, loss = gradient * shares[worker], loss * shares[worker]
        after = {
          k: before[k] + shares[worker] * (after[k] - before[k]) for k in after
        }
      self.statistics[worker] = after
      gradients.append(gradient)
      self.losses.append(loss)
    if getattr(reference, "held", None) is True:
      self.shown = reference.w  # Its update waits for the next step.
      reference.update(np.stack(gradients))
      return
    reference.update(np.stack(gradients))
    self.shown = reference.w
    if reference.synchronized and not one.stream:
      self.statistics = [self.mean_statistics()] * one.workers

  def micro_batches(self, w, statistics, batch, drawn, step):
    number = self.one.accumulate
    size, total = self.one.samples // number, 0.0
    loss, gradient = 0.0, 0.0
    for k in range(number):
      part = {x: v[k * size : (k + 1) * size] for x, v in batch.items()}
      one_loss, one_gradient, after = _model.gradient(
        w, statistics, part, drawn[step * number + k]
      )
      count = part["mask"].sum()
      # A micro-batch of padding alone has none.
      statistics = after if count or number == 1 else statistics
      total += count
      loss, gradient = loss + count * one_loss, gradient + count * one_gradient
    return loss / max(total, 1), gradient / max(total, 1), statistics

  def mean_statistics(self):
    every = self.statistics
    return {k: np.mean([x[k] for x in every], 0) for k in every[0]}

  def close(self, found, wanted, what):
    tolerance = self.tolerance * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(
      np.asarray(found, np.float64), wanted, 0, tolerance, err_msg=what
    )

  def compare(self, step, seen):
    when = f" after step {step}"
    if "loss" in seen:
      self.close(seen["loss"], self.losses, "loss" + when)
    for name in _model.STATISTICS:
      wanted = [x[name] for x in self.statistics]
      self.close(seen["model"][name], wanted, name + when)
    self.close(_model.flat(seen["params"]), self.shown, "parameters" + when)
    anchors = _model.flat(seen["anchor"])
    held = getattr(self.reference, "held", None) is True
    anchor = self.shown[0] if held else self.reference.anchor
    self.close(anchors, [anchor] * len(anchors), "anchor" + when)
    for row in anchors:
      np.testing.assert_array_equal(row, anchors[0])
    passes = (step + 1) * self.one.accumulate
    assert (seen["model"]["passes"] == passes).all()

  def compare_masks(self, seen):
    """No two workers, steps or micro-batches have the same dropout."""
    drawn = seen["model"]["drawn"]
    rows = {x.tobytes() for x in drawn.reshape(-1, *drawn.shape[2:])}
    # Masks of 16 bits repeat by chance, but not every second one.
    assert len(rows) > 0.75 * drawn.shape[0] * drawn.shape[1], "dropout"
    share = drawn.mean()
    assert abs(share - _model.KEPT) < 0.06, share

  def compare_evaluated(self, found):
    drains, found, metrics = found
    if drains:
      anchor = self.reference.drained()
    else:
      anchor = self.reference.anchor
    rows = {k: v[None] for k, v in found["params"].items()}
    self.close(_model.flat(rows)[0], anchor, "evaluated parameters")
    statistics = self.mean_statistics()
    for name, wanted in statistics.items():
      self.close(found["model"][name], wanted, "evaluated " + name)
    batches = [self.one.batch(step) for step in (98, 99)]
    loss, accuracy = _model.evaluate(anchor, statistics, batches)
    # A sample between two classes may be counted for either.
    assert abs(metrics["accuracy"] - accuracy) < 0.05, metrics
    np.testing.assert_allclose(metrics["loss"], loss, max(1e-4, self.tolerance))


def assert_same_bits(found, wanted):
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
  for x, y in pairs:
    assert x.tobytes() == y.tobytes(), "a resumed run differs"


def check_seed(seed):
  return check(_combination.draw(seed))
