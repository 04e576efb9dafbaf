"""What is compared: the variants, and sizes under which they are."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import optax
from one_bit_adam import one_bit_adam
from optax_chains import ChainRun, Config, Variant
from studies import Presets

from jdist import codecs, methods, reducers, transforms
from jdist.transforms import intervals

Chain = optax.GradientTransformationExtraArgs


def _reduced(
  run: ChainRun, codec: codecs.Codec, *, feedback: bool = True
) -> optax.GradientTransformation:
  """Synchronous SGD whose mean goes through a codec."""
  return optax.chain(
    transforms.average_gradients(
      run.axis,
      reducers.Compression(
        reducers.compressed(codec),
        reducers.ErrorFeedback() if feedback else None,
      ),
    ),
    run.inner,
  )


def _plain(run: ChainRun) -> optax.GradientTransformation:
  """The rate alone, for methods with a momentum of their own."""
  return optax.scale_by_learning_rate(run.rate)


def _share(run: ChainRun, share: float) -> optax.Schedule:
  """A share of SGD's rate, so that the grid stays as wide.

  Adam's updates are about 1 in every entry, and signs are just that: 0.04.
  Muon's are about 1 as matrices; what is no matrix has Adam there: 0.2.
  """
  return lambda step: share * run.rate(step)


def _dgc(run: ChainRun, ratio: float) -> Chain:
  # Without its warm-up of the ratio, which alone sends more than a fiftieth of
  # what synchronous SGD does in all of so short a run.
  return methods.dgc(_plain(run), ratio, 0.9, axis=run.axis, nesterov=True)


def _two_way(
  run: ChainRun, ratio: float, values: codecs.Codec, *, momentum: bool = False
) -> Chain:
  """The largest entries to the owners of the parts, and of their means to all.

  Both ends have residuals.  By 8 workers a quarter of what a gather sends.

  Args:
    run: what a variant is told.
    ratio: the part of the entries that is sent.
    values: the codec of the entries' values.
    momentum: whether it stands before the mean, with DGC's correction.
  """
  codec = codecs.TopK(ratio, values=values)
  return optax.chain(
    transforms.average_gradients(
      run.axis,
      reducers.Compression(
        reducers.compressed(codec, wire="all_to_all"),
        reducers.MomentumCorrection(0.9, nesterov=True)
        if momentum
        else reducers.ErrorFeedback(),
      ),
    ),
    _plain(run) if momentum else run.inner,
  )


def _low_rank(run: ChainRun, rank: int) -> Chain:
  """PowerSGD whose factors go in 4 bits."""
  codec = codecs.Quantize(4, 64)
  return methods.powersgd(
    run.inner,
    rank,
    axis=run.axis,
    factors=reducers.compressed(codec, owner_feedback="own_share"),
  )


def _by_leaf(run: ChainRun, rank: int, bits: int) -> Chain:
  """Large dense layers by low rank, their factors in few bits, others in 4.

  Convolutions are a twentieth of a LeNet, and of high rank.
  """
  factors = reducers.compressed(
    codecs.Quantize(bits, 64), owner_feedback="own_share"
  )
  policy = reducers.PerLeaf(
    (
      reducers.Rule(
        reducers.PowerSGD(rank, factors=factors), path="dense*/kernel"
      ),
    ),
    default=reducers.compressed(codecs.Quantize(4, 64)),
  )
  return optax.chain(
    transforms.average_gradients(
      run.axis,
      reducers.Compression(policy, reducers.ErrorFeedback()),
    ),
    run.inner,
  )


def _adam(run: ChainRun) -> Chain:
  return one_bit_adam(
    _share(run, 0.04), max(1, run.num_steps // 6), axis=run.axis
  )


def _signs(run: ChainRun) -> optax.GradientTransformation:
  return optax.scale_by_learning_rate(_share(run, 0.04))


def _local(run: ChainRun, codec: codecs.Codec | None) -> Chain:
  if codec is None:
    return methods.local_sgd(run.inner, 8, axis=run.axis)
  return methods.diloco(
    run.inner,
    intervals.ending_at(run.num_steps, 8),
    axis=run.axis,
    compression=reducers.Compression(
      reducers.compressed(codec), reducers.ErrorFeedback()
    ),
  )


# In the order in which they run: what matters most comes first.
VARIANTS: dict[str, Variant] = {
  "ssgd": lambda run: methods.ssgd(run.inner, axis=run.axis),
  "two-way top-k 2 %, int4": lambda run: _two_way(
    run, 0.02, codecs.Quantize(4)
  ),
  "two-way dgc 2 %, int4": lambda run: _two_way(
    run, 0.02, codecs.Quantize(4), momentum=True
  ),
  "dgc 0.25 %": lambda run: _dgc(run, 0.0025),
  "two-way top-k 1 %, bfloat16": lambda run: _two_way(
    run, 0.01, codecs.Cast("bfloat16")
  ),
  "two-way dgc 1 %, bfloat16": lambda run: _two_way(
    run, 0.01, codecs.Cast("bfloat16"), momentum=True
  ),
  "dense rank 6 in 3 bits, convs int4": lambda run: _by_leaf(run, 6, 3),
  "powersgd rank 6, int4": lambda run: _low_rank(run, 6),
  "powersgd rank 4, int4": lambda run: _low_rank(run, 4),
  "int4 + feedback": lambda run: _reduced(run, codecs.Quantize(4)),
  "dgc 1 %": lambda run: _dgc(run, 0.01),
  "top-k 1 % + feedback": lambda run: methods.topk_sgd(
    run.inner, 0.01, axis=run.axis
  ),
  "powersgd rank 2": lambda run: methods.powersgd(run.inner, 2, axis=run.axis),
  "ef_signsgd": lambda run: methods.ef_signsgd(run.inner, axis=run.axis),
  "dgc 0.1 %": lambda run: _dgc(run, 0.001),
  "diloco H=8 + int4": lambda run: _local(run, codecs.Quantize(4)),
  "sparse_loco H=8": lambda run: methods.sparse_loco(
    run.inner, intervals.ending_at(run.num_steps, 8), axis=run.axis
  ),
  "int8": lambda run: _reduced(run, codecs.Quantize(8), feedback=False),
  "qsgd 4 bits": lambda run: methods.qsgd(run.inner, 4, axis=run.axis),
  "terngrad": lambda run: methods.terngrad(run.inner, axis=run.axis),
  "signsgd": lambda run: methods.signsgd(_signs(run), 0.9, axis=run.axis),
  "one_bit_adam": _adam,
  "top-k 1 %": lambda run: methods.topk_sgd(
    run.inner, 0.01, axis=run.axis, feedback=False
  ),
  "powersgd rank 1": lambda run: methods.powersgd(run.inner, 1, axis=run.axis),
  "demo": lambda run: methods.demo(_signs(run), axis=run.axis),
  "local_sgd H=8": lambda run: _local(run, None),
  "muloco H=8": lambda run: methods.muloco(
    _share(run, 0.2), intervals.ending_at(run.num_steps, 8), axis=run.axis
  ),
}

# Under these names on the command line.
PRESETS: Presets = {
  "cifar10": ("CIFAR-10, LeNet: minutes a run on 2 cores", Config()),
  "cifar10-longer": (
    "the same in 15 epochs: what sends a fiftieth, beside synchronous SGD",
    Config(
      epochs=15.0, rates=(0.0125, 0.025), seeds=(30, 31, 32, 33, 34),
      variants=("ssgd", "powersgd rank 6, int4"),
    ),
  ),
  "cifar10-mlp": (
    "CIFAR-10, an MLP of 395,000 parameters: large layers compress better",
    Config(
      model="mlp", rates=(0.025, 0.05, 0.1), seeds=(30, 31, 32, 33, 34),
      variants=("ssgd", "powersgd rank 4, int4"),
    ),
  ),
  "smoke": (
    "digits, a few steps: that it runs",
    Config(
      dataset="digits", model="mlp", workers=2, epochs=1.0, warmup_epochs=0.2,
      rates=(0.1,), seeds=(0,), variants=("ssgd", "int4 + feedback"),
    ),
  ),
  "cifar100-gpu": (
    "CIFAR-100, ResNet-18 on 8 GPUs",
    Config(
      dataset="cifar100", model="resnet18", batch_size=1024, epochs=160.0,
      warmup_epochs=5.0, rates=(0.1, 0.2, 0.4, 0.8), weight_decay=5e-4,
      augment=True, dtype="bfloat16",
    ),
  ),
  "imagenet-gpu": (
    "ImageNet at 64x64, ResNet-50 on 8 GPUs",
    Config(
      dataset="imagenet_resized/64x64", model="resnet50", batch_size=1024,
      epochs=90.0, warmup_epochs=5.0, rates=(0.2, 0.4, 0.8),
      weight_decay=1e-4, augment=True, dtype="bfloat16",
    ),
  ),
}  # fmt: skip
