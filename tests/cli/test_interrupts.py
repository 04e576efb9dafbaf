"""An interrupt ends a command at any place in the code."""

import functools
import json
import subprocess
import sys
import textwrap

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
