"""An interrupt ends a command at any place in the code."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jdist import cli, training
from jdist.cli import _workload
from jdist.cli.report import _page

# This command is interrupted where Python cannot raise the exception.
_LOSES_ONE = textwrap.dedent("""
  import gc, os, signal, sys, time
  from jdist import cli
  from jdist.cli import _train

  # Background processes of a shell ignore SIGINT, and so do their children.
  signal.signal(signal.SIGINT, signal.default_int_handler)

  def lose(phase, info):
    gc.callbacks.remove(lose)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)  # It is interrupted here.

  def run(options):
    gc.callbacks.append(lose)
    gc.collect()
    for _ in range(3000):
      time.sleep(0.01)

  _train.train = run
  sys.exit(cli.main(["train"]))
""")


def test_interrupt_during_garbage_collection_is_not_lost():
  done = subprocess.run(
    (sys.executable, "-c", _LOSES_ONE),
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 130, done.stderr
  assert done.stderr == "jdist: interrupted.\n"


def test_interrupted_run_says_what_is_saved(tmp_path, monkeypatch, capsys):
  words = (
    "train --dataset synthetic --method ssgd --workers 1 --batch-size 64 "
    f"--steps 4 --output {tmp_path} --evaluate-every-epochs 0.01"
  )

  def interrupted(step, record):
    if record.step == step:
      raise KeyboardInterrupt
    return str(record.train_loss)

  saved = f"--checkpoints {tmp_path / 'c'} --checkpoint-every-epochs 0.01"
  for at, more, told, way in (
    (
      1,
      "",
      "as there is no `--checkpoints DIR`, nothing is saved.",
      "starts again",
    ),
    (1, saved, "nothing is saved.", "starts again"),
    # A step is saved after it has been evaluated.
    (3, saved, f"step 2 is saved in {tmp_path / 'c'}.", "resumes"),
  ):
    monkeypatch.setattr(_workload, "loss", functools.partial(interrupted, at))
    assert cli.main(f"{words} {more}".split()) == 130
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "interrupted"
    assert capsys.readouterr().err == (
      f"jdist: interrupted: its status is in {tmp_path}; {told} "
      f"This {way}: {status['command']}\n"
    )


def test_other_unraisable_errors_are_reported_as_usual():
  script = textwrap.dedent("""
    from jdist.cli import _interrupts

    class Broken:
      def __del__(self):
        raise RuntimeError("broken")

    with _interrupts.kept():
      Broken()
  """)
  done = subprocess.run(
    (sys.executable, "-c", script), capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0
  assert "RuntimeError: broken" in done.stderr


_TRAIN = (
  "train --dataset synthetic --method ssgd --workers 1 --batch-size 64 "
  "--steps 100000000 --evaluate-every-epochs 1 "
)
_MACHINES = """
[profile]
seconds_per_sample = 0.01
pull_bytes = 4
push_bytes = 4
[[nodes]]
name = "a"
[[nodes]]
name = "b"
"""


@pytest.mark.parametrize(
  ("words", "told"),
  [
    ("simulate DIR/cluster.toml --protocols bsp --updates 2", "are saved in"),
    (
      "train --dataset synthetic --method ssgd --workers 1 --steps 2",
      "nothing is saved. This starts again",
    ),
  ],
  ids=["simulate", "train"],
)
def test_interrupt_of_the_first_page_is_explained(
  words, told, tmp_path, monkeypatch, capsys
):
  pytest.importorskip("vl_convert")
  (tmp_path / "cluster.toml").write_text(_MACHINES)
  write, left = _page.write, [KeyboardInterrupt]

  def interrupted(*arguments):
    if left:
      raise left.pop()
    return write(*arguments)

  monkeypatch.setattr(_page, "write", interrupted)
  run = tmp_path / "run"
  words = f"{words.replace('DIR', str(tmp_path))} --output {run}"
  assert cli.main(words.split()) == 130
  printed = capsys.readouterr()
  assert told in printed.err and "┃ protocol" not in printed.out
  assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
  # There is no row yet, but it is known what was to be run.
  page = (run / "report.html").read_text()
  assert "<dt>output</dt>" in page and f"<dd>{run}</dd>" in page


_INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jdist import cli
sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("words", "saved", "way"),
  [
    (_TRAIN + "--checkpoints DIR/c", "; step ", "This resumes: jdist train"),
    (_TRAIN, "nothing is saved", "its status is in DIR/run"),
    (
      _TRAIN.replace("train --", "compare --").replace("method", "methods"),
      "rows are saved in DIR/run",
      "This resumes: jdist compare",
    ),
    (
      "simulate DIR/cluster.toml --protocols bsp asp --updates 1000000000 ",
      "the rows of no protocol are saved in DIR/run",
      "This starts again: jdist simulate",
    ),
    (
      "launch -n 1 -- " + _TRAIN + "--checkpoints DIR/c",
      "step ",
      "This resumes: jdist train",
    ),
  ],
  ids=["train", "train without checkpoints", "compare", "simulate", "launch"],
)
def test_interrupted_command_leaves_a_page(words, saved, way, tmp_path):
  folder, (saved, way) = tmp_path / "run", (
    x.replace("DIR", str(tmp_path)) for x in (saved, way)
  )  # fmt: skip
  (tmp_path / "cluster.toml").write_text(_MACHINES)
  words = f"{words.replace('DIR', str(tmp_path))} --output {folder}"
  process = subprocess.Popen(
    (sys.executable, "-c", _INTERRUPTIBLE, *words.split()),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
  )
  try:
    end_s, status = time.monotonic() + 300, {}
    # Everything is compiled when there is a row, or a checkpoint.
    while time.monotonic() < end_s and process.poll() is None:
      if (folder / "status.json").exists():
        status = json.loads((folder / "status.json").read_text())
        kept = [*(tmp_path / "c").glob("step_*.json")]
        at_once = "simulate" in words or status.get("row")
        if kept if "--checkpoints" in words else at_once:
          break
      time.sleep(0.05)
    for _ in range(2):  # The second one must not cut off what is saved.
      process.send_signal(signal.SIGINT)
      time.sleep(0.1)
    _, error = process.communicate(timeout=300)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == 130, error
  assert "Traceback" not in error
  (line,) = (x for x in error.splitlines() if x.startswith("jdist: inter"))
  assert saved in line and way in line
  status = json.loads((folder / "status.json").read_text())
  assert status["state"] == "interrupted"
  if importlib.util.find_spec("vl_convert"):
    page = (folder / "report.html").read_text()
    assert "interrupted" in page and status["command"] in page
  # The page can be written again, and its command is the one that was typed.
  assert cli.main(["report", str(folder)]) == 0


_FEW = (
  "train --dataset synthetic --method diloco --interval 4 --workers 2 "
  "--batch-size 64 --steps 64 --evaluate-every-epochs 0.5 "
  "--checkpoints DIR/c --checkpoint-every-epochs 0.5 --output DIR/run"
)


def _results(folder):
  """Returns what the rows of a run say, without times."""
  found = {}
  for row in training.read_rows(folder / "run" / "rows.jsonl"):
    name = str([row.get(x) for x in ("method", "protocol", "seed")])
    found[name] = row.get("nodes") or [
      {x: point[x] for x in ("step", "loss", "sent_bytes")}
      for point in row["curve"]
    ]
  return found


@pytest.mark.slow
@pytest.mark.parametrize(
  "words",
  [
    _FEW,
    "launch -n 2 -- " + _FEW,
    "compare --dataset synthetic --methods ssgd diloco --workers 2 --steps 16 "
    "--batch-size 64 --seeds 0 1 2 --output DIR/run",
    "simulate DIR/cluster.toml --protocols bsp asp ssp --updates 40000 "
    "--output DIR/run",
  ],
  ids=["train", "launch", "compare", "simulate"],
)
def test_printed_command_leads_to_the_undisturbed_result(words, tmp_path):
  """A terminal's interrupts, to all processes, in the middle of a run."""

  def start(words):
    process = subprocess.Popen(
      (sys.executable, "-c", _INTERRUPTIBLE, *words),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )
    return process, functools.partial(process.communicate, timeout=400)

  folders = [tmp_path / name for name in ("whole", "cut")]
  for folder in folders:
    folder.mkdir()
    (folder / "cluster.toml").write_text(_MACHINES)
    own = words.replace("DIR", str(folder)).split()
    process, end = start(own)
    try:
      if folder is folders[0]:
        _, error = end()
        assert process.returncode == 0, error
        continue
      kept = "--checkpoints" in words
      begun = "c/step_*.json" if kept else "run/rows.jsonl"
      while process.poll() is None and not [*folder.glob(begun)]:
        time.sleep(0.02)
      for _ in range(2):  # It may have ended before the second one.
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
      _, error = end()
      assert process.returncode == 130, error
      assert "Traceback" not in error
    finally:
      process.kill()
      process.wait()
  way = re.search(r"This (?:resumes|starts again): jdist (.*)", error)
  process, end = start(shlex.split(way[1]))
  _, error = end()
  assert process.returncode == 0, error
  assert _results(folders[1]) == _results(folders[0])
