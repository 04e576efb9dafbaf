"""The loss that an interval policy sees, in every form of a round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, reducers, transforms
from jdist.transforms import intervals

# Rounds of two steps of two workers, whose means are 4, 20 and 50.
LOSSES = [[1, 3], [5, 7], [10, 30], [30, 10], [0, 100], [40, 60], [1, 1]]
CAST = reducers.Compression(reducers.compressed(codecs.Cast("bfloat16")))
PARTS = reducers.Compression(
  reducers.Chunked(
    reducers.compressed(codecs.Cast("bfloat16")), max_bytes=16, multiple=2
  )
)


def next_fn(state, start_step, loss):
  del start_step
  return jnp.int32(2), state if loss is None else loss


# Rounds of two steps; the policy's state is the loss that it was given.
NOTING = intervals.IntervalPolicy(
  lambda: jnp.float32(-1), next_fn, needs_loss=True
)


LATE = transforms.Delayed
STREAM = transforms.Stream(max_bytes=16)
# The losses seen at the ends of the first three rounds.
NOW, BEFORE = [4, 20, 50], [np.nan, 4, 20]
FORMS = {
  "at once": (None, None, NOW),
  "at once in few bits": (None, CAST, NOW),
  "a round late": (LATE(), None, BEFORE),
  "a round late in few bits": (LATE(), CAST, BEFORE),
  "a round late in parts": (LATE(stream=STREAM), None, BEFORE),
  "a round late in parts of few bits": (LATE(stream=STREAM), PARTS, BEFORE),
  "a step late": (LATE(steps=1), None, BEFORE),
  "a step late in few bits": (LATE(steps=1), CAST, BEFORE),
}


@pytest.mark.parametrize("form", FORMS)
def test_policy_is_given_the_mean_over_steps_and_workers(form):
  overlap, compression, wanted = FORMS[form]
  optimizer = transforms.local_steps(
    optax.sgd(0.1), NOTING, axis="worker", overlap=overlap,
    compression=compression,
  )  # fmt: skip
  streams = overlap is not None and overlap.stream is not None
  control = transforms.Control(stream_steps=2 if streams else "fixed")

  def one(losses):
    def body(carry, loss):
      w, state = carry
      updates, state = optimizer.update(w, state, w, loss=loss, control=control)
      return (optax.apply_updates(w, updates), state), state.clock

    w = jnp.ones(9)
    return jax.lax.scan(body, (w, optimizer.init(w)), losses)[1]

  clock = jax.jit(jax.vmap(one, 1, 1, axis_name="worker"))(jnp.float32(LOSSES))
  seen = np.asarray(clock.interval_state)
  # Before its first round has ended a policy has no loss.
  np.testing.assert_array_equal(seen[0], [-1, -1])
  for worker in range(2):
    np.testing.assert_allclose(seen[[1, 3, 5], worker], wanted, rtol=1e-6)
