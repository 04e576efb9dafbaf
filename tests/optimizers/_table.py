"""Optimizers and wrappers of Optax, and the methods that train with them."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

RATE = 0.05
# The gradients of the test are of the order of one.
NOISE_SEED = 3


def _chain(*before):
  return optax.chain(*before, optax.sgd(RATE, momentum=0.9))


def _without_extra_args(optimizer):
  """Drops `value=`, which SAM of Optax 0.2.8 refuses although it says not."""

  def update(updates, state, params=None):
    return optimizer.update(updates, state, params)

  return optax.GradientTransformation(optimizer.init, update)


def _only_kernel(params):
  return {name: name == "kernel" for name in params}


def _labels(params):
  return {name: name for name in params}


OPTIMIZERS = {
  "sgd": lambda: optax.sgd(RATE),
  "sgd, momentum": lambda: optax.sgd(RATE, momentum=0.9),
  "sgd, Nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
  "sgd, a schedule": lambda: optax.sgd(
    optax.warmup_cosine_decay_schedule(0.01, 0.1, 4, 12)
  ),
  "adabelief": lambda: optax.adabelief(RATE, eps=1e-2),
  "adadelta": lambda: optax.adadelta(RATE, eps=1e-2),
  "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=2),
  "adagrad": lambda: optax.adagrad(RATE),
  "adam": lambda: optax.adam(RATE, eps=1e-2),
  "adamax": lambda: optax.adamax(RATE, eps=1e-2),
  "adamaxw": lambda: optax.adamaxw(RATE, eps=1e-2),
  "adamw": lambda: optax.adamw(RATE, eps=1e-2, weight_decay=0.1),
  "adan": lambda: optax.adan(RATE, eps=1e-2),
  "amsgrad": lambda: optax.amsgrad(RATE, eps=1e-2),
  "fromage": lambda: optax.fromage(RATE),
  "lamb": lambda: optax.lamb(RATE, eps=1e-2),
  "lars": lambda: optax.lars(RATE),
  "lion": lambda: optax.lion(RATE),
  "nadam": lambda: optax.nadam(RATE, eps=1e-2),
  "nadamw": lambda: optax.nadamw(RATE, eps=1e-2),
  "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(NOISE_SEED)),
  "novograd": lambda: optax.novograd(RATE, eps=1e-2),
  "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(RATE, eps=1e-2),
  "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(
    RATE
  ),
  "polyak_sgd": lambda: optax.polyak_sgd(RATE),
  "radam": lambda: optax.radam(RATE, eps=1e-2),
  "rmsprop": lambda: optax.rmsprop(RATE, eps=1e-2, momentum=0.5),
  "rprop": lambda: optax.rprop(RATE),
  "sign_sgd": lambda: optax.sign_sgd(RATE),
  "signum": lambda: optax.signum(RATE),
  "sm3": lambda: optax.sm3(RATE),
  "yogi": lambda: optax.yogi(RATE, eps=1e-2),
  "adaptive_grad_clip": lambda: _chain(optax.adaptive_grad_clip(0.5)),
  "add_decayed_weights": lambda: _chain(optax.add_decayed_weights(0.1)),
  "add_noise": lambda: _chain(
    optax.add_noise(0.01, 0.5, jax.random.key(NOISE_SEED))
  ),
  "apply_every": lambda: optax.chain(optax.sgd(RATE), optax.apply_every(2)),
  "apply_if_finite": lambda: optax.apply_if_finite(
    optax.sgd(RATE, momentum=0.9), 3
  ),
  "centralize": lambda: _chain(optax.centralize()),
  "clip": lambda: _chain(optax.clip(0.5)),
  "clip_by_block_rms": lambda: _chain(optax.clip_by_block_rms(0.5)),
  "clip_by_global_norm": lambda: _chain(optax.clip_by_global_norm(1.0)),
  "conditionally_transform": lambda: optax.conditionally_transform(
    optax.sgd(RATE, momentum=0.9), lambda step: step % 2 == 0
  ),
  "ema of updates": lambda: optax.chain(optax.sgd(RATE), optax.ema(0.5)),
  "flatten": lambda: optax.flatten(optax.adam(RATE, eps=1e-2)),
  "freeze": lambda: optax.chain(
    optax.sgd(RATE), optax.transforms.freeze({"kernel": False, "bias": True})
  ),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(
    RATE, momentum=0.9
  ),
  "keep_params_nonnegative": lambda: optax.chain(
    optax.sgd(RATE), optax.keep_params_nonnegative()
  ),
  "lbfgs": lambda: optax.lbfgs(),
  "lookahead": lambda: optax.lookahead(optax.sgd(RATE), 2, 0.5),
  "masked": lambda: optax.masked(optax.sgd(RATE, momentum=0.9), _only_kernel),
  "MultiSteps": lambda: optax.MultiSteps(
    optax.sgd(RATE, momentum=0.9), 2
  ).gradient_transformation(),
  "named_chain": lambda: optax.named_chain(
    ("clip", optax.clip(0.5)), ("sgd", optax.sgd(RATE))
  ),
  "normalize_by_update_norm": lambda: _chain(optax.normalize_by_update_norm()),
  "partition": lambda: optax.partition(
    {"kernel": optax.adam(RATE, eps=1e-2), "bias": optax.sgd(RATE)}, _labels
  ),
  "scale_by_backtracking_linesearch": lambda: optax.chain(
    optax.sgd(RATE), optax.scale_by_backtracking_linesearch(5)
  ),
  "scale_by_trust_ratio": lambda: optax.chain(
    optax.scale_by_trust_ratio(), optax.sgd(RATE)
  ),
  "selective_transform": lambda: optax.transforms.selective_transform(
    optax.sgd(RATE, momentum=0.9), freeze_mask={"kernel": False, "bias": True}
  ),
  "trace": lambda: optax.chain(optax.trace(0.9), optax.scale(-RATE)),
  "zero_nans": lambda: _chain(optax.zero_nans()),
  "contrib.acprop": lambda: contrib.acprop(RATE, eps=1e-2),
  "contrib.ademamix": lambda: contrib.ademamix(RATE, eps=1e-2),
  "contrib.adopt": lambda: contrib.adopt(RATE, eps=1e-2),
  "contrib.cocob": lambda: contrib.cocob(),
  "contrib.dadapt_adamw": lambda: contrib.dadapt_adamw(),
  "contrib.dog": lambda: contrib.dog(1.0),
  "contrib.dowg": lambda: contrib.dowg(1.0),
  "contrib.galore": lambda: contrib.galore(RATE, rank=1, update_proj_gap=4),
  "contrib.madgrad": lambda: contrib.madgrad(RATE, eps=1e-2),
  "contrib.mechanize": lambda: contrib.mechanize(optax.sgd(RATE)),
  "contrib.momo": lambda: contrib.momo(RATE),
  "contrib.momo_adam": lambda: contrib.momo_adam(RATE, eps=1e-2),
  "contrib.muon": lambda: contrib.muon(RATE),
  "contrib.normalize": lambda: _chain(contrib.normalize()),
  "contrib.prodigy": lambda: contrib.prodigy(),
  "contrib.reduce_on_plateau": lambda: optax.chain(
    optax.sgd(RATE), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.5)
  ),
  "contrib.sam": lambda: _without_extra_args(
    contrib.sam(
      optax.sgd(RATE), optax.chain(contrib.normalize(), optax.sgd(0.1)), 2
    )
  ),
  "contrib.schedule_free": lambda: contrib.schedule_free(
    optax.adam(RATE, b1=0.0, eps=1e-2), RATE
  ),
  "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(
    RATE, eps=1e-2
  ),
  "contrib.schedule_free_sgd": lambda: contrib.schedule_free_sgd(RATE),
  "contrib.simplified_ademamix": lambda: contrib.simplified_ademamix(
    RATE, eps=1e-2
  ),
  "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
    optax.sgd(RATE, momentum=0.9)
  ),
}

# What a state holds besides moments, from the papers: positions, which move
# with the parameters, and sums from which a position is computed.
POSITIONS = {
  "ScheduleFreeState": {"z": "position"},
  "MadgradState": {"x0": "position", "s": "sum", "grad_sum_sq": "sum"},
  "COCOBState": {
    "init_particles": "position", "cumulative_gradients": "sum",
    "scale": "sum", "subgradients": "sum", "reward": "sum",
  },
  "SAMState": {"cache": "position"},
}  # fmt: skip

METHODS = ("local_sgd", "diloco", "msdpu", "topk_sgd", "server")
OVERLAPS = ("at once", "late", "streamed")
CELLS = [
  (method, overlap)
  for method in METHODS
  for overlap in OVERLAPS
  if method != "server" or overlap == "at once"
]


def params():
  return {
    "bias": jnp.array([0.5, -0.25]),
    "kernel": jnp.array([[0.3, -0.6], [0.9, 0.2], [-0.4, 0.7]]),
  }
