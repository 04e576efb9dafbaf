"""Groups of options that commands share; a group's docstring is its title.

A field's docstring is its help.
"""

import dataclasses
from typing import Annotated, Literal

import tyro

Directory = Annotated[str | None, tyro.conf.arg(metavar="DIR")]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="METHOD [METHOD ...]")]
Norm = Literal["batch", "group", "none"]
Codec = Literal[
  "float16", "bfloat16", "int8", "int4", "int2", "sign", "ternary", "top_k",
  "random_k", "dct",
]  # fmt: skip
Feedback = Literal["none", "error", "ef21", "momentum", "smoothing"]
Reducer = Literal["gather", "all_to_all", "power_sgd", "majority_vote"]
OuterOptimizer = Literal["sgd", "momentum", "nesterov", "adam"]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """Model and data set."""

  preset: str = "digits"
  """Where the defaults come from: digits, mnist, cifar10, cifar10-gpu or
  tiny_shakespeare."""

  dataset: str = "digits"
  """synthetic needs nothing, digits scikit-learn, and the others TensorFlow
  Datasets, once `python -m jdist.data prepare NAME` was run: mnist,
  fashion_mnist, cifar10, cifar100, imagenette, imagenet_resized/SIZE;
  tiny_shakespeare is a text."""

  text: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
  """Of any kind, in place of a data set: its bytes are predicted; the last
  tenth is for testing."""

  window_length: int | None = None
  """Of a text: bytes of a sample; 128 if not given."""

  model: str = "mlp"
  """For small images mlp, lenet, cnn, resnet8 or resnet20; for larger ones
  alexnet, vgg11, vgg13, vgg15, vgg16, vgg19, resnet18, resnet34 or resnet50;
  for a text transformer."""

  norm: Norm | None = None
  """Normalisation of ResNets and VGGs; the model's own default if not given."""

  num_layers: int | None = None
  """Of the transformer; 4 if not given."""

  width: int | None = None
  """Of the transformer's vectors, 128 if not given; of the first layers of
  ResNets and VGGs, 64."""

  num_heads: int | None = None
  """Of the transformer's attention; 4 if not given, and they divide the
  width."""

  dtype: Literal["float32", "bfloat16"] = "float32"
  """In which the model computes; parameters stay float32."""


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
  """Workers and their data."""

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

  alpha: float | None = None
  """Label skew between workers (Dirichlet), i.i.d. if not given; 0.1 is a lot,
  10 little."""

  augment: bool = False
  """Random crops, padded by 4 pixels, and flips left to right: for photographs,
  neither for digits nor for a text."""


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
  """Budget and each worker's optimizer."""

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
  """Epochs in which the learning rate rises."""

  skip_nonfinite: bool = False
  """Take zeros for the gradients of a step in which a worker's are not
  finite; counted in the row."""


@dataclasses.dataclass(frozen=True)
class RoundOptions:
  """Rounds, and their overlap with computation."""

  interval: int = 8
  """Local steps of a round, H; the longest of growth, and the first of msdpu
  and adacomm, whose highest is 16, or this if it is more."""

  interval_policy: Literal[
    "method", "fixed", "growth", "adacomm", "qsr", "msdpu"
  ] = "method"
  """The rule for the interval: the method's own, or this one.  growth:
  one step at first, more as the rate falls; msdpu and adacomm follow the loss.
  """

  overlap: bool = False
  """Take the mean a round late, while the next round is computed, in a method
  that does not by itself."""

  delay_steps: int | None = None
  """After how many steps of the next round a late mean is applied; if not
  given, at its end, of MSDPU after 1."""

  carry: float | None = None
  """Part of the local progress kept when a late mean is applied; if not given,
  all of it, of MSDPU a worker's share, 1/N."""

  stream: bool = False
  """Send a late mean in sub-tensors, some in every step, under its
  computation. The same numbers; compiles a few programs instead of one."""

  correction: float | None = None
  """Of MSDPU: pull towards the anchor in a round; 0.1 if not given."""


@dataclasses.dataclass(frozen=True)
class OuterOptions:
  """Outer optimizer."""

  outer: OuterOptimizer | None = None
  """Fed with the mean pseudo-gradient of a round; the method's own if not
  given, Nesterov's momentum of DiLoCo."""

  outer_learning_rate: float | None = None
  """Of the outer optimizer; the method's own, or 1 for sgd, 0.7 for momentum
  and nesterov, 0.01 for adam."""

  outer_momentum: float | None = None
  """Of an outer optimizer with momentum; 0.9 if not given."""


