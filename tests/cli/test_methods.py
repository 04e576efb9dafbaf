"""Every method that the commands name can be built, and takes steps."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  collectives,
  conformance,
  data,
  methods,
  models,
  training,
  transforms,
)
from jdist.cli import (
  _commands,
  _groups,
  _methods,
  _options,
  _workload,
)

# Two workers that disagree have no majority, so every point between their
# targets is equally good; Muon's steps have a bounded length.
_FAR = {"signsgd": 1.3, "muloco": 1.3}
_SHAPES = {"a": (3,), "b": (2, 2), "c": (), "d": (5,)}


_MEAN = {"codec", "feedback", "reducer"}
_ROUNDS = {"interval", "interval_policy"}
_LATE = {"overlap", "delay_steps"}
_NESTEROV = {"outer_learning_rate", "outer_momentum"}
# These methods have no rounds, so an interval changes nothing.
_IN_EVERY_STEP = {
  "ssgd", "qsgd", "terngrad", "signsgd", "ef_signsgd",
  "topk_sgd", "dgc", "powersgd", "demo",
}  # fmt: skip
# The method with a trained network has tests of its own.
_NAMES = [name for name in methods.registry if name != _methods.TRAINED]


@pytest.mark.parametrize(
  ("name", "interval"),
  [(name, 1) for name in _NAMES if name in _IN_EVERY_STEP]
  + [
    pytest.param(name, interval, marks=pytest.mark.slow if interval < 3 else ())
    for name in _NAMES
    if name not in _IN_EVERY_STEP
    for interval in (1, 3)
  ],
)
def test_method_trains_towards_its_target(name, interval):
  options = _commands.Train(interval=interval, steps=120, momentum=0.5)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)

  def build(*, axis):
    return _methods.build_method(name, options, budget, axis)

  conformance.check(methods.Method("", build), within=_FAR.get(name, 0.7))


def test_workers_that_never_average_are_no_method():
  alone = methods.Method("", lambda *, axis: optax.sgd(0.1))
  with pytest.raises(AssertionError, match="agree on the anchor to the bit"):
    conformance.check(alone)


@pytest.mark.parametrize(
  ("method", "given", "used"),
  [
    ("ssgd", {}, {"codec", "feedback", "reducer"}),
    ("qsgd", {}, {"bits"}),
    ("topk_sgd", {}, {"ratio"}),
    ("powersgd", {}, {"rank"}),
    ("demo", {}, set()),
    ("sparse_loco", {}, {"bits", "ratio", "outer_learning_rate", *_ROUNDS}),
    (
      "local_sgd",
      {"codec": "top_k", "overlap": True},
      {"ratio", "carry", "stream", *_LATE, *_MEAN, *_ROUNDS},
    ),
    (
      "diloco",
      {"reducer": "power_sgd"},
      {"rank", "outer", *_NESTEROV, *_LATE, *_MEAN, *_ROUNDS},
    ),
    ("cocod", {}, {"stream", *_MEAN, *_ROUNDS}),
    (
      "cocod",
      {"interval_policy": "growth"},
      {"growth_start", "stream", *_MEAN, *_ROUNDS},
    ),
    (
      "msdpu",
      {"outer": "sgd"},
      {
        "correction", "carry", "stream", "delay_steps", "outer",
        "outer_learning_rate", "growth_start", *_MEAN, *_ROUNDS,
      },
    ),
    (
      "diloco",
      {"outer": "sgd"},
      {"outer", "outer_learning_rate", *_LATE, *_MEAN, *_ROUNDS},
    ),
    ("mp2", {}, {"predictor", *_MEAN}),
  ],
)  # fmt: skip
def test_used_options_follow_from_a_methods_arguments(method, given, used):
  taken = _methods.takes(_commands.Train(**given), method)
  found = {
    field.name
    for field in dataclasses.fields(_groups.Common)
    if "option" in field.metadata and taken & {*field.metadata["option"].fills}
  }
  # Methods with a momentum of their own are built around plain SGD.
  plain = methods.registry[method].own_momentum
  assert found == used | (set() if plain else {"optimizer", "momentum"})


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("diloco", {"codec": "int4", "feedback": "error"}),
    ("ssgd", {"codec": "top_k", "ratio": 0.5, "feedback": "ef21"}),
    ("local_sgd", {"reducer": "power_sgd", "rank": 1, "feedback": "error"}),
    ("slow_mo", {"overlap": True, "codec": "int8", "reducer": "gather"}),
    ("diloco", {"outer": "adam", "delay_steps": 1, "stream": True}),
  ],
)
def test_options_reach_the_method(name, options):
  options = _commands.Train(interval=2, steps=8, **options)
  run = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  optimizer = _methods.build_method(name, options, run, "worker")
  params = {"a": jnp.zeros((4, 4)), "b": jnp.zeros(3)}
  state = jax.eval_shape(
    jax.vmap(lambda _: optimizer.init(params), axis_name="worker"),
    jnp.zeros(2),
  )
  kinds = {type(x).__name__ for x in _all(state)}
  assert ("CompressionState" in kinds) == (
    options.codec is not None or options.reducer is not None
  )
  assert ("Flight" in kinds) == (options.overlap or options.stream)
  assert transforms.streams(state) == options.stream


@pytest.mark.parametrize("name", ["diloco", "msdpu", "streaming_diloco"])
def test_outer_optimizer_is_the_methods_own_unless_one_is_named(name):
  method = methods.registry[name]
  own = {"outer_learning_rate": 0.3} if name != "msdpu" else {}
  found = _methods._arguments(method, _commands.Train(**own))
  assert found.items() >= own.items() and "rule" not in found
  named = _commands.Train(outer="adam", outer_learning_rate=0.3)
  found = _methods._arguments(method, named)
  assert "rule" in found and "outer_learning_rate" not in found


@pytest.mark.parametrize("given", [{}, {"learning_rate": 0.3, "momentum": 0.5}])
@pytest.mark.parametrize("outer", [None, "sgd", "momentum", "nesterov", "adam"])
def test_outer_optimizer_has_the_defaults_of_the_help(outer, given):
  def rate(default):
    return given.get("learning_rate", default)

  momentum = given.get("momentum", 0.9)
  nesterov = optax.sgd(rate(0.7), momentum, nesterov=True)
  wanted = {
    None: nesterov,
    "sgd": optax.sgd(rate(1.0)),
    "momentum": optax.sgd(rate(0.7), momentum),
    "nesterov": nesterov,
    "adam": optax.adam(rate(0.01), b1=momentum),
  }[outer]
  options = {f"outer_{key}": value for key, value in given.items()}
  found = _methods.outer_optimizer(_groups.OuterOptions(outer, **options))
  one, other = found.init(1.0), wanted.init(1.0)
  for gradient in (1.0, 0.5, -2.0):
    gradient = jnp.float32(gradient)
    update, one = found.update(gradient, one)
    expected, other = wanted.update(gradient, other)
    np.testing.assert_allclose(update, expected, rtol=1e-6)


def _all(tree):
  yield tree
  if isinstance(tree, (tuple, list)):
    for child in tree:
      yield from _all(child)


@pytest.mark.parametrize("codec", ["top_k", "random_k", "dct"])
@pytest.mark.parametrize("feedback", ["none", "error", "ef21", "momentum"])
def test_sparse_codec_with_feedback_minimizes_a_square(codec, feedback):
  options = _groups.MeanOptions(codec=codec, feedback=feedback, ratio=0.25)
  made = _methods.compression(options)

  def step(carry, _):
    w, state = carry
    mean, state = made.mean(w, state, None)
    return (w - 0.01 * mean, state), None

  w = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
  start = w, made.init(w, None)
  (w, _), _ = jax.lax.scan(step, start, length=400)
  assert jnp.abs(w).max() < 0.4


def test_values_of_the_preset_do_not_count_as_given():
  gpu = _options.with_preset(_commands.Train, "cifar10-gpu")
  assert gpu.stream
  _methods.check("--method", gpu, ("local_sgd",))
  many = dataclasses.replace(gpu, delay_steps=2)
  _methods.check("--methods", many, ("qsgd", "msdpu"))
  with pytest.raises(ValueError, match="`--delay-steps` must be left out"):
    _methods.check("--method", many, ("qsgd",))


@pytest.mark.parametrize(("start", "first"), [(1.0, 1), (2.0, 4), (3.0, 8)])
def test_growth_starts_with_its_square_up_to_the_longest(start, first):
  options = _commands.Train(interval=8, growth_start=start, steps=100)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  optimizer = _methods.build_method("msdpu", options, budget, None)
  assert transforms.interval(optimizer.init(jnp.zeros(2))) == first


@pytest.mark.parametrize("rule", ["msdpu", "adacomm"])
def test_long_first_interval_is_kept(rule):
  options = _commands.Train(interval=32, interval_policy=rule, steps=100)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  optimizer = _methods.build_method("local_sgd", options, budget, None)
  assert transforms.interval(optimizer.init(jnp.zeros(2))) == 32


def test_adacomm_decides_after_each_tenth_of_a_run():
  options = _commands.Train(interval_policy="adacomm", steps=100)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  optimizer = _methods.build_method("local_sgd", options, budget, None)
  states = _all(optimizer.init(jnp.zeros(2)))
  (found,) = (x for x in states if type(x).__name__ == "AdaCommState")
  assert found.next_step == 10


def test_prediction_holds_the_variance_of_adam():
  options = _commands.Train(optimizer="adamw", steps=100)
  run = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  inner, w, ahead = _methods.optimizer_of(options, run), jnp.ones(2), []
  with jax.numpy_dtype_promotion("standard"):  # Of Optax's Adam.
    for optimizer in (
      _methods.build_method("ssgd", options, run, None, predicted_steps=8),
      transforms.predict_weights(inner, 8, b2=0.999),
    ):
      _, state = optimizer.update(w, optimizer.init(w), w)
      ahead.append(transforms.predicted_weights(state, w))
  np.testing.assert_allclose(*ahead, rtol=1e-6)
  assert (ahead[0] < w).all()


def test_only_streamed_methods_are_sent_in_steps():
  """A preset may ask for a stream that a method does not have."""
  options = _commands.Train(stream=True, delay_steps=1, interval=4, steps=8)
  run = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  team = collectives.workers(2, substrate="vmap")
  model = models.build("mlp", input_shape=(2, 2, 1), num_classes=2)
  found = {}
  for name in ("ssgd", "local_sgd"):
    optimizer = _methods.build_method(name, options, run, team.axis, model)
    given = _workload.of_trainer(options, team, optimizer, model)
    found[name] = given.get("stream_steps")
  assert found == {"ssgd": None, "local_sgd": _methods.STREAM_STEPS}


def test_windows_of_a_text_are_evaluated_in_smaller_batches(tmp_path):
  """Each byte of a window has 256 logits."""
  path = tmp_path / "text"
  path.write_bytes(b"ab" * 20000)
  text = data.load_text(str(path), "test", window_length=1024)
  assert _workload._evaluation_batch(4, text) == 128 // 4


@pytest.mark.parametrize("method", ["ssgd", "diloco"])
def test_prepared_programs_are_of_their_method(method):
  """Only a method with rounds has an anchor, and only DiLoCo a momentum."""
  options = _commands.Train(workers=2, momentum=0.0)
  workload = _workload.build(options)
  found = _workload.Prepared(workload, options, method, 0.1)
  assert found.budget.learning_rate(10**6) <= 0.1
  params = workload.model(0).params
  for optimizer in (found.programs.optimizer, found.method_for(None)):
    state = jax.eval_shape(transforms.lenient(optimizer).init, params)
    rounds = jax.eval_shape(transforms.rounds_ahead, state)
    assert (rounds is None) == (method == "ssgd")


def test_host_ends_rounds_by_default(monkeypatch):
  told = []

  class Recorded(training.Trainer):
    def __init__(self, *args, host_rounds=False, **options):
      told.append(host_rounds)
      super().__init__(*args, host_rounds=host_rounds, **options)

  monkeypatch.setattr(training.loop, "Trainer", Recorded)
  options = _commands.Train(
    dataset="digits", model="mlp", workers=2, evaluate_every_epochs=0.5
  )
  for host_rounds in (True, False):
    chosen = dataclasses.replace(options, host_rounds=host_rounds)
    workload = _workload.build(chosen)
    found = _workload.Prepared(workload, chosen, "diloco", 0.1)
    assert found.evaluate_every == round(0.5 * workload.steps_per_epoch) > 1
  # None lets the trainer decide.
  assert told == [None, False]


def test_warmup_is_half_of_a_short_run_at_most():
  options = _commands.Train(steps=10, warmup_epochs=2.0)
  budget = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  assert (budget.num_steps, budget.warmup_steps) == (10, 5)
  longer = dataclasses.replace(options, steps=40)
  budget = _methods.make_budget(longer, 0.1, steps_per_epoch=4.0)
  assert budget.warmup_steps == 8


def test_quadratic_rule_lengthens_rounds_below_half_of_the_peak():
  options = _commands.Train(interval=4, interval_policy="qsr")
  rate = optax.exponential_decay(0.1, 100, 0.5)
  run = _methods.run_of(options, 10_000, 0, rate)
  policy = _methods._interval(
    "local_sgd", methods.registry["local_sgd"], options, run
  )
  # The rate is halved in 100 steps: at a fourth rounds have 4 * 2**2 steps.
  for step, steps in ((0, 4), (99, 4), (200, 16)):
    found, _ = policy.next(policy.init(), jnp.int32(step), jnp.float32(1.0))
    assert found == pytest.approx(steps, abs=1)


def test_cosine_rises_from_a_tenth_and_ends_at_a_hundredth_of_its_peak():
  options = _commands.Train(steps=100, warmup_epochs=2.0)
  run = _methods.make_budget(options, 0.5, steps_per_epoch=4.0)
  assert (run.num_steps, run.warmup_steps) == (100, 8)
  found = [float(run.learning_rate(step)) for step in (0, 8, 54, 100)]
  # Between its ends the cosine is half-way in the middle.
  assert found == pytest.approx([0.05, 0.5, (0.5 + 0.005) / 2, 0.005])


def test_momentum_of_workers_is_nesterov_s():
  options = _commands.Train(momentum=0.5, weight_decay=0.0, steps=10)
  run = _methods.make_budget(options, 0.1, steps_per_epoch=4.0)
  optimizer, rate = _methods.optimizer_of(options, run), run.learning_rate
  w = jnp.zeros(())
  first, state = optimizer.update(w + 1.0, optimizer.init(w), w)
  second, _ = optimizer.update(w + 1.0, state, w)
  # The velocities are 1 and 1.5, and each looks one step ahead.
  np.testing.assert_allclose(first, -rate(0) * 1.5, rtol=1e-6)
  np.testing.assert_allclose(second, -rate(1) * 1.75, rtol=1e-6)


def test_rounds_of_qsr_grow_from_half_of_the_highest_rate():
  options = _commands.Train(
    interval=4, interval_policy="qsr", steps=100, warmup_epochs=2.0
  )
  run = _methods.make_budget(options, 0.1, steps_per_epoch=4.5)
  assert (run.warmup_steps, run.steps_per_epoch) == (9, 5)
  method = methods.registry["diloco"]
  policy = _methods._interval("diloco", method, options, run)
  found = []
  for step in (0, 9, 40, 70):
    found.append(int(policy.next(policy.init(), jnp.array(step), None)[0]))
  peak = float(run.learning_rate(9))
  late = (0.5 * peak / float(run.learning_rate(70))) ** 2 * 4
  assert found == [4, 4, 4, int(late)] and late > 5


def test_messages_between_stages_are_not_scaled():
  """A scaled entry of an activation is no activation."""
  options = types.SimpleNamespace(edge_codec="random_k", ratio=0.5)
  assert not _methods.edge_codec(options).scaled


@pytest.mark.parametrize(
  ("schedule", "warmup_epochs", "rates"),
  [
    ("constant", 0.0, [0.2, 0.2, 0.2]),
    ("constant", 1.0, [0.02, 0.2, 0.2]),
    # Halfway to a hundredth.
    ("cosine", 0.0, [0.2, 0.101, 0.002]),
    ("cosine", 1.0, [0.02, 0.2, 0.002]),
  ],
)
def test_rate_begins_at_its_peak_without_a_warm_up(
  schedule, warmup_epochs, rates
):
  options = _groups.Common(
    steps=4, schedule=schedule, warmup_epochs=warmup_epochs
  )
  run = _methods.make_budget(options, 0.2, 2.0)
  found = [float(run.learning_rate(step)) for step in (0, 2, 4)]
  assert found == pytest.approx(rates, rel=1e-5)


def test_nonfinite_gradients_are_skipped_where_it_is_asked_for():
  run, w = methods.Run(100, 10, 0.1), jnp.ones(2)
  for skips in (False, True):
    options = _commands.Train(method="ssgd", skip_nonfinite=skips)
    optimizer = _methods.build_method("ssgd", options, run, None)
    updates, _ = optimizer.update(jnp.full(2, jnp.nan), optimizer.init(w), w)
    assert bool((updates == 0).all()) == skips
