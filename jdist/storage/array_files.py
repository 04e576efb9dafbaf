"""Arrays on the disk: .npy files and a manifest that is written last.

    arrays.json            names, files, hashes, and the body of the caller
    w-0123456789ab.npy     an array; its name holds a part of its hash

A new manifest replaces the old one in one move, and only then are the old
files removed: a write that is cut off leaves the earlier arrays.  A new
directory is filled as `.w.unfinished` and then moved, so that one that exists
is whole.  Files that no manifest of ours has named are never removed, and a
directory that holds other arrays is refused.  Nothing is ever unpickled.  One
process saves at a time: on several hosts that share a disk, the first.
"""

import hashlib
import io
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.storage import hashes, sealed_json

PyTree: TypeAlias = Any
_MANIFEST = "arrays.json"
_FORMAT = 2
# Names that `save_arrays` gives; a manifest cannot name other files.
_FILE = re.compile(r"[^/\\]+-([0-9a-f]{12})\.npy")
# All but what every file system takes.
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")
_NUM_LETTERS = 80


def folder(directory: str | os.PathLike[str]) -> pathlib.Path:
  """Returns a directory as a path; raises a ValueError for a file."""
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


def is_there(directory: str | os.PathLike[str]) -> bool:
  """Returns whether a directory has a manifest of arrays."""
  return (folder(directory) / _MANIFEST).exists()


def save_arrays(
  directory: str | os.PathLike[str], tree: PyTree, body: dict[str, Any]
) -> None:
  """Saves the leaves of a tree, and replaces those of an earlier save.

  Of the body `"what"` says what the arrays are, and `"about"` is the user's.
  What is refused leaves nothing written.
  """
  try:
    json.dumps(body.get("about"))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"`about` must be what JSON can hold, got {body['about']!r}: {error}. "
      "Make numbers of arrays by `float` or `.tolist()`."
    ) from error
  leaves = checks.named_leaves(tree)
  arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
  for name, array in arrays.items():
    # NumPy writes others, as bfloat16, and reads bytes without a type.
    if array.dtype.isbuiltin != 1 or array.dtype.kind not in "biufc":
      raise ValueError(
        f"`{name}` cannot be saved as {array.dtype}, which .npy files do not "
        "have. Make it float32 with `.astype(jnp.float32)`."
      )
  target = folder(directory)
  earlier = refuse_others(target, body["what"])
  if target.exists():
    _fill(target, arrays, body, earlier)
    return
  # Hidden, as no directory is that somebody else saves to.
  partial = target.with_name(f".{target.name}.unfinished")
  partial.mkdir(parents=True, exist_ok=True)
  for path in partial.iterdir():
    name = path.name.removesuffix(".partial")
    if name == _MANIFEST or _FILE.fullmatch(name):
      path.unlink()  # Of a save that was cut off.
  _fill(partial, arrays, body, set())
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
    digest = hashlib.sha256(data).hexdigest()
    # For people: equal names differ by the hash, unless their arrays are equal.
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


def remove(directory: str | os.PathLike[str]) -> None:
  """Removes a directory of `save_arrays` with all that is in it, if any."""
  target = folder(directory)
  # Without its manifest it does not count, wherever the removal is cut off.
  (target / _MANIFEST).unlink(missing_ok=True)
  shutil.rmtree(target, ignore_errors=True)


def refuse_others(directory: str | os.PathLike[str], what: str) -> set[str]:
  """Raises a ValueError unless a directory is free for `what`, or holds it.

  Returns the names of files that earlier saves have left there.
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
  except (sealed_json.DamagedError, sealed_json.FormatError) as error:
    raise ValueError(
      f"{rule} has an {_MANIFEST} that is not ours, damaged, or of another "
      f"version. {error} Take another directory."
    ) from error
  if (found := manifest["body"]["what"]) != what:
    raise ValueError(f"{rule} holds {found}. Take another directory.")
  names = [file for file, _ in manifest["files"].values()] + manifest["stale"]
  return {x for x in names if isinstance(x, str) and _FILE.fullmatch(x)}


def _cut_off(path: pathlib.Path) -> bool:
  """Returns whether a file is of a first save that has no manifest yet."""
  name = _FILE.fullmatch(path.name)
  # The hash in its name is that of its content, as in no other file.
  return name is not None and hashes.hash_file(path).startswith(name[1])


def _read(target: pathlib.Path) -> dict[str, Any]:
  """Returns the manifest: of each array its file and hash, and the rest."""
  found = sealed_json.read(target / _MANIFEST, form=_FORMAT)
  try:
    files = {name: (file, sha) for name, (file, sha) in found["files"].items()}
    found["body"]["what"]
    return found | {"files": files, "stale": list(found["stale"])}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise sealed_json.DamagedError(
      target / _MANIFEST, f"cannot be read ({error!r})"
    ) from error


def load_arrays(
  directory: str | os.PathLike[str], *, what: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns the arrays by name, and the body, of `save_arrays`."""
  target = folder(directory)
  try:
    manifest = _read(target)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"`directory` must hold {what}, but there is no {_MANIFEST} in {target}."
    ) from error
  body = manifest["body"]
  if body["what"] != what:
    raise ValueError(
      f"`directory` must hold {what}, got {body['what']} in {target}."
    )
  # Never outside of the directory, whatever the manifest names.
  files = {
    name: (pathlib.Path(file).name, digest)
    for name, (file, digest) in manifest["files"].items()
  }
  hashes.check_files(target, dict(files.values()))
  try:
    return {
      name: np.load(target / file, allow_pickle=False)
      for name, (file, _) in files.items()
    }, body
  except ValueError as error:
    # A file of ours is an array of numbers, whatever its hash is.
    raise sealed_json.DamagedError(
      target, f"holds a file that is no array ({error})"
    ) from error


def tree_of(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
  """Returns loaded arrays as a tree of the shapes and types of another."""
  leaves = []
  for name, leaf in checks.named_leaves(like).items():
    array = arrays.get(name)
    found = None if array is None else (array.shape, str(array.dtype))
    wanted = (jnp.shape(leaf), str(leaf.dtype))
    if found != wanted:
      raise ValueError(
        f"`directory` must hold {name!r} as {wanted}, but there is {found}. It "
        "was written by another version, or for another model."
      )
    leaves.append(jnp.asarray(array))
  return jax.tree.unflatten(jax.tree.structure(like), leaves)
