"""A page for each method, made from the registry, docstrings and counted bytes.

The equation, the arguments, the departures and the reference are those of the
docstring, the paper is that of `papers.toml`, the options are those of
`methods.registry`, the bytes are counted in a traced step, measured accuracies
are the row of the method in `docs/methods.md`, and where it pays is predicted
by costs that `experiments/advise` recorded.
"""

import functools
import inspect
import pathlib
import re
import statistics
import tomllib
from collections.abc import Iterator
from typing import Any

import api_pages
import jax
import jax.numpy as jnp
import optax

from jdist import (
  advice,
  cluster,
  collectives,
  methods,
  models,
  prediction,
  training,
  transforms,
)

_HERE = pathlib.Path(__file__).resolve().parent
_TABLE = _HERE.parent / "methods.md"
_SYMBOLS: dict[str, dict[str, str]] = tomllib.loads(
  (_HERE / "symbols.toml").read_text()
)
PAPERS: dict[str, dict[str, str]] = tomllib.loads(
  (_HERE / "papers.toml").read_text()
)
# Commands of LaTeX that are no symbols.
_LAYOUT = {
  "leftarrow", "tfrac", "frac", "sum", "quad", "qquad", "left", "right",
  "lVert", "rVert", "lfloor", "rfloor", "lceil", "rceil",
  "min", "max", "sim", "sqrt", "odot", "neq", "in",
}  # fmt: skip
# Indices that number workers, steps and fragments.
_INDICES = {"", "i", "j", "p", "i,p"}
_MODEL, _WORKERS, _INTERVAL, _STEPS = "lenet", 8, 8, 1000
# Recorded costs of methods, and the links, in Mbit/s, on which they are shown.
_RECORDED = _HERE.parents[1] / "experiments/advise/results"
_RATES, _LATENCY_S = (10, 100, 1000), 0.0005


def pages() -> Iterator[tuple[str, str]]:
  """Yields the path and the text of each method's page."""
  yield "docs/_generated/symbols.md", common_symbols()
  yield "docs/methods/index.rst", _index()
  for name in methods.registry:
    yield f"docs/methods/{name}.rst", page(name)


def common_symbols() -> str:
  """Returns a table of the symbols that all methods share, in Markdown."""
  rows = [f"| ${_latex(x)}$ | {y} |" for x, y in _SYMBOLS["common"].items()]
  return "\n".join(["| symbol | meaning |", "|---|---|", *rows]) + "\n"


def _index() -> str:
  lines = [".. list-table::", "   :header-rows: 1", ""]
  lines += ["   * - method", "     - in one line", "     - messages"]
  for name, method in methods.registry.items():
    lines += [
      f"   * - :doc:`{title(name)} <{name}>`",
      f"     - {method.summary}",
    ]
    lines.append(
      "     - once a round" if method.in_rounds else "     - every step"
    )
  entries = "\n".join(f"   {name}" for name in methods.registry)
  return "\n\n".join([
    api_pages.title("Each method"),
    "These pages are made from the registry of methods, from docstrings and "
    "traced steps. :doc:`/docs/methods` compares their accuracy and bytes.",
    "\n".join(lines),
    f".. toctree::\n   :hidden:\n\n{entries}",
  ]) + "\n"  # fmt: skip


def page(name: str) -> str:
  """Returns the page of a method."""
  method = methods.registry[name]
  path = f"jdist.methods.{name}"
  named = title(name)
  parts = [api_pages.title(named), _facts(name, method)]
  parts += [f".. autofunction:: {path}", api_pages.title("Symbols", "-")]
  own = _SYMBOLS.get(name, {})
  if "equation" in own:
    other = f":doc:`{title(own['equation'])} <{own['equation']}>`"
    parts.append(f"The equation is that of {other}, {_rest(own['where'])}.")
  parts += [_symbol_table(name), api_pages.title("Bytes", "-"), _bytes(name)]
  parts += [api_pages.title("Whether it pays", "-"), _advice(name)]
  return "\n\n".join(parts) + "\n"


