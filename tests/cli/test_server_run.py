"""`jdist train --protocol`: runs of servers on the virtual clock."""

import json
import os
import shlex
import signal
import sys
import types

import numpy as np
import pytest

from jdist import cli, cluster, server, training
from jdist.cli import _commands, _workload
from jdist.cli.servers import _protocols, _server_parts, _server_run
from jdist.server.run import _run_marks

pytest.importorskip("simpy")

FILE = """
[[nodes]]
name = "fast"
speed = 4.0
jitter = 0.1

[[nodes]]
name = "slow"

[profile]
seconds_per_sample = 0.01
push_bytes = 38_440
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "cluster.toml"
  path.write_text(FILE)
  return str(path)


@pytest.fixture
def words(file, tmp_path):
  return [
    "train", "--protocol", "dbs", "--cluster", file, "--epochs", "1",
    "--evaluate-every-epochs", "0.5", "--learning-rate", "0.02",
    "--output", str(tmp_path / "out"),
  ]  # fmt: skip


def rows(tmp_path):
  return training.read_rows(tmp_path / "out" / "rows.jsonl")


def test_run_trains_evaluates_and_resumes(words, tmp_path, capsys, monkeypatch):
  words += ["--checkpoints", str(tmp_path / "checkpoints")]
  assert cli.main(words) == 0
  out = capsys.readouterr().out
  assert out.count("virtual s  accuracy") == 2
  assert "N = 2 workers (clock)" in " ".join(out.split())
  # The same command finds the same records, and has nothing to train.
  assert cli.main(words) == 0
  again = capsys.readouterr().out.splitlines()
  first = rows(tmp_path)[0]
  assert again[-3] == f"Nothing left to train: update {first['steps']}."
  assert again[-2] == out.splitlines()[-2] and again[-1].startswith("Row: ")
  status = json.loads(next(tmp_path.rglob("status.json")).read_text())
  assert cli.main(shlex.split(status["command"])[1:]) == 0
  # SIGTERM arrives at the first of its two records.
  half, other = first["curve"][0]["step"], str(tmp_path / "other")
  with monkeypatch.context() as patch:
    patch.setattr(
      _workload, "loss", lambda _: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert cli.main([*words, "--checkpoints", other]) == 143
  told, _, way = capsys.readouterr().err.partition(" This resumes: jdist ")
  assert told == (
    f"jdist: SIGTERM: ended after update {half}, which is saved in {other}."
  )
  assert cli.main(shlex.split(way)) == 0
  resumed_out = capsys.readouterr().out.splitlines()
  assert resumed_out[-3] == f"Resumes from update {half}."
  assert resumed_out[-2] == out.splitlines()[-2]
  first, again, _, resumed = rows(tmp_path)
  assert resumed["curve"] == first["curve"]
  assert resumed["resumed_from_step"] == half
  assert first["curve"] == again["curve"]
  assert first["staleness"] == again["staleness"]
  assert (first["method"], first["clock"]) == ("dbs", "virtual")
  assert first["accuracy"] > 0.5
  # The run is a pass in whole batches, at 5 samples each 0.01 s.
  assert first["samples"] == pytest.approx(1442, abs=64)
  assert first["virtual_s"] == pytest.approx(1442 * 0.01 / 5, rel=0.1)
  assert first["iteration_spread"] < 1.5
  # Other machines make another run.
  file = words[words.index("--cluster") + 1]
  with open(file, "a") as cluster:
    cluster.write("seconds_per_batch = 0.1\n")
  assert cli.main(words) == 2
  error = capsys.readouterr().err
  assert "`--cluster` is of other machines" in error, error
  assert error.count("\n") == 1, error
  assert cli.main([*words, "--seed", "1"]) == 2
  assert "`--seed` is 0 in the checkpoint and 1 here" in capsys.readouterr().err


def test_diverged_run_keeps_its_last_finite_state(words, tmp_path, capsys):
  folder = tmp_path / "checkpoints"
  words[words.index("0.02")] = "1e30"
  words += ["--checkpoints", str(folder), "--warmup-epochs", "0"]
  with (
    pytest.warns(RuntimeWarning, match="and it was not saved: there is none"),
    pytest.warns(RuntimeWarning, match="refuse the pushes of all workers"),
  ):
    assert cli.main(words) == 3
  assert not list(folder.glob("update_*"))
  out = capsys.readouterr().err
  assert "1e+30 here, or a longer `--warmup-epochs`." in out
  # Servers do not skip gradients.
  assert "--skip-nonfinite" not in out and "stay in" not in out


def test_run_without_machines_ends_with_an_error_and_a_row(
  words, file, tmp_path, capsys
):
  text = FILE.replace("[profile]", "outages = [{start_s = 1}]\n\n[profile]")
  text = text.replace("jitter = 0.1", "outages = [{start_s = 2}]")
  with open(file, "w") as cluster:
    cluster.write(text)
  with pytest.warns(RuntimeWarning, match="all machines are away for good"):
    assert cli.main(words) == 2
  out = capsys.readouterr()
  (row,) = rows(tmp_path)
  assert 0 < row["samples"] < 1442
  assert f"after {row['samples']:,} of 1,442 samples all are away" in out.err
  assert out.out.count("update ") == len(row["curve"]) == 2


def test_codec_compresses_pushes(words, tmp_path):
  assert cli.main([*words, "--codec", "int4", "--feedback", "error"]) == 0
  (row,) = rows(tmp_path)
  # Each gradient is a push of 9,610 parameters in 4 bits, with scales.
  assert row["pushed_bytes"] < 38_440 / 6 * (row["steps"] + 2)


@pytest.mark.slow
def test_h_ps_trains_with_few_bit_messages(words, tmp_path):
  file = words[words.index("--cluster") + 1]
  with open(file, "a") as cluster:
    cluster.write(
      """pull_bytes = 38_440
