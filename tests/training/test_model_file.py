"""Trained models in files that others read."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tensorboardX

from jdist import cli, models, training
from tests import _refusals


def test_tensors_are_named_by_their_paths(tmp_path):
  params = {"a": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3)}}
  state = {"mean": np.ones(2, np.float32)}
  path = tmp_path / "m.safetensors"
  training.save_model(path, params, state, {"rate": 0.5, "name": "x"})
  found = safetensors.numpy.load_file(path)
  assert {name: x.shape for name, x in found.items()} == {
    "params.a.w": (2, 3),
    "state.mean": (2,),
  }
  with safetensors.safe_open(path, "numpy") as file:
    assert file.metadata() == {"rate": "0.5", "name": "x"}
  assert training.load_metadata(path) == {"rate": 0.5, "name": "x"}
  read = training.load_model(path, params, state)
  assert isinstance(read[0]["a"]["w"], jax.Array)
  np.testing.assert_array_equal(read[0]["a"]["w"], params["a"]["w"])
  np.testing.assert_array_equal(read[1]["mean"], state["mean"])
  assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_texts_that_look_like_json_stay_texts(tmp_path):
  path = tmp_path / "m.safetensors"
  # A commit of digits and one "e" would become an infinity.
  given = {"commit": "59e29123", "id": "12", "no": "null", "quoted": '"q"'}
  given |= {"format": "pt", "number": 12, "nothing": None, "tree": {"a": "1"}}
  training.save_model(path, {"w": np.ones(1)}, metadata=given)
  assert training.load_metadata(path) == given
  with safetensors.safe_open(path, "numpy") as file:
    # Other programs read a plain text as it is.
    assert file.metadata()["format"] == "pt"


def test_scalar_keeps_its_shape(tmp_path):
  params = {"scale": np.float32(3.0), "turned": np.ones((2, 3), np.float32).T}
  path = tmp_path / "m.safetensors"
  training.save_model(path, params, {"count": np.int32(7)})
  found, state = training.load_model(path, params, {"count": np.int32(0)})
  assert (found["scale"].shape, float(found["scale"])) == ((), 3.0)
  assert (state["count"].shape, int(state["count"])) == ((), 7)
  np.testing.assert_array_equal(found["turned"], params["turned"])


def test_leaves_of_one_name_are_both_saved(tmp_path):
  params = {"a": {"b": np.ones(2)}, "a.b": np.zeros(2), "c": np.full(2, 2.0)}
  path = tmp_path / "m.safetensors"
  training.save_model(path, params)
  found, _ = training.load_model(path, params)
  jax.tree.map(np.testing.assert_array_equal, found, params)


def test_failed_write_raises_oserror(tmp_path):
  (tmp_path / "m.safetensors").mkdir()
  params = {"w": np.ones(3, np.float32)}
  for path in (tmp_path / "m.safetensors", tmp_path / "no" / "m.safetensors"):
    with pytest.raises(OSError, match=r"could not be written to .*: .* `path`"):
      training.save_model(path, params)
  assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_device_is_not_replaced_by_a_file(tmp_path):
  """As root, /dev/null would be a file of parameters from then on."""
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  with _refusals.refused("path", f"a file, got the device {pipe}"):
    training.save_model(pipe, {"w": np.ones(3, np.float32)})
  assert pipe.is_fifo()


def test_path_below_a_file_cannot_be_written(tmp_path):
  (tmp_path / "m").touch()
  with pytest.raises(OSError, match=r"could not be written to .*: .*`path`"):
    training.save_model(tmp_path / "m" / "m", {"w": np.ones(3, np.float32)})


def test_dtype_that_the_format_lacks_is_named(tmp_path):
  path = tmp_path / "model.safetensors"
  for dtype in (np.complex128, "float8_e4m3fn", "float8_e5m2", "int4"):
    params = {"a": np.ones(2, jnp.dtype(dtype))}
    rule = f"dtypes that a file holds, got {params['a'].dtype} at 'params.a'"
    with _refusals.refused("params", rule):
      training.save_model(path, params)
  assert not [*tmp_path.iterdir()]
  for dtype in (np.complex64, jnp.bfloat16, np.int8, np.bool_):
    params = {"a": np.ones(2, dtype)}
    training.save_model(path, params)
    found, _ = training.load_model(path, params)
    assert found["a"].dtype == dtype
    np.testing.assert_array_equal(found["a"], params["a"])


def test_names_and_texts_that_are_no_utf_8_are_refused(tmp_path):
  path, w = tmp_path / "m.safetensors", np.ones(2)
  for params, metadata in (({"\ud800": w}, {}), ({"w": w}, {"a": "\ud800"})):
    with _refusals.refused("params", "in UTF-8, got '"):
      training.save_model(path, params, metadata=metadata)
  assert not [*tmp_path.iterdir()]


def test_file_of_8_bit_floats_is_named(tmp_path):
  """Other programs write them, and NumPy has no such dtypes."""
  path, w = tmp_path / "model.safetensors", np.ones(2, jnp.float8_e5m2)
  safetensors.numpy.save_file({"params.w": w}, path)
  with _refusals.refused("path", "no attribute 'float8_e5m2'"):
    training.load_model(path, {"w": w})


def test_folder_or_no_file_is_named_by_its_path(tmp_path):
  for path in (tmp_path, tmp_path / "none"):
    for load in (training.load_metadata, lambda x: training.load_model(x, 0.0)):
      with pytest.raises(OSError) as error:
        load(path)
      assert error.value.filename == str(path)


def test_file_of_another_model_raises(tmp_path):
  path = tmp_path / "m.safetensors"
  training.save_model(path, {"w": np.ones((2, 3), np.float32)})
  with _refusals.refused("path", "a file of this model"):
    training.load_model(path, {"w": np.ones((3, 2), np.float32)})
  with pytest.raises(ValueError, match=r"its leaf params\.b is missing"):
    training.load_model(path, {"b": np.ones(3, np.float32)})


def test_loaded_transformer_runs_like_the_saved_one(tmp_path):
  built = {
    "name": "transformer", "input_shape": [8], "num_classes": 16, "width": 16,
    "num_layers": 1, "num_heads": 2,
  }  # fmt: skip
  model = models.build(**built)
  path = tmp_path / "m.safetensors"
  training.save_model(path, model.params, model.state, {"build": built})
  again = models.build(**training.load_metadata(path)["build"], seed=1)
  params, state = training.load_model(path, again.params, again.state)
  tokens = np.arange(8)[None]
  wanted, _ = model.apply(model.params, model.state, tokens, train=False)
  found, _ = again.apply(params, state, tokens, train=False)
  np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_command_writes_the_evaluated_model(tmp_path, capsys):
  path, board = tmp_path / "new" / "m.safetensors", tmp_path / "board"
  words = (
    "train", "--dataset", "synthetic", "--model", "resnet8", "--method",
    "diloco", "--workers", "2", "--batch-size", "64", "--steps", "4",
    "--final-params", str(path), "--tensorboard", str(board),
    "--output", str(tmp_path),
  )  # fmt: skip
  with jax.numpy_dtype_promotion("standard"):  # As a user has it.
    assert cli.main(words) == 0
  assert f"Model: {path}" in capsys.readouterr().out
  # As in README.
  told = training.load_metadata(path)["build"]
  assert told == {
    "name": "resnet8",
    "input_shape": [8, 8, 1],
    "num_classes": 10,
  }
  model = models.build(**told, seed=9)
  params, state = training.load_model(path, model.params, model.state)

  from jdist import data

  test = data.load("synthetic", "test")
  logits, _ = jax.jit(
    lambda p, s, x: model.apply(p, s, test.normalize(x), train=False)
  )(params, state, test.images)
  accuracy = float((np.argmax(logits, -1) == test.labels).mean())
  (row,) = training.read_rows(tmp_path / "rows.jsonl")
  assert accuracy == pytest.approx(row["accuracy"], abs=2 / len(test.labels))
  (events,) = board.iterdir()
  assert events.name.startswith("events.out.tfevents")
  assert events.stat().st_size > 100


def test_failed_write_of_events_raises_one_line(tmp_path, monkeypatch):
  def fail(self):
    raise OSError(errno.ENOSPC, "No space left on device")

  record = training.Record(7, 3, 16.0, 0.5, {"accuracy": 0.9}, 1.0, 100.0)
  with (
    pytest.raises(OSError, match=f"written to {tmp_path}: No space left"),
    training.MetricsWriter(tmp_path) as writer,
  ):
    monkeypatch.setattr(tensorboardX.SummaryWriter, "flush", fail)
    monkeypatch.setattr(tensorboardX.SummaryWriter, "close", fail)
    writer.write(record)


def test_records_become_scalars(tmp_path, monkeypatch):
  seen = []
  monkeypatch.setattr(
    tensorboardX.SummaryWriter,
    "add_scalar",
    lambda self, name, value, step: seen.append((name, value, step)),
  )
  record = training.Record(7, 3, 16.0, 0.5, {"accuracy": 0.9}, 1.0, 100.0)
  with training.MetricsWriter(tmp_path) as writer:
    writer.write(record)
  assert ("test/accuracy", 0.9, 7) in seen
  assert ("train/sent_bytes", 16.0, 7) in seen
  assert {step for _, _, step in seen} == {7}
  assert not [name for name, *_ in seen if "rate" in name]


def test_settings_learning_rate_and_interval_are_written(tmp_path, monkeypatch):
  seen = {}

  def add(self, name, value, step=None):
    seen[name, step] = value

  for method in ("add_scalar", "add_text"):
    monkeypatch.setattr(tensorboardX.SummaryWriter, method, add)
  first = training.Record(8, 2, 16.0, 0.5, {"accuracy": 0.9}, 1.0, 100.0)
  with training.MetricsWriter(
    tmp_path, settings={"method": "msdpu"}, learning_rate=lambda step: step / 10
  ) as writer:
    writer.write(first)
    writer.write(first._replace(step=20, rounds=4))
    writer.write(first._replace(step=21, rounds=4))  # Within a round.
  assert seen["settings/method", None] == "msdpu"
  # The rate is that of the last step, and steps count from 0.
  assert seen["train/learning_rate", 8] == pytest.approx(0.7)
  assert seen["train/interval", 8] == 4
  assert seen["train/interval", 20] == 6
  assert ("train/interval", 21) not in seen


def test_unknown_rate_is_not_drawn(tmp_path, monkeypatch):
  seen = []
  monkeypatch.setattr(
    tensorboardX.SummaryWriter, "add_scalar", lambda self, *x: seen.append(x[0])
  )
  record = training.Record(1, 1, 16.0, 0.5, {}, 1.0, float("nan"))
  with training.MetricsWriter(tmp_path) as writer:
    writer.write(record)
  assert "train/loss" in seen and "train/samples_per_s" not in seen
