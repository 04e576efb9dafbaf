"""Processes on this machine: how they end, and when they are restarted."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from jdist.cli import _commands
from jdist.cli.launch import _launch, _local_run

# This process ends as the file `plan` says for this start and its number: with
# a status, or by a signal to itself. With `save`, it first writes a checkpoint.
_CHILD = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
number = int(sys.argv[sys.argv.index("--process-id") + 1])
starts = here / f"starts{number}"
start = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (start + 1))
words = (here / "plan").read_text().splitlines()[start].split()[number]
how, _, save = words.partition("+")
if save:
  (here / f"step_{int(save):08d}.json").write_text("")
print(f"jdist: told by {number}", file=sys.stderr, flush=True)
if how == "sleep":
  time.sleep(600)
if how.startswith("-"):
  os.kill(os.getpid(), -int(how))
sys.exit(int(how))
"""


def _run(tmp_path, *plan, restarts=2, backoff_s=0.01):
  (tmp_path / "plan").write_text("\n".join(plan))
  run = _local_run.LocalRun(
    [sys.executable, "-c", _CHILD, str(tmp_path)],
    len(plan[0].split()),
    checkpoints=str(tmp_path),
    restarts=restarts,
    backoff_s=backoff_s,
  )
  status = run.run()
  starts = [
    len((tmp_path / f"starts{i}").read_text())
    for i in range(len(plan[0].split()))
  ]
  assert len(set(starts)) == 1
  return status, starts[0]


def test_successful_run_is_started_once(tmp_path, capfd):
  assert _run(tmp_path, "0 0 0") == (0, 1)
  assert "launch" not in capfd.readouterr().err


def test_killed_process_is_named_and_all_restart(tmp_path, capfd):
  assert _run(tmp_path, "75+7 -9", "0 0") == (0, 2)
  told = capfd.readouterr().err
  assert (
    "jdist: launch: process 1 was killed by SIGKILL; restarting all from "
    "step 7 in 0.01 s (restart 1 of 2 without a new checkpoint)." in told
  )


def test_equal_messages_are_shown_once(tmp_path, capfd):
  assert _run(tmp_path, "2 2 2") == (2, 1)
  assert capfd.readouterr().err == "jdist: told by 0\n"


def test_diverged_run_is_not_restarted(tmp_path):
  assert _run(tmp_path, "75 3") == (3, 1)


def test_sigterm_of_one_process_restarts_the_run(tmp_path):
  plan = ["143+1 143", "143+2 143", "143+3 143", "143+4 143", "0 0"]
  assert _run(tmp_path, *plan) == (0, 5)


def test_run_without_progress_is_given_up(tmp_path, capfd):
  # The second start saves a checkpoint, which resets the count of restarts.
  plan = ["1 75", "1+3 75", "1 75", "1 75", "0 0"]
  assert _run(tmp_path, *plan) == (1, 4)
  told = capfd.readouterr().err
  assert "process 0 has ended with status 1; given up after 2 rest" in told


def test_process_that_may_try_again_is_restarted(tmp_path, capfd):
  assert _run(tmp_path, "75 75", "0 0") == (0, 2)
  told = capfd.readouterr().err
  assert "process 0 has ended with status 75 (try again); restarting" in told


def test_others_of_a_killed_process_are_not_awaited_for_long(tmp_path, capfd):
  # Process 0 still waits for the one that was killed before it had joined.
  begin = time.monotonic()
  assert _run(tmp_path, "sleep -9", "0 0") == (0, 2)
  assert time.monotonic() - begin < 15
  assert "process 1 was killed by SIGKILL" in capfd.readouterr().err


def test_processes_share_a_secret_that_no_command_line_shows(
  tmp_path, monkeypatch
):
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  folder = tmp_path / "told"
  folder.mkdir()
  code = (
    "import os, pathlib, sys; "
    "found = [os.environ[x] for x in ('JDIST_RUN_ID', 'JDIST_SECRET')]; "
    "assert len(found[1]) == 64 and not set(found) & set(sys.argv); "
    "cache = os.environ['JAX_COMPILATION_CACHE_DIR']; "
    "assert os.stat(cache).st_mode & 0o77 == 0; "
    "assert 'hugetlb=1' in os.environ['GLIBC_TUNABLES']; "
    "pathlib.Path(sys.argv[1], sys.argv[-1]).write_text(' '.join(found))"
  )
  run = _local_run.LocalRun(
    [sys.executable, "-c", code, str(folder)],
    2,
    checkpoints=None,
    restarts=0,
    backoff_s=0.01,
  )
  assert run.run() == 0
  told = {path.read_text() for path in folder.iterdir()}
  assert run.run() == 0
  again = {path.read_text() for path in folder.iterdir()}
  assert len(told) == len(again) == 1 and told != again


