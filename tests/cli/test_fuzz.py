"""Any options end with status 0, 2 or 3: no traceback, no hang."""

import contextlib
import faulthandler
import io
import itertools
import os
import pathlib
import tempfile
import threading
import warnings

import hypothesis
import pytest
from hypothesis import strategies as st

from jdist import cli, methods
from jdist.cli import _commands, _options

_ENDS = (0, 2, 3)
_LIMIT_S = 240

# These make a run take seconds; options that Hypothesis adds behind override
# them.
_SMALL = (
  "--dataset", "synthetic", "--model", "mlp", "--steps", "2", "--workers", "2",
  "--batch-size", "16", "--evaluate-every-epochs", "50",
)  # fmt: skip
_NUMBERS = st.sampled_from(
  ["0", "1", "2", "3", "4", "8", "-1", "0.5", "1e-3", "1e30", "nan", "inf",
   "-inf", "1e400", "007", "2_0", "", " ", "x", "None", "true", "٣",
   "4294967296"]
)  # fmt: skip
_WORDS = st.sampled_from(
  ["", "x", "-", "--", "error", "int4", "int8", "sign", "top_k", "ef21", "none",
   "power_sgd", "gather", "all_to_all", "majority_vote", "nesterov", "adam",
   "cosine", "constant", "qsr", "adacomm", "msdpu", "fixed", "lenet", "cnn",
   "resnet8", "resnet50", "transformer", "bfloat16", "vmap", "shard_map",
   "1f1b", "gpipe", "ours", "2bw", "bsp", "dbs", "adamw", "group", "batch",
   "digits", "synthetic", "/no/such/file", "/dev/null", "/", "é\N{SNOWMAN}"]
)  # fmt: skip
# These take minutes, use the network or a cluster, or write files elsewhere.
_LEFT_OUT = {
  "coordinator_address", "num_processes", "process_id", "preset", "address",
  "driver", "output", "checkpoints", "tensorboard", "final_params",
  "cpus_per_worker", "record", "paced",
}  # fmt: skip


def _option(command):
  names = [
    name for name in command.__dataclass_fields__ if name not in _LEFT_OUT
  ]
  flags = [
    name for name in names if command.__dataclass_fields__[name].type is bool
  ]

  def words(name):
    word = _options.word(name)
    if name in flags:
      return st.sampled_from([[word], [f"--no-{word[2:]}"]])
    values = st.one_of(_NUMBERS, _WORDS)
    if name in ("workers", "batch_size", "stages", "microbatches", "chunks"):
      # A thousand devices would take too long.
      values = st.sampled_from(["0", "1", "2", "3", "4", "-2", "x", "32", "64"])
    if name == "dataset":
      values = st.sampled_from(["synthetic", "digits", "no", ""])
    if name in ("steps", "epochs"):
      values = st.sampled_from(["0", "1", "3", "-1", "nan", "1e-9", "x"])
    if name in ("num_layers", "width", "num_heads", "window_length", "rank"):
      values = st.sampled_from(["0", "1", "2", "8", "-1", "x", "2.5"])
    return values.map(lambda value: [word, value])

  return st.sampled_from(names).flatmap(words)


def _command(name, command):
  methods_of_all = st.sampled_from([*methods.registry, "no_such"])
  options = st.lists(_option(command), max_size=4)
  if name == "train":
    method = methods_of_all.map(lambda x: ["--method", x])
  else:
    method = st.lists(methods_of_all, min_size=1, max_size=2).map(
      lambda x: ["--methods", *x, "--seeds", "0"]
    )
  return st.tuples(method, options).map(
    lambda found: [name, *_SMALL, *found[0], *itertools.chain(*found[1])]
  )


_COMMANDS = st.one_of(
  _command("train", _commands.Train),
  _command("train", _commands.Train),
  _command("compare", _commands.Compare),
  st.lists(_WORDS, max_size=3),
  st.lists(_WORDS, max_size=3).map(lambda x: ["launch", "-n", "2", "--", *x]),
  st.tuples(_WORDS, _WORDS).map(lambda x: ["pipeline", *x]),
  _WORDS.map(lambda x: ["simulate", x]),
)


@pytest.fixture(scope="module")
def terminal(pytestconfig):
  """Standard error of the whole run, which still shows once pytest is ended."""
  capture = pytestconfig.pluginmanager.getplugin("capturemanager")
  with capture.global_and_fixture_disabled():
    descriptor = os.dup(2)
  yield descriptor
  os.close(descriptor)


def _check(words, terminal):
  """Runs a command in a directory of its own, where it ends as it should."""
  before = os.getcwd()
  out, error = io.StringIO(), io.StringIO()
  # A command that hangs ends the test with its words and a traceback.
  named = threading.Timer(
    _LIMIT_S - 1, os.write, [terminal, f"\nstill runs: {words}\n".encode()]
  )
  named.start()
  faulthandler.dump_traceback_later(_LIMIT_S, exit=True, file=terminal)
  try:
    with (
      tempfile.TemporaryDirectory() as folder,
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(error),
      warnings.catch_warnings(),
    ):
      os.chdir(folder)
      warnings.simplefilter("ignore")
      status = cli.main(words)
      os.chdir(before)
  finally:
    faulthandler.cancel_dump_traceback_later()
    named.cancel()
    os.chdir(before)
  told = error.getvalue()
  assert status in _ENDS, (words, status, told)
  assert "Traceback" not in told, words
  if status:
    lines = [x for x in told.splitlines() if x.startswith("jdist: ")]
    assert len(lines) == 1, (words, told)
  else:
    assert "jdist: error" not in told, words
  return status


_SETTINGS = {
  "deadline": None,
  "database": None,
  "derandomize": True,
  "suppress_health_check": list(hypothesis.HealthCheck),
  # The first failure is enough: a run costs seconds.
  "phases": [hypothesis.Phase.generate],
}


@hypothesis.settings(max_examples=8, **_SETTINGS)
@hypothesis.given(st.lists(_option(_commands.Train), min_size=1, max_size=4))
def test_random_bad_options_are_refused_in_one_line(terminal, options):
  # The last option is always wrong, so nothing is trained.
  words = ["train", *_SMALL, *itertools.chain(*options), "--momentum", "2"]
  assert _check(words, terminal) == 2


@pytest.mark.slow
@hypothesis.settings(max_examples=300, **_SETTINGS)
@hypothesis.given(_COMMANDS)
def test_random_words_end_with_a_known_status(terminal, words):
  status = _check(words, terminal)
  log = os.environ.get("JDIST_FUZZ_LOG")
  if log:
    with pathlib.Path(log).open("a") as file:
      file.write(f"{status} {words}\n")
