"""GPUs that are described: their text, and what compiling for them needs."""

import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from jdist import collectives, profiling, states
from jdist.profiling import _timeline

needs_compiler = pytest.mark.skipif(
  not any(
    importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13)
  ),
  reason="needs the extra `schedules`: JAX's plugin for CUDA",
)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("8xh200", profiling.GpuTarget("h200", 8)),
    ("2x8xH100", profiling.GpuTarget("h100", 8, nodes=2)),
    ("1xa100", profiling.GpuTarget("a100", 1)),
  ],
)
def test_topology_is_read_and_written_alike(text, expected):
  found = profiling.gpu_target(text)
  assert found == expected
  assert str(found) == text.lower()
  assert found.num_gpus == expected.gpus_per_node * expected.nodes


@pytest.mark.parametrize("kind", profiling.GPUS)
def test_compiler_is_given_the_rates_of_the_data_sheet(kind):
  gpu = profiling.GPUS[kind]
  assert profiling.gpu_target(f"8x{kind}").memory_bytes == gpu.memory_bytes
  text = " ".join(gpu.target().split())
  for said in (
    f"memory_bandwidth: {gpu.memory_bytes_per_s:.0f} ",
    f"device_memory_size: {gpu.memory_bytes} ",
    f'device_description_str: "{gpu.name}"',
  ):
    assert said in text


def test_missing_plugin_raises_with_its_extra(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r'pip install "\.\[schedules\]"'):
    profiling.gpu_target("8xh200").mesh()


def test_plugin_of_another_version_raises(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
  with pytest.raises(
    ImportError, match=f"0.1.0 does not work with jax {jax.__version__}"
  ):
    profiling.check_compiler()


@needs_compiler
@pytest.mark.parametrize("text", ["8xh200", "2x4xa100"])
def test_devices_exist_for_compiling(text):
  described = profiling.gpu_target(text)
  devices = described.devices()
  assert len(devices) == described.num_gpus
  kind = described.kind.upper()
  assert all(kind in device.device_kind for device in devices)
  processes = [device.process_index for device in devices]
  assert len(set(processes)) == described.nodes


@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gpu_program_computes_what_a_cast_leaves_out(dtype):
  workers = collectives.workers(1, mesh=profiling.gpu_target("1xh200").mesh())

  def left_out(x):
    return x - states.rounded(x, dtype).astype(jnp.float32)

  x = profiling.abstract(workers, jax.ShapeDtypeStruct((64,), jnp.float32))
  text = workers.jit(left_out).lower(x).compile().as_text()
  assert "reduce-precision" in text and "subtract" in text


@needs_compiler
def test_gpu_program_is_scheduled_around_its_collectives():
  described = profiling.gpu_target("8xh200")
  workers = collectives.workers(8, mesh=described.mesh())

  def step(w, pending, x):
    """Sends what is there from the start, and computes meanwhile."""
    mean = collectives.mean(pending, workers.axis)
    for _ in range(4):
      x = jnp.tanh(x @ w)
    return w - mean, x

  square = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
  args = profiling.abstract(workers, (square, square, square))
  events = _timeline.read_timeline(workers.jit(step).lower(*args).compile())
  kinds = [e.kind if e.kind != "compute" else bool(e.flops) for e in events]
  start, done = kinds.index("start"), kinds.index("done")
  assert kinds[start:done].count(True) == 4
  assert sum(e.flops for e in events) == 4 * 2 * 1024**3
  (sent,) = [e.collective for e in events if e.collective]
  assert sent.num_workers == 8
