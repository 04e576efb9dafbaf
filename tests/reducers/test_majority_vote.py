"""The majority decides; a tie and a zero are +1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import collectives, reducers
from tests.reducers import _reducers

VOTE = reducers.MajorityVote()


def test_vote_by_hand():
  x = jnp.asarray([[-1.0, 2.0, 0.0], [-3.0, -4.0, -5.0]])
  means, shares, *_ = _reducers.run(VOTE, x[:, None], 2)
  assert means[1, 0].tolist() == [-1, 1, 1]
  assert shares[:, 0].tolist() == [[-1, 1, 1], [-1, -1, -1]]


@pytest.mark.parametrize(
  ("num_workers", "dtype"), [(3, "bfloat16"), (8, "float32")]
)
def test_vote_has_sign_of_sum_of_own_shares(num_workers, dtype):
  trees = _reducers.make_tree(num_workers, 2, dtype)
  means, shares, *_ = _reducers.run(VOTE, trees, num_workers)
  for x, mean, share in zip(
    *map(jax.tree.leaves, (trees, means, shares)), strict=True
  ):
    assert mean.dtype == x.dtype
    np.testing.assert_array_equal(
      share, np.where(np.asarray(x) >= 0, 1.0, -1.0)
    )
    total = share.sum(0)
    for worker in np.asarray(mean, np.float32):
      np.testing.assert_array_equal(worker, np.where(total >= 0, 1.0, -1.0))


def test_nan_is_seen_by_all():
  x = jnp.ones((3, 1, 40)).at[1, 0, 0].set(jnp.nan)
  means, *_ = _reducers.run(VOTE, x, 3)
  assert np.isnan(means[:, 0, :16]).all()  # The row of worker 0.
  assert (means[:, 0, 16:] == 1).all()


def test_vote_sends_one_bit_up_and_one_down():
  like = [jax.ShapeDtypeStruct((8000,), "float32")]
  bits = VOTE.num_bits(like, 4)
  assert bits.payload == 4 * (2000 + 8)
  assert bits.sent == 2 * 3 / 4 * bits.payload
  traffic = collectives.traffic(
    lambda x: VOTE.reduce(x, (), jax.random.key(0), "worker").mean,
    like,
    axis="worker",
    num_workers=4,
  )
  assert [c.kind for c in traffic.collectives] == ["all-to-all", "all-gather"]
  assert traffic.bytes_per_step * 8 == bits.sent
