"""`jdist pipeline`: its output, its files and its refusals."""

import importlib.util
import json
import pathlib

import pytest
from flax import nnx

from jdist import cli, pipeline
from jdist.cli import _commands
from jdist.cli.pipelines import _pipeline
from jdist.cli.report import _page

pytest.importorskip("simpy")
pytest.importorskip("matplotlib")


def _run(words, capsys):
  assert cli.main(["pipeline", *words.split()]) == 0
  return capsys.readouterr().out


def test_table_is_drawn(capsys):
  told = _run("draw gpipe --stages 2 --microbatches 2", capsys)
  assert told.splitlines() == [
    "gpipe: 2 devices, 2 stages, 2 micro-batches, 1 iteration",
    "device 0 |F0  F1  .   .   .   B0  B0  B1  B1*",
    "device 1 |.   F0  F1  B0  B0  B1  B1*",
    "",
  ]


def test_table_file_is_checked(capsys, tmp_path):
  path = tmp_path / "mine.txt"
  table = pipeline.make_table("2bw", 2, 4)
  path.write_text(pipeline.format_table(table))
  told = _run(f"check {path}", capsys)
  assert "micro-batches kept, by stage: 2 1" in told
  assert "delay of the gradients, by stage: 1 1" in told


def test_timeline_of_a_table_stays_in_the_output(capsys, tmp_path):
  path = tmp_path / "mine.txt"
  path.write_text("name ../../mine\ndevice F0 B0 U\n")
  _run(f"simulate {path} --output {tmp_path / 'a' / 'b'}", capsys)
  assert (tmp_path / "a" / "b" / "mine.json").exists()
  assert not list(tmp_path.glob("*.json"))


def test_table_file_is_simulated_as_the_table_of_its_name(capsys, tmp_path):
  path, found = tmp_path / "mine.txt", []
  path.write_text(pipeline.format_table(pipeline.make_table("1f1b", 8, 4)))
  for words in (path, "1f1b --stages 8 --microbatches 4"):
    output = tmp_path / f"out{len(found)}"
    _run(f"simulate {words} --output {output}", capsys)
    found.append(json.loads((output / "rows.jsonl").read_text())["iteration_s"])
  # Eight forward passes of 1 s and backward ones of 2 s fill the pipeline.
  assert found == [33.0, 33.0]


def test_tables_are_simulated_and_compared(capsys, tmp_path):
  output = tmp_path / "out"
  names = list(pipeline.TABLES)
  told = _run(f"simulate {' '.join(names)} --output {output}", capsys)
  rows = [
    json.loads(x) for x in (output / "rows.jsonl").read_text().splitlines()
  ]
  assert [row["table"] for row in rows] == names
  found = {row["table"]: row["iteration_s"] for row in rows}
  assert found["naive"] == pytest.approx(4 * 24)
  assert found["gpipe"] == found["1f1b"] == pytest.approx(33)
  assert found["interleaved"] == pytest.approx(28.5)
  assert found["ours"] == found["2bw"] == pytest.approx(24)
  assert found["pipedream"] == pytest.approx(3)
  for name in names:
    assert f"│ {name} " in told
    events = json.loads((output / f"{name}.json").read_text())["traceEvents"]
    # As in the drawn table.
    rows = {x["args"]["name"] for x in events if x["ph"] == "M"}
    assert {f"device {i}" for i in range(4)} <= rows
    assert not [x for x in rows if "worker" in x]
  # The page, also a later one, has the command.
  status = json.loads((output / "status.json").read_text())
  words = f"jdist pipeline simulate {' '.join(names)} --output {output}"
  assert status["command"].startswith("jdist pipeline simulate naive ")
  assert set(words.split()) <= set(status["command"].split())
  if importlib.util.find_spec("vl_convert"):
    # There is neither a model nor a data set to be named.
    assert "<title>out" in (output / "report.html").read_text()
  shown = _page._state(status)
  assert status["command"] in shown and "step" not in shown.split("<pre>")[0]


