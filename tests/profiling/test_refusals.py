"""Refusals of profiles and of targets to compile for."""

import numpy as np

from jdist import profiling
from tests import _refusals


def profile(sizes):
  return profiling.profile_model(
    lambda params, state, batch, key: (params.sum(), (state, {})),
    np.ones(2, np.float32),
    lambda size: np.ones((size, 1)),
    sizes,
    repeats=1,
  )


@_refusals.table(
  ("forecasts", lambda: profiling.plot_forecasts({}, "x.png"), "one entry"),
  ("branch", lambda: profiling.read_timeline("", branch="rare"), "'idles'"),
  ("nodes", lambda: profiling.GPUS["h200"].link(0), "an int >= 1, got 0"),
  ("dtype", lambda: profiling.GPUS["a100"].device("float8"), "'bfloat16' or"),
  ("samples", lambda: profile((8,)), "two different sizes"),
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
)
def test_what_cannot_be_is_refused(argument, call, rule):
  _refusals.check(argument, call, rule)
