"""One reducer after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import profiling, reducers, transforms
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
def test_a_phase_is_its_reducer(substrate):
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


def test_residuals_go_on_into_the_next_phase():
  xs = [[4.0, 1.0], [4.0, 1.0], [0.0, 0.0]]
  phases = reducers.Scheduled(
    ((2, _reducers.Largest(1)), (None, _reducers.Plain()))
  )
  found, _ = run(
    average(phases, reducers.ErrorFeedback()), np.array(xs)[:, None], "none"
  )
  assert found[:, 0].tolist() == [[4.0, 0.0], [4.0, 0.0], [0.0, 2.0]]


@pytest.mark.parametrize("substrate", ["vmap", "mixed"])
def test_a_phase_that_is_not_on_sends_nothing(substrate):
  text = _table.runner("scheduled", substrate).compile().as_text()
  assert " conditional(" in text
  assert all(c.conditional for c in profiling.read_collectives(text))


def test_a_part_that_shrinks():
  reducer = reducers.warm_up(_reducers.Largest, 10, 1, ratios=())
  assert reducer.phases == ((None, _reducers.Largest(1)),)
  made = reducers.warm_up(lambda ratio: Part(ratio), 3, 0.01)
  assert [(end, r.k) for end, r in made.phases] == [
    (3, 0.25), (6, 0.0625), (9, 0.015625), (None, 0.01),
  ]  # fmt: skip


class Part(_reducers.Largest):
  pass


REJECTED = {
  "no end": (
    lambda: reducers.Scheduled(((2, _reducers.Plain()),)),
    r"`phases` must end with a phase without an end, .*got ends \[2\]",
  ),
  "two ends": (
    lambda: reducers.Scheduled(((None, _reducers.Plain()),) * 2),
    r"and have no other, got ends \[None, None\]",
  ),
  "falling": (
    lambda: reducers.Scheduled(
      ((3, _reducers.Plain()), (3, _reducers.Plain()), (None, jnp))
    ),
    "`phases` must be an int >= 4, got 3",
  ),
  "reducer": (
    lambda: reducers.Scheduled(((None, 0.1),)),
    "`phases` must be a `Reducer`, .*got 0.1",
  ),
  "steps": (
    lambda: reducers.warm_up(_reducers.Largest, 0),
    "`steps_per_phase` must be an int >= 1, got 0",
  ),
  "ratio": (
    lambda: reducers.warm_up(_reducers.Largest, 1, 0.0),
    r"`final_ratio` must be in \(0, 1\], got 0.0",
  ),
  "ratios": (
    lambda: reducers.warm_up(_reducers.Largest, 1, ratios=(2.0,)),
    r"`ratios` must be in \(0, 1\], got 2.0",
  ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_is_refused(name):
  call, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    call()
