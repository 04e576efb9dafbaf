"""Arrays on the disk: what is replaced, and what is never touched."""

import io
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import prediction
from jdist.storage import array_files, hashes, sealed_json
from tests import _refusals
from tests.prediction import _tiny

BODY = {"what": "x"}


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def save(folder, *values, what="x"):
  arrays = {f"w{i}": np.full(2, x) for i, x in enumerate(values)}
  array_files.save_arrays(folder, arrays, {"what": what})


def load(folder):
  arrays, _ = array_files.load_arrays(folder, what="x")
  return arrays


def test_directories_of_others_are_refused_and_left_alone(tmp_path):
  collected, numbers, others = (
    tmp_path / name for name in ("collected", "numbers", "others")
  )
  prediction.Collector(collected, _tiny.alone(), [_tiny.cut()], (1, 2))
  numbers.mkdir()
  np.save(numbers / "mine.npy", np.ones(3))
  save(others, 1.0, what="y")
  for folder, found in (
    (collected, r"front_01\.npy"),
    (numbers, r"mine\.npy"),
    (others, "holds y"),
  ):
    before = contents(folder)
    with pytest.raises(
      ValueError, match=rf"`directory` must.*{folder}.*{found}.*another"
    ):
      save(folder, 1.0)
    assert contents(folder) == before


def test_array_with_another_hash_in_its_name_is_somebody_elses(tmp_path):
  save(tmp_path / "earlier", 1.0)
  (ours,) = (tmp_path / "earlier").glob("*.npy")
  # An interrupted save leaves its arrays, and no manifest.
  for name, refused in ((ours.name, False), ("w0-0123456789ab.npy", True)):
    folder = tmp_path / name
    folder.mkdir()
    (folder / name).write_bytes(ours.read_bytes())
    if refused:
      with _refusals.refused("directory", "holds other arrays"):
        save(folder, 1.0)
    else:
      save(folder, 1.0)
    assert (folder / name).exists()


