"""Data sheets of GPUs, and GPUs to compile for, which need not exist.

XLA compiles for devices that it knows only from a text. They cannot run a
program nor hold an array, but the program equals that of real ones, so that its
order, its collectives and its memory can be read.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jdist import checks, cluster, collectives, signatures, training
from jdist.states import PyTree

# Unless this variable is set, the plugin does not load without a driver.
_SKIP_VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_REMEDY = 'Install the extra: pip install ".[schedules]" in the clone.'


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU's peak rates, which no program reaches all at once.

  Attributes:
    bfloat16_flops_per_s: The rate of dense matrix products.
    float32_flops_per_s: The rate of dense matrix products in TF32, which XLA
      uses for float32 by default.
    nvlink_bits_per_s: The bandwidth to the other GPUs of its node, in each
      direction.
    network_bits_per_s: The GPU's share of the node's network, in each
      direction.

  The others are what the compiler must know of it.
  """

  name: str
  bfloat16_flops_per_s: float
  float32_flops_per_s: float
  memory_bytes_per_s: float
  nvlink_bits_per_s: float
  network_bits_per_s: float
  memory_bytes: int
  compute_capability: tuple[int, int]
  multiprocessors: int
  fpus: int
  clock_ghz: float
  l2_bytes: int
  shared_bytes: int

  def device(
    self, dtype: Literal["bfloat16", "float32"], launch_s: float = 0.0
  ) -> cluster.Device:
    """Returns the device for programs that compute in a dtype.

    Every kernel takes at least `launch_s`.
    """
    checks.check_choice("dtype", dtype, ("bfloat16", "float32"))
    rate: float = getattr(self, f"{dtype}_flops_per_s")
    return cluster.Device(self.name, rate, self.memory_bytes_per_s, launch_s)

  def link(self, nodes: int = 1, latency_s: float = 0.0) -> cluster.Link:
    """Returns the slowest link of a ring: NVLink, or the nodes' network.

    >>> GPUS["h200"].link().bandwidth_bits_per_s / 8e9  # GB/s
    450.0
    """
    checks.check_int("nodes", nodes, 1)
    slowest = self.nvlink_bits_per_s if nodes == 1 else self.network_bits_per_s
    return cluster.Link(slowest, latency_s)

  def target(self) -> str:
    """Returns a `GpuTargetConfigProto` in text form."""
    major, minor = self.compute_capability
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32
        threads_per_core_limit: 2048 shared_memory_per_block: 49152
        shared_memory_per_core: {self.shared_bytes}
        shared_memory_per_block_optin: {self.shared_bytes - 1024}
        core_count: {self.multiprocessors} fpus_per_core: {self.fpus}
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        memory_bandwidth: {round(self.memory_bytes_per_s)}
        l2_cache_size: {self.l2_bytes} clock_rate_ghz: {self.clock_ghz}
        device_memory_size: {self.memory_bytes}
        cuda_compute_capability {{ major: {major} minor: {minor} }}
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{self.name}"
    """


# From NVIDIA's data sheets of the SXM forms, without sparsity. The networks are
# those of the DGX A100, H100 and H200.
GPUS = {
  "h200": Gpu(
    "NVIDIA H200", 989.5e12, 494.7e12, 4.8e12, 8 * 450e9, 400e9,
    141_000_000_000, (9, 0), 132, 128, 1.98, 50 << 20, 228 << 10,
  ),
  "h100": Gpu(
    "NVIDIA H100", 989.5e12, 494.7e12, 3.35e12, 8 * 450e9, 400e9,
    80_000_000_000, (9, 0), 132, 128, 1.98, 50 << 20, 228 << 10,
  ),
  "a100": Gpu(
    "NVIDIA A100", 312e12, 156e12, 2.039e12, 8 * 300e9, 200e9,
    80_000_000_000, (8, 0), 108, 64, 1.41, 40 << 20, 164 << 10,
  ),
}  # fmt: skip


@signatures.checked
@dataclasses.dataclass(frozen=True)
class GpuTarget:
  """GPUs to compile for, of a kind of `GPUS`; see `gpu_target`."""

  kind: str
  gpus_per_node: signatures.PositiveInt
  nodes: signatures.PositiveInt = 1

  def __post_init__(self) -> None:
    checks.check_choice("kind", self.kind, tuple(GPUS))

  def __str__(self) -> str:
    nodes = f"{self.nodes}x" if self.nodes > 1 else ""
    return f"{nodes}{self.gpus_per_node}x{self.kind}"

  @property
  def num_gpus(self) -> int:
    """The number of GPUs of all nodes."""
    return self.nodes * self.gpus_per_node

  @property
  def memory_bytes(self) -> int:
    """The memory of one GPU."""
    return GPUS[self.kind].memory_bytes

  def devices(self) -> list[jax.Device]:
    """Lists devices for which programs can only be compiled.

    Neither a GPU nor a driver is needed. Each node is a process of its own.

    Raises:
      ImportError: If JAX's plugin for CUDA, which the extra `schedules`
        installs, is missing or does not have JAX's version.
    """
    check_compiler()
    os.environ.setdefault(_SKIP_VARIABLE, "1")
    from jax.experimental import topologies

    try:
      described = topologies.get_topology_desc(
        platform="cuda",
        # The format is slices x hosts x devices, and a host is a process.
        topology=f"1x{self.nodes}x{self.gpus_per_node}",
        target_config=GPUS[self.kind].target(),
      )
    except NotImplementedError as error:
      raise ImportError(
        "JAX's plugin for CUDA is installed but did not load; its own message "
        f"stands above. {_REMEDY}"
      ) from error
    return list(described.devices)

  def mesh(self, axis: str = "worker") -> jax.sharding.Mesh:
    """Puts all GPUs along one axis, for `workers(num_gpus, mesh=...)`."""
    return collectives.make_mesh((self.num_gpus,), (axis,), self.devices())


@signatures.checked
def gpu_target(text: str) -> GpuTarget:
  """Reads the number and kind of GPUs.

  Args:
    text: `"8xh200"`, or `"2x8xh200"` for two nodes of eight. The kinds are
      h200, h100 and a100 (SXM, 80 GB), in upper or lower case.

  >>> target = gpu_target("2x8xH200")
  >>> target.num_gpus, target.nodes, str(target)
  (16, 2, '2x8xh200')
  """
  match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z]\w*)", text.lower())
  if match is None or match[3] not in GPUS:
    raise ValueError(
      "`text` must be GPUSxKIND or NODESxGPUSxKIND, for instance 8xh200 or "
      f"2x8xh200, with a kind of {', '.join(GPUS)}; got {text!r}."
    )
  return GpuTarget(match[3], int(match[2]), int(match[1] or 1))


def check_compiler() -> None:
  """Raises an ImportError if programs for GPUs cannot be compiled here."""
  plugin = next(filter(importlib.util.find_spec, _PLUGINS), None)
  if plugin is None:
    raise ImportError(
      f"Compiling for GPUs needs JAX's plugin for CUDA. {_REMEDY}"
    )
  name = plugin.replace("_", "-")
  version = importlib.metadata.version(name)
  # Post-releases are compatible: 0.12.0 and 0.12.0.1.
  if version.split(".")[:3] != jax.__version__.split(".")[:3]:
    raise ImportError(
      f"{name} {version} does not work with jax {jax.__version__}: their "
      f'versions must be equal. pip install "{name}=={jax.__version__}".'
    )


@signatures.checked
def set_link_rates(
  bandwidth_bits_per_s: signatures.PositiveFloat,
  latency_s: signatures.NonNegativeFloat,
) -> None:
  """Sets the rates of the link in XLA's scheduler of GPU programs.

  By default every collective is scheduled as if it took as long as a few
  products. With the rates it starts as early as its size requires. XLA reads
  them once, for all programs that this process compiles for GPUs.

  Args:
    bandwidth_bits_per_s: The bandwidth of each GPU's link, in each direction,
      in a ring of all GPUs.
    latency_s: The latency of a message of the ring, rounded to whole
      microseconds, at least one.

  Raises:
    RuntimeError: If JAX has already started, and would ignore the rates.
  """
  # JAX has no public test of whether it has started, but then refuses another
  # number of devices.
  count = jax.config.values["jax_num_cpu_devices"]
  jax.config.update("jax_num_cpu_devices", max(count, 1) + 1)
  jax.config.update("jax_num_cpu_devices", count)
  latency_us = max(1, round(latency_s * 1e6))
  estimator = {
    "nccl_op_launch_time": 1,
    # XLA expects gigabytes, whatever the name of the option says.
    "nic_speed_gbps": bandwidth_bits_per_s / 8e9,
    "chunk_prep_time": 1,
    "rtt": latency_us,
    # With one GPU a node, all messages take the link whose rates are given.
    "gpus_per_node": 1,
  }
  options = ",".join(f"{name}={value:g}" for name, value in estimator.items())
  os.environ["XLA_FLAGS"] = " ".join(
    (
      os.environ.get("XLA_FLAGS", ""),
      "--xla_gpu_enable_analytical_sol_latency_estimator=true",
      f"--xla_gpu_analytical_latency_estimator_options={options}",
    )
  )


@signatures.checked
def abstract(workers: collectives.Workers, tree: signatures.Shapes) -> PyTree:
  """Returns shapes `[workers, ...]` for one worker's arrays `[...]`.

  `workers.jit(step).lower(...)` takes them, so that a program is compiled
  without arrays and without the devices it is for.

  >>> team = collectives.workers(4, substrate="vmap")
  >>> abstract(team, jax.ShapeDtypeStruct((3,), "float32")).shape
  (4, 3)
  """
  sharding = workers.sharding()
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (workers.num_workers, *jnp.shape(x)),
      getattr(x, "dtype", type(x)),
      sharding=sharding,
    ),
    tree,
  )


@signatures.checked
def abstract_state(
  workers: collectives.Workers,
  optimizer: signatures.Optimizer,
  params: signatures.Shapes,
  model_state: signatures.Shapes = None,
) -> training.TrainState:
  """Returns the shapes of `training.init_state`, `[workers, ...]`.

  Args:
    workers: The run's workers, possibly on devices that are only described.
    optimizer: An Optax chain.
    params: One worker's parameters, arrays or `jax.ShapeDtypeStruct`, for
      instance of `models.build(..., abstract=True)`.
    model_state: One worker's batch statistics, likewise.
  """
  checks.check_some("params", params)
  # `init_state` would place real arrays on devices that cannot hold any.
  step: Any = jax.ShapeDtypeStruct((), jnp.int32)
  key: Any = jax.ShapeDtypeStruct((2,), jnp.uint32)
  model_state = {} if model_state is None else model_state
  state = training.TrainState(step, params, (), model_state, key)
  state = abstract(workers, state)
  sharding = workers.sharding()
  opt_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    jax.eval_shape(workers.spmd(optimizer.init), state.params),
  )
  return state._replace(opt_state=opt_state)
