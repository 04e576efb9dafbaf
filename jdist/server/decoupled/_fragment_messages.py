"""Fragments' pushes by few bytes: their senders' states, and what arrives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdist.server import _message_codec

PyTree = Any
Leaves = list[jax.Array]


def first_states(
  codec: _message_codec.MessageCodec | None,
  parts: Sequence[Leaves],
  seed: int,
  number: int,
  num_workers: int,
) -> list[PyTree]:
  """Returns a learner's first states of pushes, one for each fragment.

  Each rounds by random numbers of its own, in one program for all.
  """
  if codec is None:
    return [()] * len(parts)
  found: list[PyTree] = []
  for fragment, part in enumerate(parts):
    stream = (seed * num_workers + number) * len(parts) + fragment
    state = codec.init(part)
    found.append(state._replace(step=state.step + ((stream % 2048) << 20)))
  return found


@functools.lru_cache(maxsize=16)
def transfer(
  codec: _message_codec.MessageCodec | None,
) -> Callable[[Leaves, PyTree], tuple[Leaves, PyTree]]:
  """Compiles `(progress, state) -> what the server decodes, state`."""
  if codec is None:
    return lambda progress, state: (progress, state)

  @jax.jit
  def send(progress: Leaves, state: PyTree) -> tuple[Leaves, PyTree]:
    message, state = codec.encode_payloads(progress, state)
    return codec.decode_payloads(message, progress), state

  return send
