"""Workers in real processes communicate by gloo on the loopback."""

import time
import types

import pytest

from tests import _processes


def speak(workers_per_device):
  """Checks everything that a worker says against NumPy, in each process."""
  import jax
  import numpy as np

  from jdist import collectives

  num_workers = jax.device_count() * workers_per_device
  team = collectives.workers(num_workers)
  rng = np.random.default_rng(0)  # All processes draw the same numbers.
  wanted = rng.normal(size=(num_workers, num_workers, 3)).astype(np.float32)
  mine = list(team.local_workers)

  def step(x):
    return {
      "mean": collectives.mean(x, team.axis),
      # These leaves share a buffer.
      "means": collectives.mean(
        {"a": x[0], "b": x[0, 0].astype(int), "c": x, "d": x[1]}, team.axis
      ),
      "sum": collectives.sum(x, team.axis),
      "gather": collectives.gather(x, team.axis),
      "exchange": collectives.all_to_all(x, team.axis),
      "index": collectives.index(team.axis),
    }

  placed = team.place(wanted[mine])
  assert placed.shape == wanted.shape
  results = team.jit(step)(placed)
  everyone = team.gather(results)
  np.testing.assert_allclose(everyone["sum"][0], wanted.sum(0), rtol=1e-5)
  whole = wanted.astype(int)[:, 0, 0].mean(0), wanted.mean(0)
  for name, mean in zip(
    "abcd", (whole[1][0], whole[0], whole[1], whole[1][1]), strict=True
  ):
    np.testing.assert_allclose(
      everyone["means"][name][0], mean, rtol=1e-5, atol=1e-6
    )
    for row in everyone["means"][name]:
      np.testing.assert_array_equal(row, everyone["means"][name][0])
  for name in ("mean", "sum", "gather"):
    for row in everyone[name]:
      np.testing.assert_array_equal(row, everyone[name][0], err_msg=name)
  np.testing.assert_array_equal(everyone["gather"][0], wanted)
  np.testing.assert_array_equal(everyone["exchange"], wanted.swapaxes(0, 1))
  np.testing.assert_array_equal(everyone["index"], np.arange(num_workers))

  # `view` shows this process's workers only.
  for worker in mine:
    row = team.view(placed, worker)
    np.testing.assert_array_equal(row, wanted[worker])
  np.testing.assert_array_equal(team.view(placed), wanted[mine[0]])
  other = (mine[-1] + 1) % num_workers
  try:
    team.view(placed, other)
  except ValueError as error:
    assert "`worker` must run in this process" in str(error)
  else:
    raise AssertionError("saw a worker of another process")

  # `shard` takes the samples of this process's workers.
  samples = np.arange(2 * num_workers).reshape(num_workers, 2)
  batch = team.shard(samples[mine].reshape(-1))
  np.testing.assert_array_equal(team.gather(batch), samples)

  # `replicate` takes NumPy arrays and arrays of this process.
  for one in (np.arange(3.0), jax.numpy.arange(3.0)):
    copies = team.replicate({"w": one})
    assert copies["w"].shape == (num_workers, 3)
    np.testing.assert_array_equal(team.view(copies)["w"], np.arange(3.0))

  # Each worker gets a key of its own, which cannot be gathered to the host and
  # raises before any message.
  keys = team.replicate(jax.random.key(0))
  words = team.gather(team.jit(jax.random.key_data)(keys))
  assert len({row.tobytes() for row in words}) == num_workers
  own = jax.random.key_data(team.view(keys))
  assert own.tobytes() == words[team.local_workers[0]].tobytes()
  try:
    team.gather(keys)
  except ValueError as error:
    assert "typed PRNG key" in str(error)
  else:
    raise AssertionError("gather took a typed key")

  return {
    "workers": mine,
    "axis": team.axis,
    "mean": everyone["mean"][0].tobytes().hex(),
  }


def share_a_worker():
  """Each worker is sharded over two processes of one device each."""
  import jax
  import numpy as np
  from jax.sharding import PartitionSpec

  from jdist import collectives

  mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"))
  team = collectives.workers(2, mesh=mesh)
  value = np.arange(12, dtype=np.float32).reshape(4, 3)
  tree = {"split": value, "whole": value}
  specs = {"split": PartitionSpec("fsdp"), "whole": PartitionSpec()}
  copies = team.replicate(tree, specs)
  step = team.jit(lambda x: collectives.mean(x, team.axis))
  means = step(copies)
  np.testing.assert_array_equal(team.view(means["whole"]), value)
  np.testing.assert_array_equal(team.gather(means)["split"], [value] * 2)
  try:
    team.view(means["split"])
  except ValueError as error:
    assert "`gather`" in str(error)
  else:
    raise AssertionError("showed a part of a worker as the whole")
  placed = team.place(np.full((1, 3), team.local_workers[0], np.float32))
  np.testing.assert_array_equal(team.gather(placed), [[0.0] * 3, [1.0] * 3])
  return [jax.process_index(), list(team.local_workers)]


def speak_and_share():
  """Both in one run, as starting four processes takes longer than either."""
  from tests.collectives import test_processes

  return test_processes.speak(1), test_processes.share_a_worker()


def fail_in_one():
  import time

  import jax

  assert jax.process_index() == 0, "the second process fails"
  time.sleep(1000)


def sleep(note):
  import pathlib
  import time

  print("asleep", flush=True)
  pathlib.Path(note).touch()
  time.sleep(1000)


@pytest.fixture(scope="module")
def four():
  """Returns what four processes say, and what they share."""
  return list(
    zip(*_processes.run(speak_and_share, num_processes=4), strict=True)
  )


def test_four_processes_match_numpy(four):
  results, _ = four
  assert [r["workers"] for r in results] == [[0], [1], [2], [3]]
  assert {r["axis"] for r in results} == {"worker"}
  assert len({r["mean"] for r in results}) == 1


def test_two_processes_of_two_devices_with_two_workers_each():
  results = _processes.run(speak, 2, num_processes=2, devices_per_process=2)
  assert [r["workers"] for r in results] == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert results[0]["axis"] == ["worker_local", "worker"]
  assert results[0]["mean"] == results[1]["mean"]


def test_worker_may_span_processes(four):
  results = [list(found) for found in four[1]]
  assert results == [[0, [0]], [1, [0]], [2, [1]], [3, [1]]]


def test_process_that_fails_ends_the_others_and_shows_why():
  with pytest.raises(_processes.ProcessesError, match="the second process"):
    _processes.run(fail_in_one, num_processes=2)


def test_processes_that_hang_are_killed_and_named(tmp_path, monkeypatch):
  note = tmp_path / "asleep"
  # Its time is over once it sleeps.
  clock = types.SimpleNamespace(
    monotonic=lambda: 2.0 * note.exists(), sleep=time.sleep
  )
  monkeypatch.setattr(_processes, "time", clock)
  with pytest.raises(
    _processes.ProcessesError, match=r"Processes \[0\] still ran(.|\n)*asleep"
  ):
    _processes.run(sleep, str(note), num_processes=1, timeout_s=1, join=False)
