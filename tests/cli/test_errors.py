"""Unusable options are refused in one line, and nothing is written."""

import errno
import io
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from jdist import cli
from jdist.cli import _run_end
from tests import _processes

_ROOT = pathlib.Path(__file__).parent.parent.parent

_BAD = [
  (
    "trian",
    "the command must be one of train, compare, advise, overlap, bytes, "
    "simulate, pipeline, report, launch, got",
  ),
  ("train --method sgd", "`--method` must be one of ssgd"),
  ("compare --methods ssgd sgd", "`--methods` must be one of ssgd"),
  (
    "compare --methods ssgd,diloco",
    "'ssgd,diloco'. Put spaces between several.",
  ),
  ("compare --methods ssgd ssgd", "`--methods` must be one or more different"),
  ("train --dataset imagenet", "`--dataset` must be one of synthetic, digits"),
  ("train --model vit", "`--model` must be one of mlp"),
  ("train --model mlp --norm batch", "`norm` is no option of mlp"),
  ("train --preset fast", "`--preset` must be one of digits"),
  ("train --preset=fast", "`--preset` must be one of digits"),
  ("train --workers 0", "`--workers` must be at least 1, got 0"),
  ("train --workers -3", "`--workers` must be at least 1, got -3"),
  (
    "train --workers 2000 --batch-size 2000",
    "`--batch-size` must be an int from 1 to 1442, got 2000",
  ),
  ("train --interval 0", "`--interval` must be at least 1, got 0"),
  ("compare --interval -1", "`--interval` must be at least 1, got -1"),
  ("train --batch-size 100", "got 100. Take 96 or 104."),
  ("train --batch-size 0", "`--batch-size` must divide evenly"),
  ("train --accumulate 3", "over 8 workers times 3, got 128. Take 120 or 144."),
  ("train --accumulate 0", "`--accumulate` must be at least 1"),
  ("train --seed -1", "`--seed` must be from 0 to 2**32 - 1, got -1"),
  ("compare --seeds 0 -1", "`--seeds` must be from 0 to 2**32 - 1, got -1"),
  ("train --seed 4294967296", "`--seed` must be from 0 to 2**32 - 1, got 429"),
  ("compare --seeds 0 5000000000", "`--seeds` must be from 0 to 2**32 - 1"),
  (
    "train --workers 2 --batch-size 100000000",
    "`--batch-size` must be an int from 1 to 1442, got 100000000",
  ),
  ("train --model resnet50", "`--model` must suit images of 8x8: mlp, lenet"),
  ("train --model vgg16", "resnet8 or resnet20, got vgg16"),
  ("train --final-params a.pt", "`--final-params` must be a file FILE.safe"),
  (
    "train --stages 2 --final-params a.safetensors",
    "`--final-params` must be left out with `--stages`",
  ),
  ("compare --seeds 1 1", "`--seeds` must be one or more different"),
  ("train --learning-rate 0", "`--learning-rate` must be positive"),
  ("train --learning-rate nan", "`--learning-rate` must be positive"),
  ("compare --learning-rate 0.1 -0.1", "`--learning-rate` must be positive"),
  ("compare --learning-rate 0.1 0.1", "`--learning-rate` must be one or more"),
  ("train --epochs 0", "`--epochs` must be positive"),
  ("train --epochs inf", "`--epochs` must be positive and finite, got inf"),
  ("train --steps 0", "`--steps` must be at least 1"),
  ("train --warmup-epochs -1", "`--warmup-epochs` must be at least 0, got -1"),
  ("train --warmup-epochs nan", "`--warmup-epochs` must be at least 0"),
  ("train --evaluate-every-epochs 0", "`--evaluate-every-epochs` must be"),
  ("train --checkpoint-every-epochs 0", "`--checkpoint-every-epochs` must be"),
  ("train --momentum 1", "`--momentum` must be in [0, 1)"),
  ("train --weight-decay -1", "`--weight-decay` must be at least 0, got -1"),
  (
    "train --protocol h_ps --local-rate -1",
    "`--local-rate` must be at least 0, got -1",
  ),
  ("train --alpha 0", "`alpha` must be in (0, inf], got 0"),
  ("train --method diloco --outer-momentum 1", "`--outer-momentum` must be in"),
  (
    "compare --tuning-seeds 99999999999999999999",
    "`--tuning-seeds` must be in [1, 1000]",
  ),
  ("train --correction 1e400", "`--correction` must be at least 0 and finite"),
  (
    "train --method local_sgd --overlap --delay-steps 9 --dataset synthetic",
    "`--delay-steps` must be an int from 0 to 8, got 9",
  ),
  (
    "train --method msdpu --delay-steps 9 --dataset synthetic --interval 2",
    "`--delay-steps` must be an int from 0 to 2, got 9",
  ),
  (
    "train --method diloco --overlap --delay-steps 17 --dataset synthetic "
    "--interval-policy adacomm",
    "`--delay-steps` must be an int from 0 to 16, got 17",
  ),
  ("train --carry 2", "`carry` must be in [0, 1]"),
  ("train --method mp2", "`--predictor` must be given for mp2"),
  ("train --predictor here", "`--predictor` must be left out for msdpu"),
  ("overlap --methods mp2", "`--methods` must be one without trained networks"),
  (
    "train --method streaming_diloco --interval-policy adacomm",
    "`--interval-policy` must be fixed for streaming_diloco",
  ),
  (
    "compare --methods diloco streaming_diloco --interval-policy qsr",
    "`--interval-policy` must be fixed for streaming_diloco",
  ),
  (
    "train --method msdpu --schedule constant",
    "`--schedule` must be cosine for msdpu",
  ),
  (
    "train --method ssgd --interval-policy qsr",
    "`--interval-policy` must be left out for ssgd, which does not use it",
  ),
  (
    "train --method local_sgd --stream",
    "`--stream` must be left out for local_sgd, which does not use it: "
    "`--stream`, got True, is used by msdpu, cocod, overlap_local_sgd, "
    "streaming_diloco, and others with `--overlap`.",
  ),
  (
    "train --stages 2 --edge-codec int4",
    "`--edge-codec` must be left out without `--runtime processes`, got int4.",
  ),
  (
    "pipeline draw 1f1b --edge-codec int4",
    "`--edge-codec` must be left out of `jdist pipeline draw`",
  ),
  (
    "train --method qsgd --delay-steps 2",
    "`--delay-steps` must be left out for qsgd, which does not use it",
  ),
  (
    "compare --methods ssgd local_sgd --stream",
    "`--stream` must be left out for ssgd, local_sgd, which do not use it",
  ),
  (
    "train --method qsgd --codec int4 --feedback error --outer sgd --rank 3",
    "`--outer` and `--codec` and `--feedback` and `--rank` must be left out "
    "for qsgd, which does not use them: `--outer`, got sgd, is used by diloco, "
    "msdpu, streaming_diloco; `--codec`, got int4, is used by ssgd, local_sgd",
  ),
  ("train --method diloco --feedback error", "`--codec` must be given with"),
  ("train --optimizer adamw --momentum 0.5", "`--momentum` must be left out"),
  ("train --method demo --momentum 0.5", "`--momentum` must be left out for d"),
  (
    "train --method muloco --optimizer adamw --learning-rate 0.1",
    "`--optimizer` must be left out for muloco, which does not use it",
  ),
  ("bytes --model caf\udce9", "must be UTF-8, got 'caf\\udce9'. Rename"),
  (
    "train --method dgc --optimizer adamw",
    "`--optimizer` must be left out for dgc, which does not use it",
  ),
  ("train --checkpoint-every-epochs 1", "without `--checkpoints`, got 1.0"),
  ("train --steps 9 --epochs 3", "`--epochs` must be left out with `--steps 9"),
  (
    "train --method local_sgd --growth-start 0.5",
    "`--growth-start` must be left out for local_sgd, which does not use it: "
    "`--growth-start`, got 0.5, is used by msdpu, and others with "
    "`--interval-policy growth`.",
  ),
  (
    "train --interval-policy qsr --growth-start 0.5",
    "`--growth-start` must be left out for msdpu",
  ),
  (
    "compare --learning-rate 0.1 --tuning-seeds 7",
    "`--tuning-seeds` must be left out with one `--learning-rate`, got 7",
  ),
  (
    "bytes --methods ssgd --cut 2 --steps 5",
    "`--cut` and `--steps` must be left out for ssgd, which does not use them: "
    "`--cut`, got 2, is used by mp2; `--steps`, got 5, is used by "
    "post_local_sgd.",
  ),
  (
    "bytes --methods msdpu --warmup-steps 5",
    "`--warmup-steps`, got 5, is used by dgc.",
  ),
  (
    "launch --print mpi --claim x -- train --checkpoints x",
    "`--claim` must be left out without `--print kubernetes`, got x",
  ),
  ("train --codec int4 --feedback os:sep", "`feedback` must be"),
  ("train --outer os:path", "`rule` must be a sync rule"),
  (
    "simulate x.toml --protocols os:path",
    "'os:path' of protocols must be callable, got module",
  ),
  ("train --reducer gather", "`--codec` must be given with `--reducer gather`"),
  (
    "train --codec int4 --reducer power_sgd",
    "`--codec` must be left out with `--reducer power_sgd`",
  ),
  (
    "train --reducer majority_vote --feedback error",
    "`feedback` keeps the part outside a worker's share",
  ),
  ("train --codec int4 --ratio 0.1", "`--ratio` must be left out for msdpu"),
  ("train --codec int3", "`--codec` must be one of float16, bfloat16, int8, "),
  (
    "train --outer sgd --outer-learning-rate 0",
    "`--outer-learning-rate` must be positive, got 0",
  ),
  (
    "train --outer-learning-rate 0.5",
    "`--outer-learning-rate` must be left out for msdpu",
  ),
  ("train --rank 3", "`--rank` must be left out for msdpu"),
  (
    "train --method ssgd --interval 4",
    "`--interval` must be left out for ssgd, which does not use it",
  ),
  (
    "train --method mp2 --predictor none",
    "`--predictor` none cannot be used: `directory` must hold predictor, but",
  ),
  ("compare --bandwidth-mbit-per-s 0", "`--bandwidth-mbit-per-s` must be"),
  ("compare --latency-ms -1", "`--latency-ms` must be at least 0"),
  ("train --num-processes 2", "`--coordinator-address` must be given"),
  (
    "train --coordinator-address a:1 --num-processes 2",
    "`--num-processes` and `--process-id` must be given",
  ),
  (
    "train --coordinator-address a:1 --num-processes 0 --process-id 0",
    "`--num-processes` must be at least 1",
  ),
  (
    "train --coordinator-address a:1 --num-processes 2 --process-id 2",
    "`--process-id` must be an int from 0 to 1, got 2",
  ),
  (
    "train --coordinator-address a:1 --num-processes 3 --process-id 0",
    "`--workers` must be a multiple of the 3 processes, got 8",
  ),
  ("train --workers x", "--workers: invalid literal for int() with base 10"),
  ("bytes --bits x", "--bits: invalid literal for int() with base 10: 'x'. `"),
  ("train --workers", "Missing value for argument '--workers'"),
  ("train --substrate tpu", "invalid choice 'tpu' for argument '--substrate'"),
  ("compare --seeds a", "Error parsing --seeds"),
  ("train --wokers 4", "no option `--wokers`, did you mean `--workers`?"),
  ("train --wokers=4", "no option `--wokers`, did you mean `--workers`?"),
  ("train --seeds 1", "no option `--seeds`, did you mean `--seed`?"),
  ("train --zzzzzz 4", "no option `--zzzzzz`. `jdist train --help` lists all."),
  ("train digits", "Unrecognized options: digits"),
  ("train --checkpoints /dev/null/x", "`--checkpoints` /dev/null/x cannot be"),
  ("train --output /dev/null", "`--output` /dev/null cannot be used"),
  ("compare --output /dev/null/x", "`--output` /dev/null/x cannot be used"),
]


