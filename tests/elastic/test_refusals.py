"""What a server cannot run between tasks is refused with a remedy."""

import functools

import jax.numpy as jnp
import optax
import pytest

from jdist import codecs, elastic, methods, reducers, server, transforms
from jdist.transforms import intervals

PARAMS = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(4)}
SGD = optax.sgd(0.1)
RATE = optax.constant_schedule(0.1)
INT4 = codecs.Quantize(4)


def diloco(**options):
  return methods.diloco(SGD, 4, axis=None, **options)


def late(**options):
  return diloco(overlap=transforms.Delayed(**options))


def compressed(reducer, feedback=None):
  return diloco(compression=reducers.Compression(reducer, feedback))


def streaming(delay_steps):
  return methods.streaming_diloco(SGD, 4, 2, axis=None, delay_steps=delay_steps)


METHODS = {
  "gradients in every step": (
    methods.ssgd(SGD, axis=None), "`method` must be one with rounds",
  ),
  "a chain around it": (
    optax.chain(optax.clip(1.0), diloco()), "`method` must be .* not chained",
  ),
  "an adaptive interval": (
    methods.msdpu(SGD, 8, RATE, axis=None), "`interval` must be a number",
  ),
  "msdpu's own delay": (
    methods.msdpu(SGD, intervals.fixed(4), RATE, axis=None),
    "`steps` of an overlap must be, with a server, 0 or 4",
  ),
  "a share of its own": (late(carry=None), "`carry` of an overlap must be"),
  "a part of its own": (late(carry=0.5), "`carry` of .* 1: workers"),
  "a later delay": (late(after_step=8), "`after_step` of .* 0: all merges"),
  "a stream": (late(stream=transforms.Stream()), "`stream` of .* None"),
  "a delay within a task": (streaming(1), "`steps` of .* 0 or 2, the steps"),
  "control variates": (
    methods.scaffold(SGD, 4, RATE, axis=None), "ControlVariates. Take",
  ),
  "springs": (methods.easgd(SGD, 4, axis=None), "`rule` must be .* Elastic"),
  "low rank": (
    compressed(reducers.PowerSGD(2)), "`compression` must be a codec",
  ),
  "a vote": (
    compressed(reducers.MajorityVote()), "`compression` must be a codec",
  ),
  "a memory at the receiver": (
    compressed(INT4, reducers.EF21()), "`feedback` must be",
  ),
  "entries by a shared seed": (
    compressed(codecs.RandomK(0.5)), "`codec` must not choose entries",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_method_is_refused(name):
  method, said = METHODS[name]
  with pytest.raises(ValueError, match=said):
    elastic.Rounds(method, PARAMS, workers=("a", "b"))


BAD = {
  "workers": {"workers": ("a", "a")},
  "samples": {"samples": 0},
  "quorum": {"quorum": 0.0},
  "grace": {"grace": -1.0},
  "timeout_s": {"timeout_s": 0.0},
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_arguments_raise(name):
  with pytest.raises(ValueError, match=f"`{name}` must"):
    elastic.Rounds(diloco(), PARAMS, **({"workers": ("a", "b")} | BAD[name]))


def test_name_must_be_a_workers():
  rounds = elastic.Rounds(diloco(), PARAMS, workers=("a", "b"))
  with pytest.raises(ValueError, match="`name` must be 'a' or 'b'"):
    rounds.loop(None, "c")


def protocol(**options):
  return server.DecoupledDiLoCo(
    batches=server.FixedBatches(8), interval=4, quorum=1.0, grace=0.0,
    **options,
  )  # fmt: skip


def test_members_in_step_are_one_merge_late():
  """By hand: who pushes last is sent what the others are."""
  rule = protocol(ahead=1, in_step=True)
  state = rule.init("ab")
  send = functools.partial(rule.receive, state, 0.0)
  for worker in "ab":
    (reply,) = send(server.Pull(worker))
    assert reply.pulled is None
  # The first to push has its next task at once, before anything is merged.
  (reply,) = send(server.Push("a", 0, 32, 1.0))
  assert (reply.task, reply.pulled) == (2, ())
  # It waits after its second push, which belongs to the second merge.
  assert send(server.Push("a", 2, 32, 1.0)) == []
  assert send(server.Pull("a")) == []
  reply, update, waiting = send(server.Push("b", 1, 32, 1.0))
  assert (reply.worker, reply.pulled) == ("b", ())
  assert (update.tasks, update.staleness) == ((0, 1), (0, 0))
  assert (waiting.worker, waiting.pulled) == ("a", (0,))
  reply, update = send(server.Push("b", 3, 32, 1.0))
  assert (reply.worker, reply.pulled) == ("b", (0,))
  assert (update.tasks, update.staleness) == ((2, 3), (1, 1))


def test_push_that_misses_its_merge_is_in_the_next_one():
  rule = protocol(ahead=1, in_step=True)
  state = rule.init("ab")
  for worker in "ab":
    rule.receive(state, 0.0, server.Pull(worker))
  rule.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  # The merge does not wait for who has left, and returns.
  (update,) = rule.receive(state, 1.0, server.Leave("b"))
  assert update.tasks == (0,)
  rule.receive(state, 1.0, server.Join("b"))
  (reply,) = rule.receive(state, 1.0, server.Pull("b"))
  assert (reply.fragment, reply.pulled, reply.version) == (0, None, 1)
  assert [x[2:] for x in state.changes] == [
    ("joined", "a", 2), ("joined", "b", 2), ("left", "b", 1),
    ("returned", "b", 2),
  ]  # fmt: skip
  assert [x[1:] for x in state.shares] == [(1, 1)]


def test_weights_follow_samples():
  """The paper's follow samples times samples a step."""
  found = []
  for weights in ("samples", "paper"):
    rule = protocol(ahead=0, weights=weights)
    state = rule.init("ab")
    for worker in "ab":
      rule.receive(state, 0.0, server.Pull(worker))
    rule.receive(state, 1.0, server.Push("a", 0, 30, 1.0))
    update, *_ = rule.receive(state, 1.0, server.Push("b", 1, 10, 1.0))
    found.append(update.weights)
  assert found[0] == pytest.approx((0.75, 0.25))
  assert found[1] == pytest.approx((0.9, 0.1))


def test_in_step_needs_a_task_ahead():
  with pytest.raises(
    ValueError, match="`in_step` must be False with `ahead` 2"
  ):
    protocol(ahead=2, in_step=True)
