"""What is compared: the variants, and sizes under which they are."""

import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import optax
from optax_chains import ChainRun, Config, Variant
from studies import Presets

from jdist import codecs, methods, reducers, transforms
from jdist.transforms import intervals

Chain = optax.GradientTransformationExtraArgs


def _ssgd(run: ChainRun, **changes: Any) -> Chain:
  return methods.ssgd(run.inner, axis=run.axis, **changes)


def _local(run: ChainRun, rule: Any, **changes: Any) -> Chain:
  rule = intervals.ending_at(run.num_steps, rule)
  return transforms.local_steps(run.inner, rule, axis=run.axis, **changes)


def _post_local(run: ChainRun) -> Chain:
  return _local(run, intervals.post_local(run.num_steps // 2, 8))


def _adacomm(run: ChainRun) -> Chain:
  period = max(1, run.num_steps // 10)
  return _local(run, intervals.adacomm(16, period, run.rate))


def _qsr(run: ChainRun, **changes: Any) -> Chain:
  # Begins to grow in the last third of the cosine.
  highest = float(run.rate(run.warmup_steps))
  # As its rows were measured: the first rounds are sized by the warm-up's rate.
  rule = intervals.qsr(run.rate, 0.5 * highest * 8**0.5, 8, warmup_steps=0)
  return _local(run, rule, **changes)


def _diloco(run: ChainRun, interval: int, **changes: Any) -> Chain:
  rule = intervals.ending_at(run.num_steps, interval)
  return methods.diloco(run.inner, rule, axis=run.axis, **changes)


def _msdpu(run: ChainRun, interval: int, **changes: Any) -> Chain:
  # Of the mean under way a worker knows its own share, and keeps that.
  overlap = transforms.Delayed(
    changes.pop("steps", None), carry=changes.pop("carry", 1 / run.workers)
  )
  changes.setdefault("warmup_steps", run.warmup_steps)
  policy = changes.pop("policy", None) or intervals.msdpu(interval, run.rate)
  return methods.msdpu(
    run.inner,
    intervals.ending_at(run.num_steps, policy),
    run.rate,
    axis=run.axis,
    overlap=overlap,
    **changes,
  )


def _growing(run: ChainRun, start: float) -> intervals.IntervalPolicy:
  return intervals.growth(run.rate, start=start)


def _late_growth(run: ChainRun, start: float = 1 / 3, **changes: Any) -> Chain:
  """MSDPU as it is by default: rounds grow, and the longer ones are late."""
  policy = intervals.ending_at(run.num_steps, _growing(run, start))
  late = transforms.Delayed(1, carry=None, after_step=None)
  changes = {"overlap": late} | changes
  return methods.msdpu(run.inner, policy, run.rate, axis=run.axis, **changes)


def _late_switch(run: ChainRun, switch: float, **changes: Any) -> Chain:
  """SSGD's steps for a part of the run, then late rounds of 8."""
  changes = {
    "steps": 1,
    "policy": intervals.fixed(8),
    "warmup_steps": round(switch * run.num_steps),
  } | changes
  return _msdpu(run, 8, **changes)


def _in_time(run: ChainRun, rule: Any, **changes: Any) -> Chain:
  """MSDPU without its delay: corrected local steps."""
  pull = transforms.pull_to_anchor(0.1, run.rate)
  return transforms.local_steps(
    optax.chain(pull, run.inner), rule, axis=run.axis, **changes
  )


def _no_delay(run: ChainRun) -> Chain:
  """The first rule in time, with its warm-up."""
  rule = intervals.ending_at(run.num_steps, intervals.msdpu(8, run.rate))
  return _in_time(run, intervals.post_local(run.warmup_steps, rule))


def _growing_in_time(run: ChainRun, **changes: Any) -> Chain:
  rule = intervals.ending_at(run.num_steps, _growing(run, 1 / 3))
  return _in_time(run, rule, **changes)


def _in_4_bits() -> dict[str, Any]:
  """Means of 4-bit integers; what they leave out goes with the next round's."""
  return {
    "compression": reducers.Compression(
      codecs.Quantize(4), reducers.ErrorFeedback()
    )
  }


# In the order in which they run: what matters most comes first.
VARIANTS: dict[str, Variant] = {
  "ssgd": _ssgd,
  "local_sgd H=8": lambda run: _local(run, 8),
  "msdpu H0=8": lambda run: _msdpu(run, 8),
  "diloco H=8": lambda run: _diloco(run, 8),
  "local_sgd H=16": lambda run: _local(run, 16),
  "msdpu H0=4": lambda run: _msdpu(run, 4),
  "local_sgd H=4": lambda run: _local(run, 4),
  "msdpu H0=16": lambda run: _msdpu(run, 16),
  "msdpu rho=1": lambda run: _msdpu(run, 8, carry=1.0),
  "msdpu rho=1 H0=4": lambda run: _msdpu(run, 4, carry=1.0),
  "msdpu rho=0": lambda run: _msdpu(run, 8, carry=0.0),
  "msdpu fixed H=8": lambda run: _msdpu(run, 8, policy=intervals.fixed(8)),
  "msdpu no correction": lambda run: _msdpu(run, 8, correction=0.0),
  "msdpu no delay": _no_delay,
  "post_local_sgd H=8": _post_local,
  "adacomm tau0=16": _adacomm,
  "qsr H>=8": _qsr,
  "msdpu outer": lambda run: _msdpu(
    run, 8, rule=optax.sgd(0.7, momentum=0.5, nesterov=True)
  ),
  "msdpu H0=8, 2 steps late": lambda run: _msdpu(run, 8, steps=2),
  "msdpu H0=8, 2 steps late, no warm-up": lambda run: _msdpu(
    run, 8, steps=2, warmup_steps=0
  ),
  "msdpu H0=1, int4": lambda run: _msdpu(run, 1, **_in_4_bits()),
  "msdpu H0=2, int4": lambda run: _msdpu(run, 2, **_in_4_bits()),
  "local_sgd H=2, int4": lambda run: _local(run, 2, **_in_4_bits()),
  # Rounds of one step at first.
  "ssgd, int4": lambda run: _ssgd(run, **_in_4_bits()),
  "msdpu switch 0.75, int4": lambda run: _late_switch(
    run, 0.75, **_in_4_bits()
  ),
  "msdpu growth 0.5, int4": lambda run: _late_growth(run, 0.5, **_in_4_bits()),
  "msdpu growth 1, int4": lambda run: _late_growth(run, 1.0, **_in_4_bits()),
  "msdpu growth 1.5, int4": lambda run: _late_growth(run, 1.5, **_in_4_bits()),
  "msdpu, int4": lambda run: _late_growth(run, **_in_4_bits()),
  "msdpu": _late_growth,
  "msdpu, int4, no correction": lambda run: _late_growth(
    run, correction=0.0, **_in_4_bits()
  ),
  "msdpu, int4, no delay": lambda run: _growing_in_time(run, **_in_4_bits()),
  "msdpu, int4, H=8 throughout": lambda run: _late_switch(
    run, 0.0, **_in_4_bits()
  ),
  # Local SGD with MSDPU's rounds: neither a delay nor a correction.
  "local_sgd, MSDPU's rounds": lambda run: _local(run, _growing(run, 1 / 3)),
  "local_sgd, MSDPU's rounds, int4": lambda run: _local(
    run, _growing(run, 1 / 3), **_in_4_bits()
  ),
  "msdpu, int4, late from the start": lambda run: _late_growth(
    run, overlap=transforms.Delayed(1, carry=None), **_in_4_bits()
  ),
  "msdpu, int4, a round late": lambda run: _late_growth(
    run,
    overlap=transforms.Delayed(carry=None, after_step=None),
    **_in_4_bits(),
  ),
  "local_sgd H=8, int4": lambda run: _local(run, 8, **_in_4_bits()),
  "post_local_sgd H=8, int4": lambda run: _local(
    run, intervals.post_local(run.num_steps // 2, 8), **_in_4_bits()
  ),
  "qsr H>=8, int4": lambda run: _qsr(run, **_in_4_bits()),
  "diloco H=8, int4": lambda run: _diloco(run, 8, **_in_4_bits()),
}

# Those of the longer presets, what matters most first.
_LONG = (
  "ssgd", "msdpu, int4", "ssgd, int4", "local_sgd, MSDPU's rounds, int4",
  "post_local_sgd H=8, int4", "local_sgd H=8, int4", "msdpu",
  "post_local_sgd H=8", "local_sgd H=8", "qsr H>=8, int4", "diloco H=8, int4",
  "qsr H>=8", "diloco H=8",
)  # fmt: skip

# Under these names on the command line.
PRESETS: Presets = {
  "cifar10": ("CIFAR-10, LeNet: minutes a run on 2 cores", Config()),
  "mnist": (
    "MNIST, LeNet: a minute a run on 2 cores",
    Config(dataset="mnist", epochs=2.0, warmup_epochs=0.2),
  ),
  "cifar10-20": (
    "CIFAR-10, LeNet, 20 passes with crops and flips: five minutes a run",
    Config(
      epochs=20.0, warmup_epochs=1.0, augment=True,
      seeds=(100, 101, 102, 103, 104), variants=_LONG,
    ),
  ),
  "cifar10-20-protocol": (
    "CIFAR-10, LeNet, 20 passes, a rate chosen by three seeds",
    Config(
      epochs=20.0, warmup_epochs=1.0, augment=True,
      seeds=tuple(range(200, 208)), tuning_seeds=(10_000, 10_001, 10_002),
      variants=("ssgd", "msdpu, int4"),
    ),
  ),
  "mnist-10": (
    "MNIST, LeNet, 10 passes",
    Config(
      dataset="mnist", epochs=10.0, warmup_epochs=0.5,
      seeds=(100, 101, 102, 103, 104), variants=_LONG,
    ),
  ),
  "mnist-mlp": (
    "MNIST, an MLP, whose messages are large for its computation",
    Config(dataset="mnist", model="mlp", epochs=2.0, warmup_epochs=0.2),
  ),
  "cifar10-mlp": (
    "CIFAR-10, an MLP with as many parameters as six LeNets",
    Config(model="mlp"),
  ),
  "cifar10-parts": (
    "CIFAR-10, LeNet: MSDPU's parts taken away one by one, at its own rate",
    Config(
      rates=(0.05,), extensions=0, seeds=(100, 101, 102),
      variants=(
        "msdpu, int4", "msdpu, int4, no correction", "msdpu, int4, no delay",
        "msdpu, int4, H=8 throughout", "msdpu",
      ),
    ),
  ),
  "cifar10-20-parts": (
    "the same in 20 passes, at the rate of MSDPU's rounds undelayed",
    Config(
      epochs=20.0, warmup_epochs=1.0, augment=True, rates=(0.025,),
      extensions=0, seeds=(100, 101, 102, 103, 104),
      variants=(
        "local_sgd, MSDPU's rounds, int4", "msdpu, int4",
        "msdpu, int4, no delay", "msdpu, int4, no correction",
      ),
    ),
  ),
  "cifar10-skewed": (
    "CIFAR-10, workers with unlike labels",
    Config(alpha=0.3),
  ),
  "smoke": (
    "digits, a few steps: that it runs",
    Config(
      dataset="digits", model="mlp", workers=2, epochs=1.0, warmup_epochs=0.2,
      rates=(0.1,), seeds=(0,), variants=("ssgd", "msdpu H0=8"),
    ),
  ),
  "cifar100-gpu": (
    "CIFAR-100, ResNet-18 on 8 GPUs, as far as the paper says",
    Config(
      dataset="cifar100", model="resnet18", batch_size=1024, epochs=160.0,
      warmup_epochs=5.0, rates=(0.1, 0.2, 0.4, 0.8), weight_decay=5e-4,
      augment=True, dtype="bfloat16",
    ),
  ),
  "imagenette-gpu": (
    "Imagenette, ResNet-50 on 8 GPUs: an ImageNet subset",
    Config(
      dataset="imagenette", model="resnet50", batch_size=512, epochs=100.0,
      warmup_epochs=5.0, rates=(0.1, 0.2, 0.4, 0.8), weight_decay=1e-4,
      augment=True, dtype="bfloat16",
    ),
  ),
}  # fmt: skip
