"""Figures of printed tables, each column by hand."""

import math
import types

import pytest

from jdist import cluster, models, pipeline
from jdist.cli import _commands, _compare, _output
from jdist.cli.pipelines import _pipeline
from jdist.cli.programs import _advise, _bytes, _overlap
from jdist.cli.servers import _simulate


@pytest.fixture
def shown(monkeypatch):
  """Tables are the texts of their cells, by column."""

  def table(title, caption, columns, items, *, left=1):
    del caption
    rows = [item if isinstance(item, tuple) else (item,) for item in items]
    cells = {x: [show(*row) for row in rows] for x, show in columns.items()}
    return title, left, cells

  monkeypatch.setattr(_output, "table", table)


def _times(**more):
  return types.SimpleNamespace(
    **{
      "iteration_s": 6.0, "utilisation": (0.5, 0.75), "link_use": {},
      "memory_bytes": (3e6, 12e6), "edge_bytes": (),
    } | more
  )  # fmt: skip


@pytest.mark.usefixtures("shown")
def test_columns_of_simulated_tables():
  table = types.SimpleNamespace(name="gpipe", num_microbatches=4)
  sends = {"link_use": {"a": 0.25, "b": 0.5}, "edge_bytes": (2e6, 5e6)}
  found = [(table, _times()), (table, _times(**sends))]
  _, _, cells = _pipeline._grid(found)
  assert cells == {
    "table": ["gpipe"] * 2, "M": ["4"] * 2, "iteration s": ["6"] * 2,
    "of it / M": ["1.5"] * 2, "busy %": ["62.5"] * 2, "least %": ["50.0"] * 2,
    "memory MB": ["12"] * 2, "link %": ["0.0", "50.0"], "edge MB": ["0", "5"],
    "edge s": ["0", "3"],
  }  # fmt: skip


def _plan(**more):
  """Returns a candidate of two unlike stages on two unlike machines."""
  nodes = (
    cluster.Node("a", memory_bytes=16e6),
    cluster.Node("b", speed=2.0, memory_bytes=32e6),
  )
  links = {x: cluster.Link(8e6) for x in (("a", "server"), ("server", "b"))}
  machines = cluster.Cluster(nodes, cluster.Topology(links))
  costs = [
    pipeline.LayerCost("one", 1.0, 2.0, output_bytes=2e6),
    pipeline.LayerCost("two", 2.0, 4.0, output_bytes=0.0),
  ]
  plan = pipeline.partition(costs, machines, nodes=("a", "b"), cuts=(1,))
  return machines, pipeline.Candidate(
    "1f1b", 8, 2, None, False, plan=plan, times=_times(), samples_per_s=0.5,
    delay=0, **more,
  )  # fmt: skip


@pytest.mark.usefixtures("shown")
def test_columns_of_a_plans_stages():
  machines, best = _plan()
  title, left, cells = _pipeline._stages(best, machines)
  assert title == "1f1b: 8 micro-batches, 0.5 samples/s" and left == 3
  assert cells == {
    "stage": ["0", "1"], "layers": ["one", "two"], "machine": ["a", "b"],
    "seconds": ["3", "6"], "sent MB": ["2", "0"],
    # Two links carry it one after the other.
    "sent s": [f"{pipeline.stage_times(best.plan, machines)[0].send:.4g}", "0"],
    "busy %": ["50.0", "75.0"], "memory MB": ["3", "12"], "of MB": ["16", "32"],
  }  # fmt: skip
  again = pipeline.Candidate(**vars(best) | {"window": 3, "recompute": True})
  assert _pipeline._stages(again, machines)[0].startswith(
    "1f1b: 8 micro-batches, window 3, recomputation, 0.5"
  )


@pytest.mark.usefixtures("shown")
def test_columns_of_candidates():
  """Each table's best, which are sorted by speed."""

  def one(table, rate, **more):
    usual = {
      "num_microbatches": 8, "num_stages": 2, "window": None, "delay": 0,
      "recompute": False, "times": _times(),
    }  # fmt: skip
    return types.SimpleNamespace(
      table=table, samples_per_s=rate, **usual | more
    )

  found = [
    one("ours", 4.0, window=3, delay=2), one("1f1b", 3.0, recompute=True),
    one("ours", 2.0, window=1), one("gpipe", 1.0, num_microbatches=4),
    one("zb_h2", 9.0, times=None),
  ]  # fmt: skip
  _, _, cells = _pipeline._candidates(found)
  assert cells == {
    "table": ["ours", "1f1b", "gpipe"], "micro-batches": ["8", "8", "4"],
    "stages": ["2"] * 3, "window": ["3", "", ""], "recompute": ["", "yes", ""],
    "samples/s": ["4", "3", "1"], "of best %": ["100.0", "75.0", "25.0"],
    "delay": ["2", "0", "0"], "memory MB": ["12"] * 3,
  }  # fmt: skip


