"""Parts that a server cannot run between tasks are refused with a remedy."""

import jax.numpy as jnp
import optax
import pytest

from jdist import codecs, elastic, methods, reducers, transforms
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
  "an axis": (
    methods.diloco(SGD, 4, axis="worker"), "`axis` must be None",
  ),
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
  "a delay longer than its task": (
    methods.diloco(
      SGD, 1, axis=None, overlap=transforms.Delayed(after_step=None)
    ),
    "`after_step` of .* 0: all merges",
  ),
  "a task's delay that begins later": (
    late(steps=4, after_step=None), "`after_step` of .* 0: all merges",
  ),
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
