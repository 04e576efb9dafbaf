"""Arrays on the disk: .npy files and a manifest that is written last.

    arrays.json            names, the files with their hashes, what it is
    w-0123456789ab.npy     one array; its name holds a part of its hash

A new manifest replaces the old one in one move, and only then are the old
files removed: a write that is cut off leaves what was there before.  Nothing
is ever unpickled.
"""

import hashlib
import io
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist.training import sealing

PyTree: TypeAlias = Any
_MANIFEST = "arrays.json"
_FORMAT = 1


def save_arrays(
  directory: str | os.PathLike[str],
  arrays: Mapping[str, Any],
  body: dict[str, Any],
) -> None:
  """Replaces what is in the directory.

  Args:
    directory: made if it is missing; for nothing else.
    arrays: by names that may be in a file's name.
    body: what JSON can hold; `"what"` in it says what the arrays are, and
      `"about"` is the caller's.

  Raises:
    ValueError: when JSON cannot hold `about`; nothing is written then.
  """
  try:
    json.dumps(body.get("about"))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"`about` must be what JSON can hold, got {body['about']!r}: {error}. "
      "Make numbers of arrays by `float` or `.tolist()`."
    ) from error
  target = pathlib.Path(directory)
  target.mkdir(parents=True, exist_ok=True)
  files = {}
  for name, array in arrays.items():
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array), allow_pickle=False)
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    file = f"{name}-{digest[:12]}.npy"
    sealing.write_whole(target / file, data)
    files[name] = [file, digest]
  manifest = {"format": _FORMAT, "files": files, "body": body}
  sealing.write_whole(
    target / _MANIFEST, json.dumps(manifest, indent=1).encode()
  )
  kept = {file for file, _ in files.values()}
  for old in target.glob("*.npy"):
    if old.name not in kept:
      old.unlink(missing_ok=True)


def load_arrays(
  directory: str | os.PathLike[str], *, what: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads what `save_arrays` wrote.

  Raises:
    FileNotFoundError: when there is no manifest.
    ValueError: when a file has changed or is missing, or the arrays are
      something else than `what`.
  """
  target = pathlib.Path(directory)
  try:
    manifest = json.loads((target / _MANIFEST).read_text())
    form, files, body = (manifest[k] for k in ("format", "files", "body"))
    found = body["what"]
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"`directory` must hold {what}, but there is no {_MANIFEST} in {target}."
    ) from error
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"`directory` is damaged: {target / _MANIFEST} cannot be read: {error!r}."
    ) from error
  if form != _FORMAT or found != what:
    raise ValueError(
      f"`directory` must hold {what} of format {_FORMAT}, got {found} of "
      f"format {form} in {target}."
    )
  arrays = {}
  for name, (file, digest) in files.items():
    path = target / pathlib.Path(file).name  # Never outside of it.
    data = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(data).hexdigest() != digest:
      raise ValueError(
        f"`directory` is damaged: {path} is missing, has changed or is cut off."
      )
    arrays[name] = np.load(io.BytesIO(data), allow_pickle=False)
  return arrays, body


def is_there(directory: str | os.PathLike[str]) -> bool:
  """Whether something was saved in a directory."""
  return (pathlib.Path(directory) / _MANIFEST).exists()


def named(tree: PyTree) -> dict[str, Any]:
  """The leaves of a tree, by their paths.

  >>> named({"a": {"b": 1}, "c": (2,)})
  {'a.b': 1, 'c.0': 2}
  """
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def tree_of(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
  """Undoes `named`.

  Raises:
    ValueError: when a leaf is missing or of another form.
  """

  def one(path: Any, leaf: Any) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    array = arrays.get(name)
    found = None if array is None else (array.shape, str(array.dtype))
    wanted = (jnp.shape(leaf), str(leaf.dtype))
    if found != wanted:
      raise ValueError(
        f"`directory` must hold {name!r} as {wanted}, but there is {found}. It "
        "was written by another version, or for another model."
      )
    return jnp.asarray(array)

  return jax.tree_util.tree_map_with_path(one, like)
