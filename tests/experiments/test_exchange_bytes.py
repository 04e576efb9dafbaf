"""Bytes that MP² sends, as its authors count them and as a trace does."""

import functools

import jax
import pytest

from jdist import collectives, prediction
from tests.experiments import _loading


@pytest.fixture
def exchange_bytes(monkeypatch):
  module = _loading.load("exchange", "mp2/exchange.py", monkeypatch)
  return module.exchange_bytes


# Bytes of the authors' push, and in per cent what it saves as they count, like
# for like, and in both directions. By hand: 8 n + 161 over 4 N, n / N, and
# (n + N) / 2 N. Only VGG-15's are in the sheet.
BY_HAND = {
  "vgg15": (2_081_441, 88.98, 94.49, 47.2),
  "resnet18": (8 * 185_664 + 161, 88.17, 94.09, 47.0),
  "lenet": (8 * 2_572 + 161, 91.60, 95.83, 47.9),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_saved_shares_match_counts_by_hand(name, exchange_bytes):
  found = exchange_bytes(prediction.published_cut(name))
  pushed, published, like_for_like, both = BY_HAND[name]
  assert found.published_bytes == pushed
  whole = found.whole_bytes
  assert round(100 * (1 - pushed / whole), 2) == published
  assert round(100 * (1 - found.pushed_bytes / whole), 2) == like_for_like
  sent = found.pushed_bytes + whole
  assert round(100 * (1 - sent / (2 * whole)), 1) == both


def test_byte_counts_match_a_traced_step(exchange_bytes):
  """A mean of the fronts against one of all parameters, on 8 workers."""
  cut = prediction.published_cut("vgg15")
  count = functools.partial(collectives.traffic, axis="worker", num_workers=8)
  mean = functools.partial(collectives.mean, axis="worker")
  front = count(lambda tree: mean(cut.flatten_front(tree)), cut.abstract())
  whole = count(mean, cut.abstract())
  found = exchange_bytes(cut)
  # What all-reduce sends of a message, 2 (8 - 1) / 8.
  assert front.bytes_per_step == found.pushed_bytes * 1.75
  assert whole.bytes_per_step == found.whole_bytes * 1.75
  saved = 1 - front.bytes_per_step / whole.bytes_per_step
  assert f"{saved:.2%}" == "94.49%"


def test_half_precision_is_counted_in_its_width(exchange_bytes):
  cut = prediction.published_cut("lenet")
  half = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), cut.abstract()
  )
  found = exchange_bytes(prediction.cut(half, 2))
  assert found.pushed_bytes == 4 * cut.num_front
  assert found.whole_bytes == 2 * (cut.num_front + cut.num_rear)
