"""Refusals of steps, losses and runs: an argument and its rule."""

import pathlib
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import training
from jdist.training.loop import _programs
from tests import _refusals
from tests.training import _tiny

NAN = float("nan")


IMAGES = {"image": np.ones((4, 3), np.float32), "label": np.zeros(4, np.int32)}


def apply(params, state, x, train, mask=None):
  del train, mask
  return x @ params, state


def loss_of(apply=apply, batch=IMAGES, **options):
  """Traces a loss of classes on a batch."""
  loss_fn = training.classification_loss(apply, **options)
  given = jnp.ones((3, 5)), {}, batch, jax.random.key(0)
  return jax.eval_shape(loss_fn, *given)


def evaluated(apply=apply, **options):
  """Evaluates a model of classes on a batch."""
  batches = [jax.tree.map(lambda x: x[None], IMAGES)]
  evaluate = training.Evaluator(_tiny.team("none"), apply, batches, **options)
  return evaluate.measure(np.ones((3, 5), np.float32))


def step(accumulate):
  return training.make_step(
    _tiny.loss_fn, optax.sgd(0.1), axis=None, accumulate=accumulate
  )


def gradient(accumulate):
  return training.make_gradient(_tiny.loss_fn, accumulate=accumulate)


def gradient_of(loss_fn):
  return training.make_gradient(loss_fn)


def evaluator(batches):
  return training.Evaluator(_tiny.team("none"), apply, batches)


def kept(number):
  with tempfile.TemporaryDirectory() as folder:
    return training.Checkpoints(folder, _tiny.team("none"), keep=number)


def opened(folder):
  return training.Checkpoints(folder, _tiny.team("none"))


def save(step, **options):
  team = _tiny.team("vmap")
  state = _tiny.init(team, "momentum")
  with (
    tempfile.TemporaryDirectory() as folder,
    training.Checkpoints(folder, team) as checkpoints,
  ):
    checkpoints.save(step, state, **options)


def trainer(**options):
  return training.Trainer(
    _tiny.team("none"), lambda state, batch: None, **options
  )


def fit(batches=lambda start: iter(()), num_steps=3, used=False, **options):
  team = _tiny.team("vmap")
  optimizer = _tiny.optimizers(team.axis)["momentum"]
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  state = _tiny.init(team, "momentum")
  if used:
    jax.tree.leaves(state.params)[0].delete()
  training.Trainer(team, step).fit(state, batches, num_steps, **options)


def loss_alone(found):
  gradient = training.make_gradient(lambda *given: found)
  gradient(jnp.ones(2), {}, {"x": jnp.ones(2)}, jax.random.key(0))


ONE, METRICS = jnp.ones(()), {"loss": 1.0, "rounds": 1}
KEY = jax.random.key(0)
MIXED = {"a": np.ones(2), 1: np.ones(2)}
GRADIENT = training.make_gradient(
  lambda p, s, b, k: (jnp.sum(p["a"]), (s, {}))
)({"a": jnp.ones(2)}, {}, {"x": jnp.ones(2)}, jax.random.key(0))


def stepped(step):
  team = _tiny.team("vmap")
  run = training.Trainer(team, lambda state, batch: step(state))
  run.fit(_tiny.init(team, "momentum"), _tiny.batches(team), 1)


def init(params, model_state=None):
  optimizer = _tiny.optimizers(None)["momentum"]
  return training.init_state(_tiny.team("none"), optimizer, params, model_state)


def communicating(sent_bytes, num_workers=2):
  """Checks a run whose model has statistics of 12 bytes."""
  made = object.__new__(_programs.CompiledStep)
  made.workers = types.SimpleNamespace(num_workers=num_workers)
  model_state = {"mean": np.zeros((num_workers, 3), np.float32)}
  state = types.SimpleNamespace(model_state=model_state, laws=())
  sent = types.SimpleNamespace(payload_bytes=sent_bytes, count=2)
  traffic = [types.SimpleNamespace(collectives=x) for x in ([], [sent])]
  made.check_communicates(state, traffic)


