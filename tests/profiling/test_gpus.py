"""Rates of GPUs, and which of them bounds a ring."""

from jdist import cluster, profiling


def test_ring_over_nodes_is_bound_by_the_network():
  gpu = profiling.GPUS["h200"]
  assert gpu.link().bandwidth_bits_per_s == 3600e9
  assert gpu.link(2, 1e-6) == cluster.Link(400e9, 1e-6)


def test_products_in_float32_are_slower():
  gpu = profiling.GPUS["a100"]
  fast, slow = gpu.device("bfloat16"), gpu.device("float32", launch_s=1e-6)
  assert fast.flops_per_s == 2 * slow.flops_per_s
  assert (fast.launch_s, slow.launch_s) == (0.0, 1e-6)