def title(name: str) -> str:
  """Returns the name of a method as its row in `docs/methods.md` has it."""
  found = _row(name)[0]
  # A name such as signSGD keeps its letters.
  plain = re.match(r"[a-z]+[ -]", found)
  return found[0].upper() + found[1:] if plain else found


def symbols(name: str) -> dict[str, str]:
  """Returns the symbols of a method's equations and what each one means.

  Raises:
    ValueError: If the docstring has no equation, or if `symbols.toml` does not
      explain a symbol.
  """
  own = _SYMBOLS.get(name, {})
  doc = (
    inspect.getdoc(methods.registry[own.get("equation", name)].factory) or ""
  )
  text = doc.split("\nArgs:")[0]
  if ".. math::" not in text:
    raise ValueError(
      f"The docstring of `methods.{name}` must have an equation."
    )
  displayed = re.findall(r"\.\. math::((?:.+\n?)(?:[ ]+.+\n?)*)", text)
  inline = re.findall(r":math:`([^`]+)`", text)
  known = _SYMBOLS["common"] | _SYMBOLS.get(own.get("equation", name), {})
  found = dict.fromkeys(
    symbol for part in [*displayed, *inline] for symbol in _tokens(part)
  )
  unknown = [symbol for symbol in found if symbol not in known]
  arguments = methods.registry[name].arguments
  for meaning in own.values():
    unknown += set(re.findall("`([^`]+)`", meaning)) - arguments
  if unknown:
    raise ValueError(
      f"docs/_ext/symbols.toml must explain symbols, and name arguments, of "
      f"`methods.{name}`; wrong are {unknown}."
    )
  return {symbol: known[symbol] for symbol in found}


def _tokens(latex: str) -> Iterator[str]:
  """Yields the symbols of an equation, without indices of workers."""
  latex = re.sub(r"\\text\{[^}]*\}", " ", latex).replace(r"\mathrm{top}_k", "@")
  latex = re.sub(r"\^\{\((.*?)\)\}", r" \1 ", latex)
  pattern = r"(@)|\\mathrm\{(\w+)\}|(\\?[A-Za-z]+)(?:_(\{[^}]*\}|[A-Za-z0-9]))?"
  for top, word, base, index in re.findall(pattern, latex):
    if top or word:
      yield word or "top_k"
      continue
    if base.lstrip("\\") in _LAYOUT:
      # A sum runs over a symbol.
      base, index = index.strip("{}") if base == r"\sum" else "", ""
    plain = index.strip("{}")
    if base.startswith("\\"):
      yield base if plain in _INDICES else f"{base}_{index}"
      continue
    # Letters that stand side by side are a product.
    for letter in base:
      if letter not in ("i", "j"):
        yield letter


def _facts(name: str, method: methods.Method) -> str:
  rows = {"In one line": method.summary}
  if paper := PAPERS.get(name):
    rows["Paper"] = "{author}, `{title} <{url}>`__, {venue}".format(**paper)
  rows["Command line"] = f"``jdist train --method {name}``"
  rows["Communication"] = (
    "once a round" if method.in_rounds else "in every step"
  ) + (", late by definition" if method.late is not None else "")
  cells = _row(name)
  if cells[-1]:
    rows["Measured"] = _as_rst(cells[-1]) + (
      ": test accuracy in per cent, and how many times fewer bytes, in the"
      " setting of :doc:`the table of all methods </docs/methods>`"
    )
  else:
    rows["Measured"] = "not compared in an experiment of this repository"
  return "\n".join(f":{key}: {value}" for key, value in rows.items())


@functools.cache
def _rows() -> list[list[str]]:
  lines = [x for x in _TABLE.read_text().splitlines() if x.startswith("|")]
  return [[x.strip() for x in line.strip("|").split("|")] for line in lines]


