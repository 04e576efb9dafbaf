"""The page of a folder's runs: one HTML file that asks no host for anything."""

import functools
import html
import importlib.metadata
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jdist import channel, checks, cluster, training
from jdist.cli import _groups
from jdist.storage import sealed_json

STATUS = "status.json"
# The entries of a curve, with the words of their axes.
_ACROSS = {
  "step": "steps", "sent_bytes": "bytes sent by a worker", "rounds": "rounds",
  "train_s": "seconds of training", "link_s": "seconds with sending",
}  # fmt: skip
_UP = {
  "accuracy": "test accuracy", "bits_per_token": "test bits per byte",
  "loss": "test loss", "train_loss": "training loss",
}  # fmt: skip
_STATE = {
  "train_loss": "loss {}", "samples_per_s": "{} samples/s",
  "sent_bytes": "{} sent", "workers": "{} workers",
}  # fmt: skip
# More could not be read; the files of timelines have everything.
_MAX_LANES, _MAX_SPANS = 40, 1500


def report(options: Any) -> None:
  """Writes the page of a directory."""
  print(f"Report: {write(pathlib.Path(options.folder), options)}")


def write(folder: pathlib.Path, options: Any = None) -> pathlib.Path:
  """Writes report.html, with the link of options that have one."""
  try:
    return _write(folder, options)
  except (AttributeError, LookupError, OverflowError, TypeError) as e:
    words = f"files of JSON that commands wrote, got {folder}"
    raise ValueError(f"`jdist report` needs {words}: {e!r}.") from e


def _write(folder: pathlib.Path, options: Any) -> pathlib.Path:
  rows: dict[str, list[dict[str, Any]]] = {
    name: training.read_rows(folder / name)
    for name in ("rows.jsonl", "tuning.jsonl")
    if (folder / name).exists()
  }
  path = folder / STATUS
  found = path.exists()
  status = checks.read_text(path, json.loads, "JSON") if found else {}
  if not any(rows.values()) and not status:
    raise ValueError(
      f"`jdist report` needs a directory with rows.jsonl or {STATUS}, got "
      f"{folder}, which has neither."
    )
  if not isinstance(options, _groups.LinkOptions):
    options = _groups.LinkOptions()
  rate, latency_s = options.bandwidth_mbit_per_s * 1e6, options.latency_ms / 1e3
  link = cluster.Link(rate, latency_s)
  begun = [status["row"]] if status.get("row") else []
  every = [*(row for found in rows.values() for row in found), *begun]
  drawn = [*rows.get("rows.jsonl", ()), *begun]
  # A run that was interrupted before its first evaluation has no row.
  configs = [row["config"] for row in every] or [status.get("config", {})]
  settings = _same(configs)
  named = [str(settings[x]) for x in ("dataset", "model") if settings.get(x)]
  curves = _curves(drawn, link)
  timelines = _timelines(folder)
  page = _fill(
    "page.html",
    title=html.escape(", ".join(named) or folder.name),
    state=_state(status),
    facts=_facts(drawn or every, [*rows, STATUS] if status else [*rows]),
    curves=curves,
    timelines=timelines,
    vega=f'<script type="module">{vega()}</script>' * bool(curves + timelines),
    tables="".join(
      _table(name, found, settings) for name, found in rows.items() if found
    ),
    settings="".join(
      f"<div>{_term(x, y)}</div>" for x, y in settings.items() if y is not None
    ),
  )
  path = folder / "report.html"
  sealed_json.write_text(path, page)
  return path


@functools.cache
def vega() -> str:
  """Returns Vega's JavaScript, which takes seconds to put together once."""
  library = checks.import_extra("vl_convert", "report")
  version = importlib.metadata.version("vl-convert-python")
  base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  base = base.expanduser() / "jdist" / "report"
  path = base / f"vega-{version}.js"
  try:
    # Another user's script would run in this user's browser.
    channel.private_directory(base)
    if not path.exists():
      sealed_json.write_text(path, library.javascript_bundle())
    return path.read_text()
  except OSError:
    return str(library.javascript_bundle())


def _fill(template: str, **values: str) -> str:
  """Returns a template with values in the places of their names, as @name@."""
  text = (pathlib.Path(__file__).parent / template).read_text()
  return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)


def _state(status: Mapping[str, Any]) -> str:
  """Returns what the run does or how it ended, and how to repeat it."""
  if not status:
    return ""
  known, end = [str(status.get("doing", ""))], status.get("num_steps") or "?"
  if "step" in status:  # A command without a run has none.
    known.append(f"step {status['step']:,} of {_show('num_steps', end)}")
  for name, words in _STATE.items():
    if status.get(name) is not None:
      known.append(words.format(_show(name, status[name])))
  known = [x for x in (*known, str(status.get("updated", ""))) if x]
  return (
    f"<p><span class=state>{html.escape(status['state'])}</span>: "
    f"{html.escape(' · '.join(known))}</p>"
    f"<pre>{html.escape(status['command'])}</pre>"
  )


def _facts(rows: Sequence[dict[str, Any]], files: Iterable[str]) -> str:
  """Returns what was run, where, and by which versions."""
  found: dict[str, list[str]] = {
    "Methods": [row.get("method") or row.get("protocol") or "" for row in rows],
    "Seeds": [str(row["seed"]) for row in rows],
    "Device": [row["device"] for row in rows],
    "Versions": [
      ", ".join(f"{x} {y}" for x, y in row["versions"].items()) for row in rows
    ],
    "Commit": [row["commit"] for row in rows],
    "Run": [row["run"] for row in rows if "run" in row],
  }
  shown = {
    x: ", ".join(filter(None, dict.fromkeys(y))) for x, y in found.items()
  }
  terms = "".join(_term(x, y) for x, y in shown.items() if y)
  return f"<dl>{terms}<dt>Files</dt><dd>{_links(files)}</dd></dl>"