[[links]]
between = ["*", "switch"]
bandwidth_gbit_per_s = 0.001
"""
    )
  words[words.index("dbs")] = "h_ps"
  words += ["--local-rate", "0.002", "--error-limit", "0.5"]
  assert cli.main(words) == 0
  (row,) = rows(tmp_path)
  assert row["accuracy"] > 0.3
  assert set(row["staleness"]["counts"]) == {"0", "1"}
  # Two of 12 rounds are exact, the others have 16 bits, and two are in flight.
  assert row["updates"] == 12
  assert row["pushed_bytes"] < 38_440 * 2 * (2 + 12 * 0.55)


def test_h_ps_pipelines_after_a_share_of_the_run(words, tmp_path):
  words[words.index("dbs")] = "h_ps"
  assert cli.main([*words, "--pipeline-from", "0.5"]) == 0
  (row,) = rows(tmp_path)
  assert row["updates"] == 12
  # Two workers run six rounds in turn and the pipeline's first one.
  assert row["staleness"]["counts"] == {"0": 14, "1": 10}


def local_step(**options):
  train = _commands.Train(protocol="h_ps", learning_rate=0.2, **options)
  return _server_parts._local_step(train, lambda update: 0.2 / (1 + update))


def test_h_ps_foresees_the_servers_update():
  """At the server's rate, on its schedule, with its momentum."""
  step = local_step()
  assert (step.momentum, step.nesterov) == (0.9, True)
  assert [step.rate(k) for k in (0, 1, 3)] == [0.2, 0.1, 0.05]
  step = local_step(local_rate=0.1, local_momentum=0.5, momentum=0.9)
  assert (step.momentum, step.nesterov) == (0.5, True)
  assert [step.rate(k) for k in (0, 3)] == pytest.approx([0.1, 0.025])
  assert local_step(optimizer="adamw").momentum == 0.0
  assert not local_step(momentum=0.0).nesterov
  assert local_step(local_rate=0.0) is None
  assert local_step(parts=("tasks", "bits")) is None


@pytest.mark.parametrize(("protocol", "taken"), [("asp", 1), ("bsp", 2)])
def test_schedule_is_as_long_as_the_updates(protocol, taken, file, monkeypatch):
  """Asynchronous updates have one worker's samples, and BSP's those of all."""
  found, make = [], _server_parts._methods.make_budget

  def noted(options, peak, steps_per_epoch):
    found.append(steps_per_epoch)
    return make(options, peak, steps_per_epoch)

  monkeypatch.setattr(_server_parts._methods, "make_budget", noted)
  options = _commands.Train(
    protocol=protocol, cluster=file, driver="clock", batch_size=64, epochs=1.0
  )
  parts = _server_parts.assemble(options)
  # Each of the two workers has half of the batch.
  assert found == [len(parts.workload.train) / (32 * taken)]


