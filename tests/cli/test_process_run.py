"""`jdist train --runtime processes`: rows, resumed runs, and refusals."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jdist import cli
from tests import _processes

pytest.importorskip("grain")
_RUN = (
  "train --method ssgd --workers 1 --batch-size 128 --steps 6 --warmup-epochs 0"
)
_CUT = "--stages 2 --microbatches 4 --cuts 1"
_PROCESSES = "--runtime processes"
_COMPARED = ("accuracy", "test_loss", "train_loss", "rounds", "sent_bytes")


def _train(words, folder, capsys):
  assert cli.main(f"{_RUN} {words} --output {folder}".split()) == 0
  capsys.readouterr()
  return _row(folder)


def _row(folder):
  row = json.loads((folder / "rows.jsonl").read_text().splitlines()[-1])
  return {name: row[name] for name in _COMPARED}


def test_workers_of_a_stage_train_and_find_their_end(tmp_path, capsys, refusal):
  words = f"--stages 1 --microbatches 2 {_PROCESSES} --steps 2"
  words += f" --checkpoints {tmp_path / 'saved'} --workers 2"
  words += " --method local_sgd --interval 2"
  found = _train(words, tmp_path, capsys)
  assert found["rounds"] == 1 and 0 < found["test_loss"] < 3
  assert found["sent_bytes"] > 0
  # Seconds are those of the second step, as the first one compiles.
  row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[-1])
  assert row["samples_per_s"] * row["train_s"] == pytest.approx(128)
  assert cli.main(f"{_RUN} {words} --output {tmp_path}".split()) == 0
  assert "Nothing left to train: step 2 of 2." in capsys.readouterr().out
  assert _row(tmp_path) == found
  assert cli.main(f"{_RUN} {words} --workers 4".split()) == 2
  told = "`--workers` is 2 in the checkpoint and 4 here."
  assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("table", ["zb_h1", "ours --window 2 --steps 16"])
def test_processes_of_stages_leave_one_row(table, tmp_path, capsys):
  words = f"{_CUT} --table {table}"
  found = _train(f"{words} {_PROCESSES}", tmp_path / "a", capsys)
  wanted = _train(words, tmp_path / "b", capsys)
  # Between two runs of a table processes drain it, and one program does not.
  close = 1e-5 if "ours" not in table else 0.3
  assert found == pytest.approx(wanted, rel=close)


@pytest.mark.slow
@pytest.mark.parametrize(
  "method",
  [
    "ssgd",
    "powersgd",
    "qsgd",
    "msdpu --interval 3",
    "diloco --interval 3 --codec int4 --feedback error",
  ],
)
def test_workers_with_stages_leave_the_row_of_whole_models(
  method, tmp_path, capsys
):
  words = f"--workers 2 --method {method}"
  cut = f"--stages 2 --microbatches 2 --cuts 1 {_PROCESSES}"
  found = _train(f"{words} {cut}", tmp_path / "a", capsys)
  wanted = _train(f"{words} --accumulate 2", tmp_path / "b", capsys)
  # Each stage fills its own last block of a code.
  sent = found.pop("sent_bytes"), wanted.pop("sent_bytes")
  assert sent[0] == pytest.approx(sent[1], rel=0.1 if "int4" in method else 0)
  assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_coded_edges_send_less_and_train_as_well(tmp_path, capsys):
  words = f"{_CUT} {_PROCESSES}"
  rows = []
  for name, more in (("a", ""), ("b", " --edge-codec int4")):
    _train(words + more, tmp_path / name, capsys)
    text = (tmp_path / name / "rows.jsonl").read_text()
    rows.append(json.loads(text.splitlines()[-1]))
  plain, coded = rows
  assert coded["train_loss"] == pytest.approx(plain["train_loss"], rel=0.05)
  assert coded["train_loss"] != plain["train_loss"]
  assert 7 < plain["edge_bytes"] / coded["edge_bytes"] < 8


def _start(folder, words, *before):
  command = [sys.executable, "-m", "jdist", *before, *_RUN.split()]
  return subprocess.Popen([*command, *words.split(), "--output", str(folder)])


def _wait_for(saved, step, process):
  def newest():
    names = (x.stem for x in pathlib.Path(saved).glob("step_*.json"))
    return max((int(x.split("_")[1]) for x in names), default=0)

  while newest() < step and process.poll() is None:
    time.sleep(0.02)
  assert process.poll() is None, "the run was over before it could be ended"


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["SIGTERM", "stage killed"])
def test_resumed_processes_train_to_the_same_bits(ended, tmp_path, capsys):
  words = (
    f"{_CUT} {_PROCESSES} --steps 60 --momentum 0.9 --evaluate-every-epochs 1"
  )
  saved = tmp_path / "saved"
  kept = f"{words} --checkpoints {saved} --checkpoint-every-epochs 0.05"
  launch = ("launch", "-n", "2", "--backoff-s", "0", "--")
  process = _start(
    tmp_path / "a", kept, *(launch if ended == "stage killed" else ())
  )
  _wait_for(saved, 3, process)
  if ended == "SIGTERM":
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143
    found = _train(kept, tmp_path / "a", capsys)
  else:
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    assert process.wait(300) == 0
    found = _row(tmp_path / "a")
  assert found == _train(words, tmp_path / "b", capsys)


def test_processes_with_other_options_name_them(tmp_path):
  address = f"127.0.0.1:{_processes.free_port()}"
  words = f"{_CUT} {_PROCESSES} --num-processes 2 --coordinator-address"
  started = [
    subprocess.Popen(
      [sys.executable, "-m", "jdist", *_RUN.split(), *words.split(), address,
       "--process-id", str(i), "--seed", str(i), "--output",
       str(tmp_path / str(i))],
      env=_processes.environment(), stderr=subprocess.PIPE, text=True,
    )
    for i in range(2)
  ]  # fmt: skip
  for number, process in enumerate(started):
    _, error = process.communicate(timeout=200)
    assert process.returncode == 2, error
    told = f"must agree, but `--seed` is {number} in the process of dev"
    assert told in error and error.count("\n") == 1


@pytest.mark.parametrize(
  ("words", "told"),
  [
    ("", "`--runtime` must be left out without `--stages`"),
    ("--stages 2 --workers 2 --skip-nonfinite", "`--skip-nonfinite` must be"),
    ("--stages 2 --table ours --late-from 0.5", "`--late-from` must be left"),
    ("--stages 2 --table zb_h2", "`--steps` must be a multiple of the 8 iter"),
    (
      "--stages 3 --microbatches 4",
      "`--num-processes`, the 3 stages, and `--process-id` must",
    ),
    (
      "--stages 2 --table paci --steps 8 --delay-fix prediction",
      "`--delay-fix` must be left out for `--table` paci",
    ),
  ],
)
def test_invalid_options_are_refused_in_a_line(words, told, refusal):
  # The numbers of a started process keep the command from starting any.
  given = "--coordinator-address x:1 --num-processes 2 --process-id 0"
  given = given if words else ""
  assert told in refusal(f"{_RUN} {_PROCESSES} {words} {given}")


def test_launch_needs_a_process_for_each_stage(refusal):
  words = f"launch -n 3 -- {_RUN} --stages 2 {_PROCESSES}"
  assert "must be the 2 stages" in refusal(words)