def test_file_of_parameters_is_no_directory(tmp_path, refusal):
  path = tmp_path / "a.safetensors"
  path.mkdir()
  told = refusal(f"train --final-params {path}")
  assert "`--final-params` must be a file FILE.safetensors" in told


@pytest.mark.parametrize(("words", "told"), _BAD, ids=[w for w, _ in _BAD])
def test_bad_input_is_refused_in_one_line(words, told, refusal):
  assert told in refusal(words)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_message_has_neither_frame_nor_colours(encoding, monkeypatch, refusal):
  """A terminal's frame is of colours, or of hyphens."""
  members = {"encoding": encoding, "isatty": lambda self: True}
  terminal = type("Terminal", (io.StringIO,), members)
  monkeypatch.setattr(sys, "stdout", terminal())
  monkeypatch.setenv("TERM", "xterm")
  assert refusal("train extra") == (
    "jdist: error: Unrecognized options: extra. `jdist train --help` explains "
    "the options.\n"
  )


@pytest.mark.smoke
def test_process_prints_the_refusal(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "jdist", "train", "--wokers", "4"],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr == (
    "jdist: error: there is no option `--wokers`, did you mean `--workers`? "
    "`jdist train --help` lists all.\n"
  )


def test_missing_data_set_is_reported_within_seconds(tmp_path):
  def computed_s():
    used = os.times()
    return used.children_user + used.children_system

  start_s = computed_s()
  done = subprocess.run(
    [sys.executable, "-m", "jdist", "train", "--preset", "cifar10"],
    cwd=tmp_path,
    env=os.environ
    | {"PYTHONPATH": str(_ROOT), "TFDS_DATA_DIR": str(tmp_path / "none")},
    capture_output=True,
    text=True,
    timeout=300,
  )
  # Most of this time is the start of Python; a busy machine adds none to it.
  assert computed_s() - start_s < 30
  assert done.returncode == 2, done.stderr
  assert done.stderr.count("\n") == 1
  assert "python -m jdist.data prepare cifar10" in done.stderr
  assert not (tmp_path / "runs").exists()


