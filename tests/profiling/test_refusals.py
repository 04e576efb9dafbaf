"""Refusals of forecasts and of targets to compile for."""

from jdist import profiling
from jdist.profiling import _timeline
from tests import _refusals


@_refusals.table(
  ("branch", lambda: _timeline.read_timeline("", branch="rare"), "'idles'"),
  ("nodes", lambda: profiling.GPUS["h200"].link(0), "an int >= 1, got 0"),
  ("dtype", lambda: profiling.GPUS["a100"].device("float8"), "'bfloat16' or"),
  *(
    ("text", lambda text=text: profiling.gpu_target(text), "8xh200 or 2x8xh200")
    for text in (
      "",
      "h200",
      "8",
      "8xb200",
      "8 x h200",
      "axbxh200",
      "2x2x8xh200",
    )
  ),
  (
    "gpus_per_node",
    lambda: profiling.gpu_target("0xh200"),
    "an int >= 1, got 0",
  ),
  ("nodes", lambda: profiling.gpu_target("0x8xh200"), "an int >= 1, got 0"),
  (
    "bandwidth_bits_per_s",
    lambda: profiling.set_link_rates(-1e9, 0.0),
    "in (0, inf], got -1",
  ),
  (
    "latency_s",
    lambda: profiling.set_link_rates(1e9, None),
    "a finite number, got None",
  ),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
