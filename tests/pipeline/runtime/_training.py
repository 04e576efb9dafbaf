"""Training of small models: in one program, in processes, and unsplit."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist import collectives, pipeline, states, training
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small

MICRO = 3


def momentum(axis=None):
  return jdist.ssgd(optax.sgd(0.1, momentum=0.9), axis=axis)


def microbatch(sizes=small.SIZES, *, mask=False, dtype=jnp.float32):
  """Returns the shapes of a micro-batch."""
  shapes = {"x": (MICRO, sizes[0]), "y": (MICRO, sizes[-1])}
  shapes |= {"mask": (MICRO,)} if mask else {}
  return {k: jax.ShapeDtypeStruct(v, dtype) for k, v in shapes.items()}


def one_program(layers, table, sizes=small.SIZES, *, mask=False, **options):
  given = {"inputs": "x", "microbatch": microbatch(sizes, mask=mask)} | options
  stages = pipeline.cut_layers(layers, table.num_stages)
  return pipeline.OneProgram(stages, small.loss, table, **given)


def team_of(pipe, workers=1):
  """Makes workers, each on as many devices as the pipeline has."""
  shape = workers, pipe.grid.num_devices
  mesh = collectives.make_mesh(shape, ("worker", "stage"))
  return collectives.workers(workers, mesh=mesh)


def compiled_step(pipe, team, optimizer, state):
  """Compiles the step on a mesh, with the state's own placement."""
  return team.jit(
    pipe.make_step(optimizer, axis=team.axis),
    out_specs=(team.specs(state), None),
  )


def train(pipe, chain, batches, workers=1, *, drained=False):
  """Returns the state and the losses [steps, workers]."""
  team = team_of(pipe, workers)
  optimizer = chain(team.axis)
  state = pipe.init_state(team, optimizer)
  step = compiled_step(pipe, team, optimizer, state)
  losses = []
  for batch in batches:
    state, metrics = step(state, team.place(batch))
    losses.append(np.asarray(metrics["loss"]))
  assert step._cache_size() == 1
  if drained:
    state = team.jit(pipe.make_drain(optimizer, axis=team.axis))(state)
  return state, np.asarray(losses)


def split(pipe, state, worker=0):
  """Returns the whole model's parameters and state of one worker."""
  parts = state.params, state.model_state
  return pipe.split(
    *jax.tree.map(lambda x: np.asarray(states.key_words(x[worker])), parts)
  )


def unsplit(layers, chain, batches, count, workers=1, loss=None):
  """Trains workers with whole models; returns the state and the losses."""
  team = collectives.workers(
    workers, substrate="vmap" if workers > 1 else "none"
  )
  optimizer = chain(team.axis)
  state = training.init_state(team, optimizer, *small.merged(layers))
  loss = small.whole_loss(layers) if loss is None else loss
  step = team.jit(
    training.make_step(loss, optimizer, axis=team.axis, accumulate=count)
  )
  losses = []
  for batch in batches:
    state, metrics = step(state, team.place(batch))
    losses.append(np.asarray(metrics["loss"]))
  return state, np.asarray(losses)


def of_worker(state, worker=0):
  """Returns the parameters and the model's state of one worker."""
  return jax.tree.map(lambda x: x[worker], (state.params, state.model_state))


def of_first(batches):
  """Returns the first worker's batches."""
  return [jax.tree.map(lambda x: x[0], batch) for batch in batches]


def process(layers, table, sizes=small.SIZES, *, cuts=None, **options):
  given = {"inputs": "x", "loss": small.loss, "microbatch": microbatch(sizes)}
  stages = pipeline.cut_layers(layers, cuts or table.num_stages)
  return pipeline.StageProcess(stages, table=table, **(given | options))


def processes(
  layers, table, work, *args, x64=False, promotion="strict", **options
):
  """Returns the results of `work(process, peers)` on each device."""

  def run(peers):
    # A thread does not inherit JAX's settings.
    with jax.enable_x64(x64), jax.numpy_dtype_promotion(promotion):
      return work(process(layers, table, *args, peers=peers, **options), peers)

  return in_threads(len(table.devices), run)


def count_primitives(names, function, *args):
  """Counts primitives in a function's jaxpr, those inside of calls included."""

  def count(jaxpr):
    own = sum(x.primitive.name in names for x in jaxpr.eqns)
    return own + sum(
      count(getattr(inner, "jaxpr", inner))
      for x in jaxpr.eqns
      for inner in jex.jaxprs_in_params(x.params)
    )

  return count(jax.make_jaxpr(function)(*args).jaxpr)
