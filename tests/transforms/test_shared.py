"""Labels of those leaves of a state that are equal on all workers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import methods, states, transforms
from jdist.transforms import intervals

SGD = optax.sgd(0.1, momentum=0.9)


def test_unknown_wrappers_are_not_labelled_shared():
  w = {"w": jnp.ones(2)}

  def labels(*chain):
    return transforms.sharing(optax.chain(*chain).init(w))

  average = transforms.average_gradients(None)
  adaptive = methods.local_sgd(SGD, intervals.msdpu(2), axis=None)
  # Behind an average all is shared, but not a loss, wherever it stands.
  assert labels(average, SGD).params is True
  assert labels(SGD, average).state[0][0].trace == {"w": False}
  found = labels(average, optax.named_chain(("local", adaptive)))
  assert found.state[1]["local"].clock.round_loss is False
  assert found.state[1]["local"].anchor == {"w": True}
  # In a wrapper whose other leaves pass by, parameters are not.
  masked = optax.masked(optax.chain(average, SGD), {"w": True})
  assert labels(masked).params is False


class OwnState(NamedTuple):
  count: jax.Array
  noise: jax.Array


@states.declare(shared=("count",))
class DeclaredState(NamedTuple):
  count: jax.Array
  noise: jax.Array


def test_undeclared_state_is_not_shared():
  own, declared = (
    kind(jnp.zeros(()), jnp.zeros(2)) for kind in (OwnState, DeclaredState)
  )
  assert transforms.sharing(own).state == OwnState(False, False)
  assert transforms.sharing(declared).state == DeclaredState(True, False)
