"""The parts of a run: its data, model, workers and programs, by its options.

Nothing is written or trained here, so that wrong options are reported before
anything is half done.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jdist import (
  checks,
  collectives,
  data,
  models,
  profiling,
  training,
  transforms,
)
from jdist.cli import _groups, _methods, _options
from jdist.storage import hashes
from jdist.training import comparison

AnyDataset = data.Dataset | data.TextDataset
_Common = TypeVar("_Common", bound=_groups.Common)
# Bytes of all workers that are evaluated at once.
_EVALUATED = 2**17
# A resumed run may be longer, and have other workers.
FREE = ("epochs", "steps", "workers")
# Options that are no part of a run's identity.  A trained network is in the
# state: the same one may move to another path, and another one at the same path
# is another run, so that its fingerprint stands for the path.
ELSEWHERE = (
  "evaluate_every_epochs",
  "predictor",
  *_groups.CheckpointOptions.__dataclass_fields__,
  *_groups.ProcessOptions.__dataclass_fields__,
)
# Networks with many strided layers, which leave nothing of images of less than
# 16 x 16 pixels and would take minutes to compile for them.
_LARGE_MODELS = ("alexnet", "vgg", "resnet18", "resnet34", "resnet50")
_LARGE_PIXELS = 16


def named(options: _Common) -> _Common:
  """Returns the options with name and hash of own files as the data set.

  Rows and checkpoints then identify the data, wherever the files are.
  """
  option = "files" if options.text is None else "text"
  found = getattr(options, option)
  if found is None:
    return options
  others = {"dataset", "files"} - {option}
  _options.check_left_out(options, sorted(others), f"with `--{option}`")
  path = pathlib.Path(found)
  if path.is_file() and path.stat().st_size:
    digest = hashes.hash_file(path)
  elif option == "files" and path.is_dir():
    digest = hashes.hash_bytes(repr(hashes.hash_files(path)).encode())
  else:
    kind = "a file" if option == "text" else "a folder or a file"
    raise ValueError(f"`--{option}` must be {kind} with bytes, got {found!r}.")
  # The path may change when a run is resumed, but not what is there.
  return dataclasses.replace(options, dataset=f"{path.stem}-{digest[:8]}")


def check(options: _groups.Common) -> None:
  """Raises a ValueError for options that do not match, before any data is read.

  All extras that are missing are named by one ImportError.
  """
  # Only `train` has this option and the two below.
  model = getattr(options, "final_params", None)
  file = pathlib.Path(model or "")
  if model and (file.suffix != ".safetensors" or file.is_dir()):
    raise ValueError(
      "`--final-params` must be a file FILE.safetensors, by whose ending other "
      f"programs know the format, got {model!r}."
    )
  more = options.accumulate
  named = f" times {more}" if more > 1 else ""
  check_batch(options.batch_size, options.workers, more, named)
  # Missing extras are reported together, before hours of downloading data.
  needed = _check_data(options)
  for option, module, extra in (
    ("checkpoints", "orbax.checkpoint", "checkpoints"),
    ("tensorboard", "tensorboardX", "metrics"),
    ("final_params", "safetensors", "export"),
    ("driver", "simpy", "sim"),
  ):
    if getattr(options, option, None) is not None:
      needed[module] = extra
  checks.check_extras(needed)


def check_batch(
  size: int, workers: int, parts: int, named: str, remedy: str = ""
) -> None:
  """Raises a ValueError unless a batch divides over workers and their parts."""
  parts *= workers
  if size < 1 or size % parts:
    below = max(size // parts, 1) * parts
    raise ValueError(
      f"`--batch-size` must divide evenly over {workers} workers"
      f"{named}, got {size}. Take {below} or {below + parts}{remedy}."
    )


def _check_data(options: _groups.Common) -> dict[str, str]:
  """Raises a ValueError unless data set, model and their options match.

  Returns the modules that read the data set, with their extras.
  """
  if options.text is None and options.files is None:
    _options.check_name("--dataset", options.dataset, data.DATASETS)
  _options.check_name("--model", options.model, models.MODELS)
  source = data.DATASETS.get(options.dataset)
  text = options.text is not None or options.dataset in data.TEXT_NAMES
  if callable(source):
    text = isinstance(data.load(options.dataset), data.TextDataset)
  takes_text = getattr(models.MODELS[options.model], "takes_tokens", False)
  if text and not takes_text:
    raise ValueError(
      f"`--model` must be transformer for a text, got {options.model}."
    )
  if not text and takes_text:
    raise ValueError(
      f"`--model` must be one for images with {options.dataset}, got "
      f"{options.model}. It needs a text: `--dataset {data.TEXT_NAMES[0]}` or "
      "`--text FILE`."
    )
  # Images have no windows; texts have no labels that could be skewed, and
  # cannot be flipped.
  unfit = {"augment": False, "alpha": None} if text else {"window_length": None}
  for name, usual in unfit.items():
    if getattr(options, name) != usual:
      raise ValueError(
        f"`{_options.word(name)}` must be left out with "
        f"{'a text' if text else 'images'}, got {getattr(options, name)}."
      )
  if options.dataset == "digits":
    return {"sklearn": "data"}
  if source is None or callable(source) or options.dataset == "synthetic":
    return {}
  images = {} if text else {"PIL": "data"}
  return {"tensorflow_datasets": "data", "array_record": "data"} | images


def build(
  options: _groups.Common, team: Callable[[], collectives.Workers] | None = None
) -> comparison.Workload:
  """Loads the data and makes the workers, by a `team` if it is given."""
  train, test = _load(options)
  # Workers are checked before their devices are made: thousands of virtual
  # devices would take all memory.
  for name in ("batch_size", "workers"):
    option, remedy = _options.word(name), "There are no more training samples."
    checks.check_int(option, getattr(options, name), 1, len(train), remedy)
  number, substrate = options.workers, options.substrate
  workers = team() if team else collectives.workers(number, substrate=substrate)
  arguments = build_arguments(options, train)
  workload = comparison.Workload(
    workers, train, test, lambda seed: models.build(**arguments, seed=seed),
    options.batch_size, options.accumulate, options.alpha, options.augment,
    options.dtype, _evaluation_batch(options.workers, test),
  )  # fmt: skip
  workload.batches(seed=0)  # Checks `alpha` before anything is written.
  return workload


def _load(options: _groups.Common) -> tuple[AnyDataset, AnyDataset]:
  """Returns the training and the test set."""
  load: Any = functools.partial(data.load, options.files or options.dataset)
  if options.files is not None:
    load.keywords["size"] = options.image_size
  elif options.text is not None or options.dataset in data.TEXT_NAMES:
    load = functools.partial(data.load_text, options.text or options.dataset)
    if options.window_length is not None:
      load.keywords["window_length"] = options.window_length
  name = options.dataset
  train, test = (
    dataclasses.replace(load(x), name=name) for x in ("train", "test")
  )
  return train, test


def build_arguments(
  options: _groups.Common, train: AnyDataset
) -> dict[str, Any]:
  """Returns the arguments of `models.build`, without the seed."""
  large = options.model.startswith(_LARGE_MODELS)
  if large and min(train.input_shape[:2]) < _LARGE_PIXELS:
    size = "x".join(map(str, train.input_shape[:2]))
    raise ValueError(
      f"`--model` must suit images of {size}: mlp, lenet, cnn, resnet8 or "
      f"resnet20, got {options.model}, which needs {_LARGE_PIXELS}x"
      f"{_LARGE_PIXELS} or more."
    )
  chosen = {
    name: getattr(options, name)
    for name in ("norm", "num_layers", "width", "num_heads")
    if getattr(options, name) is not None
  }
  return {
    "name": options.model, "input_shape": train.input_shape,
    "num_classes": train.num_classes, **chosen,
  }  # fmt: skip


def _evaluation_batch(num_workers: int, test: AnyDataset) -> int:
  """Returns how many samples a worker evaluates at once."""
  samples = 1024
  if isinstance(test, data.TextDataset):
    # The logits of a text have 256 numbers for every byte.
    samples = min(samples, _EVALUATED // test.input_shape[0])
  return samples // num_workers or 1


@dataclasses.dataclass
class Prepared:
  """One method's programs: compiled once, used for every seed."""

  workload: comparison.Workload
  options: dataclasses.InitVar[_groups.Common]
  method: str
  peak: float

  def __post_init__(self, options: _groups.Common) -> None:
    workload = self.workload
    # Methods depend on the structure of the model and not on its seed.
    model = workload.model(0)
    self.budget = _methods.make_budget(
      options, self.peak, workload.steps_per_epoch
    )
    self.evaluate_every = workload.steps(options.evaluate_every_epochs)
    self.method_for = functools.partial(
      _methods.build_method, self.method, options, self.budget
    )
    optimizer = self.method_for(workload.workers.axis, model)
    self.programs = workload.programs(
      optimizer,
      model.apply,
      **of_trainer(options, workload.workers, optimizer, model),
    )

  def run(
    self,
    seed: int,
    *,
    on_end: Callable[[Any, Any], None] | None = None,
    **fit: Any,
  ) -> list[training.Record]:
    """Trains from a seed's initial parameters; see `Trainer.fit`.

    At the end `on_end` is called with the parameters and batch statistics.
    """
    state, records = self.programs.run(
      seed, self.budget.num_steps, evaluate_every=self.evaluate_every, **fit,
    )  # fmt: skip
    # The evaluated model is the anchor, which all workers share.
    if on_end is not None:
      on_end(*self.programs.evaluate.model(state))
    return records

  def other_workers(self, seed: int) -> Callable[[int], training.OtherWorkers]:
    """Returns how to read a checkpoint of another number of workers."""

    # Under vmap any number of old workers fits on this host.
    def read(number: int) -> training.OtherWorkers:
      old = collectives.workers(number, substrate="vmap")
      model = self.workload.model(seed)
      optimizer = self.method_for(old.axis, model)
      return training.OtherWorkers(
        old,
        lambda: training.init_state(
          old, optimizer, model.params, model.state, seed=seed
        ),
        lambda state: training.resize(
          state, optimizer, old, self.workload.workers, self.programs.optimizer
        ),
      )

    return read


