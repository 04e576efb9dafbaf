"""Wrong calls of the Python doors, by room: one clear error each.

Every argument of a door is replaced by what it cannot be.  Either the door
takes it, or it raises a ValueError of its own that quotes a name: never a
traceback that ends inside JAX, Optax or NumPy.
"""

import contextlib
import inspect
import traceback

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import jdist
from jdist import codecs, collectives, methods, reducers, training, transforms
from jdist.transforms import intervals

SGD = optax.sgd(0.1)
PARAMS = {"a": jnp.ones((4, 4)), "b": jnp.ones(3)}
TEAM = collectives.workers(2, substrate="vmap")
AXIS = "worker"
ROOMS = {}


def door(name, function, then=lambda made: made, /, **given):
  """Adds a function, all its arguments, and what is done with its result."""
  for key, one in inspect.signature(function).parameters.items():
    default = one.default
    factory = type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
    if default is not inspect.Parameter.empty and not factory:
      given.setdefault(key, default)
  ROOMS[name] = function, given, then


def traced(optimizer):
  """Traces a step of two workers, if there is one."""
  if not isinstance(optimizer, optax.GradientTransformation):
    return

  def step(params, state, loss):
    updates, state = optimizer.update(
      params, state, params, loss=loss, value=loss
    )
    return transforms.apply_updates(params, updates, state)

  params = TEAM.replicate(PARAMS)
  state = jax.eval_shape(TEAM.spmd(optimizer.init), params)
  jax.eval_shape(TEAM.spmd(step), params, state, jnp.ones(2))


def local(**options):
  given = {"inner": SGD, "interval": 2, "axis": AXIS} | options
  traced(transforms.local_steps(**given))


def compressed(reducer, feedback=None):
  made = reducers.Compression(reducer, feedback)
  traced(methods.ssgd(SGD, axis=AXIS, compression=made))


for _name, _method in methods.registry.items():
  _given = {"axis": AXIS} | {
    key: value
    for key, value in {
      "optimizer": SGD,
      "interval": 2,
      "learning_rate": 0.1,
      "local_learning_rate": 0.1,
      "switch_step": 2,
      "warmup_steps": 2,
      "fragments": 2,
    }.items()
    if key in _method.required
  }
  if _name == "msdpu":  # Its rounds grow as the rate falls.
    _given["learning_rate"] = optax.linear_schedule(0.1, 0.01, 10)
  if _name != "mp2":  # tests/transforms/test_predicted_refusals.py
    door(f"methods.{_name}", _method.factory, traced, **_given)

for _name in ("average_gradients", "skip_nonfinite"):
  door(f"transforms.{_name}", getattr(transforms, _name), traced, axis=AXIS)
door(
  "transforms.local_steps",
  transforms.local_steps,
  traced,
  inner=SGD,
  interval=2,
  axis=AXIS,
)
door(
  "transforms.fragment_steps",
  transforms.fragment_steps,
  traced,
  inner=SGD,
  interval=2,
  fragments=2,
  axis=AXIS,
)
door(
  "transforms.delay_gradients",
  transforms.delay_gradients,
  traced,
  optimizer=SGD,
  steps=1,
)
door(
  "transforms.predict_weights",
  transforms.predict_weights,
  traced,
  optimizer=SGD,
  steps=1,
)
door(
  "transforms.update_first",
  transforms.update_first,
  traced,
  optimizer=SGD,
  axis=AXIS,
)
door(
  "transforms.clip_local",
  transforms.clip_local,
  traced,
  threshold=1.0,
  axis=AXIS,
)
door(
  "transforms.clip_deviations",
  transforms.clip_deviations,
  traced,
  deviations=1.0,
)
door(
  "transforms.proximal",
  transforms.proximal,
  lambda x: local(inner=optax.chain(x, SGD)),
  strength=0.1,
)
door("transforms.Delayed", transforms.Delayed, lambda x: local(overlap=x))
door(
  "transforms.Stream",
  transforms.Stream,
  lambda x: local(overlap=transforms.Delayed(stream=x)),
)
door(
  "transforms.Elastic",
  transforms.Elastic,
  lambda x: local(rule=x),
  moving_rate=0.5,
)
door(
  "transforms.OuterStep",
  transforms.OuterStep,
  lambda x: local(rule=x),
  optimizer=SGD,
)
door(
  "transforms.ControlVariates",
  transforms.ControlVariates,
  lambda x: local(rule=x),
  learning_rate=0.1,
)
door(
  "transforms.SlowMomentum",
  transforms.SlowMomentum,
  lambda x: local(rule=x),
  learning_rate=0.1,
)
door(
  "transforms.PulledAnchor",
  transforms.PulledAnchor,
  lambda x: local(rule=x, overlap=transforms.Delayed()),
  pull=0.5,
)
for _name, _given in {
  "fixed": {"interval": 2},
  "post_local": {"switch_step": 2, "interval": 2},
  "qsr": {"learning_rate": lambda step: 0.1, "alpha": 0.1, "base_interval": 2},
  "adacomm": {"initial_interval": 4, "period_steps": 4, "learning_rate": 0.1},
  "msdpu": {"initial_interval": 4, "learning_rate": 0.1},
  "ending_at": {"total_steps": 10, "interval": 4},
}.items():
  door(
    f"intervals.{_name}",
    getattr(intervals, _name),
    lambda x: local(interval=x),
    **_given,
  )
