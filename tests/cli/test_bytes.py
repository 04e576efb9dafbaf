"""`jdist bytes`: three counts of what a worker sends."""

import itertools
import re
import subprocess
import sys
import types

import pytest

from jdist import collectives, models
from jdist.cli import _commands, _output
from jdist.cli.programs import _bytes
from tests import _processes


@pytest.mark.parametrize(
  ("words", "told"),
  [
    (
      "--methods ssgd --interval 4 --rank 3",
      "`--rank` and `--interval` must be left out for ssgd",
    ),
    ("--methods nothing", "`--methods` must be one of ssgd"),
    ("--methods ssgd ssgd", "must be one or more different methods"),
    ("--model resnet9", "`--model` must be one of"),
    ("--model transformer", "`--model` must be one of"),
    ("--workers 0", "`--workers` must be in [1, 1000], got 0"),
    ("--methods mp2 --model mlp", "`--cut` must be given for mp2 with mlp"),
    (
      "--methods mp2 --model mlp --cut 2",
      "`--cut` cannot be used: `num_layers`",
    ),
    ("--warmup-steps -1", "`--warmup-steps` must be at least 0, got -1"),
  ],
)
def test_bad_option_is_refused_in_one_line(words, told, refusal):
  assert told in refusal(f"bytes {words}")


def test_options_are_refused_before_anything_is_compiled(refusal, monkeypatch):
  monkeypatch.setattr(_bytes, "_count", lambda *given: pytest.fail("compiled"))
  assert "rank` must be" in refusal("bytes --methods ssgd powersgd --rank 0")


def test_fewer_bytes_are_fewer_than_those_of_an_all_reduce(capsys):
  """A ring of four workers sends 2 * 3/4 of all parameters in float32."""
  model = models.build("mlp", input_shape=(8, 8, 1), num_classes=10)
  exact = 1.5 * 4 * models.num_params(model)
  found = [
    _bytes.Counted(name, None, interval, None, exact, exact)
    for name, interval in (("ssgd", 1), ("local_sgd", 8))
  ]
  options = _commands.Bytes(workers=4, model="mlp")
  _output.console().print(_bytes._table(found, options, model))
  printed = capsys.readouterr().out
  assert re.search("ssgd .* 1.0x", printed)
  assert re.search("local_sgd .* 8.0x", printed)
  # A step of local SGD sends an eighth of its round.
  megabytes = f"{exact / 1e6:.4g} .* {exact / 8e6:.4g} .* 8.0x"
  assert re.search(f"local_sgd .* {megabytes}", printed)


def test_few_bytes_are_shown_as_a_bound():
  assert _bytes._megabytes(100.0) == "0.0001"
  assert _bytes._megabytes(99.0) == "< 0.0001"


@pytest.mark.slow
def test_three_counts_agree():
  done = subprocess.run(
    [
      sys.executable, "-m", "jdist", "bytes", "--model", "mlp",
      "--workers", "4", "--methods",
      "ssgd", "qsgd", "powersgd", "local_sgd", "sparse_loco",
      "dgc", "mp2", "--warmup-steps", "100", "--cut", "1",
    ],
    env=_processes.environment(), capture_output=True, text=True, timeout=600,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  rows = {}
  for line in done.stdout.splitlines():
    cells = [cell.strip() for cell in re.split("[│|]", line)[1:-1]]
    if len(cells) == 8 and cells[0]:
      rows[cells[0], cells[1]] = cells[2:]
  phases = [
    rows.pop(("dgc", f"steps {1 + 100 * i}-{100 + 100 * i}")) for i in range(4)
  ] + [rows.pop(("dgc", "from step 401 on"))]
  assert {when for _, when in rows} - {"when"} == {"always"}
  rows = {name: row for (name, _), row in rows.items()}
  # A ring of four sends 2 * 3/4 of 101,770 float32 parameters.
  assert rows["ssgd"][1:4] == ["-", "0.6106", "0.6106"]
  assert rows["ssgd"][-1] == "1.0x"
  # MP² sends the 100,480 parameters of the first layer in every step, and does
  # not use `--interval`.
  assert rows["mp2"][:4] == ["1", "-", "0.6029", "0.6029"]
  assert rows["local_sgd"][0] == "8" and rows["local_sgd"][-1] == "8.0x"
  for name in ("qsgd", "powersgd", "sparse_loco"):
    told, traced, compiled = map(float, rows[name][1:4])
    assert told == pytest.approx(traced, rel=0.01, abs=0.001), name
    assert compiled == pytest.approx(traced, rel=0.01, abs=0.001), name
  # The last phase sends a 1,000th of the weights, and each before it a fourth
  # of those of the one before, with wider indices.  Biases are always whole.
  assert all(traced == compiled for _, _, traced, compiled, *_ in phases)
  # The codecs' count is that of the last phase.
  assert [row[1] for row in phases[:-1]] == ["-"] * 4
  sent = [float(row[2]) for row in phases]
  assert all(0.2 < y / x < 0.4 for x, y in itertools.pairwise(sent))
  assert float(phases[-1][1]) == pytest.approx(sent[-1], rel=0.01)


def test_coded_bytes_are_those_of_the_program(workers=4):
  """A codec's own count, in bytes, is what is traced and compiled."""
  options = _commands.Bytes(workers=workers, steps=10)
  model = models.build(
    "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(8,),
    abstract=True,
  )  # fmt: skip
  team = collectives.workers(workers, substrate="shard_map")
  optimizer = _bytes._chain("topk_sgd", options, model, team.axis)
  (found,) = _bytes._count("topk_sgd", options, model, team, optimizer)
  assert found.coded == found.traced == found.compiled > 0


def test_phases_are_named_where_a_method_has_several(capsys):
  model = models.build("mlp", input_shape=(8, 8, 1), num_classes=10)
  phases = [None, collectives.Phase(0, 100), collectives.Phase(100)]
  found = [_bytes.Counted("dgc", x, 1, None, 4e6, 4e6) for x in phases]
  options = _commands.Bytes(workers=4, model="mlp")
  for several in (True, False):
    _output.console().print(
      _bytes._table(found if several else found[:1], options, model)
    )
    printed = capsys.readouterr().out
    assert ("when" in printed) == ("always" in printed) == several
    assert ("steps 1-100" in printed) == several
    assert ("from step 101 on" in printed) == several


def test_run_is_split_wherever_a_phase_begins_or_ends():
  phases = [collectives.Phase(0, 5), collectives.Phase(3)]
  found = _bytes._phases(types.SimpleNamespace(phases=phases))
  wanted = [(0, 3), (3, 5), (5, None)]
  assert found == [collectives.Phase(*x) for x in wanted]
