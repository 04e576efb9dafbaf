"""Five wrong calls of each option of elastic runs and of `launch`.

Each ends with one line and status 2, or with a ValueError that names the
argument, and leaves no process and no open port.
"""

import functools
import os
import shlex
import sys

import jax.numpy as jnp
import optax
import pytest

from jdist import cli, elastic, methods, server
from tests import _processes

_RAY = "--driver ray --cpus-per-worker 0.25"
# An option's wrong values; each is refused by its name unless one says another.
_TRAIN = {
  "--elastic": (
    "--method ssgd", "--method nobody", "--protocol bsp", "--substrate vmap",
    "--elastic=yes",
  ),
  "--quorum": ("0", "-0.5", "1.5", "nan", "half"),
  "--grace": ("-1", "nan", "inf", "x", "1,5"),
  "--timeout-s": ("0", "-1", "nan", "inf", "soon"),
  "--driver": ("horse", "''", "Ray", "threads,ray", "processes"),
  "--ahead": ("1", "-1", "3", "1.5", "x"),
  "--record": ("/", "''", "/proc/none/x", "/dev/null/x", "."),
  f"{_RAY} --cpus-per-worker": ("0", "-1", "nan", "inf", "many"),
  f"{_RAY} --gpus-per-worker": ("-1", "1.5", "nan", "inf", "x"),
  f"{_RAY} --address": ("a", "a:b", ":1", "127.0.0.1:1", "10.1.2.3:6379"),
}  # fmt: skip
_LAUNCH = {
  "-n": ("0", "-1", "1.5", "x", "nan"),
  "--restarts": ("-1", "1.5", "x", "nan", "''"),
  "--backoff-s": ("-1", "nan", "inf", "x", "''"),
  "--print": ("x", "''", "Slurm", "slurm,mpi", "1"),
  "--print slurm --gpus-per-node": ("0", "-1", "1.5", "x", "''"),
  "--name": ("a", "A", "-", "''", "1"),
}  # fmt: skip
_SLOW_LAUNCH = {
  "--print kubernetes --name": ("A", "a-", "a_b", "''", "ä"),
  "--print slurm": ("", "--name x", "--image y", "--gpus-per-node 2"),
  "--print slurm --claim": ("z",),
}  # fmt: skip


@pytest.fixture
def leaves_nothing():
  """Fails if a process runs, or a port listens, that did not before."""

  def running():
    own = os.getpid()
    return {*_processes.descendants(own), *_processes.listening(own)}

  before = running()
  yield
  assert running() <= before


def refused(words, option, capsys):
  """Runs a command that must end with one line about an option."""
  assert cli.main(shlex.split(words)) == 2, words
  error = capsys.readouterr().err
  assert error.startswith("jdist: error: ") and error.count("\n") == 1, error
  name = option.split()[-1].lstrip("-")
  assert name in error or name.replace("-", "_") in error, (words, error)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("option", _LAUNCH)
def test_launch_refuses_a_value_in_one_line(option, leaves_nothing, capsys):
  option_named = {"-n": "num-processes"}.get(option, option)
  for value in _LAUNCH[option]:
    words = f"launch {option} {value} -- train --method diloco"
    refused(words, option_named, capsys)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("option", _SLOW_LAUNCH)
def test_printed_file_needs_its_options(option, leaves_nothing, capsys):
  for value in _SLOW_LAUNCH[option]:
    words = f"launch -n 4 {option} {value} -- train --method diloco"
    named = "checkpoints" if option == "--print slurm" else option
    refused(words, named, capsys)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("option", _TRAIN)
