"""GPUs that are described and need not be there.

XLA compiles for devices that it knows from a text only.  The devices cannot
run anything nor hold an array, but the program is the one that real ones would
get: its schedule, its collectives and its memory can be read.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from typing import Any

import jax

from jdist import collectives

PyTree = Any

# The plugin otherwise refuses to load where there is no driver.
_SKIP_VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_REMEDY = 'Install the extra: pip install "jdist[schedules]".'


@dataclasses.dataclass(frozen=True)
class _Target:
  """What the compiler is told about a GPU, beside what all of them share."""

  name: str
  compute_capability: tuple[int, int]
  multiprocessors: int
  fpus: int
  clock_ghz: float
  memory_bytes: int
  memory_bytes_per_s: int
  l2_bytes: int
  shared_bytes: int
  shared_bytes_per_block: int

  def text(self) -> str:
    """A `GpuTargetConfigProto`."""
    major, minor = self.compute_capability
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32
        threads_per_core_limit: 2048 shared_memory_per_block: 49152
        shared_memory_per_core: {self.shared_bytes}
        shared_memory_per_block_optin: {self.shared_bytes_per_block}
        core_count: {self.multiprocessors} fpus_per_core: {self.fpus}
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        memory_bandwidth: {self.memory_bytes_per_s}
        l2_cache_size: {self.l2_bytes} clock_rate_ghz: {self.clock_ghz}
        device_memory_size: {self.memory_bytes}
        cuda_compute_capability {{ major: {major} minor: {minor} }}
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{self.name}"
    """


_TARGETS = {
  "h200": _Target(
    "NVIDIA H200", (9, 0), 132, 128, 1.98,
    141_000_000_000, 4_800_000_000_000, 50 << 20, 228 << 10, 227 << 10,
  ),
  "h100": _Target(
    "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98,
    80_000_000_000, 3_352_320_000_000, 50 << 20, 228 << 10, 227 << 10,
  ),
  "a100": _Target(
    "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41,
    80_000_000_000, 2_039_040_000_000, 40 << 20, 164 << 10, 163 << 10,
  ),
}  # fmt: skip

GPU_KINDS = tuple(_TARGETS)


@dataclasses.dataclass(frozen=True)
class Topology:
  """GPUs to compile for; made by `describe_gpus`.

  Attributes:
    kind: of the GPUs, one of `GPU_KINDS`.
    gpus_per_node: how many share a host and its fast links.
    nodes: how many hosts.
  """

  kind: str
  gpus_per_node: int
  nodes: int = 1

  def __post_init__(self) -> None:
    if self.kind not in _TARGETS:
      raise ValueError(
        f"`kind` must be one of {', '.join(GPU_KINDS)}, got {self.kind!r}."
      )
    for name in ("gpus_per_node", "nodes"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"`{name}` must be at least 1, got {getattr(self, name)}."
        )

  def __str__(self) -> str:
    nodes = f"{self.nodes}x" if self.nodes > 1 else ""
    return f"{nodes}{self.gpus_per_node}x{self.kind}"

  @property
  def num_gpus(self) -> int:
    """GPUs of all nodes."""
    return self.nodes * self.gpus_per_node

  @property
  def memory_bytes(self) -> int:
    """Memory of one GPU."""
    return _TARGETS[self.kind].memory_bytes

  def devices(self) -> list[jax.Device]:
    """Devices that programs can be compiled for, and nothing else.

    Needs no GPU and no driver.  Each node is a process of its own.

    Raises:
      ImportError: when JAX's plugin for CUDA is missing or of another version
        than JAX: the extra `schedules` brings it.
    """
    check_compiler()
    os.environ.setdefault(_SKIP_VARIABLE, "1")
    from jax.experimental import topologies

    try:
      described = topologies.get_topology_desc(
        platform="cuda",
        # Slices of hosts of devices; a host is a process.
        topology=f"1x{self.nodes}x{self.gpus_per_node}",
        target_config=_TARGETS[self.kind].text(),
      )
    except NotImplementedError as error:
      raise ImportError(
        "JAX's plugin for CUDA is installed but did not load; its own message "
        f"stands above. {_REMEDY}"
      ) from error
    return list(described.devices)

  def mesh(self, axis: str = "worker") -> jax.sharding.Mesh:
    """All GPUs along one axis, for `workers(num_gpus, mesh=...)`.

    Args:
      axis: its name.

    Raises:
      ImportError: as `devices`.
    """
    return collectives.make_mesh((self.num_gpus,), (axis,), self.devices())