def _row(name: str) -> list[str]:
  """Returns the cells of the method's row in the table of all methods."""
  for cells in _rows():
    if len(cells) == 4 and re.search(rf"\.{name}\(", cells[2]):
      return cells
  raise ValueError(f"The table of docs/methods.md must have a row of `{name}`.")


def _as_rst(text: str) -> str:
  """Turns links of Markdown to pages of experiments into those of the site."""
  return re.sub(
    r"\[([^]]+)\]\(\.\./(experiments/[^)]+)\.md\)", r":doc:`\1 </\2>`", text
  )


def _symbol_table(name: str) -> str:
  lines = [".. list-table::", "   :widths: 15 85", ""]
  for symbol, meaning in symbols(name).items():
    lines += [f"   * - :math:`{_latex(symbol)}`", f"     - {_rest(meaning)}"]
  return "\n".join(lines)


def _rest(text: str) -> str:
  """Turns code and equations of Markdown into reStructuredText."""
  text = re.sub(r"`([^`]+)`", r"``\1``", text)
  return re.sub(r"\$([^$]+)\$", r":math:`\1`", text)


def _latex(symbol: str) -> str:
  if symbol == "top_k":
    return r"\mathrm{top}_k"
  word = symbol.isalpha() and len(symbol) > 1
  return rf"\mathrm{{{symbol}}}" if word else symbol


def traffic(name: str) -> collectives.Traffic:
  """Counts what one of eight workers sends in a traced step of LeNet."""
  method = methods.registry[name]
  model = models.build(
    _MODEL, input_shape=(32, 32, 3), num_classes=10, abstract=True
  )
  run = methods.Run(
    num_steps=_STEPS,
    warmup_steps=0,
    learning_rate=optax.constant_schedule(0.1),
    interval=_INTERVAL,
  )
  options: dict[str, Any] = {}
  params = model.params
  if "predict" in method.required:
    cut = prediction.cut(model, 2)  # Its published cut.
    _, rear = cut.split(params)
    zeros = functools.partial(
      jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype)
    )
    options = {
      "cut": cut,
      "predict": lambda theta, front: zeros(rear),
      "predictor_params": (),
    }
  if method.interval_policy == "growth":
    options["interval"] = transforms.intervals.fixed(_INTERVAL)
  optimizer = method.build(optax.sgd(0.1), run, axis="workers", **options)

  def step(params: Any) -> Any:
    state = optimizer.init(params)
    updates, state = optimizer.update(
      params, state, params, loss=jnp.zeros((), jnp.float32)
    )
    return transforms.apply_updates(params, updates, state)

  return collectives.traffic(step, params, axis="workers", num_workers=_WORKERS)


_SENT = {
  "all-reduce": "2 b (N - 1) / N",
  "all-gather": "b (N - 1)",
  "reduce-scatter": "b (N - 1) / N",
  "all-to-all": "b (N - 1) / N",
  "permute": "b",
}


def _bytes(name: str) -> str:
  counted = traffic(name)
  size = sum(x.size for x in jax.tree.leaves(_model_params()))
  groups: dict[tuple[str, str], int] = {}
  for one in counted.collectives:
    when = "every step"
    if one.phase is not None:
      when = str(one.phase)
    elif one.conditional and methods.registry[name].in_rounds:
      when = "end of a round"
    key = when, one.kind
    groups[key] = groups.get(key, 0) + one.payload_bytes * one.count
  lines = [
    ".. list-table::",
    "   :header-rows: 1",
    "",
    "   * - when",
    "     - collective",
    "     - payload *b*, bytes",
    "     - bytes for each parameter",
    "     - a worker sends",
  ]
  for (when, kind), payload in groups.items():
    lines += [
      f"   * - {when}",
      f"     - {kind}",
      f"     - {payload:,}",
      f"     - {payload / size:.3g}",
      f"     - :math:`{_SENT[kind]}`",
    ]
  return (
    f"Counted in the traced step of LeNet ({size:,} parameters) with "
    f"{_WORKERS} workers and the method's defaults"
    + (f", in rounds of {_INTERVAL} steps" if methods.registry[name].in_rounds
       else "")
    + ". Dense float32 gradients have 4 bytes for each parameter. "
    f"``jdist bytes --methods {name}`` counts the same for other models, "
    "workers and options.\n\n" + "\n".join(lines)
  )  # fmt: skip