def test_restart_delays_double(tmp_path, monkeypatch):
  waits = []
  monkeypatch.setattr(
    _local_run.LocalRun, "_sleep", lambda self, wait_s: waits.append(wait_s)
  )
  assert _run(tmp_path, *["1 1"] * 9, restarts=8, backoff_s=1.0)[0] == 1
  assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_are_noted_and_their_handlers_come_back(sent):
  run = _local_run.LocalRun(
    ("true",), 1, checkpoints=None, restarts=0, backoff_s=0.0
  )
  before = signal.signal(sent, signal.SIG_IGN)
  try:
    with run._signals():
      signal.raise_signal(sent)
    assert run._stop is sent
    assert signal.getsignal(sent) is signal.SIG_IGN
  finally:
    signal.signal(sent, before)


def test_sigterm_is_forwarded_and_ends_the_run():
  # Each line is one write, because two processes share the pipe.
  waits = "import os, time; os.write(1, b'up\\n'); time.sleep(600)"
  code = (
    "import sys; from jdist.cli.launch import _local_run; "
    f"run = _local_run.LocalRun([sys.executable, '-c', {waits!r}], 2, "
    "checkpoints=None, restarts=3, backoff_s=0.01); sys.exit(run.run())"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
  )
  try:
    assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
  finally:
    process.kill()
    process.stdout.close()
    process.wait()


@pytest.mark.parametrize(
  ("statuses", "status"),
  [
    ([0, 143], 143),
    ([143, 75], 75),
    ([75, 1], 1),
    ([75, 143, -9], 137),
    ([-9, 3], 3),
  ],
)
def test_status_of_a_run_is_its_root_cause(statuses, status):
  assert _local_run.judge(statuses)[0] == status


@pytest.mark.parametrize(
  ("words", "told"),
  [
    ("-n 2", "the command behind `--` must be `train`"),
    ("-n 2 -- compare", "the command behind `--` must be `train`"),
    ("-n 0 -- train", "`--num-processes` must be at least 1"),
    ("-n 3 -- train", "`--workers` must be a multiple of the 3 processes"),
    ("-n 2 -- train --worker 2", "did you mean `--workers`?"),
    ("-n 2 -- train --process-id 0", "`--process-id` must be left out"),
    ("-n 2 --image x -- train", "`--image` must be left out without"),
    ("-n 2 --print mpi -- train", "`--checkpoints` must be given"),
    (
      "-n 2 --print kubernetes -- train --checkpoints ck",
      "`--checkpoints` must be absolute",
    ),
    (
      "-n 2 --gpus-per-node 4 --print slurm -- train --checkpoints ck",
      "`--num-processes` must be a multiple of the 4 GPUs",
    ),
    (
      "--print mpi --name A_b -- train --checkpoints ck",
      "`--name` must consist of lower-case letters",
    ),
    ("-n 2 -- train --help", "`--help` must stand alone"),
    ("-n 2 train --method diloco", "`train` must stand behind `--`"),
  ],
)
def test_bad_launch_is_refused_in_one_line(words, told, refusal):
  assert told in refusal(f"launch {words}")


# -- How long processes are waited for, by a clock of this file.


class _Clock:
  now_s = 0.0

  def monotonic(self):
    return self.now_s

  def sleep(self, seconds):
    self.now_s += seconds
    assert self.now_s < 1000


class _Process:
  """A process that ends by itself, or so many seconds after a signal."""

  def __init__(self, code=0, end_s=math.inf, saving_s=math.inf):
    self.code, self.end_s, self.saving_s = code, end_s, saving_s
    self.signals = []

  def poll(self):
    return self.code if self.clock.now_s >= self.end_s else None

  def send_signal(self, number):
    self.signals.append(number)
    self.code, self.end_s = 143, self.clock.now_s + self.saving_s

  def kill(self):
    if self.poll() is None:
      self.code, self.end_s = -9, self.clock.now_s


