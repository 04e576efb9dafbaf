"""The options of every command, as dataclasses that tyro parses.

A field is an option and its docstring is the help, as in `_groups`.  An option
with one value has a name in the singular; one with several values, such as
`--methods` and `--seeds`, has a name in the plural.
"""

import dataclasses
from typing import Annotated, Literal

import tyro

from jdist.cli import _groups
from jdist.cli._groups import COUNT, NOT_NEGATIVE, option, POSITIVE, SEED
from jdist.cli.servers import _server_options

# Actions of `jdist pipeline`, and files of `jdist launch`, that use an option:
# the first word is the option that must have one of the other values.
_CHECK, _SIMULATE, _PLAN = (
  ("action", x) for x in ("check", "simulate", "plan")
)
_TIMED = ("action", "simulate", "plan")
_NOT_PLAN = ("action", "draw", "check", "simulate")
_CLAIMS = ("print", "kubernetes", "kuberay")
_RANKS = ("print", "slurm", "kubernetes", "mpi")


@dataclasses.dataclass(frozen=True)
class Train(
  _server_options.ServerOptions,
  _groups.StageOptions,
  _groups.ProcessOptions,
  _groups.CheckpointOptions,
  _groups.Common,
):
  """Trains one model with one method, on one host or many.

  With `--checkpoints` it saves checkpoints, and the same command resumes from
  the last one.
  """

  method: str = "msdpu"
  """One of the methods below: ssgd, local_sgd, diloco, msdpu, ..."""

  learning_rate: float = option(0.1, within=POSITIVE)
  """Highest learning rate of the schedule."""

  seed: int = option(0, within=SEED)
  """Seed of the initial parameters, the order of the data and all other random
  numbers."""

  runtime: Literal["one_program", "processes"] = option(
    "one_program", needs=("stages",)
  )
  """With stages: one program over several devices, or a process for each stage,
  which runs every table and repeats no forward pass."""


@dataclasses.dataclass(frozen=True)
class Compare(_groups.LinkOptions, _groups.Common):
  """Compares methods and seeds: the same budget, one table, one page.

  With several learning rates, each method is first tuned on a held-out part of
  the training set. All methods start from the same grid, which is extended
  where its end is best. Runs whose rows are in `--output` are not repeated, so
  the same command resumes an interrupted comparison.
  """

  methods: tuple[str, ...] = ("ssgd", "local_sgd", "diloco", "msdpu")
  """One or more of the methods below."""

  learning_rate: tuple[float, ...] = option((0.1,), within=POSITIVE)
  """Highest learning rate of the schedule. Of several, each method uses the one
  that is best for it on held-out training samples."""

  grid_extensions: int = option(2, within=NOT_NEGATIVE)
  """Most learning rates that tuning adds where the lowest or the highest one is
  the best."""

  tuning_seeds: int = option(1, within="[1, 1000]")
  """Runs of each method at each learning rate, of which the mean counts. Use
  more than one where few samples are held out."""

  seeds: tuple[int, ...] = option((0, 1, 2), within=SEED)
  """Seeds of the runs of each method; the table shows mean and spread."""


@dataclasses.dataclass(frozen=True)
class Advise(_groups.ProcessOptions, _groups.LinkOptions, _groups.ModelOptions):
  """Measures one worker's step and the encoding of messages on this machine,
  counts what each method sends, and predicts how long a step takes on a link,
  below which bandwidth a method pays, and whether any pays at all. Started in
  several processes, one a host, it measures the link between them.
  """

  step: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FUNCTION")] = None
  """Your own function in place of model and data set, which returns
  `loss_fn, params, batch` of one worker, as `training.make_step` takes them,
  and batch statistics if there are any."""

  methods: tuple[str, ...] = ()
  """Methods that are compared with ssgd (default: seven methods and forms)."""

  workers: int | None = option(None, within="[2, 10000]")
  """Number of machines, one worker each (default: the processes that measure
  their link, or 8)."""

  batch_size: int = option(128, within=COUNT)
  """Samples of all workers together in a step."""

  interval: int = option(8, within="[1, 10000]")
  """Local steps of a round, H, of methods that have rounds."""

  optimizer: Literal["sgd", "adamw"] = "sgd"
  """Optimizer of each worker; sgd uses Nesterov momentum."""

  slowdown: float = option(1.0, within="[1, inf)")
  """Seconds that the slowest machine computes in one second of this one, which
  several processes measure."""

  limit_s: float = option(60.0, within=POSITIVE)
  """Seconds after which no further measurement begins."""

  output: _groups.Directory = None
  """Directory for rows (default: none are written)."""


