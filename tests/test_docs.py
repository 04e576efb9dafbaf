"""What the site is made of: names with texts, methods with symbols, links."""

import importlib
import pathlib
import re
import sys

import pytest

from jdist import advice, methods

_ROOT = pathlib.Path(__file__).parents[1]
_DOCS = _ROOT / "docs"


@pytest.fixture(scope="module")
def extension():
  """Imports modules of the site's extension, which need no Sphinx."""
  sys.path.insert(0, str(_DOCS / "_ext"))
  yield importlib.import_module
  sys.path.remove(str(_DOCS / "_ext"))


def test_every_public_name_has_a_text(extension):
  assert extension("public_names").undocumented() == []


def test_site_and_house_have_the_same_public_names(extension, monkeypatch):
  monkeypatch.syspath_prepend(str(_ROOT / "scripts"))
  house = importlib.import_module("house")
  counted = set(house.public_names(house.read_sources(_ROOT)))
  shown = {
    f"{x.source.split('.')[1]}.{x.name}"
    for names in extension("public_names").rooms().values()
    for x in names
    if x.kind != "module"
  }
  # Serve the library's own rooms.
  assert counted - shown == {
    "signatures.Explained", "signatures.checked", "signatures.explained",
    "training.check_metadata",
  }  # fmt: skip
  assert {x.split(".")[0] for x in shown - counted} == {"states"}


def test_name_without_a_text_is_found(extension, monkeypatch):
  names = extension("public_names")
  rooms = {"jdist.codecs": (names.Name("jdist.codecs", "New", "", "data", ""),)}
  monkeypatch.setattr(names, "rooms", lambda: rooms)
  assert names.undocumented() == ["jdist.codecs.New"]


def test_every_public_name_has_an_entry(extension):
  names = extension("public_names")
  pages = "\n".join(text for _, text in extension("api_pages").pages())
  full = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", pages, re.MULTILINE))
  # Two full entries of one object are a warning, which ends the build.
  every = [x for room in names.rooms().values() for x in room]
  once = [(x.source, x.name) for x in every if x.path in full]
  assert len(once) == len(set(once))
  found = full | set(re.findall(r"^\.\. py:class:: ([\w.]+)$", pages, re.M))
  data = re.findall(r"^\.\. py:data:: (\w+)\n +:module: (\S+)$", pages, re.M)
  found |= {f"{room}.{name}" for name, room in data}
  moved = {f"jdist.methods.{name}" for name in methods.registry}
  wanted = {x.path for x in every}
  daily = {x.path for x in names.rooms()["jdist"]}
  assert wanted - daily - moved <= found


@pytest.mark.parametrize("name", methods.registry)
def test_every_symbol_of_a_method_is_explained(name, extension):
  assert extension("method_pages").symbols(name)


def test_unknown_symbol_is_an_error(extension, monkeypatch):
  pages = extension("method_pages")
  monkeypatch.setitem(pages._SYMBOLS, "common", {})
  with pytest.raises(ValueError, match=r"`methods.ssgd`; wrong are .*'g'"):
    pages.symbols("ssgd")


def test_links_for_programs_lead_to_pages():
  text = (_DOCS / "_root" / "llms.txt").read_text()
  links = re.findall(r"\]\(docs/([^)]+)\.html\)", text)
  made = {"methods/index", "api/index"}
  assert len(links) > 15
  assert [
    x for x in links if x not in made and not (_DOCS / f"{x}.md").exists()
  ] == []


def test_every_page_is_in_the_navigation():
  index = (_DOCS / "index.md").read_text()
  pages = {x.relative_to(_DOCS).with_suffix("") for x in _DOCS.rglob("*.md")}
  pages = {x.as_posix() for x in pages if not x.parts[0].startswith("_")}
  listed = set(re.findall(r"^(?:.*<)?([\w/]+)>?$", index, re.MULTILINE))
  assert pages - {"index"} <= listed


def test_page_of_a_method_says_where_it_pays(extension, monkeypatch):
  pages = extension("method_pages")
  step_s = [0.01] * 3
  costs = {
    "ssgd": (1, step_s, [0.0] * 3, 1e6, 2, 0),
    "diloco int4": (8, step_s, [0.002] * 3, 1e6, 2, 0),
  }
  rows = [
    {
      "config": {"model": "lenet", "batch_size": 64},
      "method": name,
      "costs": advice.MethodCosts(*own)._asdict(),
    }
    for name, own in costs.items()
  ]
  monkeypatch.setattr(pages, "measured_costs", lambda: rows)
  # A megabyte takes 800, 80 and 8 ms, and two messages have a latency of 1 ms:
  # 811 / (12 + 801 / 8), 91 / (12 + 81 / 8) and 19 / (12 + 9 / 8).
  text = pages.page("diloco")
  cells = ["diloco int4, rounds of 8 steps", "7.2x", "4.1x", "1.4x"]
  assert "\n".join(f"     - {x}" for x in cells) in text
  # With 8 ms more of its own it takes 21.1 ms at 1,000 Mbit/s.
  rows[1]["costs"]["extra_s"] = [0.01] * 3
  cells = ["diloco int4, rounds of 8 steps", "6.8x", "3.0x", "no"]
  assert "\n".join(f"     - {x}" for x in cells) in pages.page("diloco")
  # SSGD in float32 is what the others are compared with.
  for name in ("ssgd", "scaffold"):
    text = pages.page(name)
    assert "recorded on no host" in text and "at 10 Mbit/s" not in text
  # A method that needs a predictor is compared alike, and sends two layers.
  rows[1]["method"] = "mp2"
  rows[1]["costs"] |= {"interval": 1, "extra_s": [0.002] * 3}
  text = pages.page("mp2")
  cells = ["10.0", "mp2"]
  assert "\n".join(f"     - {x}" for x in cells) in text
  assert "advise --methods" not in text
  assert "   * - every step\n     - all-reduce\n     - 11,488\n" in text


def test_methods_are_compared_with_the_base_of_their_turns(
  extension, monkeypatch
):
  pages = extension("method_pages")

  def row(turns, name, step_s):
    own = advice.MethodCosts(1, [step_s] * 3, [0.0] * 3, 1e6, 2, 0)
    config = {"model": "lenet", "batch_size": 64, "together": turns}
    return {"config": config, "method": name, "costs": own._asdict()}

  # The second turns found a machine that was half as fast.
  rows = [row("a", "ssgd", 0.1), row("a", "qsgd", 0.1)]
  rows += [row("b", "ssgd", 0.2), row("b", "demo", 0.2)]
  monkeypatch.setattr(pages, "measured_costs", lambda: rows)
  for name, alone in (("qsgd", "100.0"), ("demo", "200.0")):
    cells = ["64", alone, name, "no", "no", "no"]
    assert "\n".join(f"     - {x}" for x in cells) in pages.page(name)


@pytest.mark.parametrize(
  ("given", "read"),
  [
    ("(a=<class 'jdist.m._n.Class'>)", "(a=Class)"),
    (
      "(a: f = <function m.g>, b: list = <factory>)",
      "(a: f = g, b: list = ...)",
    ),
    ("(a=<function C.<lambda>>, b='<x>')", "(a=..., b='<x>')"),
  ],
)
def test_default_of_a_signature_is_an_expression(given, read, extension):
  assert extension("docstrings").name_defaults(given) == read