@dataclasses.dataclass(frozen=True)
class MeanOptions:
  """Mean by fewer bytes."""

  codec: Codec | None = None
  """How what is averaged is packed, in methods that leave it open; as it is if
  not given."""

  feedback: Feedback | None = None
  """What becomes of the part that is not sent: dropped (none), or kept as error
  feedback (error), EF21 or momentum correction; smoothing is of
  majority_vote."""

  reducer: Reducer | None = None
  """How the mean is taken: a codec's payloads gathered or by an all-to-all,
  what suits the codec if not given; or by power_sgd or majority_vote."""

  bits: int | None = None
  """Of each number that qsgd, sparse_loco and muloco send; the method's own
  default if not given."""

  ratio: float | None = None
  """The part of the entries that topk_sgd, dgc, sparse_loco and the codecs
  top_k, random_k and dct send; the default of each if not given."""

  rank: int | None = None
  """Of the mean of powersgd and of the reducer power_sgd; 2 if not given."""


@dataclasses.dataclass(frozen=True)
class MethodOptions(MeanOptions, OuterOptions, RoundOptions):
  """All that puts a method together."""


@dataclasses.dataclass(frozen=True)
class NetworkOptions(ModelOptions):
  """Networks that were trained before."""

  predictor: Directory = None
  """Of mp2, which needs one: a trained predictor for this model, as
  `jdist.prediction.save_predictor` leaves it, which says where it is cut."""


@dataclasses.dataclass(frozen=True)
class ResultOptions:
  """Programs, evaluation and results."""

  host_rounds: bool = True
  """Let the host say which step ends a round, of methods that take it: the
  steps before it copy less. The same numbers up to rounding; twice the
  programs."""

  evaluate_every_epochs: float = 2.0
  """Epochs between evaluations on the test set."""

  output: Directory = None
  """Directory for rows and pictures; a new one under runs/ if not given."""


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
  """Checkpoints."""

  checkpoints: Directory = None
  """Directory to save to and to resume from."""

  checkpoint_every_epochs: float = 2.0
  """Epochs between two checkpoints. SIGTERM saves one, too, and ends the run
  with status 143."""

  final_params: Annotated[
    str | None, tyro.conf.arg(metavar="FILE.safetensors")
  ] = None
  """File for the trained parameters, which `training.load_model` and other
  programs read; needs the extra `export`."""

  tensorboard: Directory = None
  """Directory for each evaluation as events of TensorBoard; needs the extra
  `metrics`."""


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
  """Several processes."""

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
class LinkOptions:
  """Link of the modelled times."""

  bandwidth_mbit_per_s: float = 100.0
  """Of each machine's link: for the modelled time in the picture."""

  latency_ms: float = 1.0
  """Of that link, for each message."""


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
  """GPUs and compiler."""

  topology: str = "8xh200"
  """GPUs to compile for, GPUSxKIND or NODESxGPUSxKIND; kinds are h200, h100
  and a100."""

  host_rounds: bool = True
  """Let the host say which step ends a round, of methods that take it: two
  programs without a conditional, as `jdist train` runs them."""

  message_mb: float | None = None
  """Size up to which ssgd:first, :scattered and :hybrid cut and join their
  messages; 4 MiB if not given."""

  pending: float = 0.33
  """Which part of the gradients ssgd:hybrid holds back for the next step."""

  tell_compiler: bool = False
  """Tell the compiler's scheduler how fast the link is. If not, it takes any
  message to last as long as a few products."""

  in_flight: int | None = None
  """Collectives that may be under way at once; if not given, the compiler's
  own choice, one."""

  combine_mb: float | None = None
  """Size up to which all-reduces are merged, 0 for none; if not given, the
  compiler's own choice."""


@dataclasses.dataclass(frozen=True)
class RateOptions:
  """Stated rates."""

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


@dataclasses.dataclass(frozen=True)
class StageOptions:
  """Pipeline of stages."""

  stages: int | None = None
  """Cut the model into stages, a device each, of every worker: so many; a whole
  model on each device if not given."""

  table: str = "1f1b"
  """Which device does what in which order: a table by its name, of `jdist
  pipeline --help`, or a file."""

  microbatches: int | None = None
  """Into which a worker's part of a batch is cut; two for each stage if not
  given."""

  window: int | None = None
  """Of ours: iterations under way at once; as many as keep all devices busy if
  not given."""

  chunks: int | None = None
  """Of interleaved: stages of each device; 2 if not given."""

  cuts: Annotated[
    tuple[int, ...], tyro.conf.arg(metavar="LAYER [LAYER ...]")
  ] = ()
  """Layers, counted from 0, at which the second and later stages begin; if not
  given, where the stages take about as long."""

  late_from: float | None = None
  """Share of the run's steps after which a table without a flush begins, which
  takes gradients late; 1f1b before. 0.5 keeps the accuracy where such a table
  from the beginning does not, see experiments/pipeline. If not given, at
  once."""

  delay_fix: Literal["none", "prediction"] = "none"
  """The remedy for late gradients: they are taken at predicted weights, by
  `transforms.predict_weights`, or as they are."""