def test_bug_keeps_its_traceback(monkeypatch):
  from jdist.cli import _train

  def broken(options):
    del options
    int("this is a bug and no bad option")

  def outside(options):
    del options
    raise OSError("the disk is gone")

  monkeypatch.setattr(_train, "train", outside)
  with pytest.raises(OSError, match="the disk is gone"):
    cli.main(["train"])
  monkeypatch.setattr(_train, "train", broken)
  with pytest.raises(ValueError, match="invalid literal"):
    cli.main(["train"])


def test_interrupt_ends_without_a_traceback(monkeypatch, capsys):
  from jdist.cli import _train

  def interrupted(options):
    del options
    raise KeyboardInterrupt

  monkeypatch.setattr(_train, "train", interrupted)
  assert cli.main(["train"]) == 130
  assert capsys.readouterr().err == "jdist: interrupted.\n"


def _caused(error, cause):
  error.__cause__ = cause
  return error


@pytest.mark.parametrize(
  ("error", "again"),
  [
    (OSError(errno.ENOSPC, "No space left on device", "rows.jsonl"), True),
    (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
    (OSError(errno.EMFILE, "x"), True),
    (OSError(errno.ENFILE, "x"), True),
    (OSError(errno.ESTALE, "x"), True),
    (OSError(errno.EAGAIN, "x"), True),
    (_caused(OSError("was not saved"), OSError(errno.EIO, "...")), True),
    (_caused(OSError("x"), ValueError("FAILED: No space left on dev")), False),
    (_caused(OSError("x"), ValueError("A: No space left on device [2]")), True),
    (_caused(ValueError("x"), OSError(errno.EADDRINUSE, "taken")), True),
    (TimeoutError("process 0 did not answer"), True),
    (ConnectionError("device 1 of the pipeline is gone"), True),
    (_run_end.LostError("a worker"), True),
    (PermissionError("process 0 is of another run"), True),
    (PermissionError(errno.EACCES, "Permission denied", "rows.jsonl"), False),
    (FileNotFoundError(errno.ENOENT, "No such file", "text"), False),
    (ValueError("`--seed` must be an int"), False),
  ],
  ids=str,
)
def test_errors_that_pass_are_told_from_wrong_options(error, again):
  assert _run_end.passes(error) == again


@pytest.mark.parametrize(
  ("host", "status"), [("127.0.0.1", 75), ("192.0.2.1", 2)]
)
def test_taken_port_and_wrong_address_have_other_statuses(host, status):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    done = subprocess.run(
      [
        sys.executable, "-m", "jdist", "train", "--dataset", "synthetic",
        "--workers", "2", "--coordinator-address", f"{host}:{port}",
        "--num-processes", "2", "--process-id", "0",
      ],
      cwd=_ROOT,
      env=_processes.environment(),
      capture_output=True,
      text=True,
      timeout=120,
    )  # fmt: skip
  assert done.returncode == status
  assert done.stderr.startswith(
    "jdist: error: `coordinator_address` must be a "
  )
  assert done.stderr.count("\n") == 1