def describe_gpus(text: str) -> Topology:
  """Reads what GPUs there should be.

  Args:
    text: `"8xh200"`, or `"2x8xh200"` for two nodes of eight; kinds are h200,
      h100 and a100 (SXM, 80 GB), in capitals or not.

  Raises:
    ValueError: when it cannot be read.

  >>> described = describe_gpus("2x8xH200")
  >>> described.num_gpus, described.nodes, str(described)
  (16, 2, '2x8xh200')
  """
  match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z]\w*)", text.lower())
  if match is None or match[3] not in _TARGETS:
    raise ValueError(
      "the topology must be GPUSxKIND or NODESxGPUSxKIND, for instance 8xh200 "
      f"or 2x8xh200, with a kind of {', '.join(GPU_KINDS)}; got {text!r}."
    )
  return Topology(match[3], int(match[2]), int(match[1] or 1))


def check_compiler() -> None:
  """Raises an ImportError when programs for GPUs cannot be compiled here."""
  plugin = next(filter(_is_there, _PLUGINS), None)
  if plugin is None:
    raise ImportError(
      f"Compiling for GPUs needs JAX's plugin for CUDA. {_REMEDY}"
    )
  version = importlib.metadata.version(plugin.replace("_", "-"))
  # A post-release of either is the same code: 0.12.0 and 0.12.0.1.
  if version.split(".")[:3] != jax.__version__.split(".")[:3]:
    name = plugin.replace("_", "-")
    raise ImportError(
      f"{name} {version} does not work with jax {jax.__version__}: their "
      f'versions must be equal. pip install "{name}=={jax.__version__}".'
    )


def tell_compiler(bandwidth_bits_per_s: float, latency_s: float) -> None:
  """Tells XLA's scheduler of GPU programs how fast the link is.

  Left alone it takes every message to last as long as a few products, begins
  it so long before it is needed, and on a slow link the device then waits.
  Told, it begins as early as a message of that size needs.  Holds for all
  programs that this process compiles for GPUs; XLA reads it once.

  Args:
    bandwidth_bits_per_s: of each GPU's link, in each direction, in a ring of
      all GPUs.
    latency_s: of a message of the ring; XLA counts whole microseconds, at
      least one.

  Raises:
    RuntimeError: when JAX has already started, and would not notice.
  """
  # JAX refuses another number of devices once it has started.
  count = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
  jax.config.update("jax_num_cpu_devices", max(count, 1) + 1)
  jax.config.update("jax_num_cpu_devices", count)
  latency_us = max(1, round(latency_s * 1e6))
  estimator = {
    "nccl_op_launch_time": 1,
    "nic_speed_gbps": bandwidth_bits_per_s / 8e9,  # In gigabytes.
    "chunk_prep_time": 1,
    "rtt": latency_us,
    "gpus_per_node": 1,
  }
  told = ",".join(f"{name}={value:g}" for name, value in estimator.items())
  os.environ["XLA_FLAGS"] = " ".join(
    (
      os.environ.get("XLA_FLAGS", ""),
      "--xla_gpu_enable_analytical_sol_latency_estimator=true",
      f"--xla_gpu_analytical_latency_estimator_options={told}",
    )
  )


def _is_there(module: str) -> bool:
  return importlib.util.find_spec(module) is not None


def abstract(workers: collectives.Workers, tree: PyTree) -> PyTree:
  """Shapes that stand for one worker's arrays, on all workers.

  `workers.jit(step).lower(...)` takes them, so that a program is compiled
  without an array and without the devices it is for.

  Args:
    workers: of the run.
    tree: one worker's arrays or `jax.ShapeDtypeStruct`, `[...]`.

  Returns:
    `jax.ShapeDtypeStruct` `[workers, ...]` with the sharding of a worker's
    arrays.

  >>> from jdist import collectives
  >>> team = collectives.workers(4, substrate="vmap")
  >>> abstract(team, jax.ShapeDtypeStruct((3,), "float32")).shape
  (4, 3)
  """
  sharding = workers.sharding()
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (workers.num_workers, *x.shape), x.dtype, sharding=sharding
    ),
    tree,
  )