for _name, _given in {
  "Cast": {},
  "Quantize": {},
  "Sign": {},
  "Ternary": {},
  "TopK": {"ratio": 0.5},
  "RandomK": {"ratio": 0.5},
  "SampledTopK": {"ratio": 0.5},
  "DCTTopK": {"chunk": 2, "k": 1},
}.items():
  door(f"codecs.{_name}", getattr(codecs, _name), compressed, **_given)
door(
  "reducers.compressed",
  reducers.compressed,
  compressed,
  codec=codecs.Quantize(4),
)
door("reducers.PowerSGD", reducers.PowerSGD, compressed)
door("reducers.Chunked", reducers.Chunked, compressed, reducer=reducers.Exact())
door(
  "reducers.PerLeaf",
  reducers.PerLeaf,
  compressed,
  rules=(reducers.Rule(reducers.Exact()),),
)
door(
  "reducers.Compression",
  reducers.Compression,
  lambda x: traced(methods.ssgd(SGD, axis=AXIS, compression=x)),
  reducer=codecs.Quantize(4),
)
for _name, _codec in {
  "ErrorFeedback": codecs.Quantize(4),
  "MomentumCorrection": codecs.TopK(0.5),
  "EF21": codecs.TopK(0.5),
}.items():
  door(
    f"reducers.{_name}",
    getattr(reducers, _name),
    lambda x, codec=_codec: compressed(codec, x),
  )
door("collectives.workers", collectives.workers, num_workers=2)
door("collectives.make_mesh", collectives.make_mesh, shape=(2,), names=(AXIS,))
for _name in ("mean", "sum", "gather", "index", "size", "all_to_all"):
  _function = getattr(collectives, _name)
  _given = {"tree": {"x": jnp.ones((2, 3))}, "axis": AXIS}
  _wanted = inspect.signature(_function).parameters
  ROOMS[f"collectives.{_name}"] = (
    lambda function=_function, **given: jax.eval_shape(
      TEAM.spmd(lambda _: function(**given)), jnp.ones(2)
    ),
    {key: _given[key] for key in _wanted},
    lambda made: made,
  )
door("Workers.replicate", TEAM.replicate, tree=PARAMS)
door("Workers.place", TEAM.place, tree=np.ones((2, 3)))
door("Workers.shard", TEAM.shard, batch=np.ones((4, 3)))
door("Workers.view", TEAM.view, tree=jnp.ones((2, 3)), worker=0)


def loss_fn(params, model_state, batch, key):
  del key
  return (params["a"].sum() * batch["x"]).mean(), (model_state, {})


DILOCO = methods.diloco(SGD, 2, axis=AXIS)
ALONE = methods.diloco(SGD, 2, axis=None)


def stepped(step):
  state = training.init_state(TEAM, DILOCO, PARAMS)
  jax.eval_shape(TEAM.spmd(step), state, {"x": jnp.ones((2, 3))})


door(
  "training.make_step",
  training.make_step,
  stepped,
  loss_fn=loss_fn,
  optimizer=DILOCO,
  axis=AXIS,
)
door(
  "training.init_state",
  training.init_state,
  workers=TEAM,
  optimizer=DILOCO,
  params=PARAMS,
)
door(
  "training.Trainer",
  training.Trainer,
  workers=TEAM,
  step=training.make_step(loss_fn, DILOCO, axis=AXIS),
)
door(
  "transforms.Control",
  transforms.Control,
  lambda x: ALONE.update(PARAMS, ALONE.init(PARAMS), PARAMS, control=x),
)
ROOMS["update"] = (
  lambda **given: ALONE.update(**({"state": ALONE.init(PARAMS)} | given)),
  {"updates": PARAMS, "params": PARAMS, "loss": jnp.ones(())},
  lambda made: made,
)
door("jdist.anchor", jdist.anchor, state=ALONE.init(PARAMS), params=PARAMS)
door("jdist.apply_updates", jdist.apply_updates, params=PARAMS, updates=PARAMS)


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory):
  # Some values are names of files.
  with contextlib.chdir(tmp_path_factory.mktemp("calls")):
    yield