@pytest.mark.parametrize(
  ("processes", "stop", "statuses", "took_s"),
  [
    ([(0, 3.0), (0, 7.0)], None, [0, 0], 7),
    # The others of a failed process end by themselves, or are killed.
    ([(1, 3.0), (75, 22.0)], None, [1, 75], 22),
    ([(1, 3.0), (0,)], None, [1, 75], 3 + 20),
    ([(0, 1.0), (-9, 3.0), (0,)], None, [0, -9, 75], 3 + 5),
    # The first failure counts.
    ([(1, 3.0), (-9, 6.0), (0,)], None, [1, -9, 75], 3 + 20),
    # Processes save upon a signal, for two minutes at most.
    ([(0, 999.0, 60.0), (0, 999.0, 100.0)], signal.SIGTERM, [143, 143], 100),
    ([(0, 999.0, 60.0), (0,)], signal.SIGINT, [143, 75], 120),
  ],
)
def test_processes_are_waited_for_as_long_as_they_may_take(
  processes, stop, statuses, took_s, monkeypatch
):
  clock, made = _Clock(), [_Process(*given) for given in processes]
  monkeypatch.setattr(_local_run, "time", clock)
  monkeypatch.setattr(_Process, "clock", clock, raising=False)
  run = _local_run.LocalRun(
    ("true",), len(made), checkpoints=None, restarts=0, backoff_s=0.0
  )
  run._stop = stop
  assert run._wait(made) == statuses
  assert clock.now_s == pytest.approx(took_s, abs=0.2)
  # The signal is sent once, to all.
  assert [x.signals for x in made] == [[stop] * (stop is not None)] * len(made)


def test_signal_while_a_restart_waits_ends_the_run(monkeypatch):
  run = _local_run.LocalRun(
    ("true",), 1, checkpoints=None, restarts=2, backoff_s=1.0
  )
  monkeypatch.setattr(run, "_attempt", lambda: [1])
  monkeypatch.setattr(
    run, "_sleep", lambda wait_s: setattr(run, "_stop", signal.SIGINT)
  )
  assert run.run() == 130


def test_wait_before_a_restart_ends_with_a_signal(monkeypatch):
  clock = _Clock()
  monkeypatch.setattr(_local_run, "time", clock)
  run = _local_run.LocalRun(
    ("true",), 1, checkpoints=None, restarts=2, backoff_s=1.0
  )
  run._sleep(3.0)
  assert clock.now_s == pytest.approx(3.0, abs=0.1)
  run._stop = signal.SIGTERM
  run._sleep(3.0)
  assert clock.now_s == pytest.approx(3.0, abs=0.1)


def test_no_process_outlives_an_error_of_the_launcher(monkeypatch):
  sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
  run = _local_run.LocalRun(
    sleeps, 2, checkpoints=None, restarts=0, backoff_s=0.0
  )
  run._environment = dict(os.environ)
  seen = []

  def fail(processes):
    seen.extend(processes)
    raise OSError

  monkeypatch.setattr(run, "_wait", fail)
  with pytest.raises(OSError):
    run._attempt()
  assert [x.returncode for x in seen] == [-9, -9]


def test_programs_are_not_kept_in_a_folder_of_another_user(monkeypatch, capsys):
  def refuse(path):
    raise OSError("it is another user's")

  monkeypatch.setattr(_local_run.channel, "private_directory", refuse)
  assert _local_run._compiled() == {}
  told = "jdist: launch: compiled programs are not kept: it is another user's\n"
  assert capsys.readouterr().err == told


@pytest.mark.parametrize(
  ("checkpoints", "restarts", "told"),
  [("c", 4, ""), (None, 4, "is not started again"), (None, 0, "")],
)
def test_run_without_checkpoints_is_not_started_again(
  checkpoints, restarts, told, monkeypatch, capsys
):
  made = []

  class Run:
    def __init__(self, *given, **options):
      made.append((*given, options))

    def run(self):
      return 7

  monkeypatch.setattr(_local_run, "LocalRun", Run)
  words = ("train", "--method", "ssgd")
  options = _commands.Launch(
    num_processes=2, restarts=restarts, backoff_s=0.5, command=words,
    train=_commands.Train(checkpoints=checkpoints),
  )  # fmt: skip
  assert _launch.launch(options) == 7
  ((command, number, options),) = made
  assert command == [sys.executable, "-m", "jdist", *words] and number == 2
  assert options == {
    "checkpoints": checkpoints, "backoff_s": 0.5,
    "restarts": restarts if checkpoints else 0,
  }  # fmt: skip
  error = capsys.readouterr().err
  assert told in error and bool(error) == bool(told)