def of_trainer(
  options: _groups.Common,
  workers: collectives.Workers,
  optimizer: Any,
  model: models.Model,
) -> dict[str, Any]:
  """Returns the arguments of the `Trainer` of a method's chain."""
  # None means wherever a method supports it.
  found: dict[str, Any] = {
    "host_rounds": None if options.host_rounds else False
  }
  if options.stream:
    # The shapes of a chain's state show whether it streams.
    state = profiling.abstract_state(
      workers, optimizer, model.params, model.state
    )
    if transforms.streams(state.opt_state):
      found["stream_steps"] = _methods.STREAM_STEPS
  return found


def heading(options: Any, workload: comparison.Workload, methods: str) -> str:
  """Returns what is about to be run."""
  samples = words(workload.train)
  steps = options.steps and checks.counted(options.steps, "step")
  where = getattr(options, "driver", None) or workload.workers.substrate
  return (
    f"{methods}. {options.dataset}: {len(workload.train)} training and "
    f"{len(workload.test)} test {samples}; {options.model}, "
    f"{models.num_params(workload.model(0)):,} parameters; N = "
    f"{checks.counted(options.workers, 'worker')} ({where}), "
    f"{options.batch_size} {samples.split()[0]} a step; "
    f"{steps or checks.counted(options.epochs, 'epoch')} on "
    f"{training.make_row({}, 0)['device']}. Options not in the command "
    f"have the defaults of the preset {options.preset}."
  )


