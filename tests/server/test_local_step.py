"""Local steps of workers: what they foresee, and when they are taken."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import data, server
from jdist.server.gradients import _merge
from tests.server import test_gradients as gradients


def _falling(update):
  return 0.1 / (1 + update)


STEP = server.LocalStep(_falling, 0.5, nesterov=True)


@pytest.mark.parametrize(
  ("step", "limit"),
  (
    (server.LocalStep(1.0, 0.9, nesterov=True), 1.357),
    (server.LocalStep(1.0, 0.9), 0.487),
    (None, 0.254),
  ),
)
def test_foresight_keeps_the_largest_stable_rate(step, limit):
  """Of Nesterov's momentum 0.9 with gradients one update late."""
  for curvature, stable in ((limit - 0.01, True), (limit + 0.01, False)):
    sent, now, buffer = np.float32(1.0), np.float32(1.0), np.float32(0.0)
    state = None if step is None else step.init(jnp.float32(1.0))
    largest = []
    for version in range(600):
      read = sent
      if step is not None:
        last = max(version - 1, 0)  # Both first tasks are of version 0.
        control = step.control(last, leads=version > 0, last=max(last - 1, 0))
        read, velocity = step.move(jnp.float32(sent), state, control)
      gradient = np.float32(curvature * read)
      if step is not None:
        state = type(state)(jnp.float32(gradient), jnp.float32(sent), velocity)
      buffer = np.float32(0.9) * buffer + gradient
      sent, now = now, now - gradient - np.float32(0.9) * buffer
      largest.append(abs(float(now)))
    assert (max(largest[-20:]) < 0.5 * max(largest[200:220])) is stable


def test_restarted_worker_takes_no_local_step():
  """Moves of the parameters meanwhile are no momentum."""
  state = STEP.init(jnp.float32(1.0))._replace(velocity=jnp.float32(3.0))
  control = STEP.control(7, leads=False, last=None)
  read, velocity = STEP.move(jnp.float32(9.0), state, control)
  assert (float(read), float(velocity)) == (9.0, 0.0)
  # Without the restart it would be (8 + 0.5 * 3) / 1.5.
  control = STEP.control(7, leads=False, last=5)
  _, velocity = STEP.move(jnp.float32(9.0), state, control)
  np.testing.assert_allclose(velocity, 9.5 / 1.5, rtol=1e-6)


@pytest.mark.parametrize("nesterov", (False, True))
def test_one_worker_with_a_late_pipeline_matches_synchronous_sgd(nesterov):
  """It foresees the server's update, the first one as well."""
  optimizer = optax.sgd(0.1, momentum=0.9, nesterov=nesterov)

  def params(step=None, **changes):
    learner, _ = gradients.learn(
      server.h_ps(16, plans=None, **changes), [1.0], 12, optimizer=optimizer,
      local_step=step,
    )  # fmt: skip
    return learner.model.params

  wanted = params(pipelined=False)
  step = server.LocalStep(0.1, 0.9, nesterov=nesterov)
  chex.assert_trees_all_close(
    params(step, pipelined_from=5), wanted, rtol=1e-4, atol=1e-6
  )
  late = params(pipelined_from=5)
  assert not np.allclose(jax.tree.leaves(late)[0], jax.tree.leaves(wanted)[0])


# By the number of each task: the version that it was sent.
SENT = (0, 0, 1, 1, 3, 4)
# Rate, whether it leads, whether its worker remembers, and whether it was sent
# others than for its last task.
CONTROLS = (
  (0, 0, 0, 1), (0.1, 1, 1, 0), (0.05, 1, 1, 1), (0.05, 1, 1, 0),
  (0, 0, 1, 1), (0, 0, 0, 1),
)  # fmt: skip


def _worker(step):
  return server.GradientWorker(
    gradients.linear, jnp.array(0.0),
    data.SampleStream(gradients.DIGITS, 1, seed=0), server.message_plans(),
    number=0, num_workers=1, sizes=[4], local_step=step,
  )  # fmt: skip


def test_local_step_is_taken_where_the_last_gradient_is_missing():
  """The server says so by the last task that it has settled."""
  worker, found = _worker(STEP), []

  def gradient(params, model_state, steps, control, *rest):
    found.append(control)
    return _merge.Pushed(jnp.array(0.0), {}), 0.0, steps

  worker._program = lambda passes, plan: gradient
  for task, settled in enumerate((-1, -1, 0, 1, 3, 4)):
    if task == 5:
      worker.restart()
    more = {"start": 0, "settled": settled}
    header = {"task": task, "version": SENT[task], "samples": 4, "more": more}
    worker.compute(header | {"push_plan": 0})
  np.testing.assert_allclose(found, CONTROLS, rtol=1e-5)


def test_rates_share_one_compiled_program():
  fast, slow = (_worker(server.LocalStep(rate)) for rate in (0.1, 0.2))
  assert fast._program(1, 0) is slow._program(1, 0)