@dataclasses.dataclass(frozen=True)
class Overlap(
  _groups.RateOptions, _groups.CompilerOptions, _groups.MeanOptions
):
  """Compiles a training step for GPUs that need not be present, and reports
  which computation hides its communication: a table, rows and a timeline.

  The order of operations is that of the compiled program. Times follow from
  stated rates; nothing is run or measured.
  """

  methods: tuple[str, ...] = ("msdpu",)
  """One or more methods, in one of their forms. ssgd sends after the backward
  pass, ssgd:first before the forward pass, ssgd:scattered sends half of each
  message at either point, and ssgd:hybrid delays the front layers' messages.
  msdpu is streamed; msdpu:simple sends its late mean at the end of a round."""

  model: str = "resnet50"
  """A model of `jdist train`; transformer is the one of GPT-2 with 124 million
  parameters."""

  batch_size: int = option(32, within=COUNT)
  """Images or sequences of one GPU in a step."""

  image_size: int | None = option(None, within=COUNT)
  """Height and width of the images (default: the size for which the model was
  made)."""

  length: int = option(1024, within=COUNT)
  """Tokens of a sequence, for the transformer."""

  norm: _groups.Norm | None = None
  """Normalization layers of ResNets and VGGs (default: the model's own)."""

  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  """Data type of the computation; parameters and messages stay float32."""

  interval: int = option(8, "interval", within=COUNT)
  """Local steps of a round, H."""

  output: _groups.Directory = None
  """Directory for rows and timelines (default: a new one under runs/)."""


@dataclasses.dataclass(frozen=True)
class Bytes(_groups.MeanOptions):
  """Counts the bytes that a worker sends, in three ways that must agree: by the
  codecs, by the collectives of the traced step, and by those of the compiled
  program. Nothing is trained.
  """

  methods: tuple[str, ...] = ("ssgd", "qsgd", "topk_sgd", "dgc", "powersgd")
  """One or more of the methods below."""

  model: str = "resnet18"
  """A model of `jdist train`."""

  workers: int = option(8, within="[1, 1000]")
  """Number of workers that train together."""

  interval: int = option(8, "interval", within=COUNT)
  """Local steps of a round, H, of methods that have rounds."""

  # The model decides how many layers there are: `prediction.cut` checks it.
  cut: int | None = option(None, "cut")
  """Layers that mp2 sends (default: as published for lenet, alexnet, vgg15,
  resnet18, resnet34 and resnet50)."""

  steps: int = option(10_000, "switch_step", within=COUNT)
  """Steps of the run; post_local_sgd begins its rounds halfway."""

  warmup_steps: int = option(0, "steps_per_phase", within=NOT_NEGATIVE)
  """Steps of each of dgc's first phases, which send more; 0 has none."""


@dataclasses.dataclass(frozen=True)
class Simulate(_server_options.ProtocolOptions):
  """Runs parameter-server protocols on a cluster with a virtual clock: updates,
  staleness, utilization and bytes, as a table, rows and timelines. Nothing is
  trained.
  """

  cluster: tyro.conf.Positional[str] = ""
  """A TOML file of machines, links and a model's costs, as
  `cluster.load_cluster` reads it."""

  protocols: tuple[str, ...] = ("bsp", "asp", "dbs")
  """One or more of the protocols below."""

  batch_size: int = option(32, within=POSITIVE)
  """Samples of a worker's task; for dbs their mean."""

  interval: int = option(8, "interval")
  """Local steps of a round, H, for decoupled_diloco."""

  updates: int | None = option(None, within="(0, 1e9]")
  """Simulated updates of the parameters (default: 1000 if no limit is
  given)."""

  samples: int | None = option(None, within="(0, 1e9]")
  """Simulated samples in updates."""

  seconds: float | None = option(None, within=POSITIVE)
  """Simulated seconds."""

  seed: int = 0
  """Seed of the machines' jitter."""

  drawn_seconds: float | None = option(None, within=POSITIVE)
  """Seconds from the start that are drawn (default: about twenty tasks of each
  worker)."""

  output: _groups.Directory = None
  """Directory for rows, a page and timelines (default: a new one under
  runs/)."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Draws, checks or simulates pipeline tables, which say which device does
  what in which order; or plans which layers, table and micro-batches are the
  fastest on a cluster. A simulation or a plan writes a table, rows, a page
  and timelines. Nothing is trained, except by `jdist pipeline train TABLE`,
  which is short for `jdist train --stages 4 --table TABLE` and takes its
  options.
  """

  action: tyro.conf.Positional[Literal["draw", "check", "simulate", "plan"]] = (
    "draw"
  )
  """What to do with the tables."""

  tables: tyro.conf.Positional[tuple[str, ...]] = ()
  """One or more tables by name, or files that `pipeline.load_table` reads
  (default: 1f1b; for plan all of them)."""

  stages: int | None = None
  """Stages of the model, one device each; for interleaved the devices. A file
  has its own number (default 4; for plan the fastest)."""

  microbatches: int | None = None
  """Micro-batches of an iteration; pipedream always has 1 (default 8; for plan
  the fastest)."""

  iterations: int | None = option(None, needs=_NOT_PLAN)
  """Optimizer steps in the table (default: the table's own number; a dozen to
  simulate a table without a flush)."""

  window: int | None = None
  """Iterations in flight at once, for the table ours (default: as many as keep
  all devices busy)."""

  chunks: int | None = option(None, needs=_NOT_PLAN)
  """Stages of each device, for the table interleaved (default 2)."""

  sends: Literal["buffered", "blocking"] = option("buffered", needs=_CHECK)
  """For check: whether a device continues once it has sent, or waits for the
  receiver."""

  max_live: int | None = option(None, needs=_CHECK)
  """For check: most micro-batches that a stage may keep."""

  max_versions: int | None = option(None, needs=_CHECK)
  """For check: most versions of the parameters that a stage may keep."""

  # Its divisors decide which micro-batches are tried.
  batch_size: int = option(256, needs=_PLAN)
  """For plan: samples of an update."""

  samples: int = option(1, within=COUNT, needs=_PLAN)
  """For plan: samples of the micro-batch to which the costs belong."""

  max_delay: int = option(0, within=NOT_NEGATIVE, needs=_PLAN)
  """For plan: updates by which gradients may be late, which costs accuracy (see
  the experiments' page ACCURACY.md)."""

  cluster: _groups.Cluster = option(None, needs=_TIMED)
  """For simulate and plan: a TOML file of machines and links, as
  `cluster.load_cluster` reads it (default: equal machines and free links)."""

  costs: _groups.File = option(None, needs=_TIMED)
  """For simulate: a TOML file with a [[stages]] table for each stage, as
  `pipeline.load_costs` reads it (default: equal stages). For plan: one for each
  layer."""

  model: str | None = option(None, needs=_PLAN)
  """For plan, in place of costs: a network, on CIFAR-10's images or 256 bytes
  of text; a machine of speed 1 computes 1 TFLOP/s."""

  forward_s: float = option(1.0, within=NOT_NEGATIVE, needs=_SIMULATE)
  """For simulate: seconds of a stage's forward pass of a micro-batch."""

  backward_s: float = option(2.0, within=NOT_NEGATIVE, needs=_SIMULATE)
  """For simulate: seconds of its whole backward pass."""

  output_bytes: float = option(0.0, within=NOT_NEGATIVE, needs=_SIMULATE)
  """For simulate: bytes of a micro-batch that a stage sends in each
  direction."""

  edge_codec: _groups.Part = option(None, needs=_TIMED)
  """For simulate and plan: encoding of these messages, as float32."""

  parameter_bytes: float = option(0.0, within=NOT_NEGATIVE, needs=_SIMULATE)
  """For simulate: bytes of a stage's parameters."""

  saved_bytes: float = option(0.0, within=NOT_NEGATIVE, needs=_SIMULATE)
  """For simulate: bytes of a micro-batch that a stage keeps for its backward
  pass."""

  optimizer_copies: float = option(1.0, within=NOT_NEGATIVE, needs=_TIMED)
  """For simulate and plan: size of the optimizer's state, in sizes of the
  parameters: 1 for momentum, 2 for Adam."""

  output: _groups.Directory = option(None, needs=_TIMED)
  """Directory for rows, a page and timelines (default: a new one under
  runs/)."""


