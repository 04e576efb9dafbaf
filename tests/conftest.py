"""Every test runs on 8 virtual CPU devices, with strict promotion.

Programs that several tests have in common, or processes that a test starts,
are compiled once: JAX keeps them in a folder that goes with the run.  Two that
differ in the names of their operations only count as the same program.
"""

import atexit
import gc
import importlib.util
import os
import pathlib
import shutil
import sys
import tempfile

# Before the backend starts; a GPU, where there is one, has its own tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JDIST_TEST_PROGRAMS" not in os.environ:  # Else one of several processes.
  os.environ["JDIST_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="jdist-tests-")
  atexit.register(
    shutil.rmtree, os.environ["JDIST_TEST_PROGRAMS"], ignore_errors=True
  )
# Programs for devices that are not there, which a plugin compiles, cannot be
# read back.
if importlib.util.find_spec("jax_plugins") is None:
  # A folder for each of pytest's processes: JAX does not lock what it writes.
  os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
    os.environ["JDIST_TEST_PROGRAMS"],
    os.environ.get("PYTEST_XDIST_WORKER", "only"),
  )
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Most tests take longer to compile than to run: LLVM, below XLA's own passes,
# is asked for less. Slow ones compute, and run as users' programs do.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = " ".join(
    (
      os.environ.get("XLA_FLAGS", ""),
      f"--xla_backend_optimization_level={3 if 'slow' in sys.argv else 0}",
    )
  )

import hypothesis
import jax
import pytest

from jdist import collectives
from jdist.storage import lease
from tests import _thinned

collectives.make_cpu_devices(8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples each time, so that a change is judged by what it changed,
# and no limits of time: a machine may be busy. `--hypothesis-profile=random`
# looks for others.
_no_limits = {
  "deadline": None,
  "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("random", **_no_limits)
hypothesis.settings.register_profile("same", derandomize=True, **_no_limits)
hypothesis.settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  _thinned.leave_out(items)


# JAX keeps what it has traced, gigabytes in the end, which the collector of
# garbage would go through again and again.
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def _frozen_leftovers():
  yield
  gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _released_leases():
  """Ends the threads of leases, which last as long as a run's process."""
  claimed, claim = [], lease.Lease.claim

  def noted(held):
    claim(held)
    claimed.append(held)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(lease.Lease, "claim", noted)
    yield
  for held in claimed:
    held.release()


@pytest.fixture(autouse=True)
def _only_cluster_of_ray(request):
  """Tests that start Ray wait for each other, in all processes of a run.

  Some look at all of Ray's processes on the machine before and after.
  """
  marks = request.node.iter_markers("skipif")
  if not any("Ray" in mark.kwargs.get("reason", "") for mark in marks):
    yield
    return
  import fcntl

  path = pathlib.Path(os.environ["JDIST_TEST_PROGRAMS"]) / "ray"
  with path.open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
