"""The front page's comparison chooses by its rule, and says what rows say."""

import numpy as np
import pytest

from tests.experiments import _loading


@pytest.fixture
def page(monkeypatch):
  _loading.enter("first_comparison", monkeypatch)
  return _loading.load("report", "first_comparison/report.py", monkeypatch)


def row(method, first, seed, hits, rate=0.1, delay=0, loss=0.1):
  marks = {"held": 100, "hits": hits, "rounds": [*range(1, len(hits) + 1)]}
  return {
    "method": method, "first": first, "seed": seed, "learning_rate": rate,
    "delay": delay, "test_loss": loss, "marks": marks,
    "sent_bytes": 1e6 / first,
  }  # fmt: skip


COSTS = [
  {
    "method": method, "first": 1 if method == "ssgd" else 8,
    "step_s": [0.001] * 3, "extra_s": [0.0] * 3, "round_bytes": 0.0,
    "messages": 10,
  }
  for method in ("ssgd", "local_sgd", "msdpu, int4")
]  # fmt: skip


def test_messages_are_hidden_by_the_steps_that_they_are_late(page):
  # Ten messages of a millisecond: ten steps hide them, of a round of 16 five.
  choice, method = page.choice, "msdpu, int4"
  assert choice.delay(COSTS, method, 32) == 10
  assert choice.delay(COSTS, method, 16) == 5
  assert choice.delay(COSTS, "local_sgd", 16) == 0
  for delay, exposed in ((0, 0.010), (7, 0.003), (10, 0.0)):
    one = row(method, 32, 0, [90, 91], delay=delay)
    steps = page.protocol.EVERY * np.array([1, 2])
    np.testing.assert_allclose(
      choice.seconds(one, COSTS), 0.001 * steps + exposed * np.array([1, 2])
    )


def test_rounds_as_good_as_ssgd_that_are_first_or_send_least_are_chosen(page):
  choice = page.choice
  tuning = [
    row(method, first, seed, [hits] * 8, rate=rate)
    for method, first, rate, hits in (
      ("ssgd", 1, 0.1, 97), ("ssgd", 1, 0.2, 96),
      ("local_sgd", 8, 0.1, 98), ("local_sgd", 16, 0.1, 97),
      ("local_sgd", 32, 0.1, 96),
    )
    for seed in (0, 1)
  ]  # fmt: skip
  soonest, fewest = (
    choice.choose(tuning, COSTS, by)
    for by in (choice.by_seconds, choice.by_bytes)
  )
  assert soonest["ssgd"][:3] == (1, 0.1, 97)
  # At equal marks the higher accuracy has reached the target earlier.
  assert soonest["local_sgd"][:3] == (8, 0.1, 98)
  assert fewest["local_sgd"].first == 16
  diverged = [x | {"test_loss": None} for x in tuning if x["first"] == 8]
  assert choice.quality(diverged) == (-np.inf, -np.inf)


def test_pages_say_what_the_rows_say(page):
  found = page.Found()
  assert not {x["seed"] for x in found.tuning} & {
    x["seed"] for runs in found.runs.values() for x in runs
  }
  assert not page.studies.write(page.pages(found), check=True)
