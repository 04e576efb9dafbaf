"""The options of every command, as dataclasses from which tyro reads them.

A field's docstring is its help.  There are no second defaults: what is not
given comes from the preset, and what the preset does not say from here.
"""

import dataclasses
from typing import Annotated, Literal, TypeVar

import tyro

# What `_methods` builds, in a line each.
METHODS: dict[str, str] = {
  "ssgd": "synchronous SGD: the gradients' mean in every step",
  "local_sgd": "H steps each for itself, then the parameters' mean",
  "post_local_sgd": "ssgd for the first half of the run, then local_sgd",
  "diloco": "local steps; their mean is a gradient for outer Nesterov",
  "msdpu": "local steps; the mean comes a round late, H follows loss",
  "fed_prox": "local_sgd with a pull back to the round's beginning",
  "easgd": "springs between the workers and a centre",
  "scaffold": "local_sgd with control variates, for unequal data",
  "slow_mo": "local_sgd with a momentum of the rounds",
  "cocod": "the last round's mean, one's own progress on top",
  "overlap_local_sgd": "a pull to a mean that is one round late",
  "od_sgd": "gradients one step late, a local step in between",
  "streaming_diloco": "diloco in fragments at staggered steps",
  "qsgd": "ssgd with integers of a few bits",
  "terngrad": "ssgd with -1, 0 or 1 times a scale",
  "signsgd": "ssgd by majority vote on the signs of momenta",
  "ef_signsgd": "ssgd with signs, and feedback of the rest",
  "one_bit_adam": "Adam, then signs of its momentum",
  "topk_sgd": "ssgd with the largest entries, and feedback",
  "dgc": "the largest entries of momenta, fewer and fewer",
  "powersgd": "ssgd with a mean of low rank, and feedback",
  "demo": "signs of the fastest components of momenta",
  "sparse_loco": "local steps; the largest entries in 2 bits",
  "muloco": "diloco with Muon inside, in 2 bits",
  "mp2": "the front layers' mean; a network predicts the others",
  "wnn": "ssgd; networks foresee the weights, every fifth epoch",
}

# Of any command.
Options = TypeVar("Options", bound="Common | Schedule | Bytes")

_Directory = Annotated[str | None, tyro.conf.arg(metavar="DIR")]


@dataclasses.dataclass(frozen=True)
class Common:
  """What one run is, whatever the method."""

  preset: str = "digits"
  """Where the defaults come from: digits, mnist, cifar10 or cifar10-gpu."""

  dataset: str = "digits"
  """digits comes with scikit-learn; the others with TensorFlow Datasets, once
  `python -m jdist.data prepare NAME` was run: mnist, fashion_mnist, cifar10,
  cifar100, imagenette, imagenet_resized/SIZE."""

  model: str = "mlp"
  """For small images mlp, lenet, cnn, resnet8 or resnet20; for larger ones
  alexnet, vgg11, vgg13, vgg15, vgg16, vgg19, resnet18, resnet34 or
  resnet50."""

  norm: Literal["batch", "group", "none"] | None = None
  """Normalisation of ResNets and VGGs; the model's own default if not given."""

  workers: int = 8
  """Workers that train together."""

  substrate: Literal["auto", "vmap", "shard_map"] = "auto"
  """How they run: shard_map over devices (on a CPU: virtual ones), vmap on one
  device, or what suits."""

  batch_size: int = 128
  """Samples of all workers together in a step; a multiple of workers times
  accumulate."""

  accumulate: int = 1
  """Micro-batches a worker cuts its part into, to save memory."""

  epochs: float = 30.0
  """Passes over the training set."""

  steps: int | None = None
  """Length of the run in steps, instead of epochs."""

  optimizer: Literal["sgd", "adamw"] = "sgd"
  """Each worker's optimizer; sgd has Nesterov momentum."""

  momentum: float = 0.9
  """Of sgd; 0 is none."""

  weight_decay: float = 0.0
  """Decoupled: times the learning rate, beside the gradient."""

  schedule: Literal["cosine", "constant"] = "cosine"
  """Of the learning rate, over all steps, after a linear warm-up."""

  warmup_epochs: float = 1.0
  """Epochs in which the learning rate rises; MSDPU is synchronous for so
  long."""

  interval: int = 8
  """Local steps of a round, H; the first interval of adaptive methods, whose
  highest is 16, or this if it is more."""

  interval_policy: Literal["method", "fixed", "adacomm", "qsr", "msdpu"] = (
    "method"
  )
  """What decides the interval: the method's own rule, or this one."""

  outer_learning_rate: float = 0.7
  """Of DiLoCo's outer optimizer, streaming or not."""

  outer_momentum: float = 0.9
  """Of DiLoCo's outer optimizer, streaming or not."""

  correction: float = 0.1
  """Of MSDPU: pull towards the anchor in a round."""

  carry: float | None = None
  """Of MSDPU: part of the local progress kept when a late mean arrives; if not
  given, a worker's share of it, 1/N."""

  bits: int | None = None
  """Of each number that qsgd, sparse_loco and muloco send; the method's own
  default if not given."""

  ratio: float | None = None
  """The part of the entries that topk_sgd, dgc and sparse_loco send; the
  method's own default if not given."""

  rank: int = 2
  """Of powersgd's mean."""

  predictor: _Directory = None
  """Of mp2, which needs one: a trained predictor for this model, as
  `jdist.prediction.save_predictor` leaves it, which says where it is cut."""

  nowcasters: _Directory = None
  """Of wnn, which needs them: trained nowcasters, as
  `jdist.prediction.save_nowcasters` leaves them."""

  nowcast_steps: int | None = None
  """Of wnn: steps that count as an epoch; a pass over the training set if not
  given."""

  delay_steps: int | None = None
  """Of MSDPU: after how many steps of the next round a mean is applied; at its
  end if not given."""

  stream: bool = False
  """Of MSDPU: send a late mean in sub-tensors, some in every step, under its
  computation. The same numbers; compiles a few programs instead of one."""

  host_rounds: bool = False
  """Let the host say which step ends a round, of methods that take it: the
  steps before it copy less. The same numbers up to rounding; twice the
  programs."""

  alpha: float | None = None
  """Label skew between workers (Dirichlet), i.i.d. if not given; 0.1 is a lot,
  10 little."""

  augment: bool = False
  """Random crops, padded by 4 pixels, and flips left to right: for photographs,
  not for digits."""

  dtype: Literal["float32", "bfloat16"] = "float32"
  """In which the model computes; parameters stay float32."""

  evaluate_every_epochs: float = 2.0
  """Epochs between evaluations on the test set."""

  output: _Directory = None
  """Directory for rows and pictures; a new one under runs/ if not given."""


