"""Arrays on the disk: .npy files and a manifest that is written last.

    arrays.json            names, files, hashes, types, and the caller's body
    w-0123456789ab.npy     an array; its name holds a part of its hash

A new manifest replaces the old one in one move, and only then are the old
files removed: an interrupted save leaves the earlier arrays.  A new directory
is filled as `.w.unfinished` and then moved, so that one that exists is whole.
Only files that a manifest of ours has named are ever removed, and a directory
that holds other arrays is refused.  One process saves at a time: on several
hosts that share a disk, the first.
"""

import functools
import hashlib
import os
import pathlib
import re
import shutil
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdist import checks, signatures, states
from jdist.states import PyTree
from jdist.storage import hashes, sealed_json

_MANIFEST = "arrays.json"
_FORMAT = 3
# Names that `save_arrays` gives; a manifest cannot name other files.
_FILE = re.compile(r"[^/\\]+-([0-9a-f]{12})\.npy")
# Every character that some file system does not take.
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")


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


@signatures.checked
def save_arrays(
  directory: str | os.PathLike[str], tree: PyTree, body: dict[str, Any]
) -> None:
  """Saves the leaves of a tree, and replaces those of an earlier save.

  Args:
    directory: Used for nothing else.
    tree: Arrays of numbers, also bfloat16, and random keys.
    body: JSON values, of which `"what"` names the arrays' kind and `"about"` is
      the user's.

  Raises:
    ValueError: If a leaf or the body cannot be saved, or the directory holds
      something else; nothing is written then.
  """
  sealed_json.check("about", body.get("about"))
  leaves = checks.named_leaves(tree)
  arrays = {name: _words(name, leaf) for name, leaf in leaves.items()}
  target = folder(directory)
  earlier = refuse_others(target, body["what"])
  if target.exists():
    _fill(target, arrays, body, earlier)
    return
  # A hidden name: no directory that a user saves to is called so.
  partial = target.with_name(f".{target.name}.unfinished")
  partial.mkdir(parents=True, exist_ok=True)
  # A user's own files stay, and are moved with the directory.
  for path in partial.iterdir():
    name = path.name.removesuffix(".partial")
    if name == _MANIFEST or _FILE.fullmatch(name):
      path.unlink()  # An interrupted save has left it.
  _fill(partial, arrays, body, set())
  partial.rename(target)


def _words(name: str, leaf: Any) -> tuple[np.ndarray, str]:
  """Returns the bits of a leaf in a type that .npy files have, and its type."""
  if states.is_key(leaf):
    return np.asarray(states.key_words(leaf)), str(leaf.dtype)
  words = array = np.asarray(leaf)
  # NumPy writes bfloat16 too, and reads it as bytes without a type.
  if array.dtype.isbuiltin == 2:
    words = array.view(f"u{array.dtype.itemsize}")
  if words.dtype.kind not in "biufc":
    raise ValueError(
      f"`{name}` must hold numbers to be saved, got {array.dtype}. Convert it "
      "with `.astype`."
    )
  return words, str(array.dtype)


def _fill(
  target: pathlib.Path,
  arrays: Mapping[str, tuple[np.ndarray, str]],
  body: dict[str, Any],
  earlier: set[str],
) -> None:
  """Writes the arrays and the manifest, and removes earlier files."""
  files = {}
  for name, (words, of) in arrays.items():
    save = functools.partial(np.save, arr=words, allow_pickle=False)
    # Hashed first, as the name holds the hash, and without a copy in memory: a
    # data set may fill most of it.
    found = hashlib.sha256()
    sink: Any = types.SimpleNamespace(write=found.update)
    save(sink)
    digest = found.hexdigest()
    # The name is for people; the hash distinguishes arrays of equal names.
    file = f"{_UNFIT.sub('_', name)[:80]}-{digest[:12]}.npy"
    sealed_json.write_whole(target / file, save)
    files[name] = [file, digest, of]
  earlier -= {file for file, _, _ in files.values()}
  # Keep listing stale files: an interrupted save may leave them behind.
  stale = sorted(file for file in earlier if (target / file).exists())
  manifest = {"files": files, "stale": stale, "body": body}
  sealed_json.write(target / _MANIFEST, manifest, form=_FORMAT)
  for file in stale:
    (target / file).unlink(missing_ok=True)


def remove(directory: str | os.PathLike[str]) -> None:
  """Removes a directory of `save_arrays`, if there is one."""
  target = folder(directory)
  # Without its manifest it does not count, wherever the removal is cut off.
  (target / _MANIFEST).unlink(missing_ok=True)
  shutil.rmtree(target, ignore_errors=True)


