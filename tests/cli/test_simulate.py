"""`jdist simulate`: its output, its files and its refusals."""

import dataclasses
import json
import re

import pytest

from jdist import cli, cluster, server
from jdist.cli import _commands, _output
from jdist.cli.servers import _protocols, _simulate

pytest.importorskip("simpy")
pytest.importorskip("matplotlib")

FILE = """
[[nodes]]
name = "fast"
count = 2
speed = 8.0

[[nodes]]
name = "slow"
memory_gb = 1

[profile]
seconds_per_sample = 0.01
bytes_per_sample = 1_000_000
pull_bytes = 1000
push_bytes = 2000
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "cluster.toml"
  path.write_text(FILE)
  return str(path)


def test_each_protocol_writes_row_and_timeline(file, tmp_path, capsys):
  output = tmp_path / "out"
  names = list(server.PROTOCOLS)
  words = ["simulate", file, "--protocols", *names, "--updates", "60"]
  assert cli.main([*words, "--output", str(output)]) == 0
  out = capsys.readouterr().out
  rows = [
    json.loads(line)
    for line in (output / "rows.jsonl").read_text().splitlines()
  ]
  assert [row["protocol"] for row in rows] == names
  assert all(row["updates"] == 60 for row in rows)
  for row in rows:
    assert len(row["nodes"]) == 3
    assert sum(x["samples"] for x in row["nodes"].values()) > 0
  for name in names:
    assert re.search(f"^│ ?{name} *│", out, re.MULTILINE)
    assert json.loads((output / f"{name}.json").read_text())["traceEvents"]
  of = {row["protocol"]: row for row in rows}
  assert of["bsp"]["staleness"]["maximum"] == 0
  assert of["asp"]["iteration_spread"] > 7
  assert of["dbs"]["iteration_spread"] < 1.2
  # At the end each machine has one task in flight.
  assert of["asp"]["pulled_bytes"] == 1000 * 63


def test_samples_and_seconds_limit_a_simulation(file, tmp_path):
  for words, key in (
    ("--samples 320", "samples"),
    ("--seconds 2", "virtual_s"),
  ):
    output = tmp_path / key
    command = f"simulate {file} --protocols asp {words} --output {output}"
    assert cli.main(command.split()) == 0
    row = json.loads((output / "rows.jsonl").read_text())
    limit = float(words.split()[1])
    assert 0.8 * limit < row[key] <= limit


def test_seed_draws_the_jitter(tmp_path):
  path = tmp_path / "jitter.toml"
  path.write_text(FILE.replace("speed = 8.0", "speed = 8.0\njitter = 0.5"))
  times = []
  for number, seed in enumerate((0, 0, 1)):
    output = tmp_path / f"out{number}"
    command = f"simulate {path} --protocols asp --updates 20 --seed {seed}"
    assert cli.main([*command.split(), "--output", str(output)]) == 0
    row = json.loads((output / "rows.jsonl").read_text())
    times.append(row["virtual_s"])
  assert times[0] == times[1] != times[2]


def test_h_ps_pipelines_after_a_share_of_the_run(file, tmp_path):
  """By updates, or by samples: 40 rounds of 3 workers' 32."""
  for limit in ("--updates 40", "--samples 3840"):
    output = tmp_path / limit[2:]
    words = f"simulate {file} --protocols h_ps --pipeline-from 0.75 {limit}"
    words = [*words.split(), "--batch-size", "32", "--output", str(output)]
    assert cli.main(words) == 0
    row = json.loads((output / "rows.jsonl").read_text())
    assert row["updates"] == pytest.approx(40, abs=1)
    counts = row["staleness"]["counts"]
    # 30 rounds run in turn, as does the pipeline's first one.
    assert counts["0"] == 31 * 3
    assert counts["1"] == pytest.approx(9 * 3, abs=3)


