"""What is compared: the variants, and sizes under which they are."""

import dataclasses
import hashlib
import json
import pathlib
import sys
from typing import Any, cast, Literal

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import exchange
import jax
import nowcaster_fit
import nowcasters
import optax
import optax_chains
import studies
from optax_chains import ChainRun, Variant

from jdist import (
  codecs,
  collectives,
  data,
  methods,
  models,
  prediction,
  reducers,
  training,
  transforms,
)
from jdist.storage import array_files

Chain = optax.GradientTransformationExtraArgs
# The network that is sent and the one that predicts: the paper's, or deeper
# predictions by more.
Kind = Literal["published", "rich"]
# What stands behind the front: what a predictor makes of it, the layers of the
# last step of the run that the predictor learned from, or those drawn at first.
Rear = Literal["predicted", "borrowed", "drawn"]
_OF_REAR = {"borrowed rear": "borrowed", "nothing predicted": "drawn"}
# SGD's rates are 25 times Adam's; the grid stays as wide.
_SGD_RATE = 25
# What the arrays of a run's end are.
PARAMETERS = "the parameters of a run"


@dataclasses.dataclass(frozen=True)
class Config(optax_chains.Config):
  """A comparison, and how its predictors and nowcasters are made."""

  FREE = (*optax_chains.Config.FREE, "cache")

  dataset: str = "mnist"
  batch_size: int = 256
  epochs: float = 1.0
  warmup_epochs: float = 0.1
  rates: tuple[float, ...] = (8e-3, 1.6e-2, 3.2e-2)
  optimizer: Literal["sgd", "adam"] = "adam"
  evaluations: int = 10

  cut: int = 2
  """Layers that are sent, as published for this network."""

  rich_cut: int = 1
  """Layers in front of our other cut."""

  rich_rank: int = 8
  """Of its predictor's convolutions; the published one has 1."""

  rank: int = 4
  """Of PowerSGD in our variant."""

  depths: tuple[int, ...] = (1, 2, 3, 4)
  """Cuts whose predictability is measured; none where there are no layers to
  spare the time for."""

  more_runs: int = 3
  """Runs with other seeds, whose fronts one more predictor learns from: whether
  it then moves to a seed that it has not seen."""

  other_dataset: str | None = "cifar10"
  """With as many classes: whether the predictor works there, too, with images
  brought to the same form; None leaves it out."""

  other_workers: int | None = 4
  """Of an ordinary run whose fronts the predictor has not seen; None leaves it
  out."""

  start_seed: int | None = None
  """Of the first weights of all runs; default each run's own seed. That of the
  run whose fronts were collected is 20000."""

  nowcast_epochs: float = 0.05
  """Passes that count as an epoch for the nowcasters: they jump after every
  fifth, and a short run has few epochs."""

  collect_rate: float = 1.6e-2
  """The learning rate of the ordinary runs that fronts are collected from: a
  rear is no better than the run that it was learned from, so the one at which
  the baseline is best."""

  samples_per_epoch: int = 64
  """Fronts that are collected in a pass of the ordinary run."""

  fit_epochs: int = 30
  """Of the predictors' training."""

  study_epochs: int = 6
  """Of the trainings that measure how well each depth is predicted."""

  fit_samples: int = 8
  """Networks that are put together for an update."""

  fit_images: int = 64
  """Images of an update."""

  fit_updates: int = 7
  """Updates with the same networks."""

  nowcast_steps: int = 1000
  """Of the nowcasters' training."""

  cache: str = str(pathlib.Path(__file__).resolve().parent / "cache")
  """Where `prepare.py` leaves what the variants load."""

  def ignores(self, variant: str) -> set[str]:
    """Ignores how predictors and nowcasters are made, without such."""
    ignored = {"depths", "study_epochs", "more_runs", "other_dataset"}
    ignored |= {"other_workers"}
    rear = rear_of(variant) if variant.startswith(("mp2", "ours")) else None
    if rear != "predicted":
      ignored |= {"fit_epochs", "fit_samples", "fit_images", "fit_updates"}
      if variant != "wnn":
        ignored |= {"samples_per_epoch"}
    if variant != "wnn":
      ignored |= {"nowcast_epochs", "nowcast_steps"}
      if rear in ("drawn", None):
        ignored |= {"collect_rate"}
    return ignored


