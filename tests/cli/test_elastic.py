"""`jdist train --elastic`: methods with rounds, on every engine."""

import json

import jax
import pytest

from jdist import cli, training
from jdist.cli import _commands
from jdist.cli.servers import _server_parts

pytest.importorskip("simpy")


@pytest.fixture
def train(tmp_path):
  words = [
    "train", "--elastic", "--workers", "2", "--epochs", "1",
    "--batch-size", "64", "--evaluate-every-epochs", "0.5",
    "--warmup-epochs", "0", "--quorum", "1", "--output", str(tmp_path),
  ]  # fmt: skip
  # The workers' threads do not inherit the settings of this thread.
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  yield lambda *more: cli.main([*words, *more])
  jax.config.update("jax_numpy_dtype_promotion", "strict")


def rows(tmp_path):
  return training.read_rows(tmp_path / "rows.jsonl")


def test_row_and_output_name_the_members(train, tmp_path, capsys):
  assert train("--method", "diloco") == 0
  out = capsys.readouterr().out
  # The start is not silent: it may take minutes.
  ready = [out.index(f"worker{i} ready\n") for i in range(2)]
  assert max(ready) < out.index("worker0 joined")
  lines = out[out.index("worker0 joined") :].splitlines()
  assert lines[0].startswith("worker0 joined at 0 s, update 0; living: 2")
  assert "100.0 % of the living in a merge" in lines[2]
  (row,) = rows(tmp_path)
  assert (row["method"], row["driver"], row["clock"]) == (
    "diloco", "threads", "wall",
  )  # fmt: skip
  assert [x[2:4] for x in row["changes"]] == [
    ["joined", "worker0"], ["joined", "worker1"],
  ]  # fmt: skip
  assert [x[1:] for x in row["merges"]] == [[2, 2]] * row["updates"]
  assert (row["merged_share"], row["accuracy"] > 0.5) == (1.0, True)
  json.dumps(row)


@pytest.mark.parametrize(
  "words",
  [
    ["--method", "diloco", "--codec", "int4", "--feedback", "error"],
    ["--method", "diloco", "--codec", "int4", "--peers"],
    *(
      pytest.param(words.split(), marks=pytest.mark.slow)
      for words in (
        "--method local_sgd", "--method msdpu", "--method fed_prox",
        "--method streaming_diloco --fragments 2",
        "--method diloco --overlap", "--method muloco",
        "--method cocod --stream --codec int4 --feedback error",
      )
    ),
  ],
)  # fmt: skip
def test_clock_and_threads_train_alike(words, train, tmp_path):
  words = [*words, "--owned"]
  assert train(*words) == train(*words, "--driver", "clock") == 0
  threads, clock = rows(tmp_path)
  assert (clock["clock"], threads["clock"]) == ("virtual", "wall")
  assert len(clock["curve"]) > 1
  for one, other in zip(clock["curve"], threads["curve"], strict=True):
    assert one["step"] == other["step"]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.slow
def test_clock_counts_the_bytes_of_plain_messages():
  options = _commands.Train(elastic=True, method="local_sgd", driver="clock")
  parts = _server_parts.assemble(options)
  assert _server_parts.simulation(parts).profile.push_bytes == 4 * 9610


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("method", ["diloco", "decoupled_diloco"])
def test_peers_reach_the_protocol_and_the_workers(method, peers, tmp_path):
  options = _commands.Train(elastic=True, method=method, peers=peers)
  if method == "decoupled_diloco":
    path = tmp_path / "cluster.toml"
    path.write_text(
      "[[nodes]]\nname = 'worker'\ncount = 4\n"
      "[profile]\nseconds_per_sample = 0.01\n"
    )
    options = _commands.Train(
      protocol=method, cluster=str(path), driver="clock", peers=peers
    )
  parts = _server_parts.assemble(options)
  assert parts.protocol.peers is peers
  learner = _server_parts._worker_learner(parts, parts.machines.names[0])
  assert (learner._merging is not None) is peers


WRONG = {
  "--method ssgd": "`method` must be one with rounds of local steps",
  "--method scaffold": "`rule` must be a mean or an outer optimizer",
  "--method post_local_sgd": "`interval` must be a number with a server",
  "--method nobody": "`--method` must be one of",
  "--method diloco --interval-policy growth": (
    "`--interval-policy` must be fixed with `--elastic`"
  ),
  "--method msdpu --growth-start 1": "`--growth-start` must be left out for",
  "--method msdpu --carry 0.5": "`carry` of an overlap must be, with a",
  "--method msdpu --delay-steps 1": "`steps` of an overlap must be, with a",
  "--method streaming_diloco --fragments 3": "a multiple of the 3 fragments",
  "--method diloco --codec int4 --feedback ef21": "`feedback` must be",
  "--method diloco --reducer power_sgd": "`--reducer` must be left out with",
  "--method nope": "`--method` must be one of",
  "--method diloco --quorum 0": "`quorum` must be",
  "--method diloco --quorum 2": "`quorum` must be",
  "--method diloco --grace -1": "`grace` must be",
  "--method diloco --timeout-s 0": "`--timeout-s` must be positive",
  "--method diloco --ahead 1": "`--ahead` must be left out for diloco",
  "--method diloco --fragments 2": "`--fragments` must be left out for diloco",
  "--method diloco --correction 1": "`--correction` must be left out for",
  "--method diloco --protocol bsp": "`--protocol` must be left out with",
  "--method diloco --substrate vmap": "`--substrate` must be left out with",
  "--method diloco --accumulate 2": "`--accumulate` must be left out with",
  "--method diloco --skip-nonfinite": "`--skip-nonfinite` must be left out",
  "--method diloco --num-processes 2": "`--num-processes` must be left out",
  "--method diloco --cluster no.toml": "`--workers` must be left out",
  "--method diloco --driver horse": "--driver",
  "--method diloco --address a:1": "`--address` must be left out without",
  "--method diloco --driver clock --record x": "`--record` must be left out",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_option_is_refused_in_one_line(words, train, capsys):
  assert train(*words.split()) == 2
  error = capsys.readouterr().err
  assert WRONG[words] in error and error.count("\n") == 1


@pytest.mark.parametrize(
  "words", ["--quorum 1", "--driver ray", "--owned", "--peers"]
)
def test_server_options_need_a_server(words, capsys):
  assert cli.main(["train", *words.split()]) == 2
  assert "without `--protocol`" in capsys.readouterr().err
