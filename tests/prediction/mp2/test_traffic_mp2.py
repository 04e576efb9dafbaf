"""Bytes: the paper's number, like for like, and those really sent."""

import functools

import jax
import pytest

from jdist import collectives, prediction

# Bytes of the authors' push, and in per cent what it saves as they count, like
# for like, and in both directions. By hand: 8 n + 161 over 4 N, n / N, and
# (n + N) / 2 N. Only VGG-15's are in the sheet.
BY_HAND = {
  "vgg15": (2_081_441, 88.98, 94.49, 47.2),
  "resnet18": (8 * 185_664 + 161, 88.17, 94.09, 47.0),
  "lenet": (8 * 2_572 + 161, 91.60, 95.83, 47.9),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_shares_are_those_counted_by_hand(name):
  found = prediction.traffic(prediction.published_cut(name))
  pushed, published, like_for_like, both = BY_HAND[name]
  assert found.published_bytes == pushed
  assert round(100 * found.uplink_saved_as_published, 2) == published
  assert round(100 * found.uplink_saved, 2) == like_for_like
  assert round(100 * found.both_saved, 1) == both


def test_the_counts_are_those_of_the_messages_in_a_traced_step():
  """A mean of the fronts against one of all parameters, on 8 workers."""
  cut = prediction.published_cut("vgg15")
  count = functools.partial(collectives.traffic, axis="worker", num_workers=8)
  mean = functools.partial(collectives.mean, axis="worker")
  front = count(lambda tree: mean(cut.flatten_front(tree)), cut.abstract())
  whole = count(mean, cut.abstract())
  found = prediction.traffic(cut)
  # What all-reduce sends of a message, 2 (8 - 1) / 8.
  assert front.bytes_per_step == found.pushed_bytes * 1.75
  assert whole.bytes_per_step == found.whole_bytes * 1.75
  saved = 1 - front.bytes_per_step / whole.bytes_per_step
  assert f"{saved:.2%}" == "94.49%"


def test_what_is_no_cut_cannot_be_counted():
  model = prediction.published_model("lenet", abstract=True)
  for wrong in (model, model.params, "lenet", None):
    with pytest.raises(ValueError, match=r"`cut` must be where.*num_layers\)"):
      prediction.traffic(wrong)


def test_half_precision_is_counted_as_it_is_sent():
  cut = prediction.published_cut("lenet")
  half = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), cut.abstract()
  )
  found = prediction.traffic(prediction.cut(half, 2))
  assert found.pushed_bytes == 4 * cut.num_front
  assert found.whole_bytes == 2 * (cut.num_front + cut.num_rear)
