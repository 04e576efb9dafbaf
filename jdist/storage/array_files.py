"""Arrays on the disk: .npy files and a manifest that is written last.

    arrays.json            names, the files with their hashes, what it is
    w-0123456789ab.npy     one array; its name holds a part of its hash

A new manifest replaces the old one in one move, and only then are the old
files removed: a write that is cut off leaves what was there before.  Where no
directory was, it is filled beside, as `.w.unfinished`, and then moved: so
whoever asks only whether it exists finds it whole.  What no manifest of ours
has named is never removed, and a directory that holds other arrays is refused.
Nothing is ever unpickled.  One process saves at a time: on several hosts that
share a disk, the first.
"""

import hashlib
import io
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist.storage import sealed_json

PyTree: TypeAlias = Any
_MANIFEST = "arrays.json"
_FORMAT = 2
# Names that `save_arrays` gives; a manifest cannot make it remove others.
_FILE = re.compile(r"[^/\\]+-([0-9a-f]{12})\.npy")
# All but what every file system takes.
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")
_NUM_LETTERS = 80


def folder(directory: str | os.PathLike[str]) -> pathlib.Path:
  """A directory as a path; a ValueError if it is none, or a file.

  >>> folder("predictors").name
  'predictors'
  """
  try:
    path = pathlib.Path(directory)
  except TypeError as error:
    raise ValueError(
      f"`directory` must be a path, as text or a `pathlib.Path`, got "
      f"{directory!r}."
    ) from error
  if path.exists() and not path.is_dir():
    raise ValueError(
      f"`directory` must be a directory, but {path} is a file. Give another."
    )
  return path


def save_arrays(
  directory: str | os.PathLike[str],
  arrays: Mapping[str, Any],
  body: dict[str, Any],
) -> None:
  """Replaces what an earlier save has left in the directory.

  Args:
    directory: for nothing else; if it is missing it appears at the end, in one
      move.
    arrays: by their names, any text.
    body: what JSON can hold; `"what"` in it says what the arrays are, and
      `"about"` is the caller's.

  Raises:
    ValueError: when JSON cannot hold `about`, an array is of a type that .npy
      files do not have, or the directory holds something else; nothing is
      written then.
  """
  try:
    json.dumps(body.get("about"))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"`about` must be what JSON can hold, got {body['about']!r}: {error}. "
      "Make numbers of arrays by `float` or `.tolist()`."
    ) from error
  held = {name: np.asarray(array) for name, array in arrays.items()}
  for name, array in held.items():
    # NumPy writes others, as bfloat16, and reads bytes without a type.
    if array.dtype.isbuiltin != 1 or array.dtype.kind not in "biufc":
      raise ValueError(
        f"`{name}` cannot be saved as {array.dtype}, which .npy files do not "
        "have. Make it float32 with `.astype(jnp.float32)`."
      )
  target = folder(directory)
  earlier = refuse_others(target, body["what"])
  if target.exists():
    _fill(target, held, body, earlier)
    return
  # Hidden, as no directory is that somebody else saves to.
  partial = target.with_name(f".{target.name}.unfinished")
  partial.mkdir(parents=True, exist_ok=True)
  for path in partial.iterdir():
    name = path.name.removesuffix(".partial")
    if name == _MANIFEST or _FILE.fullmatch(name):
      path.unlink()  # Of a save that was cut off.
  _fill(partial, held, body, set())
  partial.rename(target)


def _fill(
  target: pathlib.Path,
  arrays: Mapping[str, np.ndarray],
  body: dict[str, Any],
  earlier: set[str],
) -> None:
  """Writes the arrays and the manifest, and removes earlier files."""
  files = {}
  for name, array in arrays.items():
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    data = buffer.getvalue()
    digest = _digest(data)
    # For people: names that become one are told apart by the hash, unless
    # their arrays are the same, too.
    file = f"{_UNFIT.sub('_', name)[:_NUM_LETTERS]}-{digest[:12]}.npy"
    sealed_json.write_whole(target / file, data)
    files[name] = [file, digest]
  earlier -= {file for file, _ in files.values()}
  # Named on, as a save that is cut off below leaves them.
  stale = sorted(file for file in earlier if (target / file).exists())
  manifest = {"files": files, "stale": stale, "body": body}
  sealed_json.write(
    target / _MANIFEST, manifest, form=_FORMAT, what=body["what"]
  )
  for file in stale:
    (target / file).unlink(missing_ok=True)