def folder(options: Config) -> pathlib.Path:
  """Where what was prepared for a comparison lies.

  Another number of workers uses the same. Where predictors are moved to does
  not change them.
  """
  matters = (
    # The run that fronts and tracks are of,
    "dataset", "model", "batch_size", "epochs", "warmup_epochs", "optimizer",
    "momentum", "weight_decay", "augment", "alpha", "dtype", "collect_rate",
    "samples_per_epoch", "nowcast_epochs",
    # and what is learned from them.
    "cut", "rich_cut", "rich_rank", "depths", "more_runs", "fit_epochs",
    "study_epochs", "fit_samples", "fit_images", "fit_updates", "nowcast_steps",
  )  # fmt: skip
  named = {name: getattr(options, name) for name in matters}
  told = json.dumps(named, sort_keys=True).encode()
  key = hashlib.sha256(told).hexdigest()[:8]
  name = f"{options.dataset}-{options.model}-{key}".replace("/", "-")
  return pathlib.Path(options.cache) / name


def cut_of(options: Config, model: models.Model, kind: Kind) -> prediction.Cut:
  """Where a network is cut."""
  depth = options.cut if kind == "published" else options.rich_cut
  return prediction.cut(model, depth, name=options.model)


class Chains(optax_chains.Chains):
  """With the paper's networks, and the paper's counts of bytes."""

  options: Config

  def build(self, train: data.Dataset, seed: int) -> models.Model:
    """Builds those without normalization, where there are such."""
    if self.options.start_seed is not None:
      seed = self.options.start_seed
    if self.options.model not in prediction.PUBLISHED:
      return super().build(train, seed)
    return prediction.published_model(
      self.options.model,
      input_shape=train.input_shape,
      num_classes=train.num_classes,
      seed=seed,
    )

  def describe(
    self, variant: str, traffic: collectives.Traffic, record: training.Record
  ) -> dict[str, Any]:
    """Returns the bytes between a worker and a server, see `served`."""
    model = self.workload.model(0)
    whole = exchange.exchange_bytes(cut_of(self.options, model, "published"))
    rounds = record.rounds / record.step
    up, down = served(traffic, whole.whole_bytes, rounds)
    published = up
    if variant.startswith("mp2"):
      kind: Kind = "rich" if "1 conv" in variant else "published"
      found = exchange.exchange_bytes(cut_of(self.options, model, kind))
      # A server sends predictions back; in a ring each worker predicts itself.
      up, down = found.pushed_bytes, found.whole_bytes
      published = found.published_bytes
    return {
      "uplink_bytes_as_published": published * record.step,
      "uplink_bytes": up * record.step,
      "both_bytes": (up + down) * record.step,
      "steps_bytes": {"whole": whole.whole_bytes, "up": up, "down": down},
    }


def served(
  traffic: collectives.Traffic, whole_bytes: int, rounds_per_step: float = 1.0
) -> tuple[float, float]:
  """What a step would send to a server and back, for one worker.

  An all-reduce goes up and down once.  What is gathered goes up, and the
  payloads of all come down, or the whole network where that is less.  Of an
  exchange the shares go up, and what is gathered after it comes down.

  Args:
    traffic: of the step.
    whole_bytes: of the network.
    rounds_per_step: what stands in a conditional is sent once a round.

  Returns:
    Bytes up and down, the mean of a step.
  """
  up = down = 0.0
  for conditional, times in ((False, 1.0), (True, rounds_per_step)):
    sent = [c for c in traffic.collectives if c.conditional is conditional]
    owners = {"all-to-all", "reduce-scatter"} & {c.kind for c in sent}
    back = 0
    for c in sent:
      size = c.payload_bytes * c.count
      if c.kind != "all-gather":
        up += times * size
        back += size if c.kind == "all-reduce" else 0
      else:
        up += 0 if owners else times * size
        back += size * c.num_workers
    down += times * min(back, whole_bytes)
  return up, down


def rear_of(variant: str) -> Rear:
  """Reads from a variant's name what stands behind its front."""
  *_, last = variant.split(", ")
  return cast(Rear, _OF_REAR.get(last, "predicted"))


def source(options: Config) -> pathlib.Path:
  """Returns the folder of the last parameters of the source."""
  return folder(options) / "source"