@dataclasses.dataclass(frozen=True)
class Train(Common):
  """Trains one model with one method, on one host or many.

  Saves checkpoints if asked to and goes on from the last one by itself.
  """

  method: str = "msdpu"
  """Any of `jdist --help`: ssgd, local_sgd, diloco, msdpu, ..."""

  learning_rate: float = 0.1
  """The highest one of the schedule."""

  seed: int = 0
  """Of initial parameters, data order and everything else random."""

  checkpoints: _Directory = None
  """Directory to save to and to resume from."""

  checkpoint_every_epochs: float = 2.0
  """Epochs between two checkpoints."""

  coordinator_address: Annotated[
    str | None, tyro.conf.arg(metavar="HOST:PORT")
  ] = None
  """Of process 0, for a run of several processes; under Slurm and MPI `auto`
  finds it, and the two numbers below."""

  num_processes: int | None = None
  """How many processes the run has."""

  process_id: int | None = None
  """This process, from 0."""


@dataclasses.dataclass(frozen=True)
class Compare(Common):
  """Compares methods and seeds: same budget, one table, one picture.

  With several learning rates every method first looks for its best one on a
  part of the training set that is held out for that; all from the same grid.
  """

  methods: Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="METHOD [METHOD ...]")
  ] = ("ssgd", "local_sgd", "diloco", "msdpu")
  """Any of `jdist --help`."""

  learning_rate: Annotated[
    tuple[float, ...], tyro.conf.arg(metavar="RATE [RATE ...]")
  ] = (0.1,)
  """The highest one of the schedule; of several, each method uses the one
  that is best for it on held-out training samples."""

  seeds: Annotated[
    tuple[int, ...], tyro.conf.arg(metavar="SEED [SEED ...]")
  ] = (0, 1, 2)
  """One run each; the table says mean and spread."""

  bandwidth_mbit_per_s: float = 100.0
  """Of each machine's link: for the modelled time in the picture."""

  latency_ms: float = 1.0
  """Of that link, for each message."""


