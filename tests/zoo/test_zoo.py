"""Strangers' forms on every substrate, in `Trainer` and in an own loop."""

import itertools
import warnings

import jax
import numpy as np
import pytest

import jdist
from jdist import collectives, methods, training
from tests import _processes, _thinned
from tests.zoo import _forms, _plain

SUBSTRATES = ("vmap", "shard_map", "two on each")
WAYS = ("loop", "Trainer")
METHODS = ("local_sgd", "ssgd")


def team_of(substrate):
  if substrate == "two on each":
    mesh = collectives.make_mesh((_forms.WORKERS // 2,), ("worker",))
    return collectives.workers(_forms.WORKERS, mesh=mesh)
  return collectives.workers(_forms.WORKERS, substrate=substrate)


def train(form, substrate, way, method, rows=lambda batch, team: batch):
  """Returns parameters [workers, ...] after four steps, and the state."""
  team, plain = team_of(substrate), _plain.optimizer()
  if method == "ssgd":
    optimizer = methods.ssgd(plain, axis=team.axis)
  else:
    optimizer = jdist.local_sgd(plain, _plain.INTERVAL, axis=team.axis)
  step = training.make_step(form.loss_fn, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, form.params, form.state)
  if way == "Trainer":
    trainer = training.Trainer(team, step)
    with warnings.catch_warnings(record=True) as found:
      warnings.filterwarnings("always", "Batch shape", RuntimeWarning)
      state, _ = trainer.fit(
        state,
        lambda start: map(form.batch, range(start, _plain.STEPS)),
        _plain.STEPS,
      )
    assert len(found) == form.num_shapes - 1
    return state.params
  program = team.jit(step, donate_argnums=0)
  for number in range(_plain.STEPS):
    state, _ = program(state, team.place(rows(form.batch(number), team)))
  return state.params


# JAX's own constraint fails below its vmap on each device.
CELLS = [
  x
  for x in itertools.product(_forms.FORMS, SUBSTRATES, WAYS, METHODS)
  if x[:2] != ("sharding constraint", "two on each")
]
KEPT = {
  (name, SUBSTRATES[i % 3], WAYS[i % 2], METHODS[i // 2 % 2])
  for i, name in enumerate(_forms.FORMS)
}


@pytest.mark.parametrize(
  ("name", "substrate", "way", "method"),
  _thinned.some(CELLS, [x for x in CELLS if x in KEPT]),
)
def test_form_trains_as_in_plain_jax(name, substrate, way, method):
  check(_forms.FORMS[name], substrate, way, method)


# Forms that JAX alone refuses under a flag, by their own constants and ranks.
REFUSED = {
  ("linen RNN of LSTM cells", "x64"),
  ("linen RNN with lengths", "x64"),
  ("nnx RNN of LSTM cells", "x64"),
  ("closed-over array", "rank promotion"),
}
FAST = "x64", "a list"


@pytest.mark.parametrize(
  ("flag", "name", "substrate", "way", "method"),
  [
    pytest.param(
      flag, *x, marks=() if (flag, x[0]) == FAST else pytest.mark.slow
    )
    for flag in _forms.FLAGS
    for x in CELLS
    if x in KEPT
  ],
)
def test_form_trains_as_in_plain_jax_under_flags(
  flag, name, substrate, way, method
):
  form = _forms.under(flag, _forms.FORMS[name])
  if (name, flag) in REFUSED:
    with pytest.raises((TypeError, ValueError)):
      _plain.train(form, method)
  else:
    check(form, substrate, way, method)


def check(form, substrate, way, method):
  """Compares a form's training with that of plain JAX."""
  wanted = _plain.train(form, method)
  with form.around():
    found = train(form, substrate, way, method)
    for i, one in enumerate(wanted):
      own = jax.tree.map(lambda x, i=i: np.asarray(x)[i], found)
      assert jax.tree.structure(own) == jax.tree.structure(one)
      for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(one), strict=True):
        y = np.asarray(y)
        assert x.dtype == y.dtype
        kind = np.complex128 if np.iscomplexobj(y) else np.float64
        np.testing.assert_allclose(
          x.astype(kind), y.astype(kind), 0, form.tolerance
        )


def in_processes(names, method):
  """Returns what is wrong with each form that two processes have trained."""
  import jax
  import numpy as np

  from tests.zoo import _forms, _plain, test_zoo

  def rows(tree, team):
    return jax.tree.map(lambda x: x[np.array(team.local_workers)], tree)

  wrong = {}
  for name in names:
    form = _forms.FORMS[name]
    wanted = _plain.train(form, method)
    with form.around():
      found = test_zoo.train(form, "shard_map", "loop", method, rows)
      for i, one in enumerate(wanted):
        for x, y in zip(*map(jax.tree.leaves, (found, one)), strict=True):
          for shard in x.addressable_shards:
            own = np.asarray(shard.data)
            first = shard.index[0].start or 0
            if first <= i < first + len(own):
              kind = np.result_type(np.asarray(y).dtype, np.float32)
              away = np.abs(own[i - first].astype(kind) - np.asarray(y))
              if away.max(initial=0) > form.tolerance:
                wrong[name] = float(away.max())
  return wrong


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_forms_train_in_two_processes(method):
  found = _processes.run(
    in_processes, list(_forms.FORMS), method, num_processes=2,
    devices_per_process=2, timeout_s=1800.0,
  )  # fmt: skip
  assert found == [{}, {}]
