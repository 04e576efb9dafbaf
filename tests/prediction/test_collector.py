"""The parameter data set: what it holds, and that nothing can break it."""

import contextlib
import json
import pathlib
import threading

import jax
import numpy as np
import pytest

import jdist
from jdist import prediction, training
from jdist.storage import json_lines, sealed_json
from tests import _refusals
from tests.prediction import _tiny

STEPS = (2, 3, 5)


def collector(folder, steps=STEPS, cuts=None, **kwargs):
  cuts = [_tiny.cut(2), _tiny.cut(1)] if cuts is None else cuts
  return prediction.Collector(folder, _tiny.alone(), cuts, steps, **kwargs)


def run(collect, start=0, stop=6, add=0):
  """Steps of a run whose parameters are all equal to the step (plus add)."""
  params = _tiny.model(abstract=True).params
  for step in range(start, stop):
    state = _tiny.state(step, params)
    if add:
      params_of = jax.tree.map(lambda x: x + add, state.params)
      state = state._replace(params=params_of)
    collect(state)


def contents(folder):
  return {
    path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()
  }


def test_chosen_steps_are_balanced_and_reproducible():
  steps = prediction.choose_steps(30, 50)
  assert len(steps) == len(set(steps)) == 30 * 15
  assert list(steps) == sorted(steps)
  epochs = (np.asarray(steps) - 1) // 50
  assert (np.bincount(epochs) == 15).all() and max(steps) <= 1500
  assert steps == prediction.choose_steps(30, 50)
  # The first epochs of a longer run are those of a shorter one.
  assert steps[:150] == prediction.choose_steps(10, 50)
  assert steps != prediction.choose_steps(30, 50, seed=1)
  assert prediction.choose_steps(2, 3, 3) == (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("method", ("ssgd", "local_sgd"))
def test_collector_saves_averaged_fronts_of_every_cut(tmp_path, method):
  seen = {}
  mean = _tiny.team().jit(
    lambda state: jdist.collectives.mean(state.params, _tiny.team().axis)
  )
  cuts = [_tiny.cut(1), _tiny.cut(2)]
  steps = prediction.choose_steps(2, 4, 2)
  collect = prediction.Collector(
    tmp_path, _tiny.team(), cuts, steps, metadata={"seed": 0}
  )

  def evaluate(state):
    step = int(_tiny.team().view(state.step))
    # Copied: the next step takes the memory.
    seen[step] = jax.tree.map(np.array, _tiny.team().view(mean(state)))
    return collect(state)

  _, records = _tiny.fit(method, 8, evaluate=evaluate)
  assert records[-1].metrics == {"samples": 4.0}
  found = prediction.ParameterSet(tmp_path)
  found.verify()
  assert (found.done, found.steps) == (4, steps)
  assert found.metadata == {"seed": 0}
  assert len(np.unique(found.fronts(cuts[0])[:, 0])) == 4
  for cut in cuts:
    fronts = found.fronts(cut)
    assert fronts.shape == (4, cut.num_front) and not fronts.flags.writeable
    for step, front in zip(steps, fronts, strict=True):
      np.testing.assert_array_equal(front, cut.flatten_front(seen[step]))


class _Killed(BaseException):
  """No handler catches it, as none catches SIGKILL."""


def _kill_at(monkeypatch, number):
  """Ends everything at the n-th thing that reaches the disk.

  Before it, or for text in its middle; returns a function that says whether
  it was reached.
  """
  count = [0]

  def guarded(function, half=None):
    def call(*args, **kwargs):
      # The lease is renewed by a thread, at moments of its own.
      if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
      count[0] += 1
      if count[0] == number:
        if half is not None:
          half(*args)
        raise _Killed
      return function(*args, **kwargs)

    return call

  def half_a_file(path, data):
    path.with_name(path.name + ".partial").write_bytes(data[: len(data) // 2])

  def half_a_row(path, rows):
    text = json.dumps(rows[0])
    with path.open("a") as file:
      file.write(text[: len(text) // 2])

  monkeypatch.setattr(np.memmap, "flush", guarded(np.memmap.flush))
  monkeypatch.setattr(
    sealed_json, "write_whole", guarded(sealed_json.write_whole, half_a_file)
  )
  monkeypatch.setattr(
    json_lines, "append", guarded(json_lines.append, half_a_row)
  )
  return lambda: count[0] >= number


@pytest.mark.parametrize("add", (0, 1), ids=("the same", "another run"))
def test_killed_collection_resumes_to_the_same_bytes(
  tmp_path, monkeypatch, add
):
  """The second time from the run's start, or from its last checkpoint."""
  run(collector(tmp_path / "whole"), add=add)
  expected = contents(tmp_path / "whole")
  moments = 0
  while True:
    folder = tmp_path / f"killed_{moments}"
    if add:  # A run from another start, whose samples are to be replaced.
      run(collector(folder))
    with monkeypatch.context() as patch:
      reached = _kill_at(patch, moments + 1)
      with contextlib.suppress(_Killed):
        run(collector(folder), add=add)
    if not reached():
      break
    run(collector(folder), add=add)
    found = contents(folder)
    found.pop("rows.jsonl.partial", None)
    found.pop("manifest.json.partial", None)
    assert found == expected, moments
    prediction.ParameterSet(folder).verify()
    moments += 1
  # Two arrays and a manifest, and for each of three samples two arrays and a
  # line; another run takes the old lines back.
  assert moments == (1 + 3 * 3 if add else 2 + 1 + 3 * 3)


def test_resumed_run_resumes_its_samples(
  tmp_path,
):
  run(collector(tmp_path), stop=4)
  half = prediction.ParameterSet(tmp_path)
  assert (half.done, half.fronts(_tiny.cut(1)).shape[0]) == (2, 2)
  one, two = half.cuts
  assert repr(half) == f"ParameterSet(2 of 3 samples, {one!r}, {two!r})"
  # Another cut is compared with the one of as many layers.
  with _refusals.refused("cut", f"of {two!r}, got one of"):
    half.fronts(_tiny.cut(2, hidden_sizes=(7, 5)))
  collect = collector(tmp_path)
  assert collect.done == 2
  run(collect, start=3)
  assert prediction.ParameterSet(tmp_path).done == 3


@pytest.mark.parametrize("alike", [0, 3])
def test_samples_of_another_run_replace_those_from_the_first_unlike_one(
  alike, tmp_path
):
  run(collector(tmp_path / "found"))
  for name in ("wanted", "found"):
    collect = collector(tmp_path / name)
    run(collect, stop=alike)
    run(collect, start=alike, add=1)
  assert contents(tmp_path / "found") == contents(tmp_path / "wanted")


def test_missed_step_raises(tmp_path):
  collect = collector(tmp_path)
  with _refusals.refused("steps", "at 3, and step 2 has not"):
    run(collect, start=3)
  # At a step that was not chosen, too: the next chosen one may never come.
  rest = collector(tmp_path / "rest")
  run(rest, start=2, stop=4)
  with _refusals.refused("steps", "at 7, and step 5 has not"):
    run(rest, start=7, stop=8)


def test_data_set_of_another_run_is_refused(tmp_path):
  cut = _tiny.cut(1)
  run(collector(tmp_path, cuts=[cut], metadata={"seed": 0}))
  wide = _tiny.cut(1, hidden_sizes=(7, 5))
  found = prediction.ParameterSet(tmp_path)
  for wrong in (wide, _tiny.cut(2)):
    with _refusals.refused("cut", "of Cut("):
      found.fronts(wrong)
  with pytest.raises(ValueError, match=r"dense1\.kernel float32\[64, 6\].*7\]"):
    collector(tmp_path, cuts=[wide], metadata={"seed": 0})
  with _refusals.refused("metadata", "as in"):
    collector(tmp_path, cuts=[cut], metadata={"seed": 1})
  same = {"cuts": [cut], "metadata": {"seed": 0}}
  with _refusals.refused("steps", "as in"):
    collector(tmp_path, steps=(2, 3, 4), **same)
  with _refusals.refused("cuts", "as in"):
    collector(tmp_path, cuts=[cut, _tiny.cut(2)], metadata={"seed": 0})


def test_damaged_samples_are_found(tmp_path):
  run(collector(tmp_path))
  path = tmp_path / "front_01.npy"
  whole = path.read_bytes()
  path.write_bytes(whole[:-400] + b"\1" + whole[-399:])
  with pytest.raises(ValueError, match=r"_01\.npy has changed in sample 2"):
    prediction.ParameterSet(tmp_path).verify()
  path.write_bytes(whole[:-1])
  with pytest.raises(ValueError, match=r"front_01\.npy cannot be read"):
    prediction.ParameterSet(tmp_path).fronts(_tiny.cut(1))
  path.write_bytes(whole)
  entries = np.load(path)
  for wrong in (entries[:2], entries[:, 1:], entries.astype(np.float16)):
    np.save(path, wrong)
    with pytest.raises(ValueError, match=r"front_01\.npy holds .*and not"):
      prediction.ParameterSet(tmp_path).fronts(_tiny.cut(1))
  path.write_bytes(whole)
  np.save(path, np.array([{}]), allow_pickle=True)
  with pytest.raises(ValueError, match=r"front_01\.npy cannot be read"):
    prediction.ParameterSet(tmp_path).fronts(_tiny.cut(1))
  manifest = tmp_path / "manifest.json"
  text = manifest.read_text()
  manifest.write_text(text.replace('"steps": [2', '"steps": [1'))
  with pytest.raises(ValueError, match=r"manifest\.json has changed"):
    prediction.ParameterSet(tmp_path)
  manifest.write_text(text.replace('"format": 1', '"format": 2'))
  with pytest.raises(ValueError, match="has format 2"):
    prediction.ParameterSet(tmp_path)
  manifest.write_text(text[:50])
  with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
    prediction.ParameterSet(tmp_path)
  manifest.write_text(text)
  training.append_rows(tmp_path / "rows.jsonl", [{"row": 7, "step": 7}])
  rows = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
  (tmp_path / "rows.jsonl").write_text("".join(rows[1:]))
  with pytest.raises(ValueError, match=r"rows\.jsonl has a line 1 that is not"):
    prediction.ParameterSet(tmp_path)


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda x: x.replace("front_01", "front_11", 1), "a line 1 that is not"),
    (lambda x: x.replace("sha256", "sha255", 1), "a line 1 that is not"),
    (lambda x: x.replace('"step": 3', '"step": 4'), "a line 2 that is not"),
    (lambda x: "[1]\n" + x, "a line 1 that is not"),
    (lambda x: "{]\n" + x, "cannot be read"),
    # As many lines as samples were planned, and one more.
    (lambda x: x + x.splitlines(keepends=True)[-1], "a line 4 that is not"),
    (None, "cannot be read"),
  ],
)
def test_damaged_rows_are_refused(damage, message, tmp_path):
  run(collector(tmp_path))
  path = tmp_path / "rows.jsonl"
  if damage is None:
    path.unlink()
  else:
    path.write_text(damage(path.read_text()))
  for opened in (prediction.ParameterSet, collector):
    with pytest.raises(
      ValueError, match=rf"damaged: .*{message}.*another directory"
    ):
      opened(tmp_path)


@pytest.mark.parametrize("name", ["front_01.npy", "rows.jsonl"])
def test_foreign_files_are_not_overwritten(tmp_path, name):
  (tmp_path / name).write_bytes(b"theirs")
  with pytest.raises(ValueError, match=f"must not hold files.*has {name}"):
    collector(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == [name]
  assert (tmp_path / name).read_bytes() == b"theirs"


def test_refused_collector_leaves_no_directory(tmp_path):
  with _refusals.refused("metadata", "a dict"):
    collector(tmp_path / "none", metadata=3)
  assert not (tmp_path / "none").exists()
  run(collector(tmp_path / "some"))
  with _refusals.refused("cut", "as of `prediction.cut(...)`"):
    prediction.ParameterSet(tmp_path / "some").fronts(_tiny.model())


def test_state_before_the_first_step_is_no_sample(tmp_path):
  collect = collector(tmp_path, (1, 2))
  run(collect, stop=1)
  assert collect.done == 0
  run(collect, start=1, stop=3)
  fronts = prediction.ParameterSet(tmp_path).fronts(_tiny.cut(1))
  assert fronts[:, 0].tolist() == [1.0, 2.0]
