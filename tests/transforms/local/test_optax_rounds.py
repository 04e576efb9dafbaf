"""Optax's optimizers inside rounds, against plain JAX without this library."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import transforms
from tests import _thinned

C, SGD = optax.contrib, optax.sgd(0.1)
INTERVAL, STEPS = 3, 9
# Two workers with unlike data.
TARGETS = {
  "a": np.array([[-3.0, 0.5], [5.0, 2.0]], np.float32),
  "b": np.linspace(-1, 2, 12, dtype=np.float32).reshape(2, 2, 3),
}
START = {"a": jnp.full(2, 0.5), "b": jnp.full((2, 3), -0.25)}

INNER = {
  "adabelief": optax.adabelief(0.1),
  "adadelta": optax.adadelta(1.0),
  "adafactor": optax.adafactor(0.1),
  "adagrad": optax.adagrad(0.1),
  "adam": optax.adam(0.1),
  "adamax": optax.adamax(0.1),
  "adamaxw": optax.adamaxw(0.1),
  "adamw": optax.adamw(0.1),
  "adan": optax.adan(0.1),
  "amsgrad": optax.amsgrad(0.1),
  "fromage": optax.fromage(0.1),
  "lamb": optax.lamb(0.1),
  "lars": optax.lars(0.1),
  "lion": optax.lion(0.1),
  "nadam": optax.nadam(0.1),
  "nadamw": optax.nadamw(0.1),
  "novograd": optax.novograd(0.1),
  "optimistic": optax.optimistic_gradient_descent(0.1),
  "radam": optax.radam(0.1),
  "rmsprop": optax.rmsprop(0.1, momentum=0.9),
  "rprop": optax.rprop(0.1),
  "sign_sgd": optax.sign_sgd(0.1),
  "sgd": optax.sgd(0.1, 0.9, nesterov=True),
  "sm3": optax.sm3(0.1),
  "yogi": optax.yogi(0.1),
  "acprop": C.acprop(0.1),
  "ademamix": C.ademamix(0.1),
  "adopt": C.adopt(0.1),
  "cocob": C.cocob(),
  "dadapt_adamw": C.dadapt_adamw(0.1),
  "dog": C.dog(),
  "dowg": C.dowg(),
  "madgrad": C.madgrad(0.1),
  "mechanize": C.mechanize(SGD),
  "momo": C.momo(0.1),
  "momo_adam": C.momo_adam(0.1),
  "muon": C.muon(0.1),
  "prodigy": C.prodigy(0.1),
  "reduce_on_plateau": optax.chain(SGD, C.reduce_on_plateau()),
  "schedule_free_adamw": C.schedule_free_adamw(0.1),
  "schedule_free_sgd": C.schedule_free_sgd(0.1),
  "sam": C.sam(SGD, optax.sgd(0.01)),
  "split complex": C.split_real_and_imaginary(optax.adam(0.1)),
  "distance": optax.chain(
    optax.scale_by_distance_over_gradients(), optax.scale(-1.0)
  ),
  "lbfgs": optax.chain(optax.scale_by_lbfgs(), optax.scale(-0.1)),
  "polyak": optax.polyak_sgd(0.1),
  "ema of updates": optax.chain(optax.ema(0.9), SGD),
  "clipped": optax.chain(optax.clip_by_global_norm(1.0), SGD),
  "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), SGD),
  "decayed": optax.chain(optax.add_decayed_weights(0.1), SGD),
  "scheduled": optax.sgd(optax.linear_schedule(0.1, 0.0, STEPS)),
  "injected": optax.inject_hyperparams(optax.adam)(0.1),
  "masked": optax.masked(
    C.schedule_free_sgd(0.1), {"a": True, "b": False}
  ),
  "partitioned": optax.partition(
    {"x": C.schedule_free_sgd(0.1), "y": optax.adam(0.1)}, {"a": "x", "b": "y"}
  ),
  "several steps": optax.MultiSteps(optax.adam(0.1), 2),
  "if finite": optax.apply_if_finite(C.madgrad(0.1), 3),
  "flattened": optax.flatten(optax.adam(0.1)),
  "centred": optax.chain(optax.centralize(), optax.adam(0.1)),
  "zeroed nans": optax.chain(optax.zero_nans(), SGD),
  "keep params nonnegative": optax.chain(SGD, optax.keep_params_nonnegative()),
}  # fmt: skip
# A round averages the distance of these fields from the parameters, and the
# following ones as they are; all other leaves stay each worker's own.
POSITIONS = {"z", "cache", "x0", "init_particles"}
SUMS = {
  *("grad_sum_sq", "s", "scale", "cumulative_gradients"),
  *("subgradients", "reward"),
}
OWN = {"MechanicState", "ReduceLROnPlateauState"}
OVERLAPS = {
  "at once": None,
  "late": transforms.Delayed(),
  "streamed": transforms.Delayed(stream=transforms.Stream()),
}
# Wrappers that hide what is known of a state, and one optimizer of each kind.
OFTEN = (
  *("adam", "cocob", "madgrad", "mechanize", "schedule_free_sgd", "sam"),
  *("masked", "several steps"),
)


def losses(params, targets):
  tree = jax.tree.map(lambda w, t: jnp.sum((w - t) ** 2) / 2, params, targets)
  return sum(jax.tree.leaves(tree))


def visit(state, params, change):
  """Changes what a round averages, in a state of any nesting."""

  def of(name, value):
    if name in SUMS:
      return jax.tree.map(lambda x: change(x, jnp.zeros_like(x)), value)
    if name in POSITIONS:
      return jax.tree.map(
        lambda x, p: x if isinstance(x, optax.MaskedNode) else change(x, p),
        value, params, is_leaf=lambda x: isinstance(x, optax.MaskedNode),
      )  # fmt: skip
    return visit(value, params, change)

  if type(state).__name__ in OWN or isinstance(state, optax.MaskedNode):
    return state
  if hasattr(state, "_fields"):
    return type(state)(**{n: of(n, x) for n, x in state._asdict().items()})
  if isinstance(state, tuple):
    return tuple(visit(x, params, change) for x in state)
  if isinstance(state, dict):
    return {n: visit(x, params, change) for n, x in state.items()}
  return state


class Rounds:
  """Ends rounds in plain JAX, at once, or late with all progress kept."""

  def __init__(self, params, state, late):
    self.late, self.sent = late, None
    self.anchor = self.read(params, state)

  def read(self, params, state):
    found = jax.tree.leaves(params)
    visit(state, params, lambda x, p: found.append(x - p))
    return list(found)

  def end(self, params, state):
    here = self.read(params, state)
    if self.late:
      kept = self.sent or [0.0] * len(here)
      progress = [
        a - k - x for a, k, x in zip(self.anchor, kept, here, strict=True)
      ]
      if self.sent:
        pairs = zip(self.anchor, self.sent, strict=True)
        self.anchor = [a - x.mean(0) for a, x in pairs]
      self.sent = progress
      there = [a - x for a, x in zip(self.anchor, progress, strict=True)]
    else:
      there = [jnp.broadcast_to(x.mean(0), x.shape) for x in here]
    number = len(jax.tree.leaves(params))
    moved = jax.tree.unflatten(jax.tree.structure(params), there[:number])
    rest = iter(there[number:])
    return moved, visit(state, moved, lambda x, p: p + next(rest))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", _thinned.some(list(INNER), OFTEN))
def test_rounds_of_an_optax_optimizer_are_those_of_plain_jax(name, overlap):
  given = INNER[name]
  inner = optax.with_extra_args_support(
    given.gradient_transformation()
    if isinstance(given, optax.MultiSteps)
    else given
  )
  takes_loss = name in ("momo", "momo_adam", "polyak", "reduce_on_plateau")
  optimizer = transforms.local_steps(
    given, INTERVAL, axis="worker", overlap=OVERLAPS[overlap]
  )

  def step_by(optimizer, apply):
    def one(params, state, targets):
      loss, grads = jax.value_and_grad(losses)(params, targets)
      extra = {"value": loss} if takes_loss else {}
      updates, state = optimizer.update(grads, state, params, **extra)
      return apply(params, updates, state), state

    return jax.jit(jax.vmap(one, axis_name="worker"))

  plain = step_by(inner, lambda w, u, state: optax.apply_updates(w, u))
  step = step_by(optimizer, jdist.apply_updates)
  with jax.numpy_dtype_promotion("standard"):
    wanted = found = jax.tree.map(lambda x: jnp.stack([x, x]), START)
    state = jax.vmap(inner.init)(wanted)
    own = jax.vmap(optimizer.init, axis_name="worker")(found)
    rounds = Rounds(wanted, state, OVERLAPS[overlap] is not None)
    for number in range(STEPS + 1):
      wanted, state = plain(wanted, state, TARGETS)
      if (number + 1) % INTERVAL == 0:
        wanted, state = rounds.end(wanted, state)
      found, own = step(found, own, TARGETS)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
    found, wanted,
  )  # fmt: skip
