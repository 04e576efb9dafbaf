"""Declarations of options: each number has its range."""

import dataclasses
import math
import re
import sys
import types
import typing

import pytest

from jdist import cli, server
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
_SERVER = "ahead grace quorum"
_ELSEWHERE = {
  "Train": f"{_MEAN} {_SERVER} chunks cuts error_limit gpus_per_worker "
  "local_momentum window",
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


# The options of each range; those of one command alone stand behind its name.
_RANGES = {
  "[1, inf)": "accumulate buffer fragments gpus_per_node image_size in_flight "
  "interval length max_staleness microbatches num_heads num_layers "
  "num_processes shards slowdown splits stages steps width window_length "
  "workers Advise:batch_size Overlap:batch_size Pipeline:samples",
  "[2, 10000]": "Advise:workers",
  "(0, inf)": "bandwidth_gbit_per_s bandwidth_mbit_per_s "
  "checkpoint_every_epochs cpus_per_worker drawn_seconds epochs "
  "evaluate_every_epochs growth_start learning_rate limit_s memory_gb_per_s "
  "message_mb outer_learning_rate seconds tflop_per_s timeout_s "
  "Simulate:batch_size",
  "[0, inf)": "backoff_s backups backward_s bound combine_mb correction "
  "forward_s grid_extensions latency_ms latency_us launch_us local_rate "
  "max_delay optimizer_copies output_bytes parameter_bytes process_id "
  "restarts saved_bytes warmup_epochs warmup_steps weight_decay",
  "[0, 1)": "momentum outer_momentum pipeline_from",
  "[0, 1]": "pending",
  "(0, 1)": "late_from",
  "(0, 1e9]": "updates Simulate:samples",
  "[1, 1000]": "tuning_seeds Bytes:workers",
  "[1, 10000]": "Advise:interval",
  "[0, 4294967296)": "seed seeds",
}


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda x: x.__name__)
def test_range_of_every_option(command):
  wanted = {}
  for kind in ("", f"{command.__name__}:"):
    for within, names in _RANGES.items():
      for name in names.split():
        if name.startswith(kind) and (":" in name) == bool(kind):
          wanted[name.removeprefix(kind)] = within
  found = {
    field.name: field.metadata["option"].within
    for field in dataclasses.fields(command)
    if "option" in field.metadata and field.metadata["option"].within
  }
  assert found == {name: wanted.get(name) for name in found}


def test_own_protocol_is_found_in_the_current_directory(tmp_path, monkeypatch):
  # As the installed command starts: without the directory on its path.
  (tmp_path / "nearby.py").write_text("from jdist.server import ASP as Own\n")
  monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
  monkeypatch.chdir(tmp_path)
  _parts.resolve({"protocol": "nearby:Own"})
  assert server.PROTOCOLS.pop("nearby:Own") is server.ASP


def test_last_preset_is_that_of_the_defaults():
  words = ["--preset", "mnist", "--seed", "3", "--preset=cifar10"]
  options = cli._parse("train", words)
  assert (options.preset, options.dataset) == ("cifar10", "cifar10")
  assert _options.given(options) == ["seed"]


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


@pytest.mark.parametrize("name", ["table", "cluster"])
def test_run_is_resumed_with_the_same_file_wherever_it_is(name, tmp_path):
  found, texts = [], ["F0 B0", "F0 B0", "F0 F1 B0 B1"]
  for number, text in enumerate(texts):
    path = tmp_path / f"{number % 2}.txt"  # The last one replaces the first.
    path.write_text(text)
    options = _commands.Train(**{name: str(path)})
    found.append(_options.identity(options, _workload.ELSEWHERE))
  assert found[0] == found[1] != found[2]
  assert [x[name] for x in found] == texts


