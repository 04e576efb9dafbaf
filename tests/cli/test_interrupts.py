"""An interrupt ends a command at any place in the code."""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jdist import cli
from jdist.cli import _workload

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
  for at, more, told in (
    (
      1,
      "",
      "interrupted: no step is saved, as there is no `--checkpoints DIR`.",
    ),
    (1, saved, "interrupted: nothing is saved."),
    # A step is saved after it has been evaluated.
    (
      3,
      saved,
      f"interrupted: step 2 is saved in {tmp_path / 'c'}: the same command "
      "resumes from there.",
    ),
  ):
    monkeypatch.setattr(_workload, "loss", functools.partial(interrupted, at))
    assert cli.main(f"{words} {more}".split()) == 130
    curve = f"Its curve is in {tmp_path}."
    assert capsys.readouterr().err == f"jdist: {told} {curve}\n"
    assert json.loads((tmp_path / "status.json").read_text())["state"] == (
      "interrupted"
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
    (_TRAIN + "--checkpoints DIR/c", "step ", "the same command resumes"),
    (_TRAIN, "no step is saved", "Its curve is in DIR/run"),
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
      "the same command resumes",
    ),
  ],
  ids=["train", "train without checkpoints", "compare", "simulate", "launch"],
)
def test_interrupted_command_leaves_a_page(words, saved, way, tmp_path):
  folder, (saved, way) = tmp_path / "run", (
    x.replace("DIR", str(tmp_path)) for x in (saved, way)
  )  # fmt: skip
  (tmp_path / "cluster.toml").write_text(
    "[profile]\nseconds_per_sample = 0.01\npull_bytes = 4\npush_bytes = 4\n"
    "[[nodes]]\nname = 'a'\n[[nodes]]\nname = 'b'\n"
  )
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
        if kept if "/c" in words else "simulate" in words or status.get("row"):
          break
      time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == 130, error
  (line,) = (x for x in error.splitlines() if x.startswith("jdist: inter"))
  assert saved in line and way in line
  status = json.loads((folder / "status.json").read_text())
  assert status["state"] == "interrupted"
  if importlib.util.find_spec("vl_convert"):
    page = (folder / "report.html").read_text()
    assert "interrupted" in page and status["command"] in page
  # The page can be written again, and its command is the one that was typed.
  assert cli.main(["report", str(folder)]) == 0
