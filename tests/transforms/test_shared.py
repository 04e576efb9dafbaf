"""Labels of those leaves of a state that are equal on all workers."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import jdist
from jdist import methods, states, training, transforms
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


@states.declare(shared=("count",))
class WrappedState(NamedTuple):
  count: jax.Array
  inner: DeclaredState


def test_inner_optimizer_has_no_say_in_what_is_shared():
  declared = DeclaredState(jnp.zeros(()), jnp.zeros(2))
  found = transforms.sharing(WrappedState(jnp.zeros(()), declared)).state
  assert found == WrappedState(True, DeclaredState(False, False))


def test_injected_numbers_are_shared_and_pass_equality_on():
  def chain(rate):
    return optax.chain(transforms.average_gradients(None), optax.sgd(rate))

  for build, equal in ((chain, True), (optax.sgd, False)):
    optimizer = optax.inject_hyperparams(build)(lambda count: 0.1)
    found = transforms.sharing(optimizer.init({"w": jnp.ones(2)}))
    assert found.params is equal
    state = found.state._replace(inner_state=())
    assert all(jax.tree.leaves(state)) and state.count is True


class Trunk(NamedTuple):
  """Parameters whose names are those of declarations."""

  shared: jax.Array
  averages: jax.Array
  label: jax.Array
  rounds: jax.Array


FORMS = {
  "names": Trunk(*map(jnp.ones, (1, 2, 3, 4))),
  "ordered": collections.OrderedDict(b=jnp.ones(1), a=jnp.ones(2)),
  "default": collections.defaultdict(list, b=jnp.ones(1), a=jnp.ones(2)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
  "make",
  [methods.ssgd, lambda x, axis: methods.local_sgd(x, 2, axis=axis)],
  ids=["ssgd", "local_sgd"],
)
def test_parameters_of_any_form_are_no_declaration(make, name, tmp_path):
  workers = jdist.workers(2, substrate="vmap")
  params = FORMS[name]
  optimizer = make(optax.adam(0.1), axis=workers.axis)
  state = training.init_state(workers, optimizer, params)
  found = transforms.sharing(state.opt_state)
  assert jax.tree.structure(found.state) == jax.tree.structure(state.opt_state)
  plain = training.init_state(workers, optimizer, list(jax.tree.leaves(params)))
  wanted = transforms.sharing(plain.opt_state)
  assert jax.tree.leaves(found) == jax.tree.leaves(wanted)
  assert not transforms.averages(optax.adam(0.1).init(params))
  with training.Checkpoints(tmp_path, workers) as checkpoints:
    checkpoints.save(1, state)
    restored = checkpoints.restore(state).state
  more = jdist.workers(3, substrate="vmap")
  resized = training.resize(restored, optimizer, workers, more)
  assert jax.tree.structure(resized) == jax.tree.structure(state)
