"""What late gradients cost: the variants are what they say, and the report."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import training, transforms
from jdist.training import comparison
from tests.experiments import _loading
from tests.experiments._loading import FOLDER, load

studies = _loading.shared("studies")
_RATE = 0.1


@pytest.fixture(name="accuracy")
def _accuracy(monkeypatch):
  monkeypatch.syspath_prepend(str(FOLDER / "pipeline"))
  return load("pipeline_accuracy", "pipeline/accuracy.py", monkeypatch)


@pytest.fixture(name="report")
def _report(monkeypatch):
  return load("pipeline_report", "pipeline/accuracy_report.py", monkeypatch)


def run_of(accuracy, layers=("a", "b", "c", "d", "e")):
  return accuracy.Run(lambda step: _RATE, 100, layers, accuracy.Config())


def path(optimizer, gradients, w=0.0):
  """A parameter after each of some given gradients."""

  def step(carry, gradient):
    w, state = carry
    updates, state = optimizer.update(gradient, state, w)
    w = optax.apply_updates(w, updates)
    return (w, state), w

  w = jnp.asarray(w)
  given = jnp.asarray(gradients, w.dtype)
  with jax.numpy_dtype_promotion("standard"):
    return np.asarray(jax.lax.scan(step, (w, optimizer.init(w)), given)[1])


def test_delay_of_a_window_is_its_iterations_minus_one(accuracy):
  for name, delay in (("sync", 0), ("W=2", 1), ("W=S", 3)):
    optimizer = accuracy.VARIANTS[name](run_of(accuracy))
    moved = path(optimizer, [1.0] * 5)
    assert [w != 0 for w in moved] == [i >= delay for i in range(5)]
    sgd = optax.sgd(_RATE, 0.9)
    wanted = path(transforms.delay_gradients(sgd, delay), [1.0] * 5)
    np.testing.assert_allclose(moved, wanted, rtol=1e-6)


def test_look_ahead_is_nesterovs_at_the_same_rate(accuracy):
  gradients = [1.0, -2.0, 0.5, 3.0]
  found = accuracy.VARIANTS["sync, look-ahead"](run_of(accuracy))
  wanted = optax.sgd(_RATE, 0.9, nesterov=True)
  np.testing.assert_allclose(
    path(found, gradients), path(wanted, gradients), rtol=1e-5
  )
  # However long the momentum, as far in all.
  longer = accuracy.VARIANTS["W=S, look-ahead 0.99"](run_of(accuracy))
  (*_, last) = path(longer, [1.0] + [0.0] * 2000)
  assert float(last) == pytest.approx(-_RATE / (1 - 0.9), rel=1e-3)


def test_every_fix_takes_its_delay(accuracy):
  w = {name: jnp.array(0.0) for name in "abcde"}
  for name, variant in accuracy.VARIANTS.items():
    state = variant(run_of(accuracy)).init(w)
    rings = [
      x.pending if hasattr(x, "pending") else x.past
      for x in jax.tree.leaves(
        state, is_leaf=lambda x: hasattr(x, "pending") or hasattr(x, "past")
      )
      if hasattr(x, "pending") or hasattr(x, "past")
    ]
    delays = {key: len(ring) for rings in rings for key, ring in rings.items()}
    windows = {
      delay for word, delay in (("W=2", 1), ("W=S", 3)) if word in name
    }
    wanted = dict.fromkeys("abcde", max(windows, default=0))
    if name.startswith("PipeDream"):
      # Five layers in four stages.
      wanted = {"a": 3, "b": 3, "c": 2, "d": 1, "e": 0}
    if name.startswith("sync"):
      assert not rings
    else:
      assert delays == wanted
    read = transforms.predicted_weights(state, w)
    assert read.keys() == w.keys()


def test_half_window_is_late_in_the_second_half(accuracy):
  run = run_of(accuracy)._replace(num_steps=8)
  gradients = [2.0**i for i in range(8)]
  sgd = optax.sgd(_RATE, 0.9)
  for name, delay in (("half W=2", 1), ("half W=S", 3)):
    moved = path(accuracy.VARIANTS[name](run), gradients)
    # The first four at once, an empty pipeline, then what is late.
    wanted = path(sgd, gradients[:4] + gradients[4 : 8 - delay])
    wanted = [*wanted[:4], *[wanted[3]] * delay, *wanted[4:]]
    np.testing.assert_allclose(moved, wanted, rtol=1e-6)


def test_half_window_predicts_once_it_has_made_an_update(accuracy):
  run = run_of(accuracy)._replace(num_steps=4)
  optimizer = accuracy.VARIANTS["half W=2, prediction"](run)
  w, ahead = jnp.asarray(0.0), []
  state = optimizer.init(w)
  for _ in range(5):
    ahead.append(float(transforms.predicted_weights(state, w) - w))
    updates, state = optimizer.update(jnp.asarray(1.0), state, w)
    w = optax.apply_updates(w, updates)
  # Two steps at once, one that fills; then 0.9 times the last update, which
  # had a momentum of 1 + 0.9 + 0.81.
  np.testing.assert_allclose(ahead[:4], 0.0, atol=1e-8)
  assert ahead[4] == pytest.approx(-_RATE * 0.9 * (1 + 0.9 + 0.81))


def test_smoke_preset_runs_and_is_reported(
  accuracy, report, tmp_path, monkeypatch, capsys
):
  pytest.importorskip("sklearn")
  pytest.importorskip("matplotlib")
  pytest.importorskip("simpy")
  monkeypatch.setattr(sys, "argv", ["accuracy.py", "smoke"])
  # Optax's schedules mix floats with integer counts.
  with jax.numpy_dtype_promotion("standard"):
    accuracy.main(tmp_path)
    assert capsys.readouterr().out.count("comparison ") == 4
    accuracy.main(tmp_path)
    assert not capsys.readouterr().out  # Nothing is left to do.
  rows = training.read_rows(tmp_path / "results" / "accuracy_smoke.jsonl")
  named = {(row["method"], row["seed"]): row for row in rows}
  assert len(named) == 4 and {row["steps"] for row in rows} == {45}
  assert named["sync", 0]["accuracy"] > 0.85
  # The report draws only what a page shows.
  (tmp_path / "PAGE.md").write_text("![curves](results/accuracy_smoke.png)")
  report.main(tmp_path)
  told = capsys.readouterr().out
  assert "| W=2, prediction | 0.05 | 2 |" in told
  assert "| ours, W=2 | W=2, prediction |" in told
  assert (tmp_path / "results" / "accuracy_smoke.png").stat().st_size > 0


@pytest.mark.parametrize("preset", ("cifar10", "cifar10-batch16", "text"))
def test_report_runs_over_the_rows(preset, report, tmp_path):
  pytest.importorskip("simpy")
  pytest.importorskip("matplotlib")
  rows = training.read_rows(
    FOLDER / "pipeline" / "results" / f"accuracy_{preset}.jsonl"
  )
  runs = studies.best_runs(rows, comparison.by_loss)
  tuned = studies.tuned_rates(rows, comparison.by_loss)
  for name in runs:
    own = [row for row in rows if row["method"] == name]
    tried = {r["learning_rate"] for r in own if r["purpose"] == "tuning"}
    assert len(tried) >= 3 and tuned[name].best in tried
    # A seed that has chosen a rate is not compared.
    seeds = {r["seed"] for r in own if r["purpose"] == "tuning"}
    assert not seeds & {row["seed"] for row in runs[name]}
  found = report.table(runs, tuned)
  assert len(found.splitlines()) == 2 + len(runs)
  told = report.time_table(runs, 4, (4,))
  assert "| gpipe | sync |" in told and "| ours, W=2 | W=2 |" in told
  report.draw(runs, tmp_path / "drawn.png")
  assert (tmp_path / "drawn.png").stat().st_size > 0


def test_iterations_take_the_times_of_the_formulas(report):
  pytest.importorskip("simpy")
  # A bubble of S - 1 micro-batches, or none.
  for m in (2, 4):
    for name in ("gpipe", "1f1b"):
      assert report.iteration_s(name, 4, m) == pytest.approx((m + 3) / (4 * m))
    assert report.iteration_s("ours, W=S", 4, m) == pytest.approx(1 / 4)
  assert report.iteration_s("ours, W=2", 4, 4) == pytest.approx(1 / 4)


def test_table_that_changes_takes_the_time_of_both(report):
  pytest.importorskip("simpy")
  # A quarter of a second in all for ours; (4 + 3) / 16 with a flush.
  name = "1f1b, then ours, W=2"
  for steps, wanted in ((50, 50 * 7 / 16), (100, 50 * 7 / 16 + 50 / 4)):
    found = report.seconds(name, 4, 4, steps, 100)
    assert found == pytest.approx(wanted)
  assert report.seconds("ours, W=2", 4, 4, 8, 100) == pytest.approx(2.0)


def test_differences_match_hand_computation(report):
  def row(seed, accuracy, loss):
    return {"seed": seed, "accuracy": accuracy, "test_loss": loss}

  base = [row(0, 0.50, 1.0), row(1, 0.54, 1.0)]
  points, percent = report.differences(
    [row(0, 0.49, 1.1), row(1, 0.53, 1.1)], base
  )
  assert points.mean == pytest.approx(-1.0)
  assert percent.mean == pytest.approx(10.0)
  # The base's standard deviation is 2.83 points.
  assert report.within(points, base) == "yes, surely"
  points, _ = report.differences([row(0, 0.50, 1.0), row(1, 0.50, 1.0)], base)
  assert report.within(points, base) == "yes, on average"
  points, _ = report.differences([row(0, 0.45, 1.0), row(1, 0.50, 1.0)], base)
  assert report.within(points, base) == "no"
  assert report.differences([row(0, 0.1, None)] * 2, base) == (None, None)


def test_accuracy_is_reached_between_two_evaluations(report):
  rows = [
    {"curve": [{"step": 10, "accuracy": 0.4}, {"step": 20, "accuracy": 0.6}]}
  ]
  assert report.steps_to(rows, 50.0) == pytest.approx(15.0)
  assert report.steps_to(rows, 20.0) == pytest.approx(5.0)
  assert report.steps_to(rows, 61.0) is None


@pytest.fixture(name="remedies")
def _remedies(monkeypatch):
  return load("delay_remedies", "pipeline/delay_remedies.py", monkeypatch)


def late_path(chain, delay, steps):
  """A parameter on a quadratic, whose gradients it is, with a delay."""
  optimizer = transforms.delay_gradients(chain, delay)

  def step(carry, _):
    w, state = carry
    updates, state = optimizer.update(w, state, w)
    return (optax.apply_updates(w, updates), state), w

  w = jnp.asarray(2.0)
  return np.asarray(
    jax.lax.scan(step, (w, optimizer.init(w)), length=steps)[1], np.float64
  )


def test_compensation_corrects_by_what_has_moved_since(remedies):
  w, pending = [2.0], []
  for t in range(9):
    pending.append(w[t])
    if t < 3:
      w.append(w[t])
      continue
    g = pending[t - 3]
    w.append(w[t] - 0.1 * (g + 0.5 * g * g * (w[t] - g)))
  fix = remedies.compensate_delay(0.5, 3)
  found = late_path(optax.chain(fix, optax.sgd(0.1)), 3, 10)
  np.testing.assert_allclose(found, w, rtol=1e-5)


def test_rate_by_delay_fades_to_one(remedies):
  fix = remedies.scale_by_delay(8, anneal_steps=4)
  wanted = np.cumsum([9.0 ** -(1 - min(t / 4, 1)) for t in range(6)])
  np.testing.assert_allclose(path(fix, [1.0] * 6), wanted, rtol=1e-6)


@pytest.mark.parametrize("delay", [0, 2])
def test_look_ahead_is_nesterovs_method_at_its_points(remedies, delay):
  before = w = 2.0
  points = [w]
  for t in range(11):
    y = points[-1]
    if t < delay:
      points.append(y)
      continue
    before, w = w, y - 0.3 * (1 - 0.8) * points[t - delay]
    points.append(w + 0.8 * (w - before))
  chain = optax.chain(remedies.scale_by_look_ahead(0.8), optax.scale(-0.3))
  np.testing.assert_allclose(late_path(chain, delay, 12), points, rtol=1e-4)


def test_repeated_updates_are_predicted(remedies):
  optimizer = remedies.predict_by_repeating(optax.sgd(_RATE, 0.8), 3)
  w = jnp.asarray(2.0)
  state = optimizer.init(w)
  for _ in range(2):
    updates, state = optimizer.update(jnp.asarray(1.0), state, w)
    w = w + updates
  found = transforms.predicted_weights(state, w) - w
  np.testing.assert_allclose(found, -3 * _RATE * 1.8, rtol=1e-6)
