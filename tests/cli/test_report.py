"""The page of a run's directory, its status, and both in a browser."""

import contextlib
import json
import re
import shutil
import types

import pytest

from jdist import cli, cluster, training
from jdist.cli import _groups, _run_end
from jdist.cli.report import _page, _status

_RUN = "train --method ssgd --steps 6 --workers 4 --batch-size 32 "
_RUN += "--evaluate-every-epochs 0.05 --warmup-epochs 0 --output"


def _rows(number, points=6):
  """Returns rows of comparisons, with curves of so many points."""
  return [
    training.make_row(
      {"dataset": "digits", "model": "<mlp>", "batch_size": 128},
      seed,
      method="ssgd" if seed % 2 else "diloco",
      workers=8,
      accuracy=0.9,
      diverged=False,
      sent_bytes=38e3 * points,
      curve=[
        {
          "step": step,
          "rounds": step,
          "sent_bytes": 38e3 * step,
          "train_s": 0.01 * step,
          "accuracy": 0.9 - 1 / (step + 2 + seed % 7),
          "loss": 1 / step,
        }
        for step in range(1, points + 1)
      ],
    )
    for seed in range(number)
  ]


@pytest.fixture
def folder(tmp_path):
  pytest.importorskip("vl_convert")
  training.append_rows(tmp_path / "rows.jsonl", _rows(4))
  for name in ("bsp", "asp"):
    trace = cluster.Trace()
    trace.add("worker0", "F0", 0.0, 2.0, "forward")
    trace.add("worker0->server", "push 0", 2.0, 3.0, "push")
    trace.add("worker1", "away", 0.5, 4.0, "away")
    trace.save_perfetto(tmp_path / f"{name}.json")
  events = json.loads((tmp_path / "bsp.json").read_text())
  for at_s in (1, 3):
    events["traceEvents"].append(
      {"name": "loss", "ph": "C", "ts": 1e6 * at_s, "args": {"storm": 1 / at_s}}
    )
  (tmp_path / "bsp.json").write_text(json.dumps(events))
  return tmp_path


def _data(page, name):
  text = page.partition(f'id="{name}">')[2].partition("</script>")[0]
  return json.loads(text)


def test_report_writes_one_page_that_asks_no_host(folder, capsys):
  words = ["report", str(folder), "--bandwidth-mbit-per-s", "8"]
  assert cli.main([*words, "--latency-ms", "0"]) == 0
  assert capsys.readouterr().out == f"Report: {folder / 'report.html'}\n"
  page = (folder / "report.html").read_text()
  assert "&lt;mlp&gt;" in page and "<mlp>" not in page
  assert 'href="rows.jsonl"' in page and "rows.jsonl:4" in page
  own = page.replace(_page.vega(), "")
  assert "https://" not in own.replace("https://vega.github.io", "").replace(
    "https://ui.perfetto.dev", ""
  )
  assert " src=" not in own and "<link" not in own
  data = _data(page, "curves")
  assert data["methods"] == ["diloco", "ssgd"]
  # 38,000 bytes at 1 MB a second take 38 ms, after 10 ms of a step.
  assert data["points"][0]["link_s"] == pytest.approx(0.048)
  assert [name for name, _ in data["y"]] == ["accuracy", "loss"]
  spans = _data(page, "spans")
  assert spans["asp.json"]["spans"][:2] == [
    ["worker0", "F0", "forward", 0, 2],
    ["worker1", "away", "away", 0.5, 3.5],
  ]
  assert spans["asp.json"]["counters"] == []
  assert spans["bsp.json"]["counters"][0] == ["loss", "storm", 1, 1]


def test_curve_of_pairs_stands_in_the_trace_alone(folder):
  row = _rows(1)[0] | {"curve": [[1.0, 0.5], [2.0, 0.25]]}
  (folder / "rows.jsonl").unlink()
  training.append_rows(folder / "rows.jsonl", [row])
  page = _page.write(folder).read_text()
  assert 'id="curves"' not in page and 'id="spans"' in page


def test_status_and_page_are_written_as_a_run_goes(tmp_path, capsys):
  pytest.importorskip("vl_convert")
  assert cli.main([*_RUN.split(), str(tmp_path)]) == 0
  out = capsys.readouterr().out
  # The heading comes first, and says what is a default.
  assert out.startswith("ssgd. digits: 1442 training") and "preset digits" in (
    out.replace("\n", " ")
  )
  status = json.loads((tmp_path / "status.json").read_text())
  assert status["state"] == "ended" and status["row"] is None
  assert status["step"] == status["num_steps"] == 6
  assert status["workers"] == 4 and status["sent_bytes"] > 0
  assert status["command"].startswith("jdist train --")
  page = (tmp_path / "report.html").read_text()
  assert status["command"] in page and "rows.jsonl:1" in page
  # The command of the page repeats the run.
  assert cli.main([*status["command"].split()[1:], "--steps", "2"]) == 0
  first, second = training.read_rows(tmp_path / "rows.jsonl")
  assert first["config"] | {"steps": 2} == second["config"]