def saved(tree, template=None):
  with (
    tempfile.TemporaryDirectory() as folder,
    training.Checkpoints(folder, _tiny.team("none")) as checkpoints,
  ):
    checkpoints.save(1, tree)
    checkpoints.restore(template)


def updated(gradient):
  optimizer = _tiny.optimizers(None)["momentum"]
  update = training.make_update(optimizer, axis=None)
  update(jax.tree.map(lambda x: x[0], init(_tiny.params())), gradient)


@_refusals.table(
  ("directory", lambda: opened("gs://bucket/run"), "must be a local folder"),
  (
    "directory",
    lambda: opened(pathlib.Path("s3://bucket")),
    "must be a local folder",
  ),
  ("directory", lambda: opened("run\udcff"), "whose path is UTF-8"),
  ("batches", lambda: fit([]), "a function of an int"),
  ("batches(step)", lambda: fit(lambda start: [1]), "an iterator of batches"),
  (
    "evaluate",
    lambda: fit(evaluate=3),
    "a function of a `training.TrainState` or None",
  ),
  (
    "on_record",
    lambda: fit(on_record="x"),
    "a function of a `training.Record`",
  ),
  (
    "on_resume",
    lambda: fit(on_resume=1),
    "a function of a `training.Restored`",
  ),
  (
    "label",
    lambda: fit(label=5),
    "function of a `training.Record`",
  ),
  ("metadata", lambda: fit(metadata="text"), "a dict or None"),
  ("metadata", lambda: fit(metadata={"a": jnp.ones(1)}), "a value of JSON"),
  *(
    ("metadata", lambda x=x: fit(metadata={x: 1}), f"must not have {x!r}")
    for x in ("sent_bytes", "jdist.history")
  ),
  ("num_steps", lambda: fit(num_steps=5.5), "an int >= 1"),
  ("num_steps", lambda: fit(num_steps=0), "an int >= 1"),
  ("state", lambda: fit(used=True), "still be there"),
  ("loss_fn", lambda: gradient_of("mean"), "a function of params"),
  ("loss_fn", lambda: loss_alone(jnp.ones(())), "return `loss, (model_state"),
  ("loss_fn", lambda: loss_alone((jnp.ones(()), {})), "return `loss, (model_"),
  ("loss_fn", lambda: loss_alone((ONE, ({}, None))), "a dict of metrics, got"),
  ("loss_fn", lambda: loss_alone((ONE, ({}, {1: ONE}))), "a dict of metrics"),
  (
    "loss_fn",
    lambda: loss_alone((ONE, ({"a": ONE}, {}))),
    "must return `model_state` in its form, but its leaf a is float32[]",
  ),
  ("metrics", lambda: loss_alone((ONE, ({}, {"a": KEY}))), "tree of numbers"),
  ("loss_fn", lambda: gradient_of(lambda params: 0.0), "a function of params"),
  ("loss_fn", lambda: loss_alone((jnp.ones(3), ({}, {}))), "one float"),
  ("loss_fn", lambda: loss_alone(((ONE, ONE), ({}, {}))), "one float"),
  ("loss_fn", lambda: loss_alone((None, ({}, {}))), "one float"),
  ("loss_fn", lambda: loss_alone((jnp.int32(1), ({}, {}))), "one float"),
  ("metrics", lambda: loss_alone((ONE, ({}, {"a": "b"}))), "got 'b' at 'a'"),
  ("step", lambda: stepped(lambda state: None), "a state like its own and a d"),
  (
    "step",
    lambda: stepped(lambda state: state),
    "a state like its own and a d",
  ),
  (
    "step",
    lambda: stepped(lambda state: ((), METRICS)),
    "a state like its own",
  ),
  ("step(...)[1]", lambda: stepped(lambda state: (state, 1.0)), "a dict of"),
  (
    "step",
    lambda: stepped(lambda state: (state._replace(step=ONE), METRICS)),
    "its leaf step is float32[] and not int32[]",
  ),
  (
    "step",
    lambda: stepped(lambda state: (state, METRICS | {"a": jnp.ones(3)})),
    "got float32[3] as 'a'",
  ),
  ("gradient", lambda: updated(None), "a `Gradient`"),
  ("gradient", lambda: updated(jnp.ones(2)), "a `Gradient`"),
  ("updates", lambda: updated(GRADIENT), "its leaf bias is missing"),
  ("params", lambda: init(jax.eval_shape(_tiny.params)), "got the shape of"),
  (
    "model_state",
    lambda: init(_tiny.params(), jax.ShapeDtypeStruct((2,), "float32")),
    "got the shape of float32[2]",
  ),
  (
    "batch",
    lambda: evaluator([{"x": jnp.ones((1, 2))}]),
    "to predict, `label`",
  ),
  *(
    (name, lambda call=call: call(MIXED), "keys can be sorted, got")
    for name, call in (
      ("params", init),
      ("params", lambda tree: init([tree])),
      ("params", lambda tree: training.save_model("never.npz", tree)),
      ("model_state", lambda tree: init(_tiny.params(), tree)),
      ("loss_fn", lambda tree: loss_alone((ONE, (tree, {})))),
      ("tree", _tiny.team("none").place),
      ("tree", _tiny.team("none").view),
      ("batch", _tiny.team("none").shard),
      ("state", saved),
      ("template", lambda tree: saved({"a": np.ones((1, 2))}, tree)),
    )
  ),
  ("batches", lambda: evaluator({1, 2}), "must be a list"),
  ("num_steps", lambda: training.Progress(jnp.ones(3), "a"), "an int >= 0"),
  ("accumulate", lambda: step(0), "an int >= 1"),
  ("accumulate", lambda: gradient(0), "an int >= 1"),
  ("timeout_s", lambda: trainer(timeout_s=0), "in (0, inf]"),
  ("timeout_s", lambda: trainer(timeout_s=-1), "in (0, inf]"),
  ("timeout_s", lambda: trainer(timeout_s=NAN), "a finite number"),
  ("stream_steps[0]", lambda: _programs.Programs((0,)), "an int >= 1"),
  ("stream_steps[1]", lambda: _programs.Programs((2, -1)), "an int >= 1"),
  ("stream_steps[0]", lambda: _programs.Programs((True,)), "an int >= 1"),
  ("stream_steps[0]", lambda: _programs.Programs((2.0,)), "an int >= 1"),
  ("batches", lambda: evaluator([]), "at least one batch"),
  (
    "tree",
    lambda: evaluator(
      [{"label": np.zeros((1, 1), int), "image": np.ma.ones((1, 1))}]
    ),
    "fill masked entries",
  ),
  *(
    (
      "batches",
      lambda label=label, mask=mask: evaluator(
        [{"label": np.array([[label]]), "mask": np.array([[mask]])}]
      ),
      "a sample that counts",
    )
    for label, mask in ((-100, 1.0), (0, 0.0))
  ),
  ("keep", lambda: kept(0), "an int >= 1, got 0"),
  ("step", lambda: save(-1), "an int >= 0"),
  (
    "label",
    lambda: training.label_loss(jnp.ones((2, 3)), {"label": [1, 0]}),
    "an array, got [1, 0]",
  ),
  (
    "rows",
    lambda: training.append_rows("nowhere", [{"loss": jnp.ones(())}]),
    "a value of JSON",
  ),
  ("state", lambda: kept(1).save(1, {"none": None}), "have a filled array"),
  (
    "state",
    lambda: kept(1).save(1, {"a": jnp.zeros((1, 0))}),
    "have a filled array, got {'a'",
  ),
  ("metadata", lambda: save(1, metadata={"a": jnp.ones(1)}), "a value of JSON"),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("state", [ONE, {}, {"m": jnp.ones(3)}, {"m": 1}])
def test_model_state_of_another_form_raises(state, accumulate):
  team = _tiny.team("vmap")
  step = training.make_step(
    lambda p, s, b, k: (jnp.sum(p["bias"]), (state, {"a": 1.0})),
    optax.sgd(0.1),
    axis=team.axis,
    accumulate=accumulate,
    independent=True,
  )
  start = training.init_state(
    team, optax.sgd(0.1), {"bias": jnp.ones(2)}, {"m": jnp.ones(2)}
  )
  batch = team.place({"x": np.ones((team.num_workers, 2))})
  with _refusals.refused("loss_fn", "return `model_state` in its form"):
    team.jit(step)(start, batch)


MASK = np.ones(4, np.float32)


@_refusals.table(
  ("apply", lambda: loss_of(lambda p, s, x: (x @ p, s)), "with `train=`"),
  ("apply", lambda: loss_of(None), "a function of params"),
  (
    "apply",
    lambda: loss_of(
      lambda p, s, x, train: (x @ p, s), batch=IMAGES | {"mask": MASK}
    ),
    "`train=` and `mask=`",
  ),
  ("apply", lambda: loss_of(lambda p, s, x, train: x @ p), "logits, state"),
  ("logits", lambda: loss_of(lambda p, s, x, train: ("a", s)), "an array"),
  ("logits", lambda: loss_of(lambda p, s, x, train: ([x], s)), "an array"),
  ("batch", lambda: loss_of(lambda p, s, x, train: (x.sum(), s)), "float32[]"),
  (
    "batch",
    lambda: loss_of(lambda p, s, x, train: ((x @ p)[None], s)),
    "for logits float32[1, 4, 5]",
  ),
  ("params", lambda: init({}), "have a filled array, got {}"),
  (
    "step",
    lambda: communicating(6),
    "bring the workers together, but of 2 workers nothing",
  ),
  ("normalize", lambda: loss_of(normalize=None), "a function"),
  (
    "normalize(images)",
    lambda: loss_of(normalize=lambda x: [x]),
    "an array, got [",
  ),
  (
    "augment(images)",
    lambda: loss_of(augment=lambda x, key: None),
    "an array, got None",
  ),
  (
    "batch['image']",
    lambda: loss_of(batch={"label": IMAGES["label"], "x": MASK}),
    "an array, got None",
  ),
  ("batch", lambda: loss_of(batch=IMAGES["image"]), "the classes to predict"),
  ("mask", lambda: loss_of(batch=IMAGES | {"mask": MASK[:3]}), "one entry a"),
  ("mask", lambda: loss_of(batch=IMAGES | {"mask": MASK[:1]}), "one entry a"),
  (
    "mask",
    lambda: loss_of(batch=IMAGES | {"mask": MASK[:, None]}),
    "for labels int32[4]",
  ),
  ("compute_dtype", lambda: loss_of(compute_dtype="abc"), "dtype of floats"),
  ("compute_dtype", lambda: loss_of(compute_dtype=None), "dtype of floats"),
  ("compute_dtype", lambda: loss_of(compute_dtype="int8"), "dtype of floats"),
  ("compute_dtype", lambda: evaluated(compute_dtype="abc"), "got 'abc'"),
  ("apply", lambda: evaluated(lambda p, s, x: (x @ p, s)), "with `train=`"),
  ("logits", lambda: evaluated(lambda p, s, x, train: (1.0, s)), "an array"),
  (
    "normalize(images)",
    lambda: evaluated(normalize=lambda x: "text"),
    "an array, got 'text'",
  ),
  (
    "workers",
    lambda: training.Evaluator(None, apply, [IMAGES]),
    "as of `jdist.workers(...)`, got None",
  ),
)
def test_unfit_model_or_batch_is_refused_in_one_sentence(argument, call, rule):
  _refusals.check(argument, call, rule)


def test_fit_model_is_traced_and_evaluated():
  loss, _ = loss_of(batch=IMAGES | {"mask": MASK}, compute_dtype="bfloat16")
  assert loss.shape == () and loss.dtype == jnp.float32
  found = evaluated(lambda p, s, x, **_: (x @ p, s))
  assert found["loss"] == pytest.approx(np.log(5.0), rel=1e-6)


def test_more_than_the_statistics_is_communication():
  communicating(6.5)
  communicating(0, num_workers=1)


@pytest.mark.parametrize(
  ("step", "takes"),
  [
    (lambda state, batch: 0, False),
    (lambda state, batch, control: 0, True),
    (lambda state, batch, **more: 0, True),
    (3, False),  # It has no signature.
  ],
)
def test_step_may_take_a_control(step, takes):
  assert _programs._takes_control(step) is takes
