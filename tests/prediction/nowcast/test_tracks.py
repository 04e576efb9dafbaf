"""Tracks of entries, and arrays on the disk."""

import hashlib

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import prediction
from jdist.prediction.nowcast import _tracks
from jdist.storage import array_files, sealed_json
from tests import _refusals

PARAMS = {
  "block": {
    "bias": np.arange(4.0),
    "kernel": np.arange(72.0).reshape(3, 3, 2, 4),
  },
  "head": {
    "bias": np.arange(3.0),
    "kernel": 100 + np.arange(12.0).reshape(4, 3),
  },
}


def recorded(tracker, epochs):
  for epoch in epochs:
    tracker.record(
      {
        k: {n: x + 1000 * epoch for n, x in v.items()}
        for k, v in PARAMS.items()
      }
    )
  return tracker.tracks()


def test_a_track_is_of_one_entry():
  tracks = recorded(prediction.Tracker(PARAMS, entries_per_kind=6), range(3))
  assert {k: t.shape for k, t in tracks.items()} == {
    "conv": (6, 3),
    "dense": (6, 3),
    "bias": (6, 3),
  }
  everything = {
    "conv": PARAMS["block"]["kernel"].ravel(),
    "dense": PARAMS["head"]["kernel"].ravel(),
    "bias": np.concatenate([PARAMS["block"]["bias"], PARAMS["head"]["bias"]]),
  }
  for kind, track in tracks.items():
    assert track.dtype == np.float32
    np.testing.assert_array_equal(np.diff(track), 1000)
    assert np.isin(track[:, 0], everything[kind]).all()
  # Different entries, and both leaves of the kind have some.
  assert len(set(tracks["conv"][:, 0])) == 6
  assert len(recorded(prediction.Tracker(PARAMS), range(1))["bias"]) == 7


def test_tracks_are_saved_as_float32(tmp_path):
  for dtype in (np.float64, jnp.bfloat16, np.float16):
    run = {"bias": np.ones((2, 9)).astype(dtype)}
    prediction.save_tracks(tmp_path, [run])
    (found,) = prediction.load_tracks(tmp_path)
    assert found["bias"].dtype == np.float32 and (found["bias"] == 1).all()


def test_tracks_come_back(tmp_path):
  runs = [
    recorded(prediction.Tracker(PARAMS), range(3)),
    {"dense": np.zeros((2, 9), np.float32)},
  ]
  for n in (2, 1, 2):  # What was there is replaced.
    prediction.save_tracks(tmp_path / "tracks", runs[:n], {"model": "small"})
  files = list((tmp_path / "tracks").iterdir())
  assert len(files) == 5
  for found, run in zip(
    prediction.load_tracks(tmp_path / "tracks"), runs, strict=True
  ):
    assert set(found) == set(run)
    for kind in run:
      np.testing.assert_array_equal(found[kind], run[kind])


def test_what_is_no_track_is_not_saved(tmp_path):
  with _refusals.refused("runs[0]['bias']", "a track"):
    prediction.save_tracks(tmp_path / "tracks", [{"bias": None}])
  assert not (tmp_path / "tracks").exists()


def test_damage_is_seen(tmp_path):
  prediction.save_tracks(tmp_path, [{"bias": np.ones((3, 4), np.float32)}])
  (file,) = tmp_path.glob("*.npy")
  whole = file.read_bytes()
  file.write_bytes(whole[:-1])
  with _refusals.refused("directory", "has changed"):
    prediction.load_tracks(tmp_path)
  file.unlink()
  with pytest.raises(ValueError, match="is missing"):
    prediction.load_tracks(tmp_path)
  (tmp_path / "arrays.json").write_text("{")
  with pytest.raises(ValueError, match="cannot be read"):
    prediction.load_tracks(tmp_path)
  with pytest.raises(FileNotFoundError, match="`directory` must hold tracks"):
    prediction.load_tracks(tmp_path / "nowhere")


def test_nothing_is_unpickled(tmp_path):
  """An object array, as an attacker would write it."""
  prediction.save_tracks(tmp_path, [{"bias": np.ones((3, 4), np.float32)}])
  manifest = sealed_json.read(
    tmp_path / "arrays.json", form=array_files._FORMAT
  )
  bad = tmp_path / "bad.npy"
  np.save(bad, np.array([{}], object), allow_pickle=True)
  digest = hashlib.sha256(bad.read_bytes()).hexdigest()
  manifest["files"] = {"run_000_bias": ["bad.npy", digest]}
  sealed_json.write(
    tmp_path / "arrays.json", manifest, form=array_files._FORMAT
  )
  with pytest.raises(ValueError, match="allow_pickle=False"):
    prediction.load_tracks(tmp_path)


def test_a_cut_write_leaves_what_was_there(tmp_path, monkeypatch):
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


def test_windows_that_are_too_long_are_refused():
  tracks = [np.zeros((2, 9), np.float32), np.zeros((2, 11), np.float32)]
  histories, targets = _tracks.windows(tracks, 4)
  assert histories.shape == (8, 5) and targets.shape == (8,)
  for horizon in (5, 6):  # One of both, or both.
    with pytest.raises(ValueError, match=r"must be of 1\d epochs.*got 9"):
      _tracks.windows(tracks, horizon)