def test_only_earlier_arrays_are_removed(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")  # No array: nothing is at risk.
  save(tmp_path, 1.0, 2.0)
  for name in ("mine.npy", "run-0123456789ab.npy"):
    np.save(tmp_path / name, np.ones(3))
  save(tmp_path, 3.0)
  names = sorted(contents(tmp_path))
  kept = ["arrays.json", "mine.npy", "notes.txt", "run-0123456789ab.npy"]
  assert set(kept) < set(names) and len(names) == len(kept) + 1


def test_unreadable_manifest_is_not_replaced(tmp_path):
  (tmp_path / "arrays.json").write_text('["somebody else\'s"]')
  with _refusals.refused("directory", "cannot be read"):
    save(tmp_path, 1.0)
  assert len(contents(tmp_path)) == 1


def test_directories_of_similar_names_are_left_alone(tmp_path):
  names = ("run.partial", "run.unfinished", "run")
  for number, name in enumerate(names):
    save(tmp_path / name, number)
  for number, name in enumerate(names):
    assert (load(tmp_path / name)["w0"] == number).all()


def crafted(folder, **changed):
  """Writes a manifest with the right seal, as an attacker would."""
  manifest = sealed_json.read(folder / "arrays.json", form=array_files._FORMAT)
  sealed_json.write(
    folder / "arrays.json", manifest | changed, form=array_files._FORMAT
  )


def test_crafted_manifest_removes_nothing_outside(tmp_path):
  folder = tmp_path / "tracks"
  save(folder, 1.0)
  names = ("../mine-0123456789ab.npy", "notes.txt", "..")
  files = {f"x{i}": [name, "", "float32"] for i, name in enumerate(names)}
  crafted(folder, stale=[*names, 3], files=files)
  (folder / "notes.txt").write_text("mine")
  np.save(tmp_path / "mine-0123456789ab.npy", np.ones(3))
  (old,) = folder.glob("*.npy")
  save(folder)
  assert sorted(contents(folder)) == ["arrays.json", "notes.txt", old.name]
  assert (tmp_path / "mine-0123456789ab.npy").exists()


class _Opens:
  """Opens a file for writing once it is unpickled."""

  def __init__(self, victim):
    self.victim = victim

  def __reduce__(self):
    return open, (str(self.victim), "w")


@pytest.mark.parametrize("of", ("object", "O8", "<U3", "i4,f4", 3))
def test_crafted_array_is_damaged_and_not_unpickled(of, tmp_path):
  folder, victim = tmp_path / "in", tmp_path / "victim"
  victim.write_text("precious")
  save(folder, 1.0)
  bad = folder / "bad.npy"
  np.save(bad, np.array([_Opens(victim)], object), allow_pickle=True)
  crafted(folder, files={"w0": [bad.name, hashes.hash_file(bad), of]})
  with _refusals.refused("directory", "holds a file that is no array"):
    load(folder)
  assert victim.read_text() == "precious"


@pytest.mark.parametrize("content", ["nothing", "archive", "zip"])
def test_crafted_file_that_is_no_array_is_damaged(content, tmp_path):
  save(tmp_path, 1.0)
  bad = tmp_path / "bad.npy"
  bad.write_bytes(b"PK\x03\x04 none" if content == "zip" else b"")
  if content == "archive":
    with bad.open("wb") as file:
      np.savez(file, w=np.ones(3))
  crafted(tmp_path, files={"w0": [bad.name, hashes.hash_file(bad), "float32"]})
  with _refusals.refused("directory", "holds a file that is no array"):
    load(tmp_path)
  crafted(tmp_path, files={"w0": [5, 5, 5]})
  with _refusals.refused("directory", "5 is missing"):
    load(tmp_path)


@pytest.mark.parametrize(
  "changed",
  [{"files": {"w0": 3}}, {"files": [1]}, {"stale": 3}, {"body": {}}],
)
def test_crafted_manifest_of_another_form_is_damaged(changed, tmp_path):
  save(tmp_path, 1.0)
  crafted(tmp_path, **changed)
  with pytest.raises(hashes.DamagedError, match="cannot be read"):
    load(tmp_path)


def test_rows_of_another_shape_or_type_are_damaged(tmp_path):
  path = tmp_path / "rows.npy"
  array_files.create_rows(path, 3, 2)
  assert array_files.open_rows(path, 3, 2).shape == (3, 2)
  with pytest.raises(hashes.DamagedError, match=r"float32\[3, 2\] and not"):
    array_files.open_rows(path, 2, 3)
  np.save(path, np.zeros((3, 2)))
  with pytest.raises(hashes.DamagedError, match="holds float64"):
    array_files.open_rows(path, 3, 2)


def test_damage_and_other_arrays_raise_different_errors(tmp_path):
  save(tmp_path, 1.0)
  with pytest.raises(ValueError, match="must hold y, got x") as other:
    array_files.load_arrays(tmp_path, what="y")
  assert not isinstance(other.value, hashes.DamagedError)
  (file,) = tmp_path.glob("*.npy")
  file.write_bytes(file.read_bytes()[:-1])
  with pytest.raises(hashes.DamagedError, match="has changed"):
    load(tmp_path)
  file.unlink()
  with pytest.raises(hashes.DamagedError, match="is missing"):
    load(tmp_path)
  (tmp_path / "arrays.json").write_text("[" * 100_000)
  with pytest.raises(hashes.DamagedError, match="cannot be read"):
    load(tmp_path)
  with pytest.raises(FileNotFoundError, match="`directory` must hold x"):
    load(tmp_path / "nowhere")


def test_names_may_have_characters_that_files_cannot(tmp_path):
  arrays = {
    name: np.full(2, value, np.float32)
    for value, name in enumerate(
      ("net/~/linear.w", "net_~_linear.w", "x" * 300, "..", "a\\b", "\u00e9")
    )
  }
  # Of the same file and content.
  arrays |= {"a/b": np.ones(1, np.float32), "a_b": np.ones(1, np.float32)}
  for number in range(2):
    arrays |= {"changed/": np.full(1, number, np.float32)}
    array_files.save_arrays(tmp_path / "in", arrays, {"what": "x"})
  found, _ = array_files.load_arrays(tmp_path / "in", what="x")
  assert found.keys() == arrays.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(found[name], array)
  assert [path.name for path in tmp_path.iterdir()] == ["in"]
  assert len(contents(tmp_path / "in")) == len(arrays)  # Two in one file.


@pytest.mark.parametrize("dtype", [object, "U3"])
def test_leaves_that_are_no_numbers_are_refused(dtype, tmp_path):
  array_files.save_arrays(tmp_path, {"w": np.zeros(2)}, {"what": "x"})
  before = contents(tmp_path)
  with _refusals.refused("w", "must hold numbers"):
    array_files.save_arrays(
      tmp_path, {"w": np.zeros(2).astype(dtype)}, {"what": "x"}
    )
  assert contents(tmp_path) == before


def test_narrow_floats_and_keys_are_loaded_with_the_same_bits(tmp_path):
  tree = {
    "half": jnp.array([0.1, -jnp.inf, jnp.nan], jnp.bfloat16),
    "eighth": jnp.array(3.0, jnp.float8_e5m2),
    "key": jax.random.split(jax.random.key(3), 2),
    "none": jnp.zeros((0, 2)),
  }
  array_files.save_arrays(tmp_path, tree, {"what": "x"})
  arrays, _ = array_files.load_arrays(tmp_path, what="x")
  found = array_files.tree_of(arrays, tree)
  for name, leaf in tree.items():
    assert found[name].dtype == leaf.dtype
    words = (
      np.asarray(jax.random.key_data(x) if name == "key" else x)
      for x in (found[name], leaf)
    )
    one, other = (x.tobytes() for x in words)
    assert one == other
  for like in ({}, tree | {"half": tree["none"]}, tree | {"w": tree["none"]}):
    with _refusals.refused("directory", "must hold"):
      array_files.tree_of(arrays, like)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda text: text.replace('"note": 1', '"note": 2'), "has changed"),
    (lambda text: text.replace('"stale": []', '"stale": [3]'), "has changed"),
    (lambda text: text.replace('"format": 3', '"format": 1'), "has format 1"),
    (lambda text: text[:-2], "cannot be read"),
    (lambda text: "{}", "cannot be read"),
  ],
)
def test_manifest_that_has_changed_is_refused(change, message, tmp_path):
  body = {"what": "x", "note": 1}
  array_files.save_arrays(tmp_path, {"w": np.zeros(2)}, body)
  manifest = tmp_path / "arrays.json"
  text = manifest.read_text()
  assert change(text) != text
  manifest.write_text(change(text))
  with pytest.raises(ValueError, match=f"`directory`.*{message}"):
    array_files.load_arrays(tmp_path, what="x")
  with pytest.raises(
    ValueError, match=f"`directory`.*{message}.*another direc"
  ):
    array_files.save_arrays(tmp_path, {"w": np.ones(2)}, body)