def test_steps_and_their_end_are_written_alike(tmp_path):
  status = {"state": "running", "command": "", "step": 1014, "num_steps": 4056}
  (tmp_path / "status.json").write_text(json.dumps(status))
  page = _page.write(tmp_path).read_text()
  assert "running</span>: step 1,014 of 4,056" in page
  (tmp_path / "status.json").write_text(
    json.dumps(status | {"num_steps": None})
  )
  assert "step 1,014 of ?" in _page.write(tmp_path).read_text()


def test_report_needs_rows_or_a_status(refusal):
  assert "rows.jsonl or status.json, got empty" in refusal("report empty")


def test_without_the_extra_only_a_report_fails(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
  _page.vega.cache_clear()
  training.append_rows(tmp_path / "rows.jsonl", _rows(1))
  assert cli.main(["report", str(tmp_path)]) == 2
  assert "pip install vl-convert-python" in capsys.readouterr().err


@contextlib.contextmanager
def _browser():
  sync = pytest.importorskip("playwright.sync_api")
  path = shutil.which("chromium") or shutil.which("google-chrome")
  if path is None:
    pytest.skip("there is no Chromium on the path")
  with sync.sync_playwright() as play:
    browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
    yield browser
    browser.close()


# All timelines have one place and one part of the time, which begins after 0.
_ENLARGED = """() => {
  const places = [...document.querySelectorAll(".timeline")].map(chart => {
    const box = chart.querySelector(".role-frame .background");
    const {left, width} = box.getBoundingClientRect();
    const texts = chart.querySelectorAll(".role-axis-label text");
    const times = [...texts].map(x => x.textContent);
    const first = times.find(x => /^[0-9.]+$/.test(x));
    return [left, width, first].join();
  });
  return new Set(places).size === 1 && !places[0].endsWith(",0.0");
}"""


@pytest.mark.slow
def test_page_in_a_browser(folder):
  assert cli.main(["report", str(folder)]) == 0
  with _browser() as browser:
    for scheme, ground in (("light", "255"), ("dark", "13")):
      for width in (400, 1600):
        page = browser.new_page(
          viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        asked, errors = [], []
        page.on("request", lambda x, asked=asked: asked.append(x.url))
        page.on("pageerror", lambda x, errors=errors: errors.append(x))
        page.goto((folder / "report.html").as_uri())
        page.wait_for_selector("#chart[data-drawn]")
        page.wait_for_selector("[data-drawn='bsp.json: loss']")
        # One second stands in one place in all charts, also when enlarged.
        page.locator("[data-drawn='asp.json'] svg").hover()
        page.mouse.wheel(0, -600)
        page.wait_for_function(_ENLARGED)
        # Only the file itself, and nothing runs over the right edge.
        assert [x for x in asked if not x.startswith("data:")] == [
          (folder / "report.html").as_uri()
        ]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert color.startswith(f"rgb({ground},")
        assert not errors

    # A table scrolls between its rows' names and their links.
    table = page.locator(".wide").first
    table.evaluate("x => x.style.width = '400px'")
    assert table.evaluate("x => x.scrollWidth > x.clientWidth + 20")
    cells = table.locator("tr").nth(1).locator("td")
    frame = table.bounding_box()
    for scrolled in (0, 20):
      table.evaluate(f"x => x.scrollLeft = {scrolled}")
      name, link = cells.first.bounding_box(), cells.last.bounding_box()
      assert name["x"] >= frame["x"]
      assert link["x"] + link["width"] <= frame["x"] + frame["width"]

    def lines():
      return page.locator("#chart .mark-line path").count()

    def choose(name, value):
      page.locator(f"[name={name}][value='{value}']").click()
      page.wait_for_selector(f"#chart[data-drawn*='{name}={value}']")

    assert lines() == 4
    choose("lines", "mean")
    assert lines() == 2
    choose("x", "link_s")
    choose("y", "loss")
    text = page.locator("#chart").inner_text()
    assert "seconds with sending at 100 Mbit/s" in text and "test loss" in text
    page.locator("[value=ssgd]").click()
    page.wait_for_function(
      "document.querySelectorAll('#chart .mark-line path').length == 1"
    )
    # The choices survive a reload.
    page.reload()
    page.wait_for_selector("#chart[data-drawn]")
    assert lines() == 1 and page.locator("[value=loss]").is_checked()


@pytest.mark.slow
def test_page_of_two_hundred_rows_is_small_and_opens_at_once(folder):
  training.append_rows(folder / "rows.jsonl", _rows(196, points=60))
  assert cli.main(["report", str(folder)]) == 0
  assert (folder / "report.html").stat().st_size < 5e6
  with _browser() as browser:
    page = browser.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("#chart[data-drawn]")
    found = session.send("Performance.getMetrics")["metrics"]
    # The page's own time, which other programs do not lengthen.
    (own_s,) = (x["value"] for x in found if x["name"] == "ThreadTime")
    assert own_s < 2
    assert page.locator("*").count() < 6000


def test_options_in_common_have_one_value_in_all_rows():
  rows = [{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3}, {"a": 1, "b": 2}]
  assert _page._same(rows) == {"a": 1}
  assert _page._same(rows[:1]) == rows[0]


def test_figures_stay_while_something_else_is_done():
  noted = []
  status = types.SimpleNamespace(
    bar=types.SimpleNamespace(show=lambda *given: None),
    note=lambda **entries: noted.append(entries),
  )
  record = training.Record(2, 1, 3.0, 0.5, {}, 1.0, 4.0)
  for doing in ("", "compiling"):
    _status.Status.step(status, record, doing, "msdpu:", before=5)
  steps, compiling = noted
  assert steps["train_loss"] == 0.5 and "train_loss" not in compiling
  assert compiling == {"doing": "msdpu: compiling", "step": 7}
  assert steps["doing"] == "msdpu: training"


def test_accuracies_are_shown_in_hundredths_of_a_percent():
  assert _page._show("accuracy", 0.98765) == "98.77 %"


def test_other_processes_make_no_directories(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  config = {"checkpoints": "a", "final_params": "b/c", "process_id": 1}
  _status.Status({"output": "d", **config}, lambda output: "", "run", "heading")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("x.json", "[1, 2]"),
    ("x.json", '{"traceEvents": [{"ph": "X"}]}'),
    ("x.json", "no JSON"),
    ("rows.jsonl", "[1]\n"),
    ("rows.jsonl", '{"config": 3}\n'),
  ],
)
def test_files_of_others_end_no_run(name, text, tmp_path):
  pytest.importorskip("vl_convert")
  (tmp_path / name).write_text(text)
  config = {"output": str(tmp_path)}
  with _status.Status(config, lambda output: "command", "run", "heading"):
    pass
  status = json.loads((tmp_path / "status.json").read_text())
  assert status["state"] == "ended"
  if text == "[1, 2]":  # It is no timeline, and does not matter.
    assert "<pre>command</pre>" in _page.write(tmp_path).read_text()
  else:
    with pytest.raises(ValueError, match=r"JSON|rows of objects"):
      _page.write(tmp_path)


@pytest.fixture
def written(monkeypatch):
  """Notes the files of a status in place of writing them."""
  found = []
  monkeypatch.setattr(
    _status.json_lines, "write", lambda path, rows: found.extend(rows)
  )
  monkeypatch.setattr(
    _status.importlib.util, "find_spec", lambda name: name == "vl_convert"
  )
  monkeypatch.setattr(_page, "write", lambda *given: found.append("page"))
  return found


@pytest.mark.parametrize(
  ("error", "state"),
  [
    (None, "ended"), (KeyboardInterrupt("stop"), "interrupted"),
    (_run_end.TerminatedError("stop"), "ended by SIGTERM"),
    (_run_end.DivergedError("stop"), "diverged"), (OSError("stop"), "failed"),
  ],
)  # fmt: skip
def test_status_says_how_a_run_has_ended(error, state, tmp_path, written):
  config = {"output": str(tmp_path)}
  with (
    contextlib.suppress(BaseException),
    _status.Status(config, lambda output: "go", "run", "heading"),
  ):
    assert written[-1]["state"] == "running"
    if error:
      raise error
  *_, body, page = written
  assert (body["state"], page) == (state, "page")
  assert body["doing"] == ("stop" if error else "")


def test_page_is_written_less_often_than_the_file(
  tmp_path, written, monkeypatch
):
  clock = types.SimpleNamespace(now_s=0.0)
  clock.monotonic = lambda: clock.now_s
  monkeypatch.setattr(_status, "time", clock)
  config, log = {"output": str(tmp_path)}, []
  with _status.Status(config, lambda output: "go", "run", "heading") as status:
    # The first note draws the page, and later ones with another row.
    for now_s, row in (
      (0, 0), (1, 0), (2.5, 0), (3, 1), (10, 2), (21, 0), (22, 3),
    ):  # fmt: skip
      clock.now_s, before = now_s, len(written)
      status.note(**({"row": row} if row else {}))
      log.append(len(written) - before)
  assert log == [2, 0, 1, 0, 1, 1, 2]


@pytest.mark.parametrize(
  ("config", "shown"),
  [
    ({}, True), ({"driver": "clock"}, True), ({"driver": "threads"}, False),
    ({"process_id": 1}, False),
  ],
)  # fmt: skip
def test_bar_is_shown_where_nothing_tears_it(config, shown, tmp_path, written):
  config = {"output": str(tmp_path / "out"), **config}
  config |= {"checkpoints": str(tmp_path / "a" / "b")}
  config |= {"final_params": str(tmp_path / "c" / "d.safetensors")}
  status, told = _status.Status(config, lambda _: "go", "run", "heading"), []
  status.bar = types.SimpleNamespace(
    __enter__=lambda: told.append("begun"), __exit__=lambda: told.append("over")
  )
  with status:
    assert told == ["begun"] * shown
  assert told[-1] == "over"
  made = sorted(str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*"))
  assert made == (
    ["a", "a/b", "c", "out"] if "process_id" not in config else []
  )


def test_each_round_waits_for_the_latency_of_its_messages(folder):
  options = _groups.LinkOptions(bandwidth_mbit_per_s=8.0, latency_ms=2.0)
  _, second = _data(_page.write(folder, options).read_text(), "curves")[
    "points"
  ][:2]
  # Two rounds of 38,000 bytes, in 14 messages each among eight workers, after
  # two steps of 10 ms.
  assert second["link_s"] == pytest.approx(0.02 + 0.076 + 2 * 14 * 0.002)


def test_timelines_are_cut_to_what_can_be_read(tmp_path, monkeypatch):
  monkeypatch.setattr(_page, "_MAX_LANES", 2)
  monkeypatch.setattr(_page, "_MAX_SPANS", 3)
  trace = cluster.Trace()
  for at_s in (4.0, 1.0, 2.0, 3.0):
    for name in ("a", "b", "c"):
      trace.add(name, f"F{at_s:g}", at_s, at_s + 0.5, "forward")
  trace.save_perfetto(tmp_path / "x.json")
  (tmp_path / "empty.json").write_text('{"traceEvents": []}')
  (tmp_path / "status.json").write_text('{"state": "ended"}')
  text = _page._timelines(tmp_path)
  data = _data(text, "spans")
  assert [*data] == ["x.json"]
  # The earliest ones of the first two rows.
  assert data["x.json"]["spans"] == [
    ["a", "F1", "forward", 1, 0.5], ["b", "F1", "forward", 1, 0.5],
    ["a", "F2", "forward", 2, 0.5],
  ]  # fmt: skip
  assert '<a href="x.json">x.json</a>' in text
  (tmp_path / "x.json").unlink()
  assert _page._timelines(tmp_path) == ""


@pytest.mark.parametrize(
  ("name", "value", "shown"),
  [
    ("x", None, "–"), ("x", True, "yes"), ("x", False, "no"),
    ("x", [1, "<a>"], "1 &lt;a&gt;"), ("x", [], "–"),
    ("x", "<b>", "&lt;b&gt;"), ("x", 12345.6, "12,346"),
    ("sent_bytes", 2e6, "2 MB"), ("x", 12345, "12,345"),
    ("x", 1234.5, "1,234"), ("x", 0.123456, "0.1235"),
  ],
)  # fmt: skip
def test_value_is_shown_by_its_kind(name, value, shown):
  assert _page._show(name, value) == shown


def test_table_has_what_differs_and_a_link_to_each_row():
  rows = [
    {"config": {"seed": i, "same": 1}, "loss": 0.5 * i, "method": "ssgd",
     "curve": [1], "device": "cpu", "commit": "x", "run": "y"}
    for i in (1, 2)
  ]  # fmt: skip
  for file, title in (("rows.jsonl", "Runs"), ("tuning.jsonl", "Tuning")):
    text = _page._table(file, rows, {"same": 1})
    heads = re.findall(r"<th scope=col>(.*?)</th>", text)
    # The command that was run stands first.
    assert heads == ["method", "loss", "seed", "row"]
    assert f"<h2>{title}</h2>" in text
    cells = re.findall(r"<td>(.*?)</td>", text)
    assert cells[:3] == ["ssgd", "0.5", "1"] and f"{file}:2</a>" in text


def test_facts_of_a_run_are_listed_once():
  row = {
    "method": "ssgd", "seed": 1, "device": "cpu", "commit": "abc",
    "versions": {"jax": "1", "optax": "2"}, "run": "r",
  }  # fmt: skip
  other = row | {"method": None, "protocol": "asp", "seed": 2}
  text = _page._facts([row, row, other], ["rows.jsonl"])
  for term, words in {
    "Methods": "ssgd, asp", "Seeds": "1, 2", "Device": "cpu", "Commit": "abc",
    "Versions": "jax 1, optax 2", "Run": "r",
  }.items():  # fmt: skip
    assert f"<dt>{term}</dt><dd>{words}</dd>" in text, text
  assert '<a href="rows.jsonl">' in text
  del row["run"]
  assert "<dt>Run</dt>" not in _page._facts([row], [])
