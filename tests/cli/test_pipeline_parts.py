"""`jdist pipeline`: what its options become, without tables on a clock."""

import dataclasses
import pathlib
import types

import jax
import pytest

from jdist import cluster, codecs, models, pipeline, training
from jdist.cli import _commands, _methods, _output
from jdist.cli.pipelines import _pipeline, _tables

_LAYER = pipeline.LayerCost("one", 1.0, 2.0, output_bytes=64.0)


@pytest.mark.parametrize("options", [
  {}, {"sends": "blocking", "max_live": 3, "max_versions": 2}
])  # fmt: skip
def test_table_is_checked_by_its_limits(options, monkeypatch, capsys):
  asked = []
  report = types.SimpleNamespace(
    blocking="sends" in options, live=(4, 3), versions=(2, 1), delays=(0, 5)
  )
  monkeypatch.setattr(
    pipeline, "check_table", lambda *given, **more: asked.append(more) or report
  )
  _pipeline._check("the table", _commands.Pipeline(**options))
  usual = {"sends": "buffered", "max_live": None, "max_versions": None}
  assert asked == [usual | options]
  sends = "buffered or blocking" if options else "buffered"
  assert capsys.readouterr().out.splitlines() == [
    "the table", f"  runs to its end, with {sends} sends",
    "  micro-batches kept, by stage: 4 3",
    "  versions of the parameters, by stage: 2 1",
    "  delay of the gradients, by stage: 0 5",
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("names", "options", "wanted"),
  [
    ("gpipe", {}, {"num_iterations": 1}),
    ("ours", {"window": 2}, {"num_iterations": 12, "window": 2}),
    ("ours", {"iterations": 4, "window": 2}, {"num_iterations": 4}),
    ("interleaved", {"chunks": 3}, {"num_stages": 6}),
    ("gpipe ours", {"window": 2}, {"num_iterations": 1}),
    ("ours gpipe", {"window": 2}, {"num_iterations": 12, "window": 2}),
  ],
)
def test_options_of_a_table_are_of_those_that_have_them(names, options, wanted):
  options = _commands.Pipeline(
    action="simulate", tables=tuple(names.split()), stages=2, microbatches=4,
    **options,
  )  # fmt: skip
  table = _pipeline._table(names.split()[0], options)
  assert table.num_microbatches == 4 and len(table.devices) == 2
  assert {x: getattr(table, x) for x in wanted} == wanted


def test_option_that_no_table_has_is_refused():
  options = _commands.Pipeline(
    action="draw", tables=("gpipe",), stages=2, microbatches=4, window=2
  )
  with pytest.raises(ValueError, match=r"`--window` must be left out.*gpipe"):
    _pipeline.run(options)


def test_table_to_be_drawn_has_its_own_iterations():
  options = _commands.Pipeline(
    tables=("ours",), stages=2, microbatches=4, window=2
  )
  drawn = _pipeline._table("ours", options)
  assert drawn == pipeline.make_table("ours", 2, 4, window=2)
  # One beside it that has no window is drawn without.
  drawn = _pipeline._table("gpipe", options)
  assert drawn == pipeline.make_table("gpipe", 2, 4)


@pytest.mark.parametrize(
  ("table", "part"), [(("gpipe", 2, 4), 1.0), (("interleaved", 2, 4), 0.5)]
)
def test_equal_devices_divide_their_costs_over_their_stages(
  table, part, monkeypatch
):
  given = []
  monkeypatch.setattr(
    pipeline, "simulate", lambda *found, **more: given.append((found, more))
  )
  options = _commands.Pipeline(
    forward_s=3.0, backward_s=5.0, parameter_bytes=7.0, saved_bytes=11.0,
    output_bytes=64.0, optimizer_copies=2.5,
  )  # fmt: skip
  table = pipeline.make_table(*table)
  _pipeline._times(table, "machines", options)
  ((simulated, costs, machines), more), *_ = given
  assert (simulated, machines) == (table, "machines")
  assert more == {"optimizer_copies": 2.5}
  assert costs == [
    pipeline.LayerCost(
      f"stage {i}", 3.0 * part, 5.0 * part, parameter_bytes=7.0 * part,
      saved_bytes=11.0 * part, output_bytes=64.0,
    )
    for i in range(table.num_stages)
  ]  # fmt: skip