def refuse_others(directory: str | os.PathLike[str], what: str) -> set[str]:
  """Raises a ValueError unless a directory is free for `what`, or holds it.

  Before a long training call it by itself: when it is saved is too late.

  Returns:
    The names of files that earlier saves have left there.
  """
  target = folder(directory)
  rule = f"`directory` must be for {what} alone, but {target}"
  if not is_there(target):
    others = [x.name for x in sorted(target.glob("*.npy")) if not _cut_off(x)]
    if others:
      more = f" and {len(others) - 1} more" if len(others) > 1 else ""
      raise ValueError(
        f"{rule} holds other arrays, {others[0]}{more}. Take another directory."
      )
    return set()
  try:
    manifest = _read(target)
  except (sealed_json.DamagedError, sealed_json.OtherFormatError) as error:
    raise ValueError(
      f"{rule} has an {_MANIFEST} that is not ours, damaged, or of another "
      f"version: it {error}. Take another directory."
    ) from error
  if manifest.what != what:
    raise ValueError(f"{rule} holds {manifest.what}. Take another directory.")
  names = [file for file, _ in manifest.files.values()] + manifest.stale
  return {x for x in names if isinstance(x, str) and _FILE.fullmatch(x)}


def _cut_off(path: pathlib.Path) -> bool:
  """Whether a file is of a first save that never came to its manifest."""
  name = _FILE.fullmatch(path.name)
  # Its name tells its content, which no other file's does.
  return name is not None and _digest(path.read_bytes()).startswith(name[1])


def _digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


class _Manifest(NamedTuple):
  what: str
  files: dict[str, tuple[str, str]]  # Of each array its file and hash.
  stale: list[str]
  body: dict[str, Any]


def _read(target: pathlib.Path) -> _Manifest:
  found = sealed_json.read(target / _MANIFEST, form=_FORMAT)
  try:
    body, stale = found["body"], found["stale"]
    files = {name: (file, sha) for name, (file, sha) in found["files"].items()}
    return _Manifest(body["what"], files, list(stale), body)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise sealed_json.DamagedError(f"cannot be read: {error!r}") from error


def load_arrays(
  directory: str | os.PathLike[str], *, what: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads what `save_arrays` wrote.

  Raises:
    FileNotFoundError: when there is no manifest.
    ValueError: when a file has changed or is missing, or the arrays are
      something else than `what`.
  """
  target = folder(directory)
  try:
    manifest = _read(target)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"`directory` must hold {what}, but there is no {_MANIFEST} in {target}."
    ) from error
  except sealed_json.DamagedError as error:
    raise ValueError(
      f"`directory` is damaged: {target / _MANIFEST} {error}. Make it anew."
    ) from error
  except sealed_json.OtherFormatError as error:
    raise ValueError(f"`directory` {target} {error}") from error
  if manifest.what != what:
    raise ValueError(
      f"`directory` must hold {what}, got {manifest.what} in {target}."
    )
  arrays = {}
  for name, (file, digest) in manifest.files.items():
    path = target / pathlib.Path(file).name  # Never outside of it.
    data = path.read_bytes() if path.exists() else b""
    if _digest(data) != digest:
      raise ValueError(
        f"`directory` is damaged: {path} is missing, has changed or is cut off."
      )
    arrays[name] = np.load(io.BytesIO(data), allow_pickle=False)
  return arrays, manifest.body


def is_there(directory: str | os.PathLike[str]) -> bool:
  """Whether something was saved in a directory."""
  return (folder(directory) / _MANIFEST).exists()


def tree_of(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
  """Undoes `checks.named_leaves`.

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