def _prediction(
  run: ChainRun, kind: Kind = "published", rear: Rear = "predicted"
) -> tuple[prediction.Cut, Any, Any]:
  """A cut, and what predicts behind it, with its parameters.

  What is borrowed or drawn stays as it is, whatever the front.
  """
  cut = cut_of(run.options, run.model, kind)
  params = run.model.params
  if rear == "predicted":
    path = _made(folder(run.options) / f"predictor-{kind}")
    predictor, params = prediction.load_predictor(path, cut)
    return cut, predictor.apply, params
  if rear == "borrowed":
    path = _made(source(run.options))
    arrays, _ = array_files.load_arrays(path, what=PARAMETERS)
    params = array_files.tree_of(arrays, params)
  _, rest = cut.split(params)
  return cut, lambda first, front: first, rest


def _made(path: pathlib.Path) -> pathlib.Path:
  if not path.exists():
    raise SystemExit(
      f"There is no {path}. Make it with `prepare.py` and the same preset and "
      "options."
    )
  return path


def _mp2(
  run: ChainRun, kind: Kind = "published", rear: Rear = "predicted"
) -> Chain:
  cut, predict, params = _prediction(run, kind, rear)
  return methods.mp2(run.inner, cut, predict, params, axis=run.axis)


def _in_bits(run: ChainRun, bits: int) -> Chain:
  """Means of a few bits, with feedback."""
  return optax.chain(
    transforms.average_gradients(
      run.axis,
      reducers.Compression(
        reducers.compressed(codecs.Quantize(bits, 64)),
        reducers.ErrorFeedback(),
      ),
    ),
    run.inner,
  )


def _rest(run: ChainRun, rank: int) -> Chain:
  """The residual's mean of low rank, with factors in 4 bits."""
  return methods.powersgd(
    run.inner,
    rank,
    axis=run.axis,
    factors=reducers.compressed(
      codecs.Quantize(4, 64), owner_feedback="own_share"
    ),
  )


def _ours(
  run: ChainRun,
  rank: int | None = None,
  *,
  bits: int | None = None,
  rear: Rear = "predicted",
) -> Chain:
  """A front in 8 bits, and a predicted rest whose residual learns in fewer.

  Args:
    run: what a variant is told.
    rank: of the residual's mean; default the comparison's.
    bits: of the residual's entries, in place of a low rank.
    rear: what the residual is added to.
  """
  rank = run.options.rank if rank is None else rank
  cut, predict, params = _prediction(run, rear=rear)
  rest = _rest(run, rank) if bits is None else _in_bits(run, bits)
  return transforms.predict_rest(
    _in_bits(run, 8), cut, predict, params, axis=run.axis, rest=rest
  )


def _refreshed(run: ChainRun, rear: Rear = "predicted") -> Chain:
  """The front's means, and in turn those of the layers behind it.

  Every 16 steps, in float32; between its turns a layer goes where its worker
  and the prediction take it.
  """
  interval, axis = 16, run.axis
  front = methods.local_sgd(run.inner, interval, axis=axis)
  cut, predict, params = _prediction(run, rear=rear)
  layers = len(jax.tree.leaves(cut.split(run.model.params)[1])) // 2
  rest = transforms.fragment_steps(run.inner, interval, layers, axis=axis)
  return transforms.predict_rest(
    front, cut, predict, params, axis=axis, rest=rest
  )


def _wnn(run: ChainRun) -> Chain:
  path = _made(folder(run.options) / "nowcasters")
  return optax.chain(
    methods.ssgd(run.inner, axis=run.axis),
    nowcasters.nowcast_weights(
      nowcaster_fit.load_nowcasters(path), nowcast_steps(run), axis=run.axis
    ),
  )


def nowcast_steps(run: ChainRun) -> int:
  """Steps of what counts as an epoch for the nowcasters."""
  share = run.options.nowcast_epochs / run.options.epochs
  return max(1, int(run.num_steps * share))


def _dgc(run: ChainRun) -> Chain:
  # Its momentum stands before the mean, so that SGD is behind it, not Adam.
  # Without its warm-up of the ratio, which alone would send more than the rest
  # of so short a run.
  return methods.dgc(
    optax.scale_by_learning_rate(lambda step: _SGD_RATE * run.rate(step)),
    0.01,
    0.9,
    axis=run.axis,
    nesterov=True,
  )


