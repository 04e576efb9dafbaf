"""Arrays on the disk: what is replaced, and what is never touched."""

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import prediction
from jdist.prediction.mp2 import _predictor_fit
from jdist.storage import array_files, sealed_json
from tests import _refusals
from tests.prediction import _tiny
from tests.prediction._fits import FIT, fit_predictor, predictor

RUNS = [{"bias": np.ones((2, 9), np.float32)}]


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def save_predictor(folder):
  params = jax.jit(predictor().init)(jax.random.key(0))
  prediction.save_predictor(folder, predictor(), params)


def save_tracks(folder, runs):
  tree = dict(enumerate(runs))
  array_files.save_arrays(folder, tree, {"what": "tracks"})


def never(*args, **kwargs):
  raise AssertionError("Trained before the directory was looked at.")


@pytest.mark.parametrize(
  "save",
  [
    save_predictor,
    lambda folder: save_tracks(folder, RUNS),
    lambda folder: fit_predictor(FIT, directory=folder),
  ],
  ids=("predictor", "tracks", "fit"),
)
def test_what_others_have_put_there_is_left_alone(save, tmp_path, monkeypatch):
  # Refused at once, and not after an epoch of training.
  monkeypatch.setattr(_predictor_fit, "_update", never)
  collected, numbers, others = (
    tmp_path / name for name in ("collected", "numbers", "others")
  )
  prediction.Collector(collected, _tiny.alone(), [_tiny.cut()], (1, 2))
  numbers.mkdir()
  np.save(numbers / "mine.npy", np.ones(3))
  array_files.save_arrays(others, {"w": np.ones(2)}, {"what": "others"})
  for folder, found in (
    (collected, r"front_01\.npy"),
    (numbers, r"mine\.npy"),
    (others, "holds others"),
  ):
    before = contents(folder)
    with pytest.raises(
      ValueError, match=rf"`directory` must.*{folder}.*{found}.*another"
    ):
      save(folder)
    assert contents(folder) == before


def test_only_what_was_saved_before_is_removed(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")  # No array: nothing is at risk.
  save_tracks(tmp_path, RUNS * 2)
  for name in ("mine.npy", "run-0123456789ab.npy"):
    np.save(tmp_path / name, np.ones(3))
  save_tracks(tmp_path, [{"bias": np.zeros((2, 9), np.float32)}])
  names = sorted(contents(tmp_path))
  kept = ["arrays.json", "mine.npy", "notes.txt", "run-0123456789ab.npy"]
  assert set(kept) < set(names) and len(names) == len(kept) + 1


def test_a_manifest_that_cannot_be_read_is_not_replaced(tmp_path):
  (tmp_path / "arrays.json").write_text('["somebody else\'s"]')
  with _refusals.refused("directory", "cannot be read"):
    save_tracks(tmp_path, RUNS)
  assert len(contents(tmp_path)) == 1


def test_directories_whose_names_are_alike_are_left_alone(tmp_path):
  names = ("run.partial", "run.unfinished", "run")
  for name in names:
    save_tracks(tmp_path / name, RUNS)
  for name in names:
    arrays, _ = array_files.load_arrays(tmp_path / name, what="tracks")
    assert len(arrays) == len(RUNS)


def test_nothing_outside_is_removed(tmp_path):
  """Whatever a manifest says, as an attacker would write it."""
  folder = tmp_path / "tracks"
  save_tracks(folder, RUNS)
  manifest = sealed_json.read(folder / "arrays.json", form=array_files._FORMAT)
  names = ("../mine-0123456789ab.npy", "notes.txt", "..")
  manifest["stale"] = [*names, 3]
  manifest["files"] |= {f"x{i}": [name, ""] for i, name in enumerate(names)}
  sealed_json.write(folder / "arrays.json", manifest, form=array_files._FORMAT)
  (folder / "notes.txt").write_text("mine")
  np.save(tmp_path / "mine-0123456789ab.npy", np.ones(3))
  save_tracks(folder, [])
  assert sorted(contents(folder)) == ["arrays.json", "notes.txt"]
  assert (tmp_path / "mine-0123456789ab.npy").exists()


def test_names_need_not_be_fit_for_files(tmp_path):
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, object, "U3", jnp.float8_e5m2])
def test_types_that_would_not_come_back_are_refused(dtype, tmp_path):
  array_files.save_arrays(tmp_path, {"w": np.zeros(2)}, {"what": "x"})
  before = contents(tmp_path)
  with _refusals.refused("w", "cannot be saved as"):
    array_files.save_arrays(
      tmp_path, {"w": np.zeros(2).astype(dtype)}, {"what": "x"}
    )
  assert contents(tmp_path) == before


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda text: text.replace('"note": 1', '"note": 2'), "has changed"),
    (lambda text: text.replace('"stale": []', '"stale": [3]'), "has changed"),
    (lambda text: text.replace('"format": 2', '"format": 1'), "has format 1"),
    (lambda text: text[:-2], "cannot be read"),
    (lambda text: "{}", "cannot be read"),
  ],
)
def test_a_manifest_that_has_changed_is_refused(change, message, tmp_path):
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
  """Nobody catches it, as nobody catches SIGKILL."""