WRONG = {
  "no file": ("", r"jdist simulate CLUSTER.toml"),
  "a file that is not there": ("nowhere.toml", "no file 'nowhere.toml'"),
  "protocol": (
    "FILE --protocols best",
    "`--protocols` must be one of bsp, .*'best'",
  ),
  "twice": ("FILE --protocols asp asp", "`--protocols` must be .* different"),
  "no updates": ("FILE --updates 0", "`--updates` must be in .0, 1e9., got 0"),
  "seconds of years": (
    "FILE --seconds 1e300",
    r"`--seconds` must be in \[0, \S+\], got 1e\+300",
  ),
  "updates of years": (f"FILE --updates {10**20}", "`--updates` must be in"),
  "samples of years": (f"FILE --samples {10**20}", "`--samples` must be in"),
  "batch": ("FILE --batch-size 0", "`--batch-size` must be positive"),
  "memory": ("FILE --batch-size 2000", "'slow' has 1 GB: 1000 samples fit"),
  "bound": ("FILE --protocols ssp --bound -1", "`--bound` must be at least 0"),
  "share": (
    "FILE --protocols h_ps --pipeline-from 1",
    r"`--pipeline-from` must be in \[0, 1\), got 1",
  ),
  "a share of seconds": (
    "FILE --protocols h_ps --pipeline-from 0.5 --seconds 2",
    "`--pipeline-from` must be 0 with `--seconds`.* `--updates`",
  ),
  "a pipeline that is left out": (
    "FILE --protocols h_ps --pipeline-from 0.5 --parts tasks --updates 9",
    "`pipelined_from` must be 0 without `pipelined`, got 4",
  ),
  "drawn": ("FILE --drawn-seconds 0", "`--drawn-seconds` must be positive"),
  "option": ("FILE --protocol asp", "did you mean `--protocols`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_input_is_refused_in_one_line(
  name, file, tmp_path, capsys, monkeypatch
):
  import re

  monkeypatch.chdir(tmp_path)
  words, message = WRONG[name]
  assert cli.main(["simulate", *words.replace("FILE", file).split()]) == 2
  out = capsys.readouterr().err
  assert out.count("\n") == 1 and re.search(message, out)
  assert not (tmp_path / "runs").exists()


def test_file_without_costs_is_refused(tmp_path, capsys):
  path = tmp_path / "cluster.toml"
  path.write_text('[[nodes]]\nname = "a"\n')
  assert cli.main(["simulate", str(path)]) == 2
  assert "[profile]" in capsys.readouterr().err


@pytest.mark.parametrize(("start_s", "updates"), [(0.0, 0), (1.0, 3)])
def test_run_without_machines_reports_its_end(
  start_s, updates, tmp_path, capsys
):
  away = f"\n[[nodes.outages]]\nstart_s = {start_s}\n"
  file = tmp_path / "away.toml"
  text = f'[[nodes]]\nname = "a"\n{away}{FILE[FILE.index("[profile]") :]}'
  file.write_text(text)
  output = tmp_path / "out"
  words = ["simulate", str(file), "--protocols", "asp", "--batch-size", "32"]
  assert cli.main([*words, "--output", str(output)]) == 0
  out = capsys.readouterr().out
  assert f"asp has ended after update {updates} at " in out
  assert "away for good" in out


def test_defaults_are_a_thousand_updates_and_tasks_of_the_median(
  file, monkeypatch, tmp_path, capsys
):
  options = _commands.Simulate(cluster=file, batch_size=50)
  *_, limits = _simulate._check(options)
  assert limits["updates"] == 1000
  limited = dataclasses.replace(options, seconds=2.0)
  assert _simulate._check(limited)[2]["updates"] is None
  # Twenty tasks of 0.5 s at speed 8, as two of three machines have it.
  made, trace = [], cluster.Trace
  monkeypatch.setattr(
    cluster, "Trace", lambda until_s: made.append(until_s) or trace()
  )
  for more in ("", "--drawn-seconds 3"):
    words = (
      f"simulate {file} --batch-size 50 --updates 1 --protocols asp {more}"
    )
    assert cli.main([*words.split(), "--output", str(tmp_path / "o")]) == 0
  assert made == [pytest.approx(20 * 0.5 / 8), 3.0]


@pytest.mark.parametrize("ended", ["asp", None])
def test_interrupt_says_which_rows_are_saved(
  ended, file, tmp_path, monkeypatch, capsys
):
  run, left = server.Simulation.run, [1] * bool(ended)

  def interrupted(simulation, **limits):
    if not left:
      raise KeyboardInterrupt
    left.pop()
    run(simulation, **limits)

  monkeypatch.setattr(server.Simulation, "run", interrupted)
  words = f"simulate {file} --updates 3 --protocols asp bsp --output {tmp_path}"
  assert cli.main(words.split()) == 130
  out, error = capsys.readouterr()
  assert ("No protocol has ended." in out) == (ended is None)
  assert error.startswith(
    f"jdist: interrupted: the rows of {ended or 'no protocol'} are saved in "
    f"{tmp_path}. This starts again: jdist simulate {file} "
  )


def test_figures_have_the_units_of_their_headings(file, capsys):
  machines, profile = _protocols.load(file)
  run = server.Simulation(machines, server.ASP(), profile)
  run.run(updates=1)
  run.pulled_bytes, run.pushed_bytes = 2e9, 1.5e9
  _output.console().print(_simulate._table({"asp": run}))
  assert "│     3.5 │" in capsys.readouterr().out
  heading = _simulate._heading(
    machines, dataclasses.replace(profile, pull_bytes=3e6)
  )
  assert heading.startswith("3 machines of speed 1 to 8; ")
  assert ": 10 ms for a sample at speed 1, 3 MB pulled and 0.002 MB" in heading


@pytest.mark.parametrize(
  ("batch_size", "most"), [(32, "1.88235e+07"), (320, "1.88235e+08")]
)
def test_seconds_are_those_of_a_thousand_million_tasks(
  batch_size, most, file, capsys
):
  """Speeds 8, 8 and 1 do 17 seconds of work in a second."""
  words = f"simulate {file} --batch-size {batch_size} --seconds 1e12"
  assert cli.main(words.split()) == 2
  error = capsys.readouterr().err
  # A task takes a hundredth of a second for each sample.
  assert f"`--seconds` must be in [0, {most}], got 1" in error