# In the order in which they run: what matters most comes first.
VARIANTS: dict[str, Variant] = {
  "baseline": lambda run: methods.ssgd(run.inner, axis=run.axis),
  "ours": _ours,
  "mp2 as published": _mp2,
  "mp2, nothing predicted": lambda run: _mp2(run, rear="drawn"),
  "mp2, borrowed rear": lambda run: _mp2(run, rear="borrowed"),
  "wnn": _wnn,
  "top-k 1 % + feedback": lambda run: methods.topk_sgd(
    run.inner, 0.01, axis=run.axis
  ),
  "dgc 1 %": _dgc,
  "top-k 1 %": lambda run: methods.topk_sgd(
    run.inner, 0.01, axis=run.axis, feedback=False
  ),
  "ours, nothing predicted": lambda run: _ours(run, rear="drawn"),
  "ours, rank 16": lambda run: _ours(run, 16),
  "ours, rank 16, nothing predicted": lambda run: _ours(run, 16, rear="drawn"),
  "ours, 2 bits": lambda run: _ours(run, bits=2),
  "ours, 2 bits, nothing predicted": lambda run: _ours(
    run, bits=2, rear="drawn"
  ),
  "ours, 2 bits, borrowed rear": lambda run: _ours(
    run, bits=2, rear="borrowed"
  ),
  "ours, refreshed": _refreshed,
  "ours, refreshed, nothing predicted": lambda run: _refreshed(
    run, rear="drawn"
  ),
  "mp2 rank 8, 1 conv": lambda run: _mp2(run, "rich"),
  "mp2 1 conv, borrowed rear": lambda run: _mp2(run, "rich", "borrowed"),
}

# The paper's sizes: 8 workers of 125 images, 300 passes.
_PUBLISHED = Config(
  depths=(), more_runs=0, other_dataset=None, other_workers=None,
  batch_size=1000, epochs=300.0, warmup_epochs=0.0, collect_rate=1e-3,
  rates=(5e-4, 1e-3, 2e-3), nowcast_epochs=1.0, samples_per_epoch=15,
  fit_epochs=30, fit_samples=25, fit_images=125, fit_updates=100,
  nowcast_steps=20_000, evaluations=300,
)  # fmt: skip
# What the paper says of one network: the cut, and how its predictor is trained.
_OF_MODEL: dict[str, dict[str, int]] = {
  "vgg15": {"cut": 4},
  "resnet18": {"cut": 10, "fit_samples": 200, "fit_updates": 40},
  # Their cuts are the paper's, their predictors' training is ResNet-18's.
  "resnet34": {"cut": 16, "fit_samples": 200, "fit_updates": 40},
  "resnet50": {"cut": 23, "fit_samples": 200, "fit_updates": 40},
  "alexnet": {"cut": 2, "fit_epochs": 5},
}


def _on_gpus(model: str, dataset: str) -> tuple[str, Config]:
  own = _OF_MODEL[model]
  return (
    f"{dataset}, {model} on 8 GPUs, as far as the paper says",
    dataclasses.replace(
      _PUBLISHED, dataset=dataset, model=model, rich_cut=own["cut"], **own
    ),
  )


# Under these names on the command line.
PRESETS: studies.Presets = {
  "mnist": ("MNIST, LeNet: a minute a run on 2 cores", Config()),
  "cifar10": (
    "CIFAR-10, LeNet: minutes a run on 2 cores",
    Config(
      dataset="cifar10", other_dataset="mnist", epochs=5.0, warmup_epochs=0.5,
      rates=(1e-3, 4e-3, 1.6e-2), samples_per_epoch=16,
    ),
  ),
  "smoke": (
    "digits, a few steps: that it runs",
    Config(
      dataset="digits", model="mlp", workers=2, batch_size=128, epochs=1.0,
      cut=1, depths=(1,), more_runs=1, other_dataset=None, other_workers=4,
      rates=(1e-2,), seeds=(0,),
      collect_rate=1e-2, nowcast_epochs=0.1, samples_per_epoch=6,
      fit_epochs=1, study_epochs=1, fit_samples=3,
      fit_images=40, fit_updates=1, nowcast_steps=500, evaluations=3,
      variants=("baseline", "ours"),
    ),
  ),
  **{
    f"{model}-{dataset}-gpu": _on_gpus(model, dataset)
    for model in _OF_MODEL
    for dataset in ("cifar10", "cifar100")
  },
}  # fmt: skip