def refuse_others(directory: str | os.PathLike[str], what: str) -> set[str]:
  """Raises a ValueError unless a directory is free for `what`, or has it.

  Returns the names of files that earlier saves have left there.
  """
  target = folder(directory)
  rule = f"`directory` must be for {what} alone, but {target}"
  if not is_there(target):
    others = [x.name for x in sorted(target.glob("*.npy")) if not _is_ours(x)]
    if others:
      more = f" and {len(others) - 1} more" if len(others) > 1 else ""
      raise ValueError(
        f"{rule} holds other arrays, {others[0]}{more}. Take another directory."
      )
    return set()
  try:
    manifest = _read(target)
  except ValueError as error:
    raise ValueError(
      f"{rule} has an {_MANIFEST} that is not ours, damaged, or of another "
      f"version. {error} Take another directory."
    ) from error
  if (found := manifest["body"]["what"]) != what:
    raise ValueError(f"{rule} holds {found}. Take another directory.")
  names = [x[0] for x in manifest["files"].values()] + manifest["stale"]
  return {x for x in names if isinstance(x, str) and _FILE.fullmatch(x)}


def _is_ours(path: pathlib.Path) -> bool:
  """Returns whether an interrupted first save has left a file."""
  name = _FILE.fullmatch(path.name)
  # No other program names a file by a hash of its content.
  return name is not None and hashes.hash_file(path).startswith(name[1])


def _read(target: pathlib.Path) -> dict[str, Any]:
  """Returns the manifest: the file, hash and type of each array, and more."""
  found = sealed_json.read(target / _MANIFEST, form=_FORMAT)
  try:
    files = {
      name: (str(x), str(sha), str(of))
      for name, (x, sha, of) in found["files"].items()
    }
    found["body"]["what"]
    return found | {"files": files, "stale": list(found["stale"])}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise hashes.DamagedError(
      target / _MANIFEST, f"cannot be read ({error!r})"
    ) from error


def load_arrays(
  directory: str | os.PathLike[str], *, what: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns the arrays by name, and the body, of `save_arrays`.

  Random keys are returned as their words; `tree_of` makes keys of them.

  Raises:
    FileNotFoundError: If there is nothing.
    ValueError: If it is something else, and as a `hashes.DamagedError`
      when a file is missing or has changed.
  """
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
  # A crafted manifest must not lead outside of the directory.
  files = {
    name: (pathlib.Path(file).name, digest, of)
    for name, (file, digest, of) in manifest["files"].items()
  }
  hashes.check_files(target, {file: sha for file, sha, _ in files.values()})
  try:
    return {
      name: _typed(np.load(target / file, allow_pickle=False), of)
      for name, (file, _, of) in files.items()
    }, body
  except MemoryError:
    raise
  except Exception as error:  # Of NumPy or zipfile, if a file was crafted.
    raise hashes.DamagedError(
      target, f"holds a file that is no array ({error})"
    ) from error


def _typed(words: np.ndarray, of: str) -> np.ndarray:
  words = words[...]  # An archive of arrays has no such key.
  # Only extension types, such as bfloat16, are kept as words: a crafted name of
  # another type changes nothing.
  if of.startswith("key<") or np.dtype(of).isbuiltin != 2:
    return words
  return words.view(of)


@signatures.checked
def tree_of(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
  """Returns loaded arrays as a tree of the shapes and types of another.

  Raises:
    ValueError: If there are others; it names the first one.
  """
  leaves = checks.named_leaves(like)
  expected = {name: states.key_words(leaf) for name, leaf in leaves.items()}
  for name in expected | dict(arrays):
    found, wanted = (
      f"{x[name].dtype}{list(x[name].shape)}" if name in x else "nothing"
      for x in (arrays, expected)
    )
    if found != wanted:
      raise ValueError(
        f"`directory` must hold {wanted} as {name!r}, got {found}. It was "
        "written for another model or optimizer, or by another version."
      )
  found_leaves = [
    states.as_key(arrays[name], leaf) for name, leaf in leaves.items()
  ]
  return jax.tree.unflatten(jax.tree.structure(like), found_leaves)


def create_rows(path: pathlib.Path, num_rows: int, length: int) -> None:
  """Makes a file of float32 rows in its full size, for `open_rows`."""
  shape = (num_rows, length)
  np.lib.format.open_memmap(path, "w+", np.float32, shape).flush()


def open_rows(
  path: pathlib.Path, num_rows: int, length: int, *, write: bool = False
) -> np.memmap:
  """Maps a file of `create_rows` into memory, [num_rows, length]."""
  try:
    rows = np.load(path, "r+" if write else "r", allow_pickle=False)
  except (OSError, ValueError) as error:
    raise hashes.DamagedError(path, f"cannot be read ({error})") from error
  if rows.shape != (num_rows, length) or rows.dtype != np.float32:
    found = f"{rows.dtype}{list(rows.shape)}"
    raise hashes.DamagedError(
      path, f"holds {found} and not float32{[num_rows, length]}"
    )
  return rows