def test_decoupled_diloco_takes_local_steps(words, tmp_path):
  words[words.index("dbs")] = "decoupled_diloco"
  words += ["--interval", "4", "--fragments", "2", "--grace", "0.25"]
  words += ["--outer", "sgd", "--outer-learning-rate", "0.9"]
  assert cli.main(words) == 0
  (row,) = rows(tmp_path)
  assert row["accuracy"] > 0.3
  # A push has two local steps of 64 samples, for a half of the parameters.
  pushes = sum(row["staleness"]["counts"].values())
  assert row["samples"] == 128 * pushes
  assert row["pushed_bytes"] == pytest.approx(
    38_440 / 2 * pushes, rel=0.1, abs=38_440
  )


@pytest.mark.parametrize(
  ("more", "rule"),
  (
    (["--method", "diloco"], "`--method` must be left out with `--protocol`"),
    (["--interval", "3"], "`--interval` must be left out for dbs, which does"),
    (["--workers", "3"], "`--workers` must be left out with `--protocol`"),
    (["--reducer", "gather"], "`--reducer` must be left out"),
    (["--table", "gpipe"], "`--table` must be left out without `--stages`"),
    (["--checkpoint-every-epochs", "1"], "`--checkpoint-every-epochs` must be"),
    (
      ["--protocol", "decoupled_diloco", "--interval-policy", "growth"],
      "`--interval-policy` must be left out with `--protocol`",
    ),
    (["--protocol", "asap"], "`--protocol` must be one of bsp"),
    (["--protocol", "nowhere:it"], "`--protocol` must be MODULE:NAME of one"),
    (["--cluster", "nowhere.toml"], "There is no file"),
    (
      ["--protocol", "h_ps", "--codec", "int4"],
      "`--codec` must be left out for h_ps, which does not use it",
    ),
    (
      ["--bound", "7", "--backups", "3", "--splits", "9"],
      "`--bound` and `--splits` and `--backups` must be left out for dbs",
    ),
    (
      ["--protocol", "bsp", "--backups", "2"],
      "`--backups` must be an int from 0 to 1, got 2",
    ),
    (
      ["--protocol", "decoupled_diloco", "--fragments", "3"],
      "`interval` must be a multiple of the 3 fragments",
    ),
    (
      ["--protocol", "h_ps", "--error-limit", "0"],
      "`error_limit` must",
    ),
    (
      ["--protocol", "h_ps", "--parts", "tasks", "--error-limit", "0.5"],
      "`--error-limit` must be left out for h_ps",
    ),
    (["--protocol", "os:getcwd"], "`os:getcwd` must be a `server.Protocol`"),
    (["--batch-size", "65"], "`--batch-size` must divide evenly"),
    (["--shards", "0"], "`--shards` must be at least 1, got 0"),
    (["--shards", "x"], "--shards"),
    (["--shards", "9"], "`shards` must leave each a tensor, got 9 for 4"),
    (
      ["--shards", "2", "--protocol", "decoupled_diloco"],
      "`--shards` must be left out for decoupled_diloco",
    ),
    (["--shards", "-1"], "`--shards` must be at least 1, got -1"),
    (["--no-paced"], "`--paced` must be left out without `--driver ray`"),
    (
      ["--driver", "threads", "--address", "a:1"],
      "`--address` must be left out without `--driver ray`",
    ),
  ),
)
def test_unusable_server_options_are_refused_in_one_line(
  more, rule, words, capsys
):
  assert cli.main([*words, *more]) == 2
  error = capsys.readouterr().err
  assert rule in error and error.count("\n") == 1


def damped(batches):
  """A protocol of a user's own."""
  return server.ASP(
    batches=batches,
    weighting=server.Weighting(staleness=server.inverse_staleness),
  )


def test_user_defined_protocol_trains(words, tmp_path):
  words[words.index("dbs")] = f"{__name__}:damped"
  assert cli.main(words) == 0
  (row,) = rows(tmp_path)
  assert row["accuracy"] > 0.5 and row["method"].endswith(":damped")


def test_splits_are_at_most_the_workers(words, tmp_path, capsys):
  words[words.index("dbs")] = "n_softsync"
  assert cli.main([*words, "--splits", "3"]) == 2
  error = capsys.readouterr().err
  assert "`--splits` must be an int from 1 to 2, got 3" in error
  assert cli.main([*words, "--splits", "2"]) == 0
  assert rows(tmp_path)[0]["updates"] > 0