def test_costs_and_machines_are_read(capsys, tmp_path):
  costs, machines = tmp_path / "costs.toml", tmp_path / "cluster.toml"
  costs.write_text(
    "[[stages]]\nforward_s = 1.0\nbackward_s = 1.0\noutput_bytes = 125\n"
    "[[stages]]\nname = 'rear'\nforward_s = 1\nbackward_s = 3\n"
  )
  machines.write_text(
    "[[nodes]]\nname = 'a'\n[[nodes]]\nname = 'b'\nspeed = 2\n"
    "[[links]]\nbetween = ['a', 'server']\nbandwidth_gbit_per_s = 1e-6\n"
    "[[links]]\nbetween = ['server', 'b']\nbandwidth_gbit_per_s = 1\n"
  )
  words = f"simulate gpipe --stages 2 --microbatches 1 --costs {costs} "
  _run(f"{words} --cluster {machines} --output {tmp_path / 'out'}", capsys)
  (row,) = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
  # Each of both messages takes a second.
  assert json.loads(row)["makespan_s"] == pytest.approx(1 + 1 + 2 + 1 + 1)


def test_plan_is_printed_and_its_table_can_be_checked(capsys, tmp_path):
  costs, output = tmp_path / "layers.toml", tmp_path / "out"
  costs.write_text(
    "".join(
      f"[[stages]]\nname = '{x}'\nforward_s = 1.0\nbackward_s = 2.0\n"
      for x in "abcd"
    )
  )
  words = f"plan 1f1b ours --costs {costs} --stages 2 --batch-size 4"
  words += " --max-delay 1"
  told = _run(f"{words} --output {output}", capsys)
  assert "samples/s" in told and "a to b" in told and "c to d" in told
  rows = [
    json.loads(x) for x in (output / "rows.jsonl").read_text().splitlines()
  ]
  assert {row["table"] for row in rows} == {"1f1b", "ours"}
  assert rows[0]["table"] == "ours" and rows[0]["cuts"] == [2]
  assert rows[0]["samples_per_s"] == pytest.approx(1 / 6)
  assert json.loads((output / "plan.json").read_text())["traceEvents"]
  assert f"jdist train --stages 2 --table {output}" in told.replace("\n", "")
  told = _run(f"check {output / 'table.txt'}", capsys)
  assert "delay of the gradients, by stage: 1 1" in told


def test_plan_names_the_runtime_of_its_table(capsys, tmp_path):
  words = "plan 1f1b zb_h2 --model lenet --stages 2 --batch-size 8 --samples 4"
  told = _run(f"{words} --output {tmp_path}", capsys)
  row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
  assert row["table"] == "zb_h2" and row["delay"] == 0
  assert "table.txt --runtime processes" in told.replace("\n", "")
  assert "jdist train --stages 2 --table 1f1b --microbatches" in told


def test_command_of_one_program_names_its_window():
  h2, ours = (
    pipeline.Candidate(
      name, 4, 2, window, False, samples_per_s=rate,
      made=pipeline.make_table(name, 2, 4),
    )
    for name, window, rate in (("zb_h2", 1, 2.0), ("ours", 3, 1.0))
  )  # fmt: skip
  told = _pipeline._command(h2, [h2, ours], pathlib.Path("x"), None)
  assert told.splitlines()[-1].split("jdist train ")[1] == (
    "--stages 2 --table ours --microbatches 4 --window 3"
  )
  assert "50.0 %" in told


def test_network_is_planned_by_its_operations(capsys, tmp_path):
  words = "plan 1f1b --model lenet --stages 2 --batch-size 8 --samples 4"
  told = _run(f"{words} --output {tmp_path}", capsys)
  assert "conv" in told and "dense" in told
  row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
  # The first layers have most of the operations.
  assert row["cuts"] == [1] and row["num_microbatches"] > 1


