"""The options of every command, as dataclasses from which tyro reads them.

A field's docstring is its help.  There are no second defaults: what is not
given comes from the preset, and what the preset does not say from here.
Options that take one value are in the singular, and `--methods`, `--seeds`,
which take one or more, in the plural; `train` trains one model.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro

from jdist.cli import _groups, _presets
from jdist.cli.servers import _server_options

# Of any command.
Options = TypeVar(
  "Options", bound="Common | Overlap | Bytes | Simulate | Pipeline"
)


AnyCommon = TypeVar("AnyCommon", bound="Common")


# The last group comes first in the help, and among the fields.
@dataclasses.dataclass(frozen=True)
class Common(
  _groups.ResultOptions,
  _groups.NetworkOptions,
  _groups.MethodOptions,
  _groups.BudgetOptions,
  _groups.WorkerOptions,
  _groups.ModelOptions,
):
  """One run, whatever the method."""


@dataclasses.dataclass(frozen=True)
class Train(
  _server_options.ServerOptions,
  _groups.StageOptions,
  _groups.ProcessOptions,
  _groups.CheckpointOptions,
  Common,
):
  """Trains one model with one method, on one host or many.

  Saves checkpoints if asked to and goes on from the last one by itself.
  """

  method: str = "msdpu"
  """Any of `jdist --help`: ssgd, local_sgd, diloco, msdpu, ..."""

  learning_rate: float = 0.1
  """The highest one of the schedule."""

  seed: int = 0
  """Of initial parameters, data order and everything else random."""


@dataclasses.dataclass(frozen=True)
class Compare(_groups.LinkOptions, Common):
  """Compares methods and seeds: same budget, one table, one picture.

  With several learning rates every method first looks for its best one on a
  part of the training set that is held out for that; all from the same grid,
  which goes on where its end is best. Runs whose rows are in `--output` are not
  repeated: the same command goes on where it was stopped.
  """

  methods: _groups.Names = ("ssgd", "local_sgd", "diloco", "msdpu")
  """Any of `jdist --help`."""

  learning_rate: Annotated[
    tuple[float, ...], tyro.conf.arg(metavar="RATE [RATE ...]")
  ] = (0.1,)
  """The highest one of the schedule; of several, each method uses the one
  that is best for it on held-out training samples."""

  grid_extensions: int = 2
  """Further learning rates that a method is tuned with at most, where its best
  one is the lowest or the highest."""

  tuning_seeds: int = 1
  """Runs of each method at each learning rate, of which the mean counts. More
  than one where few samples are held out."""

  seeds: Annotated[
    tuple[int, ...], tyro.conf.arg(metavar="SEED [SEED ...]")
  ] = (0, 1, 2)
  """One run each; the table says mean and spread."""


# Options of runs with a parameter server, with stages, and of what a run keeps
# and in which processes.
OF_SERVERS = tuple(_server_options.ServerOptions.__dataclass_fields__)
OF_STAGES = tuple(_groups.StageOptions.__dataclass_fields__)
OF_CHECKPOINTS = tuple(_groups.CheckpointOptions.__dataclass_fields__)
OF_PROCESSES = tuple(_groups.ProcessOptions.__dataclass_fields__)

# Of methods that have several forms, the first is meant without a colon.
FORMS: dict[str, tuple[str, ...]] = {
  "ssgd": ("after", "first", "scattered", "hybrid"),
  "msdpu": ("streamed", "simple"),
}


@dataclasses.dataclass(frozen=True)
class Overlap(
  _groups.RateOptions,
  _groups.StageOptions,
  _groups.CompilerOptions,
  _groups.MeanOptions,
):
  """Compiles a training step for GPUs that need not be there, and says what
  hides its communication: a table, rows and a drawn timeline.

  The order is that of the compiled program. Times are computed from stated
  rates; nothing is run or measured.
  """

  methods: _groups.Names = ("msdpu",)
  """One or more methods, in forms: ssgd sends after the backward pass,
  ssgd:first before the forward pass, ssgd:scattered half of each message then
  and ssgd:hybrid the front layers' messages; msdpu is streamed, msdpu:simple
  sends its late mean at once at a round's end."""

  model: str = "resnet50"
  """A model of `jdist train`, or transformer: that of GPT-2, 124 million
  parameters."""

  batch_size: int = 32
  """Images or sequences of one GPU in a step."""

  image_size: int | None = None
  """Height and width of the images; if not given, what the model was made
  for."""

  length: int = 1024
  """Tokens of a sequence, for the transformer."""

  norm: _groups.Norm | None = None
  """Normalisation of ResNets and VGGs; the model's own default if not given."""

  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  """In which the model computes; parameters and messages stay float32."""

  interval: int = 8
  """Local steps of a round, H."""

  output: _groups.Directory = None
  """Directory for rows and picture; a new one under runs/ if not given."""