@pytest.mark.parametrize(
  "more", (["--owned"], ["--bound", "1"], ["--shards", "2"])
)
def test_server_options_need_a_protocol(more, capsys):
  assert cli.main(["train", *more]) == 2
  assert "without `--protocol`" in capsys.readouterr().err


def test_protocol_needs_machines(capsys):
  assert cli.main(["train", "--protocol", "asp"]) == 2
  assert "`--cluster` must be given" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("name", "options", "gradients"),
  [
    ("asp", {}, 1),
    ("bsp", {}, 8),
    ("bsp", {"backups": 3}, 5),
    ("h_ps", {}, 8),
    ("decoupled_diloco", {}, 8),
    ("n_softsync", {}, 8),
    ("n_softsync", {"splits": 3}, 2),
    ("n_softsync", {"splits": 3, "buffer": 5}, 5),
    ("fedbuff", {}, 10),
    ("fedbuff", {"buffer": 5}, 5),
  ],
)
def test_gradients_of_an_update_give_the_length_of_a_run(
  name, options, gradients
):
  train = _commands.Train(protocol=name, **options)
  assert _protocols.gradients_per_update(name, train, 8) == gradients


def test_missing_clock_is_named_before_anything_is_made(
  words, tmp_path, capsys, monkeypatch
):
  monkeypatch.setitem(sys.modules, "simpy", None)
  assert cli.main(words) == 2
  out, error = capsys.readouterr()
  assert "`simpy` is needed here" in error and ".[sim]" in error
  assert out == "" and not (tmp_path / "out").exists()


def test_shared_link_is_as_fast_as_the_largest_shard_allows(monkeypatch):
  """By hand: the larger one of two shards has three quarters of the bytes."""
  shards = [{"params": np.zeros(x, np.float32)} for x in (3, 1)]
  monkeypatch.setattr(_server_parts, "_server_learner", lambda _: (None, None))
  monkeypatch.setattr(server, "divide", lambda learner, number: shards)
  links = {("a", "b"): cluster.Link(9.0), ("a", "s"): cluster.Link(9.0)}
  nodes = tuple(map(cluster.Node, "ab"))
  machines = cluster.Cluster(nodes, cluster.Topology(links), server="s")
  options = types.SimpleNamespace(shards=2)
  parts = types.SimpleNamespace(machines=machines, options=options)
  found = _server_parts.shared_links(parts).topology.links
  rates = {ends: link.bandwidth_bits_per_s for ends, link in found.items()}
  assert rates == {("a", "b"): 9.0, ("a", "s"): 9.0 * 4 / 3}


def test_line_of_a_record_has_the_living_in_percent(capsys):
  record = training.Record(
    step=3, rounds=3, sent_bytes=2e6, train_loss=0.5,
    metrics={"accuracy": 0.25}, train_s=1.5, samples_per_s=40.0,
    clock="virtual",
  )  # fmt: skip
  mark = _run_marks.Mark(
    3, 60, 1.5, 4e6, 0.5, 0.5, 0.5, True, None, merged_share=0.75
  )
  _server_run._print_record(record, mark, None)
  out = capsys.readouterr().out
  assert "75.0 % of the living in a merge" in out
  assert "1.5 virtual s  accuracy 25.00 %" in out


def test_clock_sends_pushes_of_the_codec_s_size(file):
  options = _commands.Train(
    protocol="asp", cluster=file, driver="clock", batch_size=64, epochs=1.0,
    codec="int4",
  )  # fmt: skip
  parts = _server_parts.assemble(options)
  costs = _server_parts.simulation(parts).profile
  assert costs.push_bytes == parts.push_codec.num_bytes(parts.model.params)
  assert costs.push_bytes < 38_440 / 6  # Those of the file.


def test_workers_of_all_seeds_have_streams_of_their_own(file):
  found = []
  for seed in (0, 1):
    options = _commands.Train(
      protocol="asp", cluster=file, driver="clock", batch_size=64, epochs=1.0,
      seed=seed,
    )  # fmt: skip
    parts = _server_parts.assemble(options)
    found += [
      _server_parts._worker_learner(parts, name)._stream
      for name in parts.machines.names
    ]
  assert found == [0, 1, 2, 3]


def test_padded_sizes_of_a_worker_are_at_least_one_sample():
  """Eighths of the largest batch, rounded up so that all batches fit."""
  sizes = _server_parts.batch_sizes(server.dbs(10), "a")
  assert sizes == (2, 3, 4, 7, 10)
  assert _server_parts.batch_sizes(server.dbs(1), "a") == (1,)