_WRONG = {
  "no such table": ("draw dapple", "a table must be one of naive, gpipe"),
  "no such action": ("paint 1f1b", "action"),
  "a cyclic table": (
    "check CYCLIC",
    "the devices wait for each other: device 0 with B0/0",
  ),
  "blocking sends": ("check 1f1b --sends blocking", "with blocking sends"),
  "too few micro-batches": ("draw 2bw --microbatches 2", "num_microbatches"),
  "an option of another action": (
    "draw 1f1b --max-live 3",
    "`--max-live` must be left out of `jdist pipeline draw`",
  ),
  "an option of another table": (
    "draw gpipe --window 2",
    "`--window` must be left out for gpipe, without such an option",
  ),
  "an option of none of two": (
    "draw 1f1b gpipe --chunks 2",
    "`--chunks` must be left out for 1f1b, gpipe",
  ),
  "a cost beside a file of costs": (
    "simulate 1f1b --stages 1 --costs COSTS --forward-s 3",
    "`--forward-s` must be left out with `--costs`",
  ),
  "bytes beside a file of costs": (
    "simulate 1f1b --stages 1 --costs COSTS --output-bytes 3",
    "`--output-bytes` must be left out with `--costs`",
  ),
  "one table twice": ("simulate gpipe 1f1b gpipe", "`TABLE` must be one or"),
  "stages of a file": ("check CYCLIC --stages 3", "`--stages` must be left"),
  "iterations of a file": ("draw CYCLIC --iterations 2", "`--iterations` must"),
  "chunks of files": ("draw CYCLIC CYCLIC --chunks 2", "`--chunks` must be"),
  "stages beyond the costs": (
    "simulate 1f1b --costs COSTS",
    "`costs` must be one for each of the table's 4",
  ),
  "a typo in the costs": ("simulate 1f1b --costs TYPO", "forwards_s"),
  "a negative cost": ("simulate 1f1b --forward-s -1", "`--forward-s` must be"),
  "too few machines": ("simulate 1f1b --cluster CLUSTER", "fewer `--stages`"),
  "a plan without costs": ("plan ours", "must be given to plan, but not both"),
  "a plan of costs and a network": (
    "plan ours --costs COSTS --model lenet",
    "but not both, got",
  ),
  "a network that there is not": ("plan --model lenot", "lenot"),
  "a plan of many iterations": (
    "plan --costs COSTS --iterations 3",
    "`--iterations` must be left out of `jdist pipeline plan`",
  ),
  "a batch without a plan": ("draw --batch-size 3", "`--batch-size` must be"),
  "micro-batches that do not divide": (
    "plan --costs COSTS --batch-size 8 --microbatches 3",
    "`num_microbatches` must divide the batch, got 3",
  ),
  "more stages than layers": (
    "plan --costs COSTS --stages 2",
    "each of the 2 stages, got 1",
  ),
  "a stage beyond memory": (
    "plan 1f1b --costs HEAVY --cluster SMALL",
    "layer 'stage 0' alone needs 30 GB, and 'a' has 1 GB",
  ),
  "no file": ("simulate 1f1b --cluster none.toml", "none.toml"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_bad_pipeline_is_refused_in_one_line(name, capsys, tmp_path):
  words, reason = _WRONG[name]
  for key, text in {
    "CYCLIC": "device F0 B0 F1 B1 U\ndevice F0 F1 B0 B1 U",
    "COSTS": "[[stages]]\nforward_s = 1\n",
    "HEAVY": "[[stages]]\nforward_s = 1\nparameter_bytes = 1e10\n",
    "SMALL": "[[nodes]]\nname = 'a'\nmemory_gb = 1\n",
    "TYPO": "[[stages]]\nforwards_s = 1\n",
    "CLUSTER": "[[nodes]]\nname = 'a'\n",
  }.items():
    (tmp_path / key).write_text(text)
    words = words.replace(key, str(tmp_path / key))
  assert cli.main(["pipeline", *words.split()]) == 2
  told, *picture = capsys.readouterr().err.splitlines()
  assert reason in told
  # A table that cannot run is drawn up to the place of the deadlock.
  assert bool(picture) == ("cannot run" in told)
  assert all(x.startswith("device ") for x in picture)
  assert not list(tmp_path.glob("runs*"))


def test_costs_are_of_images_and_their_classes(monkeypatch):
  # They follow from shapes, without random parameters.
  monkeypatch.delattr(nnx, "Rngs")
  options = _commands.Pipeline(action="plan", model="mlp", samples=2)
  costs, num_bytes = _pipeline._costs(options)
  assert num_bytes == 2 * 32 * 32 * 3 * 4
  assert costs[-1].parameter_bytes == 4 * (128 * 10 + 10)