def test_row_of_a_simulated_table_has_all_figures(monkeypatch, tmp_path):
  figures = {
    "iteration_s": 1.5, "makespan_s": 2.5, "bubble": 0.25,
    "utilisation": (0.5, 0.75), "edge_bytes": (8,), "memory_bytes": (16, 32),
  }  # fmt: skip
  saved, rows, ended = [], [], []
  times = types.SimpleNamespace(
    **figures, link_use={"a": 0.5},
    trace=types.SimpleNamespace(save_perfetto=saved.append),
  )  # fmt: skip
  monkeypatch.setattr(_pipeline, "_times", lambda *given: times)
  monkeypatch.setattr(_pipeline, "_grid", len)
  monkeypatch.setattr(
    training, "make_row", lambda config, seed, **more: (config, seed, more)
  )
  monkeypatch.setattr(
    training, "append_rows", lambda *given: rows.append(given)
  )
  monkeypatch.setattr(
    _output, "finish", lambda *given, **more: ended.append((given, more))
  )
  made = {x: pipeline.make_table(x, 2, 4) for x in ("gpipe", "1f1b")}
  options = _commands.Pipeline(
    action="simulate", tables=tuple(made), stages=2, output=str(tmp_path)
  )
  _pipeline._simulate(list(made.values()), options)
  file, ((config, seed, row),) = rows[1]
  assert file == tmp_path / "rows.jsonl" and seed == 0
  assert (config["action"], config["stages"]) == ("simulate", 2)
  assert row == {**figures, "table": "1f1b", "link_use": {"a": 0.5}}
  assert saved == [tmp_path / "gpipe.json", tmp_path / "1f1b.json"]
  assert ended == [((tmp_path, options), {"timelines": True})]
  # Each needs a machine for every device, and a name of its own.
  two = tmp_path / "two.toml"
  two.write_text("[[nodes]]\nname = 'a'\n[[nodes]]\nname = 'b'\n")
  options = dataclasses.replace(options, cluster=str(two))
  _pipeline._simulate(list(made.values()), options)
  with pytest.raises(ValueError, match="each of the 3 devices of naive, got a"):
    _pipeline._simulate([pipeline.make_table("naive", 3, 1)], options)
  with pytest.raises(ValueError, match="`TABLE` must be"):
    _pipeline._simulate([made["gpipe"]] * 2, options)
  assert len(rows) == 4


def test_messages_of_a_codec_are_smaller(monkeypatch):
  monkeypatch.setattr(pipeline, "load_costs", lambda file: [_LAYER, file])
  assert _pipeline._coded([_LAYER], _commands.Pipeline()) == [_LAYER]
  options = _commands.Pipeline(edge_codec="int8", output_bytes=64.0)
  wanted = _LAYER.coded(_methods.edge_codec(options))
  assert wanted.sent_share < 1.0 == _LAYER.sent_share
  assert _pipeline._coded([_LAYER], options) == [wanted]
  options = _commands.Pipeline(costs="file")
  assert _pipeline._costs(options) == ([_LAYER, "file"], 0.0)


@pytest.mark.parametrize(
  ("model", "shape", "classes", "dtype"),
  [("transformer", (256,), 256, "int32"), ("mlp", (32, 32, 3), 10, "float32")],
)
def test_network_is_cut_by_the_shapes_of_its_inputs(
  model, shape, classes, dtype, monkeypatch
):
  built, counted = [], []

  def build(name, **more):
    built.append((name, more))
    return types.SimpleNamespace(layers="layers")

  def layer_costs(layers, batch, **more):
    counted.append((layers, batch, more))
    return "costs"

  monkeypatch.setattr(models, "build", build)
  monkeypatch.setattr(pipeline, "layer_costs", layer_costs)
  found = _pipeline._costs(_commands.Pipeline(model=model, samples=3))
  inputs = jax.ShapeDtypeStruct((3, *shape), dtype)
  assert found == ("costs", 4 * inputs.size)
  more = {"input_shape": shape, "num_classes": classes, "abstract": True}
  assert built == [(model, more)]
  how = {"inputs": "x", "source": "lowered"}
  assert counted == [("layers", {"x": inputs}, how)]


def _candidate(name="1f1b", rate=2.0, **more):
  made = pipeline.make_table(name, 2, 4) if more.pop("made", True) else None
  return pipeline.Candidate(
    name, 4, 2, more.pop("window", None), False, samples_per_s=rate, made=made,
    **more,
  )  # fmt: skip