@dataclasses.dataclass(frozen=True)
class Bytes(_groups.MeanOptions):
  """Counts what a worker sends, in three ways that must agree: as the codecs
  count, by the collectives of the traced step, and by those of the compiled
  program. Nothing is trained.
  """

  methods: _groups.Names = ("ssgd", "qsgd", "topk_sgd", "dgc", "powersgd")
  """Any of `jdist --help`."""

  model: str = "resnet18"
  """A model of `jdist train`."""

  workers: int = 8
  """Workers that train together."""

  interval: int = 8
  """Local steps of a round, H, of methods that have rounds."""

  cut: int | None = None
  """Layers that mp2 sends; if not given, as published for lenet, alexnet,
  vgg15, resnet18, resnet34 and resnet50."""

  steps: int = 10_000
  """Steps of the run, of which one_bit_adam warms up for a sixth."""

  warmup_steps: int = 0
  """Steps of the learning rate's warm-up, and of each of dgc's first phases,
  which send more; 0 has none."""


@dataclasses.dataclass(frozen=True)
class Simulate(_server_options.ProtocolOptions):
  """Runs protocols of a parameter server on a cluster whose time is computed
  and not waited for: updates, staleness, utilisation and bytes, as a table,
  rows and drawn timelines. Nothing is trained.
  """

  cluster: tyro.conf.Positional[str] = ""
  """A TOML file of machines, links and a model's costs, as of
  `cluster.load_cluster`."""

  protocols: Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="PROTOCOL [PROTOCOL ...]")
  ] = ("bsp", "asp", "dbs")
  """One or more protocols."""

  batch_size: int = 32
  """Samples of a worker's task; of dbs, on the average."""

  interval: int = 8
  """Of decoupled_diloco: local steps of a round, H."""

  updates: int | None = None
  """Simulated updates of the parameters; 1000 if no limit is given."""

  samples: int | None = None
  """Simulated samples in updates."""

  seconds: float | None = None
  """Simulated seconds."""

  seed: int = 0
  """Of the machines' jitter."""

  drawn_seconds: float | None = None
  """How much of the beginning is drawn; about twenty tasks of each worker if
  not given."""

  output: _groups.Directory = None
  """Directory for rows, pictures and timelines; a new one under runs/ if not
  given."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Draws, checks or simulates the tables of a pipeline: which device does what
  in which order; or plans which layers, table and micro-batches are the fastest
  on a cluster. A simulation or a plan leaves a table, rows, pictures and
  timelines. Nothing is trained, but by `jdist pipeline train TABLE`, which is
  `jdist train --stages 4 --table TABLE` and takes its options.
  """

  action: tyro.conf.Positional[Literal["draw", "check", "simulate", "plan"]] = (
    "draw"
  )
  """What is done with the tables."""

  tables: tyro.conf.Positional[tuple[str, ...]] = ()
  """One or more tables by name, or files as `pipeline.load_table` reads them;
  1f1b if not given, and all to plan."""

  stages: int | None = None
  """Stages of the model, a device each; of interleaved, the devices. A file has
  its own. 4 if not given; to plan, those that are fastest."""

  microbatches: int | None = None
  """Micro-batches of an iteration; of pipedream always 1. 8 if not given; to
  plan, those that are fastest."""

  iterations: int | None = None
  """Optimizer steps in the table; its own number if not given, and a dozen to
  simulate one without a flush."""

  window: int | None = None
  """Of ours: iterations under way at once; as many as keep all devices busy if
  not given."""

  chunks: int | None = None
  """Of interleaved: stages of each device; 2 if not given."""

  sends: Literal["buffered", "blocking"] = "buffered"
  """To check: whether a device goes on once it has sent, or waits for the
  receiver."""

  max_live: int | None = None
  """To check: micro-batches that a stage may keep."""

  max_versions: int | None = None
  """To check: versions of the parameters that a stage may keep."""

  batch_size: int = 256
  """To plan: samples of an update."""

  samples: int = 1
  """To plan: samples of the micro-batch that the costs are of."""

  cluster: _groups.Directory = None
  """To simulate or plan: a TOML file of machines and links, as of
  `cluster.load_cluster`; equal machines without links if not given."""

  costs: _groups.Directory = None
  """To simulate: a TOML file with a [[stages]] table for each stage, as of
  `pipeline.load_costs`; stages are equal if not given. To plan: of each
  layer."""

  model: str | None = None
  """To plan, in place of costs: a network, on CIFAR-10's images or 256 bytes of
  text; a machine of speed 1 does 1 TFLOP/s."""

  forward_s: float = 1.0
  """Seconds of a stage's forward pass of a micro-batch."""

  backward_s: float = 2.0
  """Seconds of its whole backward pass."""

  output_bytes: float = 0.0
  """Bytes that a stage sends of a micro-batch, in each direction."""

  parameter_bytes: float = 0.0
  """Bytes of a stage's parameters."""

  saved_bytes: float = 0.0
  """Bytes that a stage keeps of a micro-batch for its backward pass."""

  optimizer_copies: float = 1.0
  """What the optimizer keeps, in sizes of the parameters: 1 for momentum, 2 for
  Adam."""

  output: _groups.Directory = None
  """Directory for rows, pictures and timelines; a new one under runs/ if not
  given."""