@pytest.mark.usefixtures("shown")
def test_columns_of_protocols():
  summary = {
    "updates": 12345, "samples_per_s": 67.5, "utilisation": 0.875,
    "iteration_spread": 1.25,
    "staleness": {
      "mean_over_updates": 0.5, "mean_over_nodes": 1.5, "maximum": 7
    },
  }  # fmt: skip
  run = types.SimpleNamespace(
    now_s=2.5, summary=lambda: summary, pulled_bytes=3e9, pushed_bytes=1e9,
    state=types.SimpleNamespace(discarded={"late": 1000, "lost": 234}),
  )  # fmt: skip
  _, _, cells = _simulate._table({"asp": run})
  assert {name: cell for name, (cell,) in cells.items()} == {
    "protocol": "asp", "time s": "2.5", "updates": "12,345",
    "samples/s": "67.5", "busy %": "87.5", "staleness": "0.50 / 1.50 / 7",
    "spread": "1.25", "unused": "1,234", "GB sent": "4",
  }  # fmt: skip


@pytest.mark.usefixtures("shown")
def test_columns_of_messages():
  def message(conditional):
    return types.SimpleNamespace(
      kind="all-reduce", conditional=conditional, wire_bytes=2e6, send_s=5e-4,
      kernels=3, products=2, compute_s=2.5e-4, hidden_share=0.5,
    )  # fmt: skip

  end = types.SimpleNamespace(collectives=[message(True), message(False)])
  for interval, rest, each in (
    (8, [message(False)], "each step"), (8, [], "round's end"),
    (1, [], "each step"),
  ):  # fmt: skip
    between = types.SimpleNamespace(collectives=rest)
    found = _overlap.Found("msdpu", end, between, interval, 0, 0.0)
    title, left, cells = _overlap.messages_table(found)
    assert title.startswith("Collectives of msdpu") and left == 3
    assert cells == {
      "#": ["1", "2"], "collective": ["all-reduce"] * 2,
      "when": ["round's end", each], "MB sent": ["2"] * 2,
      "µs on the link": ["500.0"] * 2, "kernels under it": ["3"] * 2,
      "products": ["2"] * 2, "µs of kernels": ["250.0"] * 2,
      "hidden %": ["50.0"] * 2,
    }  # fmt: skip


@pytest.mark.usefixtures("shown")
def test_columns_and_row_of_steps_on_gpus():
  def step(**figures):
    usual = dict.fromkeys(("send_s", "exposed_s", "wire_bytes"), 0.0)
    return types.SimpleNamespace(
      **usual | {"collectives": (), "compute_s": 0.25, "flops": 7.0} | figures
    )

  end = step(
    end_s=0.01, send_s=0.004, exposed_s=0.001, wire_bytes=4e6, hidden_share=0.5
  )
  rest = step(end_s=0.006, hidden_share=1.0)
  found = _overlap.Found("msdpu", end, rest, 4, 9, 3.0)
  assert _overlap.methods_table([found])[2] == {
    "method": ["msdpu"], "round": ["4"], "MB a step": ["1"],
    "sending ms": ["1.000"], "hidden %": ["75.0"], "step ms": ["7.000"],
    "last step ms": ["10.000"], "its hidden %": ["50.0"],
  }  # fmt: skip
  row = _overlap.row(_commands.Overlap(), found)
  for name, value in {
    "method": "msdpu", "interval": 4, "compile_s": 3.0, "memory_bytes": 9,
    "mean_step_s": 0.007, "mean_wire_bytes": 1e6, "hidden_share": 0.75,
    "messages": [],
  }.items():  # fmt: skip
    assert row[name] == pytest.approx(value), name
  assert row["between"] == {
    "step_s": 0.006, "compute_s": 0.25, "send_s": 0.0, "exposed_s": 0.0,
    "hidden_share": 1.0, "wire_bytes": 0.0, "flops": 7.0,
  }  # fmt: skip
  assert row["meeting"]["step_s"] == 0.01


@pytest.mark.usefixtures("shown")
def test_columns_of_counted_bytes():
  model = models.build("mlp", input_shape=(8, 8, 1), num_classes=10)
  # A ring of four sends one and a half times the parameters.
  exact = 6.0 * models.num_params(model)
  found = [
    _bytes.Counted("topk_sgd", None, 1, 3e6, 2e6, 1e6),
    _bytes.Counted("diloco", None, 4, None, 2 * exact, 8e6),
    _bytes.Counted("none", None, 4, None, 0.0, 0.0),
  ]
  options = _commands.Bytes(workers=4, model="mlp")
  _, left, cells = _bytes._table(found, options, model)
  assert left == 1 and cells == {
    "method": ["topk_sgd", "diloco", "none"], "round": ["1", "4", "4"],
    "MB a round: coded": ["3", "-", "-"],
    "traced": ["2", f"{2e-6 * exact:,.4g}", "< 0.0001"],
    "compiled": ["1", "8", "< 0.0001"],
    "MB a step": ["2", f"{0.5e-6 * exact:,.4g}", "< 0.0001"],
    "fewer than ssgd": [f"{exact / 2e6:,.1f}x", "2.0x", "-"],
  }  # fmt: skip