def test_plan_is_asked_for_what_is_given(monkeypatch, tmp_path):
  asked, rows, log = [], [], []
  best = _candidate(
    times=types.SimpleNamespace(
      trace=types.SimpleNamespace(save_perfetto=log.append)
    )
  )
  monkeypatch.setattr(
    pipeline, "plan",
    lambda *given, **more: asked.append((given, more)) or (best, [best]),
  )  # fmt: skip
  monkeypatch.setattr(pipeline.Candidate, "row", lambda self: {"row": 1})
  monkeypatch.setattr(_pipeline, "_costs", lambda options: ([_LAYER], 48.0))
  monkeypatch.setattr(_tables, "machines", lambda _, number: number)
  for name in ("_stages", "_candidates", "_command"):
    monkeypatch.setattr(_pipeline, name, lambda *given: given[-1])
  monkeypatch.setattr(training, "make_row", lambda *given, **more: more)
  monkeypatch.setattr(
    training, "append_rows", lambda *given: rows.append(given)
  )
  monkeypatch.setattr(_output, "finish", lambda *given, **more: None)
  _pipeline._plan(
    _commands.Pipeline(action="plan", model="mlp", output=str(tmp_path))
  )
  assert asked.pop() == (
    ([_LAYER], 4, 256),
    {
      "tables": None, "num_microbatches": None, "samples": 1,
      "num_stages": None, "windows": None, "max_delay": 0,
      "optimizer_copies": 1.0, "input_bytes": 48.0,
    },
  )  # fmt: skip
  assert rows == [(tmp_path / "rows.jsonl", [{"row": 1}])]
  assert log == [tmp_path / "plan.json"]
  table = (tmp_path / "table.txt").read_text()
  assert pipeline.parse_table(table) == best.made
  options = _commands.Pipeline(
    action="plan", costs="c", output=str(tmp_path), tables=("ours", "1f1b"),
    microbatches=6, samples=3, stages=5, window=2, max_delay=1, batch_size=12,
    optimizer_copies=2.0, edge_codec="int8",
  )  # fmt: skip
  _pipeline._plan(options)
  (((costs, number, size), more),) = asked
  assert costs == _pipeline._coded([_LAYER], options) != [_LAYER]
  assert (number, size) == (5, 12)
  assert more == {
    "tables": ("ours", "1f1b"), "num_microbatches": [6], "samples": 3,
    "num_stages": [5], "windows": [2], "max_delay": 1,
    "optimizer_copies": 2.0, "input_bytes": 48.0,
  }  # fmt: skip


def test_commands_of_a_plan_are_for_both_runtimes():
  path = pathlib.Path("table.txt")

  def told(best, *others, codec=None):
    return _pipeline._command(best, [best, *others], path, codec).splitlines()

  first, processes, share, program = told(_candidate(), codec="int8")
  assert first.startswith("Table: table.txt.")
  assert processes == (
    "  jdist train --stages 2 --table table.txt --runtime processes "
    "--edge-codec int8"
  )
  assert "takes 100.0 % of that speed" in share
  assert program == "  jdist train --stages 2 --table table.txt"
  # A program splits no backward pass over iterations; one that was not made,
  # and a slower one, are not named.
  best = _candidate("zb_h2")
  assert len(told(best)) == 2
  slower = _candidate("gpipe", 0.5)
  *_, share, program = told(best, _candidate("naive", made=False), slower,
                            _candidate("1f1b", 0.25))  # fmt: skip
  assert "takes 25.0 %" in share
  assert program == "  jdist train --stages 2 --table gpipe --microbatches 4"


def test_machines_are_those_of_a_file_or_equal(monkeypatch):
  found = _tables.machines(_commands.Pipeline(), 2)
  assert found.names == ("device 0", "device 1")
  assert [x.speed for x in found.nodes] == [1.0, 1.0]
  monkeypatch.setattr(cluster, "load_cluster", lambda file: (file, "profile"))
  assert _tables.machines(_commands.Pipeline(cluster="file"), 2) == "file"


def test_codec_of_messages_is_made_by_its_name():
  found = _methods.edge_codec(_commands.Pipeline(edge_codec="int8"))
  assert found == codecs.Quantize(8)
  assert _methods.edge_codec(_commands.Pipeline()) is None
