"""Groups of options that commands share: the one table of options.

A group is a dataclass whose docstring is its title.  A field is an option: its
name, type and default are the option's, the docstring below it is the help.
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import tyro

Directory = Annotated[str | None, tyro.conf.arg(metavar="DIR")]
Path = Annotated[str | None, tyro.conf.arg(metavar="DIR|FILE")]
File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Weights = Annotated[str | None, tyro.conf.arg(metavar="FILE.safetensors")]
Address = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")]
Cluster = Annotated[str | None, tyro.conf.arg(metavar="CLUSTER.toml")]
Norm = Literal["batch", "group", "none"]
# A name of this package or of others', or an attribute of an own module.
Part = Annotated[str | None, tyro.conf.arg(metavar="NAME|MODULE:NAME")]

COUNT = "[1, inf)"
POSITIVE = "(0, inf)"
NOT_NEGATIVE = "[0, inf)"
SEED = f"[0, {2**32})"


class Option(NamedTuple):
  """Properties of an option that its name, type and help do not have.

  Attributes:
    fills: The arguments of factories of methods or protocols that it fills.  It
      is refused where no chosen factory takes any of them.
    within: The range of its value, or of each value, for instance "[0, 1)".
    needs: The option without which it must be left out, and the values of that
      option if not any will do; None for an option that must be left out.
    hint: Options by which other methods use it.
  """

  fills: tuple[str, ...] = ()
  within: str | None = None
  needs: tuple[Any, ...] = ()
  hint: str | None = None


def option(default: Any, *fills: str, **properties: Any) -> Any:
  """Returns a dataclass field for an option with properties."""
  return dataclasses.field(
    default=default, metadata={"option": Option(fills, **properties)}
  )


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """Model and data set."""

  preset: str = "digits"
  """The source of the defaults: digits, mnist, cifar10, cifar10-gpu or
  tiny_shakespeare."""

  dataset: str = "digits"
  """synthetic needs no files and digits needs scikit-learn. The others are read
  by TensorFlow Datasets once `python -m jdist.data prepare NAME` has run:
  mnist, fashion_mnist, cifar10, cifar100, imagenette, imagenet_resized/SIZE,
  and tiny_shakespeare, which is a text."""

  text: File = None
  """Any file, in place of a data set. The model predicts its bytes, and the
  last tenth is the test set."""

  files: Path = None
  """A folder with a sub-folder of images for each class, or a file .npz, .npy
  or .parquet with numbers, or one array of images, and the classes in its
  column `label`, in place of a data set. Every fifth sample of a class, in the
  order of names or rows, is for testing."""

  image_size: int | None = option(None, within=COUNT, needs=("files",))
  """Height and width to which images of a folder are scaled and cropped
  (default: they must be of one size)."""

  # These four have defaults in `models` and `data`; None keeps them, and is
  # refused with a model that has no such option.
  window_length: int | None = option(None, within=COUNT)
  """Bytes of a sample of a text (default 128)."""

  model: str = "mlp"
  """mlp, lenet, cnn, resnet8 or resnet20 for small images; alexnet, vgg11,
  vgg13, vgg15, vgg16, vgg19, resnet18, resnet34 or resnet50 for larger ones;
  transformer for a text."""

  norm: Norm | None = None
  """Normalization layers of ResNets and VGGs (default: the model's own)."""

  num_layers: int | None = option(None, within=COUNT)
  """Layers of the transformer (default 4)."""

  width: int | None = option(None, within=COUNT)
  """Size of the transformer's vectors (default 128), or channels of the first
  layers of ResNets and VGGs (default 64)."""

  num_heads: int | None = option(None, within=COUNT)
  """Attention heads of the transformer; must divide the width (default 4)."""

  dtype: Literal["float32", "bfloat16"] = "float32"
  """Data type of the computation; parameters stay float32."""


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
  """Workers and their data."""

  workers: int = option(8, within=COUNT)
  """Number of workers that train together."""

  substrate: Literal["auto", "vmap", "shard_map"] = "auto"
  """How workers run: shard_map puts them on several devices (virtual ones on a
  CPU), vmap on one device; auto chooses."""

  # Its rule depends on the number of workers: see `_workload.check`.
  batch_size: int = 128
  """Samples of all workers together in a step; a multiple of workers times
  accumulate."""

  accumulate: int = option(1, within=COUNT)
  """Micro-batches into which a worker splits its part of the batch, to save
  memory."""

  alpha: float | None = None
  """Dirichlet parameter of the label skew between workers: 0.1 is strong, 10 is
  weak (default: independent and identically distributed data)."""

  augment: bool = False
  """Crop photographs at random with 4 pixels of padding, and flip them left to
  right. Suits neither digits nor texts."""


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
  """Budget and each worker's optimizer."""

  epochs: float = option(30.0, within=POSITIVE, needs=("steps", None))
  """Passes over the training set."""

  steps: int | None = option(None, within=COUNT)
  """Length of the run in steps, in place of epochs."""

  optimizer: Literal["sgd", "adamw"] = option("sgd", "worker_optimizer")
  """Optimizer of each worker; sgd uses Nesterov momentum."""

  momentum: float = option(
    0.9, "worker_optimizer", "mu", within="[0, 1)", needs=("optimizer", "sgd")
  )
  """Momentum of sgd; 0 disables it."""

  weight_decay: float = option(0.0, within=NOT_NEGATIVE)
  """Decoupled weight decay, multiplied by the learning rate."""

  schedule: Literal["cosine", "constant"] = "cosine"
  """Learning rate after the linear warm-up."""

  warmup_epochs: float = option(1.0, within=NOT_NEGATIVE)
  """Epochs of the learning rate's warm-up, at most half of the run."""

  skip_nonfinite: bool = False
  """Replace the gradients of a step by zeros where a worker's are not finite;
  the row counts these steps."""


@dataclasses.dataclass(frozen=True)
class RoundOptions:
  """Rounds, and their overlap with computation."""

  interval: int = option(8, "interval", within=COUNT)
  """Local steps of a round, H: the longest round of growth, and the first one
  of msdpu and adacomm, whose longest is the larger of 16 and this."""

  # A policy replaces the number as the factory's `interval`.
  interval_policy: Literal[
    "method", "fixed", "growth", "adacomm", "qsr", "msdpu"
  ] = option("method", "interval")
  """Rule for the interval: the method's own or one of the others. growth starts
  with one step and grows as the learning rate falls; msdpu and adacomm follow
  the loss."""

  growth_start: float = option(
    1 / 3, "growth", within=POSITIVE, hint="--interval-policy growth"
  )
  """c of growth, whose first rounds have c^2 steps: rounds of MSDPU are longer,
  and fewer, the larger it is."""

  overlap: bool = option(False, "overlap")
  """Apply each mean one round late, so that it is sent while the next round is
  computed, in a method that does not do so by definition."""

  delay_steps: int | None = option(None, "delay_steps", "overlap", "late")
  """Steps of the next round after which a late mean is applied (default: at the
  end of the round; for MSDPU after 1)."""

  # "late" is no argument of a factory: `_methods.takes` adds it wherever a
  # method or these options make a mean late.
  carry: float | None = option(None, "late", hint="--overlap")
  """Share of the local progress that is kept when a late mean is applied
  (default: all of it; for MSDPU a worker's share, 1/N)."""

  stream: bool = option(False, "late", "stream", hint="--overlap")
  """Send a late mean in sub-tensors, some in every step, while the step is
  computed, by a few programs instead of one. The numbers are the same without a
  codec; a codec encodes each sub-tensor by itself in place of each leaf."""

  correction: float | None = option(None, "correction", within=NOT_NEGATIVE)
  """MSDPU correction strength, the pull towards the anchor per round (default
  0.1)."""


@dataclasses.dataclass(frozen=True)
class OuterOptions:
  """Outer optimizer."""

  outer: Part = option(None, "rule")
  """Optimizer of the outer parameters, applied to the mean pseudo-gradient of a
  round: sgd, momentum, nesterov or adam, or a sync rule of your own (default:
  the method's own, for DiLoCo nesterov)."""

  outer_learning_rate: float | None = option(
    None, "outer_learning_rate", within=POSITIVE, hint="--outer"
  )
  """Learning rate of the outer optimizer (default: the method's own, or 1 for
  sgd, 0.7 for momentum and nesterov, 0.01 for adam)."""

  outer_momentum: float | None = option(
    None, "outer_momentum", within="[0, 1)", hint="--outer"
  )
  """Momentum of the outer optimizer (default 0.9)."""


@dataclasses.dataclass(frozen=True)
class MeanOptions:
  """Compression of means."""

  codec: Part = option(None, "compression")
  """Encoding of the tensors that are averaged, for methods that do not define
  one: float16, bfloat16, int8, int4, int2, sign, ternary, top_k, random_k or
  dct (default: no compression)."""

  feedback: Part = option(None, "compression")
  """Use of the part that is not sent: none drops it; error is error feedback,
  ef21 is EF21, momentum is momentum correction; smoothing suits
  majority_vote."""

  reducer: Part = option(None, "compression")
  """Computation of the mean: gather or all_to_all exchange a codec's payloads
  (default: whichever suits the codec); power_sgd and majority_vote need no
  codec."""

  bits: int | None = option(None, "bits")
  """Bits per number that qsgd, sparse_loco and muloco send (default: the
  method's own)."""

  # DGC calls the same share its density.
  ratio: float | None = option(None, "ratio", "density", hint="--codec top_k")
  """Share of the entries that topk_sgd, dgc, sparse_loco and the codecs top_k,
  random_k and dct send (default: the method's own, or 0.01)."""

  rank: int | None = option(None, "rank", hint="--reducer power_sgd")
  """Rank of the mean of powersgd and of the reducer power_sgd (default 2)."""


@dataclasses.dataclass(frozen=True)
class MethodOptions(MeanOptions, OuterOptions, RoundOptions):
  """Parts of a method."""


@dataclasses.dataclass(frozen=True)
class NetworkOptions(ModelOptions):
  """Trained network of mp2."""

  predictor: Directory = option(None, "predictor_params")
  """Trained predictor for this model, which mp2 needs, written by
  `jdist.prediction.save_predictor`."""


@dataclasses.dataclass(frozen=True)
class ResultOptions:
  """Programs, evaluation and results."""

  host_rounds: bool = True
  """Let the host end rounds, for methods that support it: the steps of a round
  copy less, the numbers are the same up to rounding, and two programs are
  compiled in place of one."""

  evaluate_every_epochs: float = option(2.0, within=POSITIVE)
  """Epochs between evaluations on the test set."""

  output: Directory = None
  """Directory for rows and pictures (default: a new one under runs/)."""


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
  """Checkpoints."""

  checkpoints: Directory = None
  """Directory to save to and to resume from."""

  checkpoint_every_epochs: float = option(
    2.0, within=POSITIVE, needs=("checkpoints",)
  )
  """Epochs between two checkpoints. SIGTERM saves one as well, and ends the run
  with status 143."""

  final_params: Weights = None
  """File for the trained parameters, which `training.load_model` and other
  programs read. Needs the extra `export`."""

  tensorboard: Directory = None
  """Directory for the evaluations as TensorBoard events. Needs the extra
  `metrics`."""


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
  """Several processes."""

  coordinator_address: Address = None
  """Address of process 0 in a run of several processes; under Slurm and MPI,
  `auto` finds it and the two numbers below."""

  # `auto` needs neither of them, so that `_train` checks which are missing.
  num_processes: int | None = option(None, within=COUNT)
  """Number of processes of the run."""

  process_id: int | None = option(None, within=NOT_NEGATIVE)
  """Number of this process, from 0."""


@dataclasses.dataclass(frozen=True)
class LinkOptions:
  """Link of the modelled times."""

  bandwidth_mbit_per_s: float = option(100.0, within=POSITIVE)
  """Bandwidth of each machine's link."""

  latency_ms: float = option(1.0, within=NOT_NEGATIVE)
  """Latency of that link, for each message."""


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
  """GPUs and compiler."""

  topology: str = "8xh200"
  """GPUs to compile for, as GPUSxKIND or NODESxGPUSxKIND; the kinds are h200,
  h100 and a100."""

  host_rounds: bool = True
  """Let the host end rounds, for methods that support it: two programs without
  a conditional, as `jdist train` runs them."""

  message_mb: float | None = option(None, within=POSITIVE)
  """Message size up to which ssgd:first, :scattered and :hybrid split and join
  tensors (default 4 MiB)."""

  pending: float = option(0.33, within="[0, 1]")
  """Share of the gradients that ssgd:hybrid holds back for the next step."""

  tell_compiler: bool = False
  """Give the link's rates to the compiler's scheduler. Without them it assumes
  that any message takes as long as a few matrix products."""

  in_flight: int | None = option(None, within=COUNT)
  """Collectives that may be in flight at once (default: the compiler's choice,
  one)."""

  combine_mb: float | None = option(None, within=NOT_NEGATIVE)
  """Size up to which all-reduces are merged; 0 merges none (default: the
  compiler's choice)."""


@dataclasses.dataclass(frozen=True)
class RateOptions:
  """Stated rates."""

  bandwidth_gbit_per_s: float | None = option(None, within=POSITIVE)
  """Bandwidth of each GPU's link in each direction (default: the data sheet's,
  of NVLink, or of the network if there are several nodes)."""

  latency_us: float = option(2.0, within=NOT_NEGATIVE)
  """Assumed latency of each message of a ring."""

  tflop_per_s: float | None = option(None, within=POSITIVE)
  """Rate of matrix products and convolutions (default: the data sheet's)."""

  memory_gb_per_s: float | None = option(None, within=POSITIVE)
  """Rate of a GPU's memory (default: the data sheet's)."""

  launch_us: float = option(2.0, within=NOT_NEGATIVE)
  """Assumed duration of the shortest kernel."""


@dataclasses.dataclass(frozen=True)
class StageOptions:
  """Pipeline of stages."""

  stages: int | None = option(None, within=COUNT)
  """Number of stages into which each worker's model is cut, one device each
  (default: a whole model on each device)."""

  table: str = option("1f1b", needs=("stages",))
  """Order of the passes on each device: the name of a table, as in `jdist
  pipeline --help`, or a file."""

  microbatches: int | None = option(None, within=COUNT, needs=("stages",))
  """Micro-batches of a worker's part of a batch (default: two for each
  stage)."""

  window: int | None = option(None, needs=("stages",))
  """Iterations in flight at once, for the table ours (default: as many as keep
  all devices busy)."""

  chunks: int | None = option(None, needs=("stages",))
  """Stages of each device, for the table interleaved (default 2)."""

  # The layers are counted only when the model has been built.
  cuts: tuple[int, ...] = option((), needs=("stages",))
  """Layers, counted from 0, at which the second and later stages begin
  (default: where the stages take about as long)."""

  late_from: float | None = option(None, within="(0, 1)", needs=("stages",))
  """Share of the run after which a table without a flush replaces 1f1b; its
  gradients are late. 0.5 keeps the accuracy where such a table from the start
  does not, see experiments/pipeline (default: from the start)."""

  edge_codec: Part = option(None, needs=("runtime", "processes"))
  """Encoding of the outputs and gradients that stages exchange: int8, int4,
  bfloat16, ... (default: sent as they are)."""

  delay_fix: Literal["none", "prediction"] = option("none", needs=("stages",))
  """Remedy for late gradients: compute them at predicted weights, with
  `transforms.predict_weights`, or leave them as they are."""


# Fields and help list the groups in reverse order: the last base is the first.
@dataclasses.dataclass(frozen=True)
class Common(
  ResultOptions,
  NetworkOptions,
  MethodOptions,
  BudgetOptions,
  WorkerOptions,
  ModelOptions,
):
  """One run, whatever the method."""