def words(dataset: AnyDataset) -> str:
  """Returns the plural noun for a data set's samples."""
  if isinstance(dataset, data.TextDataset):
    return f"windows of {dataset.input_shape[0]} bytes"
  return "rows" if dataset.input_shape[:2] == (1, 1) else "images"


def quality(metrics: Mapping[str, float]) -> str:
  """Returns a model's quality, as a training run prints it."""
  text = f"accuracy {100 * metrics['accuracy']:.2f} %"
  if "bits_per_token" in metrics:
    text = f"{metrics['bits_per_token']:.3f} bits per byte  {text}"
  return text


def loss(record: training.Record) -> str:
  """Returns the training loss, or a dash where no step has been trained."""
  unknown = math.isnan(record.train_loss) and not record.diverged
  # If every step was skipped, the loss is not a number and no dash either.
  if unknown and not record.skipped:
    return "–"
  return f"{record.train_loss:.4f}"


def speed(record: training.Record, dataset: AnyDataset) -> str:
  """Returns the speed of training, in images or in bytes of a text."""
  if isinstance(dataset, data.TextDataset):
    length = dataset.input_shape[0]
    return f"{training.format_rate(record.samples_per_s * length)} bytes"
  return f"{training.format_rate(record.samples_per_s)} images"


def print_record(
  record: training.Record, num_steps: int, dataset: AnyDataset
) -> None:
  """Prints a line about an evaluation."""
  print(
    f"step {record.step}/{num_steps}  {quality(record.metrics)}  "
    f"train loss {loss(record)}  rounds {record.rounds}  "
    f"{training.format_bytes(record.sent_bytes)} sent per worker  "
    f"{speed(record, dataset)}/s",
    flush=True,
  )


def resumed_text(
  options: _groups.Common, found: training.Restored, programs: Any
) -> str:
  """Returns where a run resumes; it may become longer, but not shorter."""
  before, workers = found.metadata, options.workers
  steps = programs.budget.num_steps
  old_steps = _methods.num_steps(
    before["epochs"], before["steps"], programs.workload.steps_per_epoch
  )
  # A shorter run would have decayed its learning rate earlier.
  if steps < old_steps:
    raise ValueError(
      f"`--{'epochs' if options.steps is None else 'steps'}` must not be less "
      f"than when the run began, {checks.counted(old_steps, 'step')}, got "
      f"{steps}. Take as many or more, or start again in another directory."
    )
  text = f"Resumes from step {found.step}"
  if found.step == steps:
    text = f"Nothing left to train: step {steps} of {steps}"
  if steps > old_steps:
    text += (
      f", of {steps} steps where it had {old_steps}; the schedule is that of "
      "the longer run"
    )
  if before.get("workers", workers) != workers:
    text += f", with N = {workers} in place of {before['workers']}"
  return f"{text}."