@pytest.mark.usefixtures("shown")
def test_columns_of_predicted_times():
  def costs(interval, size, extra_s):
    return types.SimpleNamespace(
      interval=interval, round_bytes=size, extra_s=(extra_s, extra_s)
    )

  seconds = {"ssgd": (0.2, 0.25, 0.3), "diloco": (0.1, 0.125, 0.2)}
  found = types.SimpleNamespace(
    base="ssgd", slowdown=2.0, link=cluster.Link(5e6, 0.003),
    costs={"ssgd": costs(1, 4e3, 0.0), "diloco": costs(8, 4e3, 0.25e-3)},
    seconds=seconds.get, exposed_s={"ssgd": 0.05, "diloco": 0.0}.get,
    pays=lambda name: True, pays_below=lambda name: 2.5e9,
    rate_for=lambda name, part: part * 1e9 if name == "ssgd" else None,
  )  # fmt: skip
  title, _, cells = _advise._times(found, 3)
  assert title.startswith("N = 3, links of 5 Mbit/s and 3 ms: predicted")
  assert cells == {
    "method": ["ssgd", "diloco"], "ms a step": ["250", "125"],
    "± %": ["20", "40"], "faster": ["1.00x", "2.00x"], "waits %": ["20", "0"],
    "kB a step": ["4.0", "0.5"], "adds ms": ["0", "0.5"], "pays": ["-", "yes"],
    "below Mbit/s": ["2,500"] * 2,
  }  # fmt: skip
  found.pays = lambda name: False
  assert _advise._times(found, 3)[2]["pays"] == ["-", "no"]
  assert _advise._rates(found)[2] == {
    "method": ["ssgd", "diloco"], "50 %": ["500", "-"], "75 %": ["750", "-"],
    "90 %": ["900", "-"], "95 %": ["950", "-"], "99 %": ["990", "-"],
  }  # fmt: skip


def test_verdict_names_a_method_that_pays():
  seconds = {"ssgd": (0.2, 0.25, 0.3), "diloco": (0.1, 0.1, 0.2)}
  found = types.SimpleNamespace(base="ssgd", best="diloco", seconds=seconds.get)
  told = "Yes: diloco takes 2.50 times less time than ssgd."
  assert _advise._verdict(found) == told
  found.best = "ssgd"
  assert _advise._verdict(found).startswith("No: on this link no method is ")


@pytest.mark.parametrize(
  ("rate", "told"),
  [(None, "-"), (0, "any"), (math.inf, "any"), (1234567890.0, "1,230"),
   (2.5e5, "0.25")],
)  # fmt: skip
def test_rate_has_three_digits_of_megabits(rate, told):
  assert _advise._megabits(rate) == told


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.usefixtures("shown")
def test_columns_of_compared_methods(text):
  """Seeds are paired, and differ by 2 and 4."""

  def rows(values, sent_bytes, rounds, rate):
    return [
      {
        "seed": seed, "accuracy": x / 100, "test_loss": 1.0, "rounds": rounds,
        "sent_bytes": sent_bytes, "samples_per_s": 1500.0,
        "learning_rate": rate,
      } | ({"bits_per_token": x} if text else {})
      for seed, x in enumerate(values)
    ]  # fmt: skip

  found = {
    "ssgd": rows([50.0, 60.0], 8e6, 1200, 0.1),
    "diloco": rows([52.0, 64.0], 2e6, 300, 0.05),
  }
  printed = []

  def cells(seeds):
    options = types.SimpleNamespace(
      seeds=[*range(seeds)], methods=[*found], dataset="d", model="m", workers=4
    )
    of_seeds = {x: y[:seeds] for x, y in found.items()}
    console = types.SimpleNamespace(print=printed.append)
    _compare._print_table(console, of_seeds, options)
    return printed.pop()

  title, left, columns = cells(2)
  assert (title, left) == ("d, m, N = 4 workers, 2 seeds", 1)
  quality, speed = "test accuracy %", "images/s"
  values = ["55.00 ± 7.07", "58.00 ± 8.49"]
  # Student's t is 12.71 for two seeds, and the deviation of 2 and 4 is 1.41.
  more = ["-", "+3.00 ± 12.71"]
  one = ["50.00", "52.00"]
  if text:
    quality, speed = "test bits per byte", "windows/s"
    values = ["55.000 ± 7.071", "58.000 ± 8.485"]
    more, one = ["-", "+3.000 ± 12.706"], ["50.000", "52.000"]
  wanted = {
    "method": ["ssgd", "diloco"], quality: values, "more than ssgd": more,
    "rounds": ["1,200", "300"], "MB sent": ["8", "2"],
    "fewer bytes": ["1.0x", "4.0x"], speed: ["1,500"] * 2,
    "rate": ["0.1", "0.05"],
  }  # fmt: skip
  assert columns == wanted and [*columns] == [*wanted]
  # A single seed has no pairs.
  del wanted["more than ssgd"]
  title, _, columns = cells(1)
  assert title.endswith(", 1 seed") and columns == wanted | {quality: one}
  # Nor has a single method.
  del found["diloco"]
  assert "more than ssgd" not in cells(2)[2]
  _compare._print_table(None, {}, None)
