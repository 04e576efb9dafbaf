"""One reducer after the other."""

import jax
import numpy as np
import pytest

from jdist import codecs, collectives, profiling, reducers, transforms
from tests.reducers._averages import average, gradients, run
from tests.transforms import _reducers, _table

PHASES = reducers.Scheduled(
  (
    (2, _reducers.Plain()),
    (5, _reducers.Largest(2)),
    (None, _reducers.Owned(0.5)),
  )
)


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_phase_is_its_reducer(substrate):
  xs = gradients(9)
  found, states = run(average(PHASES), xs, substrate)
  for start, stop, reducer in (
    (0, 2, _reducers.Plain()),
    (2, 5, _reducers.Largest(2)),
    (5, 9, _reducers.Owned(0.5)),
  ):
    part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], xs)
    wanted, _ = run(average(reducer), part, substrate)
    jax.tree.map(
      lambda f, w, a=start, b=stop: np.testing.assert_array_equal(f[a:b], w),
      found,
      wanted,
    )
  labels = transforms.sharing(states).state.reducer
  # The third reducer's state is part shared and part not, as without phases.
  assert labels.step is labels.phases[2].seen is True
  assert labels.phases[2].mine is False


def test_residuals_continue_in_next_phase():
  xs = [[4.0, 1.0], [4.0, 1.0], [0.0, 0.0]]
  phases = reducers.Scheduled(
    ((2, _reducers.Largest(1)), (None, _reducers.Plain()))
  )
  found, _ = run(
    average(phases, reducers.ErrorFeedback()), np.array(xs)[:, None], "none"
  )
  assert found[:, 0].tolist() == [[4.0, 0.0], [4.0, 0.0], [0.0, 2.0]]


@pytest.mark.parametrize("substrate", ["vmap", "mixed"])
def test_inactive_phase_sends_nothing(substrate):
  text = _table.runner("scheduled", substrate).compile().as_text()
  assert " conditional(" in text
  assert all(c.conditional for c in profiling.read_collectives(text))


def test_phase_is_counted_in_its_own_steps():
  def traffic(reducer):
    def one(x):
      state = reducer.init(x, "worker")
      return reducer.reduce(x, state, jax.random.key(0), "worker").mean

    like = jax.ShapeDtypeStruct((16,), "float32")
    return collectives.traffic(one, like, axis="worker", num_workers=4)

  two, one = (reducers.compressed(codecs.TopK(k=k)) for k in (2, 1))
  phases = reducers.Scheduled(((2, reducers.Exact()), (5, two), (None, one)))
  found = traffic(phases)
  sent = [found.sent_bytes(1, 0, after_steps=step) for step in (1, 2, 4, 5)]
  whole, few, fewer = (traffic(x).sent_bytes(1, 0) for x in phases.reducers)
  assert len({whole, few, fewer}) == 3
  assert sent == [whole, few, few, fewer]


def test_warm_up_sends_smaller_parts():
  reducer = reducers.warm_up(_reducers.Largest, 10, 1)
  assert reducer.phases == ((None, _reducers.Largest(1)),)
  made = reducers.warm_up(lambda ratio: Part(ratio), 3, 0.01)
  assert [(end, r.k) for end, r in made.phases] == [
    (3, 0.25), (6, 0.0625), (9, 0.015625), (None, 0.01),
  ]  # fmt: skip


class Part(_reducers.Largest):
  pass


def test_flush_has_the_residuals_of_owners_of_earlier_phases():
  first, last = (reducers.compressed(codecs.Quantize(2)) for _ in range(2))
  phases = reducers.Scheduled(
    ((1, first), (2, _reducers.Plain()), (None, last))
  )

  def flushed(x):
    state, key = phases.init(x, "worker"), jax.random.key(0)
    state = phases.reduce(x, state, key, "worker").state
    own = first.flush(state.phases[0], x, "worker")[0]
    found, after = phases.flush(state, x, "worker")
    return found, own, after.step

  x = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32)
  found, own, steps = jax.vmap(flushed, axis_name="worker")(x)
  assert np.abs(own).max() > 0.01
  np.testing.assert_array_equal(found, own)
  assert steps.tolist() == [1] * 3  # The phases continue.


def test_warm_up_has_no_phase_that_sends_as_little_as_the_last():
  made = reducers.warm_up(lambda ratio: _reducers.Owned(ratio), 10, 0.0625)
  assert [(end, one.step) for end, one in made.phases] == [
    (10, 0.25),
    (None, 0.0625),
  ]


def test_bits_are_those_of_the_last_phase():
  first, last = (reducers.compressed(codecs.TopK(k=k)) for k in (4, 1))
  like = jax.ShapeDtypeStruct((64,), "float32")
  found = reducers.Scheduled(((2, first), (None, last))).num_bits(like, 4)
  assert found == last.num_bits(like, 4) != first.num_bits(like, 4)


def test_phases_of_float64_have_one_dtype():
  """A codec sends float32 for it, and an exact mean all of it."""
  exact = reducers.Exact()
  phases = reducers.Scheduled(
    ((1, reducers.compressed(codecs.Sign())), (None, exact))
  )

  def mean(x):
    state, key = phases.init(x, None), jax.random.key(0)
    found = phases.reduce(x, state, key, None)
    return found, phases.flush(found.state, x, None)[0]

  with jax.enable_x64(True):
    x = np.array([1.0, 3.0 + 1e-12])
    (mean, share, _), left = jax.eval_shape(mean, x)
    assert {mean.dtype, share.dtype, left.dtype} == {x.dtype}
    # Error feedback would keep what all have been sent.
    sent = exact.reduce(x, (), None, None).own_share
    np.testing.assert_array_equal(sent, x)
