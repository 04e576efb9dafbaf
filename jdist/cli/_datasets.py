"""The data set that options name, of images or of a text, and its model."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jdist import data, models, training
from jdist.cli import _options
from jdist.storage import hashes

AnyDataset = data.Dataset | data.TextDataset
# Bytes that are evaluated at once, of all workers.
_EVALUATED = 2**17
# Networks with many layers, which take minutes to compile and are not made for
# images of less than 16 x 16 pixels.
_LARGE_MODELS = ("alexnet", "vgg", "resnet18", "resnet34", "resnet50")
_LARGE_PIXELS = 16


def named(options: _options.AnyCommon) -> _options.AnyCommon:
  """Returns the options with the name and a hash of `--text` as data set.

  Rows and checkpoints then say which text it was, wherever the file lies.

  Raises:
    ValueError: when both are given, or there is no such file.
  """
  if options.text is None:
    return options
  usual = _options.with_preset(type(options), options.preset)
  if options.dataset != usual.dataset:
    raise ValueError(
      f"`--dataset` must be left out with `--text`, got {options.dataset}."
    )
  path = pathlib.Path(options.text)
  if not path.is_file():
    raise ValueError(f"`--text` must be a file, got {options.text!r}.")
  digest = hashes.hash_file(path)[:8]
  return dataclasses.replace(options, dataset=f"{path.stem}-{digest}")


def check(options: _options.Common) -> None:
  """Raises a ValueError when data set, model and their options do not suit."""
  text = options.text is not None or options.dataset in data.TEXT_NAMES
  if not text:
    known = (*data.NAMES, *data.TEXT_NAMES)
    _options.check_name("--dataset", options.dataset, known)
  _options.check_name("--model", options.model, models.NAMES)
  if text and options.model not in models.TEXT_NAMES:
    raise ValueError(
      f"`--model` must be {' or '.join(models.TEXT_NAMES)} for a text, got "
      f"{options.model}."
    )
  if not text and options.model in models.TEXT_NAMES:
    raise ValueError(
      f"`--model` must be one of images for {options.dataset}, got "
      f"{options.model}. It takes a text: `--dataset "
      f"{data.TEXT_NAMES[0]}` or `--text FILE`."
    )
  unfit = {"augment": False, "alpha": None} if text else {"window_length": None}
  for name, usual in unfit.items():
    if getattr(options, name) != usual:
      raise ValueError(
        f"`{_options.word(name)}` must be left out with "
        f"{'a text' if text else 'images'}, got {getattr(options, name)}."
      )
  _options.check_least(
    options, window_length=1, num_layers=1, width=1, num_heads=1
  )


def modules(options: _options.Common) -> dict[str, str]:
  """Returns the modules that reading the data needs, with their extras."""
  if options.dataset == "digits":
    return {"sklearn": "data"}
  if options.text is not None or options.dataset == "synthetic":
    return {}
  images = {} if options.dataset in data.TEXT_NAMES else {"PIL": "data"}
  return {"tensorflow_datasets": "data", "array_record": "data"} | images


def load(options: _options.Common) -> tuple[AnyDataset, AnyDataset]:
  """Returns the training and the test set."""
  if options.text is None and options.dataset in data.NAMES:
    return data.load(options.dataset), data.load(options.dataset, "test")
  source = options.dataset if options.text is None else options.text
  given: dict[str, Any] = {}
  if options.window_length is not None:
    given["window_length"] = options.window_length
  train, test = (
    dataclasses.replace(
      data.load_text(source, split, **given), name=options.dataset
    )
    for split in ("train", "test")
  )
  return train, test


def build_model(
  options: _options.Common, train: AnyDataset, seed: int
) -> models.Model:
  """Builds the model that options name, for a data set."""
  large = options.model.startswith(_LARGE_MODELS)
  if large and min(train.input_shape[:2]) < _LARGE_PIXELS:
    size = "x".join(map(str, train.input_shape[:2]))
    raise ValueError(
      f"`--model` must suit images of {size}: mlp, lenet, cnn, resnet8 or "
      f"resnet20, got {options.model}, which takes {_LARGE_PIXELS}x"
      f"{_LARGE_PIXELS} or more."
    )
  return models.build(**build_arguments(options, train), seed=seed)


def build_arguments(
  options: _options.Common, train: AnyDataset
) -> dict[str, Any]:
  """Returns how the model of a data set is built, but for its seed."""
  chosen = {
    name: getattr(options, name)
    for name in ("norm", "num_layers", "width", "num_heads")
    if getattr(options, name) is not None
  }
  return {
    "name": options.model,
    "input_shape": train.input_shape,
    "num_classes": train.num_classes,
    **chosen,
  }


def evaluation_batch(options: _options.Common, test: AnyDataset) -> int:
  """Returns how many samples a worker evaluates at once."""
  samples = 1024
  if isinstance(test, data.TextDataset):
    samples = min(samples, _EVALUATED // test.input_shape[0])
  return samples // options.workers or 1


def words(dataset: AnyDataset) -> str:
  """Returns what a data set's samples are."""
  if isinstance(dataset, data.TextDataset):
    return f"windows of {dataset.input_shape[0]} bytes"
  return "images"


def quality(metrics: Mapping[str, float]) -> str:
  """Returns a model's quality, as it is shown while it is trained."""
  told = f"accuracy {100 * metrics['accuracy']:.2f} %"
  if "bits_per_token" in metrics:
    told = f"{metrics['bits_per_token']:.3f} bits per byte  {told}"
  return told


def loss(record: training.Record) -> str:
  """Returns the training loss, and a dash where no step has been trained."""
  unknown = math.isnan(record.train_loss) and not record.diverged
  # Steps that were skipped may have had none that is finite.
  if unknown and not record.skipped:
    return "–"
  return f"{record.train_loss:.4f}"


def speed(record: training.Record, dataset: AnyDataset) -> str:
  """Returns how fast a run trains: in images, or in bytes of a text."""
  if isinstance(dataset, data.TextDataset):
    length = dataset.input_shape[0]
    return f"{training.format_rate(record.samples_per_s * length)} bytes"
  return f"{training.format_rate(record.samples_per_s)} images"
