"""Declarations of options: each number has its range."""

import dataclasses
import sys
import types
import typing

import pytest

from jdist import server
from jdist.cli import _commands, _options, _output, _parts, _workload
from tests import _refusals

_COMMANDS = [
  x
  for x in vars(_commands).values()
  if dataclasses.is_dataclass(x) and x.__module__ == _commands.__name__
]

# Numbers whose rules depend on other options or on what they are given to,
# which refuses them.
_MEAN = "alpha batch_size bits carry delay_steps rank ratio"
_SERVER = "ahead error_limit grace local_momentum quorum"
_ELSEWHERE = {
  "Train": f"{_MEAN} {_SERVER} chunks cuts gpus_per_worker window",
  "Compare": _MEAN,
  "Overlap": "bits rank ratio",
  "Bytes": "bits cut rank ratio",
  "Simulate": f"{_SERVER} interval seed",
  "Pipeline": "batch_size chunks iterations max_live max_versions microbatches "
  "stages window",
}


def _is_number(hint):
  kinds = typing.get_args(hint) or (hint,)
  return int in kinds or float in kinds


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda x: x.__name__)
def test_every_number_has_a_range(command):
  hints = typing.get_type_hints(command)
  without = {
    field.name
    for field in dataclasses.fields(command)
    if _is_number(hints[field.name])
    and getattr(field.metadata.get("option"), "within", None) is None
  }
  assert without == set(_ELSEWHERE.get(command.__name__, "").split())


def test_own_protocol_is_found_in_the_current_directory(tmp_path, monkeypatch):
  # As the installed command starts: without the directory on its path.
  (tmp_path / "nearby.py").write_text("from jdist.server import ASP as Own\n")
  monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
  monkeypatch.chdir(tmp_path)
  _parts.resolve({"protocol": "nearby:Own"})
  assert server.PROTOCOLS.pop("nearby:Own") is server.ASP


def test_table_has_its_title_and_caption():
  grid = _output.table("Title", "Caption", {"a": str, "b": str}, [])
  assert (grid.title, grid.caption) == ("Title", "Caption")
  assert [x.justify for x in grid.columns] == ["left", "right"]


def test_process_behind_the_last_is_refused():
  given = types.SimpleNamespace(
    num_processes=2, process_id=2, coordinator_address="a:1", workers=2
  )
  with _refusals.refused("--process-id", "from 0 to 1, got 2"):
    _options.join_processes(given, 2)


def test_bools_are_words_of_a_command():
  usual = _options.with_preset(_commands.Train, "digits")
  given = dataclasses.replace(usual, host_rounds=False, skip_nonfinite=True)
  words = _options.command_line(given).split()
  assert {"--no-host-rounds", "--skip-nonfinite"} <= {*words}


@pytest.mark.parametrize(
  ("host", "told"),
  [
    ("127.0.0.1", "jdist launch -n 2 -- train --method diloco"),
    (
      "10.0.0.1",
      "jdist train --method diloco --coordinator-address 10.0.0.1:99 "
      "--num-processes 2 --process-id 1",
    ),
  ],
)
def test_machine_of_several_repeats_its_own_command(host, told):
  usual = _options.with_preset(_commands.Train, "digits")
  given = dataclasses.replace(
    usual, method="diloco", coordinator_address=f"{host}:99", num_processes=2,
    process_id=1,
  )  # fmt: skip
  words = _options.command_line(given)
  assert sorted(words.split()) == sorted(told.split())
  assert words.startswith(told[:12])


def test_remedy_is_a_batch_that_every_worker_has_a_part_of():
  for size, told in ((1, "Take 4 or 8."), (6, "Take 4 or 8."), (9, "8 or 12")):
    with _refusals.refused("--batch-size", told):
      _workload.check_batch(size, 4, 1, "")
  _workload.check_batch(8, 4, 2, "")


# Options that may change when a run is resumed.
_FREE = (
  "checkpoint_every_epochs checkpoints coordinator_address "
  "evaluate_every_epochs files final_params num_processes output predictor "
  "preset process_id tensorboard text"
)


def test_resumed_run_may_have_other_values_of_these_options_alone():
  found = _options.identity(_commands.Train(), _workload.ELSEWHERE)
  given = {field.name for field in dataclasses.fields(_commands.Train)}
  assert given - {*found} == {*_FREE.split()}


# Options that are refused without another one, or without its values.
_TRAIN = {
  "files": "image_size",
  "steps None": "epochs",
  "optimizer sgd": "momentum",
  "checkpoints": "checkpoint_every_epochs",
  "stages": "table microbatches window chunks cuts late_from delay_fix runtime",
  "runtime processes": "edge_codec",
  "protocol": "bound splits buffer max_staleness backups parts pipeline_from "
  "error_limit local_rate local_momentum fragments quorum grace ahead peers "
  "cluster driver timeout_s shards owned",
  "driver ray": "address cpus_per_worker gpus_per_worker",
  "driver ray threads": "paced record",
}
_NEEDS = {
  "Train": _TRAIN,
  "Compare": {x: _TRAIN[x] for x in ("files", "steps None", "optimizer sgd")},
  "Advise": {"files": "image_size"},
  "Simulate": {
    "protocol": _TRAIN["protocol"].removesuffix(
      " cluster driver timeout_s shards owned"
    )
  },
  "Pipeline": {
    "action draw check simulate": "iterations chunks",
    "action check": "sends max_live max_versions",
    "action plan": "batch_size samples max_delay model",
    "action simulate plan": "cluster costs edge_codec optimizer_copies output",
    "action simulate": "forward_s backward_s output_bytes parameter_bytes "
    "saved_bytes",
  },
  "Launch": {
    "print None": "backoff_s",
    "print": "name",
    "print slurm kubernetes mpi": "gpus_per_node",
    "print kubernetes kuberay slurm": "image",
    "print kubernetes kuberay": "claim",
  },
}


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda x: x.__name__)
def test_options_need_what_they_are_for(command):
  found = {}
  for field in dataclasses.fields(command):
    option = field.metadata.get("option")
    if option is not None and option.needs:
      needs = " ".join(map(str, option.needs))
      found.setdefault(needs, set()).add(field.name)
  wanted = _NEEDS.get(command.__name__, {})
  assert found == {need: {*names.split()} for need, names in wanted.items()}
