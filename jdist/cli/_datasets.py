"""The data set that options name, of images or of a text, and its model."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from jdist import data, models, training
from jdist.cli import _groups, _options
from jdist.storage import hashes

AnyDataset = data.Dataset | data.TextDataset
_Common = TypeVar("_Common", bound=_groups.Common)
# Bytes of all workers that are evaluated at once.
_EVALUATED = 2**17
# Networks with many strided layers, which leave nothing of images of less than
# 16 x 16 pixels and would take minutes to compile for them.
_LARGE_MODELS = ("alexnet", "vgg", "resnet18", "resnet34", "resnet50")
_LARGE_PIXELS = 16


def named(options: _Common) -> _Common:
  """Returns the options with the name and a hash of `--text` as data set.

  Rows and checkpoints then identify the text, wherever its file is.

  Raises:
    ValueError: when both are given, or there is no such file.
  """
  if options.text is None:
    return options
  if "dataset" in _options.given(options):
    raise ValueError(
      f"`--dataset` must be left out with `--text`, got {options.dataset}."
    )
  path = pathlib.Path(options.text)
  if not path.is_file():
    raise ValueError(f"`--text` must be a file, got {options.text!r}.")
  # The path may change when a run is resumed, but not the text.
  digest = hashes.hash_file(path)[:8]
  return dataclasses.replace(options, dataset=f"{path.stem}-{digest}")


def check(options: _groups.Common) -> dict[str, str]:
  """Checks that data set, model and their options match.

  Returns:
    The modules that read the data set, with their extras.

  Raises:
    ValueError: when they do not match.
  """
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
  if options.text is not None or options.dataset == "synthetic":
    return {}
  images = {} if text else {"PIL": "data"}
  return {"tensorflow_datasets": "data", "array_record": "data"} | images


def load(options: _groups.Common) -> tuple[AnyDataset, AnyDataset]:
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
  options: _groups.Common, train: AnyDataset, seed: int
) -> models.Model:
  """Builds the model that options name, for a data set."""
  large = options.model.startswith(_LARGE_MODELS)
  if large and min(train.input_shape[:2]) < _LARGE_PIXELS:
    size = "x".join(map(str, train.input_shape[:2]))
    raise ValueError(
      f"`--model` must suit images of {size}: mlp, lenet, cnn, resnet8 or "
      f"resnet20, got {options.model}, which needs {_LARGE_PIXELS}x"
      f"{_LARGE_PIXELS} or more."
    )
  return models.build(**build_arguments(options, train), seed=seed)


def build_arguments(
  options: _groups.Common, train: AnyDataset
) -> dict[str, Any]:
  """Returns the arguments of `models.build`, without the seed."""
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


def evaluation_batch(num_workers: int, test: AnyDataset) -> int:
  """Returns how many samples a worker evaluates at once."""
  samples = 1024
  if isinstance(test, data.TextDataset):
    # The logits of a text have 256 numbers for every byte.
    samples = min(samples, _EVALUATED // test.input_shape[0])
  return samples // num_workers or 1


def words(dataset: AnyDataset) -> str:
  """Returns the plural noun for a data set's samples."""
  if isinstance(dataset, data.TextDataset):
    return f"windows of {dataset.input_shape[0]} bytes"
  return "images"


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