def with_preset(options: type[Options], name: str) -> Options:
  """Returns the defaults of a command under a preset."""
  if not issubclass(options, Common):
    return options()
  check_name("--preset", name, tuple(_presets.PRESETS))
  changes: dict[str, object] = dict(_presets.PRESETS[name])
  if options is Train:
    changes["learning_rate"] = changes["learning_rate"][0]  # type: ignore[index]
    changes.pop("tuning_seeds", None)  # It tunes nothing.
  return options(preset=name, **changes)  # type: ignore[arg-type]


def common(options: "Overlap | Bytes", **more: Any) -> Common:
  """The options of a run as far as another command has them."""
  fields = ("interval", *_groups.MeanOptions.__dataclass_fields__)
  return Common(**{name: getattr(options, name) for name in fields}, **more)


def word(name: str) -> str:
  """Returns an option as it is typed."""
  return f"--{name.replace('_', '-')}"


def check_different(option: str, values: Sequence[Any], what: str) -> None:
  """Raises a ValueError unless there are one or more values, once each."""
  if not values or len(set(values)) < len(values):
    raise ValueError(
      f"`{option}` must be one or more different {what}, got {tuple(values)}."
    )


def check_least(options: Any, **least: float) -> None:
  """Raises a ValueError for an option below its least value, or infinite."""
  for name, low in least.items():
    value = getattr(options, name)
    if value is not None and not low <= value < math.inf:
      raise ValueError(f"`{word(name)}` must be at least {low}, got {value}.")


def check_seeds(option: str, *seeds: int) -> None:
  """Raises a ValueError for a seed that is negative or beyond 32 bits."""
  for seed in seeds:
    if not 0 <= seed < 2**32:
      raise ValueError(f"`{option}` must be from 0 to 2**32 - 1, got {seed}.")


def check_positive(options: Any, *names: str) -> None:
  """Raises a ValueError for an option that is not positive and finite."""
  for name in names:
    value = getattr(options, name)
    if value is not None and not 0 < value < math.inf:
      raise ValueError(f"`{word(name)}` must be positive, got {value}.")


def check_name(option: str, name: str, known: tuple[str, ...]) -> None:
  """Raises a ValueError unless a name is one of the known ones."""
  if name not in known:
    raise ValueError(
      f"`{option}` must be one of {', '.join(known)}, got {name!r}."
    )


def check_left_out(options: Any, names: Iterable[str], where: str) -> None:
  """Raises a ValueError for an option that is not as the preset has it."""
  usual = with_preset(type(options), getattr(options, "preset", "digits"))
  for name in names:
    value = getattr(options, name)
    if value != getattr(usual, name):
      raise ValueError(f"`{word(name)}` must be left out {where}, got {value}.")