# Options that are refused without another one, or without its values.
_TRAIN = {
  "files": "image_size",
  "steps None": "epochs",
  "optimizer sgd": "momentum",
  "checkpoints": "checkpoint_every_epochs",
  "stages": "table microbatches window chunks cuts late_from delay_fix runtime",
  "runtime processes": "edge_codec",
  "protocol": "bound splits buffer max_staleness backups parts pipeline_from "
  "fragments quorum grace ahead peers error_limit local_rate local_momentum "
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
      " error_limit local_rate local_momentum cluster driver timeout_s shards"
      " owned"
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


@pytest.mark.parametrize(
  ("within", "value", "rule"),
  [
    ("(0, inf)", 0.0, "positive"), ("(0, inf)", 1e-300, None),
    ("(0, inf)", math.inf, "positive and finite"),
    ("[0, inf)", 0, None), ("[0, inf)", -1, "at least 0"),
    ("[2, inf)", 1, "at least 2"), ("[2, inf)", 2, None),
    ("[1, inf)", 2**31 - 1, None),
    ("[1, inf)", 2**31, "at least 1 and below 2**31"),
    ("[0, 1)", 1.0, "in [0, 1)"), ("[0, 1)", 0.0, None),
    ("[0, 1]", 1.0, None), ("[0, 1]", 1.5, "in [0, 1]"),
    ("(0, 1)", 0.0, "in (0, 1)"), ("[1, 1000]", 1001, "in [1, 1000]"),
    ("[0, 4294967296)", 2**32, "from 0 to 2**32 - 1"),
    ("[0, 4294967296)", 2**32 - 1, None),
    ("[0, 1]", math.nan, "in [0, 1]"), ("(0, inf)", math.nan, "positive"),
  ],
)  # fmt: skip
def test_value_is_within_its_range_or_told_it(within, value, rule):
  if rule is None:
    _options._check_within("some_field", value, within)
    return
  with pytest.raises(ValueError, match=r"^`--some-field` must be") as caught:
    _options._check_within("some_field", value, within)
  assert str(caught.value) == f"`--some-field` must be {rule}, got {value}."


@pytest.mark.parametrize(
  ("given", "driver"),
  [
    ({}, None), ({"protocol": "asp"}, "clock"), ({"elastic": True}, "threads"),
    ({"protocol": "asp", "driver": "ray"}, "ray"),
    ({"elastic": True, "driver": "clock"}, "clock"),
  ],
)  # fmt: skip
def test_server_runs_on_the_usual_engine_unless_one_is_named(given, driver):
  found = _options.with_driver(_commands.Train(**given))
  assert found.driver == driver
  compare = _commands.Compare()
  assert _options.with_driver(compare) is compare


@pytest.mark.parametrize(
  ("given", "rule"),
  [
    ({"batch_size": 64}, None),
    ({"workers": 0}, "`--workers` must be at least"),
    ({"output": ""}, "`--output` must not be empty: leave it out."),
    ({"chunks": 2}, "`--chunks` must be left out without `--stages`, got 2"),
    ({"chunks": 2, "stages": 2}, None),
    ({"edge_codec": "int4", "stages": 2},
     "must be left out without `--runtime processes`"),
    ({"momentum": 0.5, "optimizer": "adamw"},
     "`--momentum` must be left out without `--optimizer sgd`"),
    ({"epochs": 3.0, "steps": 4},
     "`--epochs` must be left out with `--steps 4`"),
    # A later check finds the options of a protocol that a method uses.
    ({"quorum": 0.5}, "without `--protocol`"),
    ({"quorum": 0.5, "elastic": True}, None),
  ],
)  # fmt: skip
def test_option_without_its_need_is_refused(given, rule):
  options = _commands.Train(**given)
  if rule is None:
    _options.check(options)
    return
  with pytest.raises(ValueError) as caught:
    _options.check(options)
  assert rule in str(caught.value)


def test_values_of_several_are_each_within_the_range():
  _options.check(_commands.Compare(learning_rate=(0.1, 0.2)))
  with pytest.raises(ValueError, match="`--learning-rate` must be pos"):
    _options.check(_commands.Compare(learning_rate=(0.1, 0.0)))


# The arguments of factories that options fill, and what makes others use them.
_FILLS = {
  "optimizer": ("worker_optimizer", None), "interval": ("interval", None),
  "momentum": ("worker_optimizer mu", None),
  "interval_policy": ("interval", None),
  "growth_start": ("growth", "--interval-policy growth"),
  "overlap": ("overlap", None),
  "delay_steps": ("delay_steps overlap late", None),
  "carry": ("late", "--overlap"), "stream": ("late stream", "--overlap"),
  "correction": ("correction", None), "outer": ("rule", None),
  "outer_learning_rate": ("outer_learning_rate", "--outer"),
  "outer_momentum": ("outer_momentum", "--outer"),
  "codec": ("compression", None), "feedback": ("compression", None),
  "reducer": ("compression", None), "bits": ("bits", None),
  "ratio": ("ratio density", "--codec top_k"),
  "rank": ("rank", "--reducer power_sgd"),
  "predictor": ("predictor_params", None), "bound": ("bound", None),
  "splits": ("n", None), "buffer": ("buffer", None),
  "max_staleness": ("max_staleness", None), "backups": ("backups", None),
  "parts": ("tasks pipelined plans", None),
  "pipeline_from": ("pipelined_from", None), "error_limit": ("plans", None),
  "local_rate": ("local_step", None), "local_momentum": ("local_step", None),
  "fragments": ("fragments", None), "quorum": ("quorum", None),
  "grace": ("grace", None), "ahead": ("ahead", None), "peers": ("peers", None),
  "timeout_s": ("timeout_s", None), "shards": ("shards", None),
}  # fmt: skip


def test_options_fill_these_arguments():
  fields = dataclasses.fields(_commands.Train)
  options = {x.name: x.metadata.get("option") for x in fields}
  found = {
    name: (" ".join(option.fills), option.hint)
    for name, option in options.items()
    if option is not None and (option.fills or option.hint)
  }
  assert found == _FILLS


@pytest.mark.parametrize(
  ("given", "refusal"),
  [
    (
      {"rank": 2},
      "`--rank` must be left out for one, which does not use it: `--rank`, got "
      "2, is used by two, and others with `--reducer power_sgd`.",
    ),
    (
      {"growth_start": 2.0},
      "`--growth-start` must be left out for one, which does not use it: "
      "`--growth-start`, got 2.0, is used by others with `--interval-policy "
      "growth`.",
    ),
    (
      {"bound": 2},
      "`--bound` must be left out for one, which does not use it: `--bound`, "
      "got 2, is used by none of them.",
    ),
  ],
)
def test_unused_option_is_told_its_users(given, refusal):
  usual = _options.with_preset(_commands.Train, "digits")
  options = dataclasses.replace(usual, **given)
  takes = {"one": {"bits"}, "two": {"rank"}}.__getitem__
  with pytest.raises(ValueError, match=f"^{re.escape(refusal)}$"):
    _options.check_used(options, ["one"], ["one", "two"], takes)