class _Killed(BaseException):
  """No handler catches it, as none catches SIGKILL."""


@pytest.mark.parametrize("begun", (False, True), ids=("first", "second"))
def test_save_after_a_kill_at_any_moment_is_whole(tmp_path, monkeypatch, begun):
  """What was there before, or the new, and in the end nothing else."""
  old = {"a": np.zeros(2), "b": np.ones(2)}
  new = {"a": np.full(2, 5.0), "b": np.ones(2), "c": np.full(2, 7.0)}
  body = {"what": "x"}
  array_files.save_arrays(tmp_path / "whole", new, body)
  expected = contents(tmp_path / "whole")
  for number in range(100):
    folder = tmp_path / str(number)
    if begun:
      array_files.save_arrays(folder, old, body)
    with monkeypatch.context() as patch:
      _kill_at(patch, number)
      try:
        array_files.save_arrays(folder, new, body)
      except _Killed:
        pass
      else:
        break
    if begun or folder.exists():
      found, _ = array_files.load_arrays(folder, what="x")
      assert any(
        found.keys() == x.keys() and all((found[k] == x[k]).all() for k in x)
        for x in (old, new)
      )
    for _ in range(2):  # Nothing more is to be removed after the first.
      array_files.save_arrays(folder, new, body)
    assert contents(folder) == expected
    assert not list(tmp_path.glob(".*"))
  # Three arrays and a manifest; of the old ones one goes, or all are moved.
  assert number == 5


def test_rest_of_another_interrupted_save_is_removed(tmp_path, monkeypatch):
  folder, write = tmp_path / "in" / "tracks", sealed_json.write_whole

  def stop_at_the_manifest(path, data):
    if path.suffix == ".json" and _is_own_thread():
      raise _Killed
    write(path, data)

  with monkeypatch.context() as patch:
    patch.setattr(sealed_json, "write_whole", stop_at_the_manifest)
    with pytest.raises(_Killed):
      save(folder, 1.0)
  assert not folder.exists()
  (left,) = folder.parent.iterdir()
  (left / "notes.txt").write_text("mine")
  save(folder)
  assert load(folder) == {}
  assert list(folder.parent.iterdir()) == [folder]
  assert sorted(contents(folder)) == ["arrays.json", "notes.txt"]


def _is_own_thread():
  """Returns False in a thread of another test that still renews its lease."""
  return threading.current_thread() is threading.main_thread()


def _kill_at(monkeypatch, number):
  """Ends everything at the n-th thing that reaches the disk, in its middle."""
  left = [None] * (number + 1)

  def guarded(function, half):
    def call(path, *args, **kwargs):
      if left and _is_own_thread():
        left.pop()
        if not left:
          half(path, *args)
          raise _Killed
      return function(path, *args, **kwargs)

    return call

  def half_a_file(path, data):
    whole = io.BytesIO()
    data(whole) if callable(data) else whole.write(data)
    half = whole.getvalue()[: whole.tell() // 2]
    path.with_name(path.name + ".partial").write_bytes(half)

  monkeypatch.setattr(
    sealed_json, "write_whole", guarded(sealed_json.write_whole, half_a_file)
  )
  unlink = guarded(pathlib.Path.unlink, lambda path: None)
  monkeypatch.setattr(
    pathlib.Path, "unlink", lambda path, *a, **k: unlink(path)
  )
  rename = guarded(pathlib.Path.rename, lambda path, to: None)
  monkeypatch.setattr(pathlib.Path, "rename", lambda path, to: rename(path, to))


def test_about_may_have_numbers_for_keys(tmp_path):
  about = {9: "a", 10: "b"}  # As texts they are in another order.
  body = {"what": "a test", "about": about}
  array_files.save_arrays(tmp_path / "x", {"w": np.ones(2)}, body)
  _, found = array_files.load_arrays(tmp_path / "x", what="a test")
  assert found["about"] == {"9": "a", "10": "b"}
