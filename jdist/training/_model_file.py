"""Trained models in safetensors files, which other programs can read."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jdist import checks, signatures, states
from jdist.states import PyTree
from jdist.storage import sealed_json


@signatures.checked
def save_model(
  path: str | os.PathLike[str],
  params: signatures.Arrays,
  model_state: signatures.Arrays = None,
  metadata: Mapping[str, Any] | None = None,
) -> None:
  """Writes parameters, and batch statistics, as named tensors.

  A tensor has the name of its path: `params.dense1.kernel`, `state.norm.mean`.

  Args:
    path: The path of the file, which is written completely or not at all.
    params: The parameters of one model, a tree of arrays.
    model_state: The batch statistics, if any.
    metadata: JSON values for the file's header, which holds them as texts.
      `load_metadata` reads them.

  Raises:
    OSError: If the file cannot be written, for instance because the disk is
      full.
  """
  safetensors = checks.import_extra("safetensors.numpy", "export")
  failed = checks.import_extra("safetensors", "export").SafetensorError
  named = _named(params, {} if model_state is None else model_state)
  checks.check_some("params", params)
  # safetensors writes the memory of an array as it is, so that a transposed one
  # must be copied. `ascontiguousarray` would turn scalars into vectors.
  arrays = {name: np.asarray(x, order="C") for name, x in named.items()}
  for name, x in arrays.items():
    # NumPy could not read other extension types back.
    other = x.dtype.isbuiltin == 2 and x.dtype.name != "bfloat16"
    if other or x.dtype == np.complex128:
      raise ValueError(
        f"`params` must have dtypes that a file holds, got {x.dtype} at "
        f"{name!r}. Cast it, for instance to bfloat16."
      )
  given = sealed_json.check("metadata", dict(metadata or {}))
  header = {
    name: value if str(value) == _value(value) else json.dumps(value)
    for name, value in given.items()
  }
  # Renaming is atomic, so that a reader never sees half a file; but it would
  # take away a device such as /dev/null.
  target, partial = pathlib.Path(path), f"{os.fspath(path)}.partial"
  if target.exists() and not (target.is_file() or target.is_dir()):
    raise ValueError(f"`path` must be that of a file, got the device {path}.")
  try:
    safetensors.save_file(arrays, partial, header)
    os.replace(partial, path)
  except UnicodeEncodeError as error:
    rule = "`params` must have names, and `metadata` texts, in UTF-8"
    raise ValueError(f"{rule}, got {error.object!r}. Rename it.") from None
  except (OSError, failed) as error:
    with contextlib.suppress(OSError):
      os.unlink(partial)
    raise OSError(
      f"the model could not be written to {os.fspath(path)}: {error}. Make "
      "room, or take another `path`."
    ) from error


@signatures.checked
def load_model(
  path: str | os.PathLike[str],
  params: signatures.Shapes,
  model_state: signatures.Shapes = None,
) -> tuple[PyTree, PyTree]:
  """Reads a model that `save_model` has written.

  Args:
    path: The path of the file.
    params: A tree like the saved one, for instance of a new model. Its values
      are not used.
    model_state: A tree like the saved batch statistics, if any.

  Returns:
    The parameters and the batch statistics, `jax.Array`s.

  Raises:
    ValueError: If the file does not have exactly these tensors.
  """
  safetensors = checks.import_extra("safetensors.numpy", "export")
  with _named_errors(path):
    saved = safetensors.load_file(path)
  state = {} if model_state is None else model_state
  named = _named(params, state)
  checks.check_form(
    f"`path` must be a file of this model, got {os.fspath(path)}",
    saved,
    named,
    "Build the model as it was: a file of `jdist train` has the arguments of "
    "`models.build` in `training.load_metadata(path)['build']`.",
  )
  likes = jax.tree.leaves((params, state))
  leaves = [
    states.as_key(saved[name], like)
    for name, like in zip(named, likes, strict=True)
  ]
  both: tuple[PyTree, PyTree] = params, state
  return jax.tree.unflatten(jax.tree.structure(both), leaves)


@signatures.checked
def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads the metadata that `save_model` has written, texts and JSON values."""
  safetensors = checks.import_extra("safetensors", "export")
  with _named_errors(path), safetensors.safe_open(path, "numpy") as file:
    header = file.metadata() or {}
  return {name: _value(text) for name, text in header.items()}


@contextlib.contextmanager
def _named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
  """Names the file if it is not one of safetensors."""
  failed = checks.import_extra("safetensors", "export").SafetensorError
  try:
    with open(path, "rb"):  # Its errors name the path.
      yield
  except (failed, AttributeError) as error:  # NumPy has no 8-bit floats.
    raise ValueError(
      f"`path` must be a file of `save_model`, got {os.fspath(path)}: {error}."
    ) from None


def _value(text: Any) -> Any:
  """Returns the JSON value of a text, or what is no such text itself."""
  try:
    return json.loads(text)
  except (TypeError, ValueError):
    return text


def _named(params: PyTree, model_state: PyTree) -> dict[str, Any]:
  """Returns the leaves by name, the parameters first, and keys as data."""
  found = {}
  for kind, tree in (("params", params), ("state", model_state)):
    for name, leaf in checks.named_leaves(tree).items():
      found[f"{kind}.{name}" if name else kind] = states.key_words(leaf)
  return found