def test_elastic_run_refuses_a_value_in_one_line(
  option, leaves_nothing, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
  first = "train --elastic --method diloco --workers 2 --batch-size 64"
  for value in _TRAIN[option]:
    words = [first, option, value]
    name = option
    if value.startswith("--"):
      words, name = [first, value], value.split()[0].partition("=")[0]
    if value in ("--method ssgd", "--elastic=yes"):
      name = {"--method ssgd": "method", "--elastic=yes": "yes"}[value]
    if option.endswith("--address") and ":1" in value and value != ":1":
      name = value.split(":")[0]
    refused(" ".join(words), name, capsys)


# These words behind `train` of servers are refused by the option's name.
_SERVERS = {
  "--buffer": (
    *(f"--protocol fedbuff --buffer {x}" for x in ("0", "-1", "1.5", "x")),
    "--protocol asp --buffer 4",
  ),
  "--peers": (
    "--peers", "--protocol bsp --peers", "--protocol asp --peers",
    "--stages 2 --peers", "--elastic --method diloco --no-peer",
  ),
  "--shards": (
    *(f"--protocol asp --shards {x}" for x in ("0", "-1", "x")),
    "--protocol decoupled_diloco --shards 2",
    "--elastic --method diloco --shards 2",
  ),
}  # fmt: skip


@linux
@pytest.mark.slow
@pytest.mark.parametrize("option", _SERVERS)
def test_server_refuses_a_value_in_one_line(
  option, leaves_nothing, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "machines.toml").write_text(
    "[[nodes]]\nname = 'worker'\ncount = 2\n"
    "[profile]\nseconds_per_sample = 0.01\n"
  )
  for value in _SERVERS[option]:
    if "--protocol" in value:
      value += " --cluster machines.toml --driver threads"
    refused(f"train --batch-size 64 {value}", option, capsys)


METHOD = methods.diloco(optax.sgd(0.1), 2, axis=None)
ROUNDS = functools.partial(elastic.Rounds, workers=("a", "b"))
# Each line has a factory, one of its arguments, and its wrong values.
_PYTHON = {
  "Rounds method": (
    lambda x: ROUNDS(x, jnp.zeros(3)),
    (None, "x", methods.ssgd(optax.sgd(0.1), axis=None), optax.sgd(0.1), 1),
  ),
  "Rounds params": (
    lambda x: ROUNDS(METHOD, x), ("x", object(), [None, "y"], {"a": "b"}, {1}),
  ),
  "Rounds workers": (
    lambda x: elastic.Rounds(METHOD, jnp.zeros(3), workers=x),
    (("a", "a"), (), (1, 2), 3, (None,)),
  ),
  **{
    f"Rounds {name}": (
      lambda x, name=name: ROUNDS(METHOD, jnp.zeros(3), **{name: x}), values,
    )
    for name, values in {
      "samples": (0, -1, 1.5, "x", None),
      "quorum": (0.0, -1, 1.5, float("nan"), "half"),
      "grace": (-1, float("nan"), float("inf"), "x", None),
      "timeout_s": (0, -1, float("nan"), "soon", [1]),
      "seed": (-1, 1.5, "x", None, 2**40),
    }.items()
  },
  "RayEngine workers": (server.RayEngine, (0, -1, 1.5, "x", None)),
  **{
    f"RayEngine {name}": (
      lambda x, name=name: server.RayEngine(2, **{name: x}), values,
    )
    for name, values in {
      "cpus_per_worker": (0, -1, float("nan"), float("inf"), "x"),
      "gpus_per_worker": (-1, 1.5, float("nan"), float("inf"), "x"),
      "spares": (-1, 1.5, "x", None, float("nan")),
      "address": ("a", "a:b", ":1", "127.0.0.1:1", ""),
    }.items()
  },
  "loop name": (
    lambda x: ROUNDS(METHOD, jnp.zeros(3)).loop(None, x),
    ("c", "", 1, None, "A"),
  ),
}  # fmt: skip


@linux
@pytest.mark.parametrize("call", _PYTHON)
def test_argument_is_refused_by_name(call, leaves_nothing):
  make, values = _PYTHON[call]
  for value in values:
    with pytest.raises(ValueError, match=f"`{call.split()[1]}`|No Ray cluster"):
      make(value)