SOME = ("text", {"x": 1})
MORE = (
  None,
  -1,
  0,
  0.5,
  [1, 2],
  float("nan"),
  True,
  np.ones(5),
  int,
  object(),
  optax.EmptyState(),
  10**12,
  {"a": jnp.ones((4, 3)), "b": jnp.ones(3)},
)
_PATHS = {"path", "directory", "tuning"}
# Too large to try, or right, if seldom of use.
LEFT_OUT = {
  ("num_workers", 10**12), ("shape", 10**12), ("donate_argnums", 10**400),
  ("size", 10**400),
}  # fmt: skip


def raw_error(name, /, **changed):
  """Calls a door wrongly, and returns what ended beyond this library."""
  function, given, then = ROOMS[name]
  try:
    then(function(**(given | changed)))
  except Exception as error:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    # An IndexError ends an iteration over what has no length.
    clear = isinstance(error, ValueError | ImportError | IndexError)
    # Python itself names a file that is missing or a directory.
    if isinstance(error, OSError) and changed.keys() <= _PATHS:
      return None
    # The tests' strict promotion refuses integers in Optax's own arithmetic.
    if isinstance(error, jax.dtypes.TypePromotionError):
      return None
    if not (clear and "/jdist/" in last and "`" in str(error)):
      return f"{name}({changed}): {error!r} in {last}"
  return None


def raw_errors(name, values):
  """Replaces each argument of a door by each value."""
  found = [
    raw_error(name, **{argument: value})
    for argument in ROOMS[name][1]
    for value in values
    if not (isinstance(value, int) and (argument, value) in LEFT_OUT)
  ]
  return [error for error in found if error is not None]


# Other modules add doors of their own, and test these.
NAMES = list(ROOMS)


@pytest.mark.parametrize("name", NAMES)
def test_right_call_is_right(name):
  function, given, then = ROOMS[name]
  then(function(**given))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_wrong_argument_is_named(name):
  assert not raw_errors(name, SOME)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROOMS)
def test_more_wrong_arguments_are_named(name):
  assert not raw_errors(name, MORE)


_SIZES = st.integers(-3, 9)
_ARRAYS = st.builds(
  lambda shape, dtype: np.ones(shape, dtype),
  st.lists(st.integers(0, 4), max_size=3),
  st.sampled_from(
    ["float32", "float64", "int8", "uint32", "bool", "complex64", "U3", "O"]
  ),
)
_ANYTHING = st.one_of(
  _SIZES,
  st.floats(width=32),
  st.text(max_size=4),
  st.binary(max_size=4),
  st.none() | st.booleans(),
  _ARRAYS,
  st.lists(_SIZES | st.text(max_size=2), max_size=3),
  st.lists(_SIZES | st.floats(width=32), max_size=3).map(tuple),
  st.dictionaries(st.sampled_from("abx"), _ARRAYS | _SIZES, max_size=3),
  st.sampled_from(
    [int, object(), jnp.int8, np.float32, np.int64(2), 2**40, 1 + 1j, {1, 2},
     PARAMS, SGD, optax.adam(0.1), optax.EmptyState(), TEAM, AXIS, DILOCO,
     codecs.Quantize(4), codecs.TopK(0.5), reducers.Exact(), reducers.PowerSGD,
     intervals.fixed(2), transforms.Delayed(), loss_fn, lambda step: 0.1]
  ),
)  # fmt: skip


# Other modules add doors of their own.
_TRACED = sorted(x for x in ROOMS if ROOMS[x][1])


@st.composite
def _calls(draw):
  """A door, and one to three of its arguments with anything in their place."""
  name = draw(st.sampled_from(_TRACED))
  given = ROOMS[name][1]
  chosen = draw(
    st.lists(
      st.sampled_from(sorted(given)), min_size=1, max_size=3, unique=True
    )
  )
  changed = {argument: draw(_ANYTHING) for argument in chosen}
  hypothesis.assume(
    not any(
      isinstance(changed.get(argument), int) and changed[argument] > 1000
      for argument, _ in LEFT_OUT
    )
  )
  return name, changed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@hypothesis.settings(
  max_examples=1000,
  deadline=None,
  database=None,
  suppress_health_check=list(hypothesis.HealthCheck),
  # What is wrong is wrong in one argument as a rule: no need to shrink.
  phases=[hypothesis.Phase.generate],
)
@hypothesis.given(_calls())
def test_any_call_is_right_or_names_what_is_wrong(call):
  name, changed = call
  assert raw_error(name, **changed) is None