@pytest.mark.parametrize("begun", (False, True), ids=("first", "second"))
def test_killed_at_any_moment_it_saves_the_next_time(
  tmp_path, monkeypatch, begun
):
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


def test_what_an_earlier_stop_has_left_is_cleared_away(tmp_path, monkeypatch):
  """Even that of other arrays; what others put beside it is kept."""
  folder, write = tmp_path / "in" / "tracks", sealed_json.write_whole

  def stop_at_the_manifest(path, data):
    if path.suffix == ".json":
      raise _Killed
    write(path, data)

  with monkeypatch.context() as patch:
    patch.setattr(sealed_json, "write_whole", stop_at_the_manifest)
    with pytest.raises(_Killed):
      save_tracks(folder, RUNS)
  assert not folder.exists()
  (left,) = folder.parent.iterdir()
  (left / "notes.txt").write_text("mine")
  save_tracks(folder, [])
  assert array_files.load_arrays(folder, what="tracks")[0] == {}
  assert list(folder.parent.iterdir()) == [folder]
  assert sorted(contents(folder)) == ["arrays.json", "notes.txt"]


def _kill_at(monkeypatch, number):
  """Ends everything at the n-th thing that reaches the disk, in its middle."""
  left = [None] * (number + 1)

  def guarded(function, half):
    def call(path, *args, **kwargs):
      if left:
        left.pop()
        if not left:
          half(path, *args)
          raise _Killed
      return function(path, *args, **kwargs)

    return call

  def half_a_file(path, data):
    path.with_name(path.name + ".partial").write_bytes(data[: len(data) // 2])

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


def test_damage_is_seen(tmp_path):
  save_tracks(tmp_path, RUNS)
  (file,) = tmp_path.glob("*.npy")
  whole = file.read_bytes()
  file.write_bytes(whole[:-1])
  with _refusals.refused("directory", "has changed"):
    array_files.load_arrays(tmp_path, what="tracks")
  file.unlink()
  with pytest.raises(ValueError, match="is missing"):
    array_files.load_arrays(tmp_path, what="tracks")
  (tmp_path / "arrays.json").write_text("{")
  with pytest.raises(ValueError, match="cannot be read"):
    array_files.load_arrays(tmp_path, what="tracks")
  with pytest.raises(FileNotFoundError, match="`directory` must hold tracks"):
    array_files.load_arrays(tmp_path / "nowhere", what="tracks")


def test_nothing_is_unpickled(tmp_path):
  """A manifest names an array of objects, as an attacker would write it."""
  save_tracks(tmp_path, RUNS)
  manifest = sealed_json.read(
    tmp_path / "arrays.json", form=array_files._FORMAT
  )
  bad = tmp_path / "bad.npy"
  np.save(bad, np.array([{}], object), allow_pickle=True)
  digest = hashlib.sha256(bad.read_bytes()).hexdigest()
  ((name, (_, _, *rest)),) = manifest["files"].items()
  manifest["files"] = {name: ["bad.npy", digest, *rest]}
  sealed_json.write(
    tmp_path / "arrays.json", manifest, form=array_files._FORMAT
  )
  with pytest.raises(ValueError, match=r"allow_pickle=False|bad\.npy"):
    array_files.load_arrays(tmp_path, what="tracks")


def test_interrupted_save_leaves_earlier_arrays(tmp_path, monkeypatch):
  array_files.save_arrays(tmp_path, {"w": np.zeros(2)}, {"what": "x"})
  write = sealed_json.write_whole

  def fail_at_the_manifest(path, data):
    if path.suffix == ".json":
      raise OSError("the disk is full")
    write(path, data)

  monkeypatch.setattr(sealed_json, "write_whole", fail_at_the_manifest)
  with pytest.raises(OSError, match="full"):
    array_files.save_arrays(tmp_path, {"w": np.ones(2)}, {"what": "x"})
  arrays, _ = array_files.load_arrays(tmp_path, what="x")
  np.testing.assert_array_equal(arrays["w"], [0, 0])
  with pytest.raises(ValueError, match="must hold y, got x"):
    array_files.load_arrays(tmp_path, what="y")