@dataclasses.dataclass(frozen=True)
class Report(_groups.LinkOptions):
  """Writes report.html into the directory of a run or a comparison: what was
  run, where and how to repeat it, curves over steps, bytes, rounds and seconds,
  and a table of the runs. The page is one file and asks no host for anything.
  `train`, `compare` and `simulate` write it while they run.
  """

  folder: tyro.conf.Positional[str] = ""
  """The directory, with rows.jsonl or status.json."""


@dataclasses.dataclass(frozen=True)
class Launch:
  """Starts a training run in several processes on this machine, given by the
  command behind `--`. A process that fails is restarted from its last
  checkpoint, with an increasing delay. With `--print` it prints the file with
  which a cluster starts the run.

  SIGTERM makes the run save and end with status 143. Statuses 2 (options that
  cannot be used) and 3 (diverged) end it without a restart.
  """

  num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = (
    option(1, within=COUNT)
  )
  """Number of processes, -n for short; the workers are divided among them."""

  restarts: int = option(5, within=NOT_NEGATIVE)
  """Most restarts in a row without a new checkpoint."""

  backoff_s: float = option(1.0, within=NOT_NEGATIVE, needs=("print", None))
  """Seconds before a restart; doubled each further time, up to a minute."""

  print: Literal["slurm", "kubernetes", "mpi", "kuberay"] | None = None
  """Start nothing, but print the file with which Slurm, Kubernetes (JobSet) or
  MPI starts the run, or KubeRay a parameter server: a pod with as many cores as
  its speed for each machine of the cluster's file."""

  name: str = option("jdist", needs=("print",))
  """Name of the printed job."""

  gpus_per_node: int | None = option(None, within=COUNT, needs=_RANKS)
  """GPUs of a machine in the printed job, one process each (default: CPUs)."""

  image: str = option("jdist:latest", needs=(*_CLAIMS, "slurm"))
  """Container image of the printed job, in which jdist is installed (for Slurm
  none, unless it is given)."""

  claim: str = option("jdist-checkpoints", needs=_CLAIMS)
  """Claim of the volume with the checkpoints of a printed JobSet or RayJob."""

  # The command behind `--` and its parsed options, which `cli` fills in.
  command: tyro.conf.Suppress[tuple[str, ...]] = ()
  train: tyro.conf.Suppress[Train | None] = None
