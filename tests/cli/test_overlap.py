"""`jdist overlap`, with the compiler for GPUs and without."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import pytest

from jdist import cli, cluster, collectives, methods, models, profiling
from jdist.cli import _commands, _output
from jdist.cli.programs import _overlap, _overlap_inputs
from jdist.profiling import _timeline

_PROFILING = pathlib.Path(__file__).parent.parent / "profiling"
needs_compiler = pytest.mark.skipif(
  not any(
    importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13)
  ),
  reason="needs the extra `schedules`: JAX's plugin for CUDA",
)

_BAD = [
  ("--methods sgd", "`--methods` must be one of ssgd"),
  (
    "--methods msdpu msdpu",
    "`--methods` must be one or more different methods",
  ),
  ("--methods msdpu:fast", "msdpu has the forms streamed, simple, got"),
  ("--methods local_sgd:first", "local_sgd has one form only, got"),
  ("--method msdpu", "no option `--method`, did you mean `--methods`?"),
  ("--model vit", "`--model` must be one of mlp"),
  ("--topology h200", "`--topology`: `text` must be GPUSxKIND"),
  ("--topology 0xh200", "`gpus_per_node` must be an int >= 1, got 0"),
  ("--batch-size 0", "`--batch-size` must be at least 1, got 0"),
  ("--image-size -1", "`--image-size` must be at least 1, got -1"),
  ("--length 0", "`--length` must be at least 1, got 0"),
  ("--interval 0", "`--interval` must be at least 1, got 0"),
  ("--in-flight 0", "`--in-flight` must be at least 1, got 0"),
  ("--combine-mb -1", "`--combine-mb` must be at least 0, got -1"),
  ("--message-mb 0", "`--message-mb` must be positive, got 0"),
  ("--model lenet --length 4", "`--length` must be left out with images"),
  (
    "--model transformer --image-size 8",
    "`--image-size` must be left out with a text",
  ),
  ("--methods ssgd --message-mb 1", "`--message-mb` must be left out without"),
  (
    "--methods ssgd:first --pending 0.5",
    "`--pending` must be left out w",
  ),
  ("--pending 1.5", "`--pending` must be in [0, 1], got 1.5"),
  ("--pending nan", "`--pending` must be in [0, 1], got nan"),
  ("--combine-mb nan", "`--combine-mb` must be at least 0, got nan"),
  ("--bandwidth-gbit-per-s 0", "`--bandwidth-gbit-per-s` must be positive"),
  ("--tflop-per-s inf", "`--tflop-per-s` must be positive and finite, got inf"),
  ("--memory-gb-per-s -1", "`--memory-gb-per-s` must be positive, got -1"),
  ("--latency-us -1", "`--latency-us` must be at least 0, got -1"),
  ("--launch-us nan", "`--launch-us` must be at least 0, got nan"),
  ("--dtype float8", "invalid choice 'float8' for argument '--dtype'"),
]


def test_figures_of_a_round_are_means_over_its_steps():
  ends = types.SimpleNamespace(end_s=5.0, send_s=4.0, exposed_s=3.0)
  rest = types.SimpleNamespace(end_s=1.0, send_s=1.0, exposed_s=0.0)
  found = _overlap.Found("a", ends, rest, 4, 0, 0.0)
  assert found.mean_step_s == (5 + 3 * 1) / 4
  assert found.hidden_share == pytest.approx(1 - 3 / 7)
  silent = types.SimpleNamespace(end_s=1.0, send_s=0.0, exposed_s=0.0)
  found = _overlap.Found("a", silent, silent, 4, 0, 0.0)
  assert found.hidden_share == 1.0


@pytest.mark.parametrize(("words", "told"), _BAD, ids=[w for w, _ in _BAD])
def test_bad_option_is_refused_in_one_line(words, told, refusal):
  assert told in refusal(f"overlap {words}")


def test_missing_compiler_is_refused_with_its_extra(
  tmp_path, monkeypatch, capsys
):
  found = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name, *rest: (
      None if name.startswith("jax_cuda") else found(name, *rest)
    ),
  )
  monkeypatch.chdir(tmp_path)
  assert cli.main(["overlap"]) == 2
  out, error = capsys.readouterr()
  assert error.count("\n") == 1
  assert 'pip install ".[schedules]"' in error
  assert out == ""
  assert list(tmp_path.iterdir()) == []


def test_report_of_a_forecast_has_a_line_for_each_collective(capsys):
  text = (_PROFILING / "delayed_on_8_h200.hlo").read_text()
  device = cluster.Device("toy", 2 * 1024**3, memory_bytes_per_s=1e30)
  step = profiling.forecast(text, device, cluster.Link(8e9))
  found = _overlap.Found("msdpu", step, step, 8, 10**9, 3.0)
  _output.console().print(_overlap.messages_table(found))
  _output.console().print(_overlap.methods_table([found]))
  out = re.sub(" *│ *", "│", capsys.readouterr().out)
  assert "│1│all-reduce│each step│3.67│" in out
  assert "│msdpu│8│3.67│" in out
  row = _overlap.row(_commands.Overlap(), found)
  assert row["hidden_share"] == row["meeting"]["hidden_share"] == 1.0
  assert row["messages"][0]["kernels"] == 4
  # The last of eight steps alone sends.
  silent = dataclasses.replace(step, collectives=())
  found = dataclasses.replace(found, between=silent)
  row = _overlap.row(_commands.Overlap(), found)
  assert row["mean_wire_bytes"] == step.wire_bytes / 8 > 0


def test_forms_name_methods_of_the_registry():
  assert set(_overlap_inputs.FORMS) <= set(methods.registry)


@pytest.mark.parametrize("model", models.MODELS)
def test_every_model_has_a_batch(model):
  task = _overlap_inputs.make_task(_commands.Overlap(model=model, batch_size=3))
  assert all(x.shape[0] == 3 for x in task.batch.values())


@pytest.mark.parametrize("timelines", [False, True])
def test_timelines_are_named_where_there_are_some(
  timelines, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  _output.finish(tmp_path, _commands.Overlap(), timelines=timelines)
  told = capsys.readouterr().out
  # Without the extra that draws it there is no page.
  assert "\nNo report was made. Install what is missing: pip install" in told
  status = json.loads((tmp_path / "status.json").read_text())
  command = f"jdist overlap --output {tmp_path}"
  assert status == {"state": "ended", "command": command}
  # The state that a run itself has written stays.
  (tmp_path / "status.json").write_text("{}")
  _output.finish(tmp_path, _commands.Overlap())
  assert (tmp_path / "status.json").read_text() == "{}"
  assert f"Rows: {tmp_path / 'rows.jsonl'}" in told
  assert (f": {tmp_path}/*.json" in told) is timelines


def test_donated_memory_counts_once():
  sizes = {"argument": 8, "output": 7, "alias": 6, "temp": 5}
  memory = types.SimpleNamespace(
    **{f"{name}_size_in_bytes": x for name, x in sizes.items()}
  )
  program = types.SimpleNamespace(memory_analysis=lambda: memory)
  assert _overlap_inputs.memory_bytes(program) == 8 + 7 - 6 + 5


@pytest.mark.parametrize(
  ("name", "size", "shape", "classes"),
  [
    ("lenet", None, (28, 28, 1), 10), ("resnet8", None, (32, 32, 3), 10),
    ("resnet18", None, (224, 224, 3), 1000), ("resnet18", 32, (32, 32, 3), 10),
    ("resnet18", 33, (33, 33, 3), 1000),
  ],
)  # fmt: skip
def test_images_are_of_the_size_for_which_a_model_was_made(
  name, size, shape, classes
):
  model, found = _overlap_inputs.image_model(name, size)
  assert found == shape
  # The last layer has a bias for each class.
  assert jax.tree.leaves(model.params)[-2].shape == (classes,)


def test_transformer_is_the_smallest_gpt_2():
  task = _overlap_inputs.make_task(_commands.Overlap(model="transformer"))
  # It has 50,257 tokens, a length of 1,024 and 12 layers of width 768.
  assert models.num_params(task.model) == 124_439_808


@pytest.mark.parametrize(
  ("topology", "options", "expected"),
  [
    ("8xh200", {}, (3600e9, 989.5e12, 4.8e12)),
    ("2x8xh200", {"dtype": "float32"}, (400e9, 494.7e12, 4.8e12)),
    (
      "8xa100",
      {
        "bandwidth_gbit_per_s": 100.0,
        "tflop_per_s": 50.0,
        "memory_gb_per_s": 1.0,
      },
      (100e9, 50e12, 1e9),
    ),
  ],
)
def test_rates_default_to_the_data_sheet(topology, options, expected):
  _, device, link = _overlap_inputs.check(
    _commands.Overlap(topology=topology, **options)
  )
  rates = (
    link.bandwidth_bits_per_s, device.flops_per_s, device.memory_bytes_per_s,
  )  # fmt: skip
  assert rates == expected
  assert link.latency_s == device.launch_s == 2e-6


@pytest.fixture
def run(tmp_path, capsys):
  """Runs the command on a small model; gives its rows and what it printed."""
  pytest.importorskip("matplotlib")

  def one(*words, model="mlp"):
    output = tmp_path / "out"
    status = cli.main(
      ["overlap", "--model", model, "--output", str(output), *words]
    )
    out, error = capsys.readouterr()
    assert status == 0, error
    assert "Timelines" in (output / "report.html").read_text()
    lines = (output / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], out

  return one


# A ring of eight sends 2 * 7/8 of the parameters' bytes.
_BYTES = (784 * 128 + 128 + 128 * 10 + 10) * 4 * 2 * 7 / 8


def test_compiler_combines_messages_of_megabytes():
  options = _commands.Overlap(in_flight=3, combine_mb=2.5)
  flags = _overlap_inputs.compiler_flags(options)
  assert list(flags.values()) == [3, 2_500_000]
  assert not _overlap_inputs.compiler_flags(_commands.Overlap())


@needs_compiler
def test_one_method_lists_its_collectives(run):
  (row,), out = run("--methods", "ssgd", "--topology", "8xh200")
  (message,) = row["messages"]
  assert message["kind"] == "all-reduce"
  assert message["wire_bytes"] == row["mean_wire_bytes"] == _BYTES
  assert not message["conditional"]
  assert 0 <= row["hidden_share"] <= 1
  assert "Collectives of ssgd" in out and "each step" in out
  assert "Stated rates, not measurements" in out
  # Two layers run forward and backward, without the images' gradient.
  layers = 784 * 128 * 2 + 128 * 10 * 3
  # The compiler pads 784 to 896 where it splits the sum.
  assert row["meeting"]["flops"] == pytest.approx(2 * 32 * layers, rel=0.1)


@needs_compiler
def test_streamed_round_is_hidden_and_conditional_one_is_not(run):
  rows, out = run(
    "--methods", "msdpu", "msdpu:simple", "--interval", "4",
    "--tflop-per-s", "0.01", "--bandwidth-gbit-per-s", "100",
    "--latency-us", "0", "--launch-us", "0", "--no-host-rounds",
  )  # fmt: skip
  streamed, simple = rows
  assert streamed["interval"] == simple["interval"] == 4
  # A round sends the same bytes, up to the last sub-tensor's overlap.
  assert streamed["mean_wire_bytes"] == pytest.approx(_BYTES / 4, rel=0.01)
  assert simple["mean_wire_bytes"] == pytest.approx(_BYTES / 4, rel=0.01)
  assert not any(m["conditional"] for m in streamed["messages"])
  assert all(m["conditional"] for m in simple["messages"])
  # With slow products, computation is long enough to hide the messages.
  assert streamed["hidden_share"] > 0.95
  assert streamed["messages"][0]["products"] > 0
  assert sum(m["products"] for m in simple["messages"]) == 0
  assert simple["hidden_share"] < streamed["hidden_share"] - 0.3
  assert "msdpu:simple" in out and "Collectives of" not in out


@needs_compiler
@pytest.mark.slow  # It compiles for GPUs for a minute.
def test_host_rounds_have_no_conditional(run):
  words = ("--methods", "msdpu", "local_sgd", "ssgd", "--interval", "4")
  decided, _ = run(*words, "--no-host-rounds")
  told = run(*words)[0][len(decided) :]
  for one, other in zip(told, decided, strict=True):
    assert one["interval"] == other["interval"]
    assert one["mean_wire_bytes"] == pytest.approx(other["mean_wire_bytes"])
    assert not any(m["conditional"] for m in one["messages"])
  streamed, local, _ = told
  assert streamed["between"]["wire_bytes"] > 0
  assert local["between"]["wire_bytes"] == 0
  # Without a conditional nothing is copied around it.
  for one, other in zip(told[:2], decided[:2], strict=True):
    assert one["between"]["compute_s"] < other["between"]["compute_s"]


@needs_compiler
def test_less_merging_sends_more_messages(run):
  (merged, *_), _ = run("--methods", "ssgd")
  rows, _ = run("--methods", "ssgd", "--combine-mb", "0", "--in-flight", "4")
  apart = rows[-1]
  assert len(merged["messages"]) == 1 and len(apart["messages"]) == 4
  assert apart["mean_wire_bytes"] == merged["mean_wire_bytes"]


@needs_compiler
def test_update_first_hides_under_the_forward_pass(run):
  # Five sixths of LeNet's bytes belong to the layers behind its convolutions.
  (row,), _ = run(
    "--methods", "ssgd:first",
    "--message-mb", "0.05", "--combine-mb", "0", "--in-flight", "4",
    "--tflop-per-s", "0.01", "--bandwidth-gbit-per-s", "100",
    "--latency-us", "0", "--launch-us", "0",
    model="lenet",
  )  # fmt: skip
  # It is 0.76, and almost nothing if the forward pass waits for all messages.
  assert row["hidden_share"] > 0.5
  front, *behind = row["messages"]
  assert front["products"] == 0  # The first layer waits for its message.
  assert sum(m["products"] > 0 for m in behind) >= len(behind) / 2


@needs_compiler
def test_update_first_sends_as_much_as_ssgd(run):
  rows, _ = run("--methods", "ssgd", "ssgd:first", "ssgd:scattered")
  kinds = [[m["kind"] for m in row["messages"]] for row in rows]
  assert kinds[0] == kinds[1] == ["all-reduce"]
  assert sorted(kinds[2]) == ["all-gather", "reduce-scatter"]
  sent = [row["mean_wire_bytes"] for row in rows]
  assert sent[1] == sent[0]
  assert sent[2] == pytest.approx(sent[0], rel=0.01)


@needs_compiler
@pytest.mark.slow  # It compiles for GPUs for a minute.
def test_update_first_hides_more_than_after_on_a_slow_link(tmp_path):
  # The command needs a process in which JAX has not started.
  pytest.importorskip("matplotlib")
  words = (
    "--model", "resnet8", "--methods", "ssgd", "ssgd:scattered", "ssgd:hybrid",
    "--tell-compiler", "--message-mb", "0.06",
    "--bandwidth-gbit-per-s", "10", "--output", str(tmp_path),
  )  # fmt: skip
  done = subprocess.run(
    [sys.executable, "-m", "jdist", "overlap", *words],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  lines = (tmp_path / "rows.jsonl").read_text().splitlines()
  after, *others = [json.loads(line) for line in lines]
  for row in others:
    assert row["hidden_share"] > after["hidden_share"] + 0.1, row["method"]
    assert row["mean_step_s"] < after["mean_step_s"], row["method"]


def test_link_rates_must_be_set_before_jax_starts():
  jax.devices()
  with pytest.raises(RuntimeError, match="before"):
    profiling.set_link_rates(1e9, 1e-6)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
  ("model", "giga_flops"),
  [
    # An image takes 4.09 billion multiply-adds, three times in training,
    # without the first layer's gradient of the images.
    ("resnet50", (3 * 4.089 - 0.118) * 2),
    # A token takes 6 operations for each parameter but the 1,024 positions.
    # Each of 12 layers has two products of length x length x width.
    (
      "transformer",
      6e-9 * (124.44e6 - 1024 * 768) * 1024 + 3e-9 * 12 * 4 * 1024**2 * 768,
    ),
  ],
)
def test_operations_match_published_counts(model, giga_flops):
  options = _commands.Overlap(model=model, batch_size=2)
  described = profiling.gpu_target("8xh200")
  workers = collectives.workers(8, mesh=described.mesh())
  (program,) = _overlap._programs(
    "ssgd", False, options, _overlap_inputs.make_task(options), workers
  )
  events = _timeline.read_timeline(program)
  found = sum(event.flops for event in events)
  assert found / 2 / 1e9 == pytest.approx(giga_flops, rel=0.01)


def test_rates_and_steps_are_shown_in_their_units(capsys):
  device = cluster.Device("toy", 3e12, 4e9, launch_s=5e-6)
  link = cluster.Link(6e9, latency_s=7e-6)
  assert _overlap.rates(device, link) == (
    "Stated rates, not measurements: 3 TFLOP/s, 4 GB/s of memory, 5 µs at "
    "least a kernel; link 6 Gbit/s each way, 7 µs a message."
  )
  step = types.SimpleNamespace(
    end_s=0.5, send_s=0.25, exposed_s=0.0, wire_bytes=2e6, hidden_share=1.0
  )
  found = _overlap.Found("msdpu", step, step, 1, 0, 0.0)
  _output.console().print(_overlap.methods_table([found]))
  cells = capsys.readouterr().out.split("│ msdpu")[1].splitlines()[0]
  assert [x.strip() for x in cells.split("│")[1:8]] == [
    "1", "2", "250.000", "100.0", "500.000", "500.000", "100.0",
  ]  # fmt: skip
