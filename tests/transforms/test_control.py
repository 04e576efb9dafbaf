"""Controls: what a host says is followed, or refused: never ignored."""

import jax.numpy as jnp
import optax
import pytest

from jdist import methods, training, transforms
from tests.training import _tiny

SGD = optax.sgd(0.1)
W = {"a": jnp.arange(4.0), "b": jnp.ones(2)}
SAID = {
  "round_ends": True, "arrives": True, "stream_steps": 1,
  "fragments": (transforms.Control(),),
}  # fmt: skip


class Cut:
  split = staticmethod(lambda tree: (tree["a"], tree["b"]))
  join = staticmethod(lambda front, rest: {"a": front, "b": rest})


def predicted(front, rest=None):
  return transforms.predict_rest(
    front, Cut, lambda theta, f: theta * f[:2], jnp.array(1.0),
    axis=None, rest=rest,
  )  # fmt: skip


def local(**options):
  return transforms.local_steps(SGD, 2, axis=None, **options)


def streamed():
  return local(
    overlap=transforms.Delayed(stream=transforms.Stream(max_bytes=8))
  )


DEAF = {
  "update_first": lambda: transforms.update_first(SGD, axis=None),
  "predict_rest": lambda: predicted(SGD),
}
FOLLOWING = {
  "local_steps": local,
  "cocod": lambda: methods.cocod(SGD, 2, axis=None),
  "easgd": lambda: methods.easgd(SGD, 2, axis=None),
  "slow_mo": lambda: methods.slow_mo(SGD, 2, 0.1, axis=None),
  "scaffold": lambda: methods.scaffold(SGD, 2, 0.1, axis=None),
  "overlap_local_sgd": lambda: methods.overlap_local_sgd(SGD, 2, axis=None),
  "a front": lambda: predicted(local()),
  "a front, and a rest that follows no host": lambda: predicted(local(), SGD),
}


def update(optimizer, **said):
  control = transforms.Control(**said)
  return optimizer.update(W, optimizer.init(W), W, control=control)


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("method", DEAF)
def test_unsupported_control_raises_with_its_name(method, name):
  optimizer = DEAF[method]()
  refused = rf"`control` must leave `{name}` out for .*`{method}`"
  with pytest.raises(ValueError, match=refused):
    update(optimizer, **{name: SAID[name]})
  update(optimizer)
  assert transforms.rounds_ahead(optimizer.init(W)) is None


@pytest.mark.parametrize("method", FOLLOWING)
def test_host_ends_rounds(method):
  optimizer = FOLLOWING[method]()
  assert transforms.rounds_ahead(optimizer.init(W)).shape == (2, 3)
  _, ended = update(optimizer, round_ends=True)
  _, going_on = update(optimizer, round_ends=False)
  assert bool(transforms.synchronized(ended))
  assert not bool(transforms.synchronized(going_on))


@pytest.mark.parametrize(
  "build", [streamed, lambda: predicted(streamed(), local())]
)
def test_host_chooses_the_number_of_stream_steps(build):
  found = update(build(), stream_steps=1)
  assert str(found) != str(update(build()))


@pytest.mark.parametrize("build", [local, lambda: predicted(local())])
def test_stream_steps_without_a_stream_raise(build):
  with pytest.raises(ValueError, match="`stream_steps` must be left out"):
    update(build(), stream_steps=1)


@pytest.mark.parametrize(
  ("said", "message"),
  [
    ({"round_ends": 1}, "`round_ends` .*True, False or None, got 1"),
    ({"arrives": "now"}, "`arrives` .*True, False or None, got 'now'"),
    ({"stream_steps": 0}, "`stream_steps` must be an int >= 1, got 0"),
    ({"stream_steps": True}, "`stream_steps` must be an int >= 1, got True"),
  ],
)
def test_control_of_another_kind_is_refused(said, message):
  with pytest.raises(ValueError, match=message):
    transforms.Control(**said)


@pytest.mark.parametrize(
  "build",
  [
    lambda axis: methods.ssgd(SGD, axis=axis),
    lambda axis: methods.easgd(SGD, 2, axis=axis),
    lambda axis: transforms.update_first(SGD, axis=axis),
    lambda axis: methods.cocod(SGD, 2, axis=axis),
  ],
)
@pytest.mark.parametrize("host_rounds", [False, True])
def test_trainer_refuses_stream_steps_without_a_stream(build, host_rounds):
  team = _tiny.team("vmap")
  chain = build(team.axis)
  step = training.make_step(_tiny.loss_fn, chain, axis=team.axis)
  trainer = training.Trainer(
    team, step, stream_steps=(1, 2), host_rounds=host_rounds
  )
  state = training.init_state(team, chain, _tiny.params())

  def no_batches(start):
    raise AssertionError(f"asked for a batch of step {start}")

  refused = r"`stream_steps` must be empty for .* got \(1, 2\).* Leave it out"
  with pytest.raises(ValueError, match=refused):
    trainer.fit(state, no_batches, 3)


def test_places_ahead_pass_the_round_s_end():
  optimizer, w = transforms.local_steps(SGD, 3, axis=None), jnp.ones(2)
  state, found = optimizer.init(w), []
  for _ in range(3):
    found.append(transforms.rounds_ahead(state).tolist())
    _, state = optimizer.update(w, state, w)
  assert found == [
    [[3, 0, 3], [3, 1, 3]],
    [[3, 1, 3], [3, 2, 3]],
    [[3, 2, 3], [3, 0, 3]],
  ]


@pytest.mark.parametrize("method", FOLLOWING)
def test_controls_of_fragments_need_fragments(method):
  with pytest.raises(ValueError, match="`control` must leave `fragments` out"):
    update(FOLLOWING[method](), fragments=(transforms.Control(),))