def _curves(rows: Sequence[dict[str, Any]], link: cluster.Link) -> str:
  """Returns the chart of the rows' curves, with the choice of its axes."""
  # The curve of a storm, with pairs of seconds and losses, is in its trace.
  rows = [x for x in rows if isinstance((x.get("curve") or [0])[0], dict)]
  methods = list(dict.fromkeys(str(row.get("method")) for row in rows))
  points: list[dict[str, Any]] = []
  for number, row in enumerate(rows):
    messages = cluster.ring_messages(row["workers"])
    for point in row["curve"]:
      sending_s = link.send_s(point["sent_bytes"], point["rounds"] * messages)
      every = point | {"link_s": point["train_s"] + sending_s}
      points.append({
        "run": number,
        "method": methods.index(str(row.get("method"))),
        # As many digits as a picture can show.
        **{
          x: float(f"{y:.6g}") if isinstance(y, float) else y
          for x, y in every.items()
          if x in _ACROSS | _UP
        },
      })  # fmt: skip
  up = [x for x in _UP.items() if any(x[0] in point for point in points)]
  if not up:
    return ""
  seconds = f"{_ACROSS['link_s']} at {link.bandwidth_bits_per_s / 1e6:g} Mbit/s"
  across = _ACROSS | {"link_s": f"{seconds} and {1e3 * link.latency_s:g} ms"}
  data = {
    "x": [*across.items()], "y": up, "methods": methods, "points": points,
    "ends": [row["curve"][-1]["step"] for row in rows],
    "runs": [f"{row.get('method')}, seed {row['seed']}" for row in rows],
  }  # fmt: skip
  return _fill("curves.html", data=_script(data))


def _table(
  file: str, rows: Sequence[dict[str, Any]], settings: Mapping[str, Any]
) -> str:
  """Returns a table with a line for each row of a file."""
  # What is equal in all rows stands in the settings.
  own = [
    {x: y for x, y in row.items() if not isinstance(y, dict | list)}
    | {x: y for x, y in row["config"].items() if x not in settings}
    for row in rows
  ]
  names = list(dict.fromkeys(x for row in own for x in row))
  hidden = {"commit", "device", "run", "clock", "purpose"}
  names = [x for x in names if x not in hidden]
  names.sort(key=lambda x: x not in ("method", "protocol"))
  head = "".join(f"<th scope=col>{x.replace('_', ' ')}</th>" for x in names)
  body = "".join(
    "<tr>"
    + "".join(f"<td>{_show(x, row.get(x))}</td>" for x in names)
    + f'<td><a href="{file}">{file}:{line}</a></td></tr>'
    for line, row in enumerate(own, 1)
  )
  title = "Tuning" if file.startswith("tuning") else "Runs"
  return (
    f"<h2>{title}</h2><div class=wide tabindex=0 role=region "
    f'aria-label="{title}"><table><thead><tr>{head}<th scope=col>row</th></tr>'
    f"</thead><tbody>{body}</tbody></table></div>"
  )


def _timelines(folder: pathlib.Path) -> str:
  """Returns the timelines of a folder's traces, on one axis."""
  files: dict[str, dict[str, list[tuple[Any, ...]]]] = {}
  for path in sorted(folder.glob("*.json")):
    whole = checks.read_text(path, json.loads, "JSON")
    events = whole.get("traceEvents", ()) if isinstance(whole, dict) else ()
    rows = {x["tid"]: x["args"]["name"] for x in events if x["ph"] == "M"}
    lanes = list(rows)[:_MAX_LANES]
    found = sorted(
      (x for x in events if x["ph"] == "X" and x["tid"] in lanes),
      key=lambda x: x["ts"],
    )
    spans = [
      (rows[x["tid"]], x["name"], x["cat"], x["ts"] / 1e6, x["dur"] / 1e6)
      for x in found[:_MAX_SPANS]
    ]
    counters = [
      (x["name"], line, x["ts"] / 1e6, value)
      for x in events
      if x["ph"] == "C"
      for line, value in x["args"].items()
    ]
    if spans:
      files[path.name] = {"spans": spans, "counters": counters}
  if not files:
    return ""
  return _fill("timelines.html", links=_links(files), data=_script(files))


def _script(data: Any) -> str:
  """Returns data as JSON that cannot end the script that it stands in."""
  return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _links(names: Iterable[str]) -> str:
  return ", ".join(f'<a href="{x}">{x}</a>' for x in map(html.escape, names))


def _same(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the options that have one value in all rows."""
  first, *others = configs
  return {
    x: y for x, y in first.items() if all(z.get(x, z) == y for z in others)
  }


def _term(name: str, value: Any) -> str:
  return f"<dt>{name.replace('_', ' ')}</dt><dd>{_show(name, value)}</dd>"


def _show(name: str, value: Any) -> str:
  """Returns a value as the page shows it, by the unit in its name."""
  if value is None:
    return "–"
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, list):
    return html.escape(" ".join(map(str, value))) or "–"
  if not isinstance(value, int | float):
    return html.escape(str(value))
  if name == "accuracy":
    return f"{100 * value:.2f} %"
  if name.endswith("_bytes"):
    return training.format_bytes(value)
  if isinstance(value, int) or value >= 1e4:
    return f"{value:,.0f}"
  return f"{value:,.4g}"
