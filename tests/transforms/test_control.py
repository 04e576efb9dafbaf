"""What a host tells is heard, or refused: never handed on to nobody."""

import jax.numpy as jnp
import optax
import pytest

from jdist import methods, training, transforms
from tests.training import _tiny

SGD = optax.sgd(0.1)
W = {"a": jnp.arange(4.0), "b": jnp.ones(2)}
TOLD = {"round_ends": True, "stream_steps": 1}


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
  return local(delay_rounds=1, stream=transforms.Stream(max_bytes=8))


DEAF = {
  "easgd": lambda: methods.easgd(SGD, 2, axis=None),
  "slow_mo": lambda: methods.slow_mo(SGD, 2, 0.1, axis=None),
  "scaffold": lambda: methods.scaffold(SGD, 2, 0.1, axis=None),
  "overlap_local_sgd": lambda: methods.overlap_local_sgd(SGD, 2, axis=None),
  "streaming_diloco": lambda: methods.streaming_diloco(SGD, 2, 2, axis=None),
  "fragment_steps": lambda: transforms.fragment_steps(SGD, 2, 2, axis=None),
  "lead_step": lambda: transforms.lead_step(SGD, SGD, axis=None),
  "od_sgd": lambda: methods.od_sgd(SGD, 0.1, axis=None),
  "update_first": lambda: transforms.update_first(SGD, axis=None),
  "predict_rest": lambda: predicted(SGD),
}


def update(optimizer, **options):
  return optimizer.update(W, optimizer.init(W), W, **options)


@pytest.mark.parametrize("option", TOLD)
@pytest.mark.parametrize("name", DEAF)
def test_what_a_method_cannot_hear_is_refused_by_its_name(name, option):
  optimizer = DEAF[name]()
  told = rf"`{option}` must be None for .*`{name}`.* got {TOLD[option]}\. Leave"
  with pytest.raises(ValueError, match=told):
    update(optimizer, **{option: TOLD[option]})
  update(optimizer, **{option: None})


@pytest.mark.parametrize(
  ("build", "option"),
  [
    (local, "round_ends"),
    (streamed, "stream_steps"),
    (lambda: methods.cocod(SGD, 2, axis=None), "round_ends"),
    (lambda: methods.easgd(local(), 3, axis=None), "round_ends"),
    (lambda: predicted(local()), "round_ends"),
    (lambda: predicted(SGD, local()), "round_ends"),
    (lambda: predicted(streamed(), local()), "stream_steps"),
    (
      lambda: predicted(local(), DEAF["easgd"]()),
      "round_ends",
    ),
  ],
)
def test_what_is_handed_on_to_local_steps_is_heard(build, option):
  optimizer = build()
  found = update(optimizer, **{option: TOLD[option]})
  assert str(found) != str(update(optimizer))


def test_what_is_not_streamed_is_no_rest_of_mp2():
  with pytest.raises(ValueError, match="`stream_steps` must be None for `pred"):
    update(
      predicted(SGD, streamed()), control=transforms.Control(stream_steps=1)
    )


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
def test_a_trainer_streams_nothing_that_is_not_streamed(build, host_rounds):
  team = _tiny.team("vmap")
  chain = build(team.axis)
  step = training.make_step(_tiny.loss_fn, chain, axis=team.axis)
  trainer = training.Trainer(
    team, step, stream_steps=(1, 2), host_rounds=host_rounds
  )
  state = training.init_state(team, chain, _tiny.params())

  def no_batches(start):
    raise AssertionError(f"asked for a batch of step {start}")

  told = r"`stream_steps` must be empty for .* got \(1, 2\).* Leave it out, or"
  with pytest.raises(ValueError, match=told):
    trainer.fit(state, no_batches, 3)
