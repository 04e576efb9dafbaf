"""Data sheets of GPUs."""

import dataclasses
from typing import Literal

from jdist import checks, cluster


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
  """

  name: str
  bfloat16_flops_per_s: float
  float32_flops_per_s: float
  memory_bytes_per_s: float
  nvlink_bits_per_s: float
  network_bits_per_s: float

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


# From NVIDIA's data sheets of the SXM forms, without sparsity. The networks are
# those of the DGX A100, H100 and H200.
GPUS = {
  "h200": Gpu("NVIDIA H200", 989.5e12, 494.7e12, 4.8e12, 8 * 450e9, 400e9),
  "h100": Gpu("NVIDIA H100", 989.5e12, 494.7e12, 3.35e12, 8 * 450e9, 400e9),
  "a100": Gpu("NVIDIA A100", 312e12, 156e12, 2.039e12, 8 * 300e9, 200e9),
}