# Of methods that have several forms, the first is meant without a colon.
FORMS: dict[str, tuple[str, ...]] = {
  "ssgd": ("after", "first", "scattered", "hybrid"),
  "msdpu": ("streamed", "simple"),
}


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Compiles a training step for GPUs that need not be there, and says what
  hides its communication: a table, rows and a drawn timeline.

  The order is that of the compiled program. Times are computed from stated
  rates; nothing is run or measured.
  """

  method: Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="METHOD [METHOD ...]")
  ] = ("msdpu",)
  """One or more methods, in forms: ssgd sends after the backward pass,
  ssgd:first before the forward pass, ssgd:scattered half of each message then
  and ssgd:hybrid the front layers' messages; msdpu is streamed, msdpu:simple
  sends its late mean at once at a round's end."""

  model: str = "resnet50"
  """A model of `jdist train`, or transformer: that of GPT-2, 124 million
  parameters."""

  topology: str = "8xh200"
  """GPUs to compile for, GPUSxKIND or NODESxGPUSxKIND; kinds are h200, h100
  and a100."""

  batch_size: int = 32
  """Images or sequences of one GPU in a step."""

  image_size: int | None = None
  """Height and width of the images; if not given, what the model was made
  for."""

  length: int = 1024
  """Tokens of a sequence, for the transformer."""

  norm: Literal["batch", "group", "none"] | None = None
  """Normalisation of ResNets and VGGs; the model's own default if not given."""

  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  """In which the model computes; parameters and messages stay float32."""

  interval: int = 8
  """Local steps of a round, H."""

  message_mb: float | None = None
  """Size up to which ssgd:first, :scattered and :hybrid cut and join their
  messages; 4 MiB if not given."""

  pending: float = 0.33
  """Which part of the gradients ssgd:hybrid holds back for the next step."""

  host_rounds: bool = False
  """Let the host say which step ends a round, of methods that take it: two
  programs without a conditional, as of `Trainer(..., host_rounds=True)`."""

  tell_compiler: bool = False
  """Tell the compiler's scheduler how fast the link is. If not, it takes any
  message to last as long as a few products."""

  in_flight: int | None = None
  """Collectives that may be under way at once; if not given, the compiler's
  own choice, one."""

  combine_mb: float | None = None
  """Size up to which all-reduces are merged, 0 for none; if not given, the
  compiler's own choice."""

  bandwidth_gbit_per_s: float | None = None
  """Of each GPU's link, in each direction; if not given, the data sheet's for
  NVLink, and for the network if there are several nodes."""

  latency_us: float = 2.0
  """Assumed for each message of a ring."""

  tflop_per_s: float | None = None
  """Rate of products and convolutions; the data sheet's if not given."""

  memory_gb_per_s: float | None = None
  """Rate of a GPU's memory; the data sheet's if not given."""

  launch_us: float = 2.0
  """Assumed for the shortest kernel."""

  output: _Directory = None
  """Directory for rows and picture; a new one under runs/ if not given."""


@dataclasses.dataclass(frozen=True)
class Bytes:
  """Counts what a worker sends, in three ways that must agree: as the codecs
  tell, by the collectives of the traced step, and by those of the compiled
  program. Nothing is trained.
  """

  method: Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="METHOD [METHOD ...]")
  ] = ("ssgd", "qsgd", "topk_sgd", "dgc", "powersgd")
  """Any of `jdist --help`."""

  model: str = "resnet18"
  """A model of `jdist train`."""

  workers: int = 8
  """Workers that train together."""

  interval: int = 8
  """Local steps of a round, H, of methods that have rounds."""

  bits: int | None = None
  """Of qsgd, sparse_loco and muloco; a method's own if not given."""

  ratio: float | None = None
  """Entries that are sent, of topk_sgd, dgc and sparse_loco; a method's own if
  not given."""

  rank: int = 2
  """Of PowerSGD."""

  cut: int | None = None
  """Layers that mp2 sends; if not given, as published for lenet, alexnet,
  vgg15, resnet18, resnet34 and resnet50."""

  steps: int = 10_000
  """Steps of the run, of which one_bit_adam warms up for a sixth."""

  warmup_steps: int = 0
  """Steps of the learning rate's warm-up, and of each of dgc's first phases,
  which send more; 0 has none."""


# What a preset changes. Presets are for both commands: a learning rate of
# several values is a grid for `compare`, and its first value is `train`'s.
PRESETS: dict[str, dict[str, object]] = {
  "digits": {"learning_rate": (0.1, 0.05, 0.2, 0.4)},
  "mnist": {
    "dataset": "mnist",
    "model": "lenet",
    "epochs": 2.0,
    "warmup_epochs": 0.1,
    "evaluate_every_epochs": 0.5,
    "learning_rate": (0.05,),
  },
  "cifar10": {
    "dataset": "cifar10",
    "model": "cnn",
    "epochs": 4.0,
    "warmup_epochs": 0.5,
    "evaluate_every_epochs": 0.5,
    "learning_rate": (0.05,),
  },
  "cifar10-gpu": {
    "dataset": "cifar10",
    "model": "resnet20",
    "batch_size": 1024,
    "epochs": 160.0,
    "warmup_epochs": 5.0,
    "weight_decay": 5e-4,
    "evaluate_every_epochs": 5.0,
    "learning_rate": (0.4,),
    "dtype": "bfloat16",
    "stream": True,
  },
}


def with_preset(options: type[Options], name: str) -> Options:
  """The defaults of a command under a preset.

  Raises:
    ValueError: when there is no such preset.
  """
  if not issubclass(options, Common):
    return options()
  if name not in PRESETS:
    raise ValueError(
      f"`--preset` must be one of {', '.join(PRESETS)}, got {name!r}."
    )
  changes: dict[str, object] = dict(PRESETS[name])
  if options is Train:
    changes["learning_rate"] = changes["learning_rate"][0]  # type: ignore[index]
  return options(preset=name, **changes)  # type: ignore[arg-type]