@functools.cache
def _model_params() -> Any:
  model = models.build(
    _MODEL, input_shape=(32, 32, 3), num_classes=10, abstract=True
  )
  return model.params


@functools.cache
def measured_costs() -> list[dict[str, Any]]:
  """Returns the rows of what methods cost a worker, of experiments/advise."""
  files = _RECORDED / "predicted.jsonl", _RECORDED / "costs.jsonl"
  return [row for x in files if x.exists() for row in training.read_rows(x)]


def _advice(name: str) -> str:
  """Returns where a method pays by recorded costs, and how to measure it."""
  found: dict[str, dict[str, Any]] = {}
  # Methods that were measured in turns have equal settings, and one base.
  for row in measured_costs():
    one = found.setdefault(repr(row["config"]), {})
    one[row["method"]] = advice.MethodCosts(**row["costs"])
  nets = {
    (row["config"]["model"], row["config"]["batch_size"], variant): costs
    for row in measured_costs()
    for costs in [found[repr(row["config"])]]
    for variant in costs
    if variant != "ssgd" and variant.split()[0] == name
  }
  lines = [
    ".. list-table::",
    "   :header-rows: 1",
    "",
    "   * - net",
    "     - images a step",
    "     - ms a step alone",
    "     - method",
    *(f"     - at {rate} Mbit/s" for rate in _RATES),
  ]
  base = len(lines)
  for (model, batch, variant), costs in sorted(nets.items()):
    steps = costs[variant].interval
    rounds = f", rounds of {steps} steps" if steps > 1 else ""
    cells = [model, batch, f"{1e3 * _alone_s(costs):.1f}", variant + rounds]
    ordered = {"ssgd": costs["ssgd"], **costs}
    cells += [_times(ordered, variant, rate) for rate in _RATES]
    lines += [f"   {'*' if i == 0 else ' '} - {x}" for i, x in enumerate(cells)]
  measured = (
    "How many times faster than synchronous SGD in float32 a step is, as "
    "``advice.Advice`` predicts it, on links with a latency of "
    f"{1e3 * _LATENCY_S:g} ms between two hosts with one core each, with the "
    "costs that these hosts recorded on one of them. It says **no** where the "
    "method does not pay beyond the spread of the measurements (:doc:`the "
    "predictions beside measured steps </experiments/advise/README>`).\n\n"
    + "\n".join(lines)
  )
  if len(lines) == base:
    measured = (
      "What it costs a worker to compute was recorded on no host. It does not "
      "pay where that takes longer than the messages that it saves."
    )
  if "predict" in methods.registry[name].required:
    return (
      f"{measured}\n\nThe first two layers are sent, and the predictor of the "
      "paper gives the others: its numbers, which training finds, do not "
      "change its time. :doc:`The experiment </experiments/mp2/TABLES>` has "
      "the times of other cuts and predictors."
    )
  return (
    f"{measured}\n\nThis measures a step here and predicts the method's time "
    "on the link that you name, and says below which bandwidth it pays "
    "(:doc:`/docs/schedules`):\n\n"
    ".. code-block:: text\n\n"
    f"   jdist advise --methods {name} --bandwidth-mbit-per-s 100"
  )


def _alone_s(costs: dict[str, Any]) -> float:
  return statistics.median(costs["ssgd"].step_s)


def _times(costs: dict[str, Any], name: str, rate: int) -> str:
  """Returns how many times faster than the first method a step is, or no."""
  said = advice.Advice(costs, cluster.Link(1e6 * rate, _LATENCY_S))
  if not said.pays(name):
    return "no"
  return f"{said.seconds(said.base)[1] / said.seconds(name)[1]:.1f}x"
