"""A Sphinx extension: pages made from the library, links, and checks.

Before the sources are read it writes a page for each room (`docs/api`) and for
each method of the registry (`docs/methods`).  It turns links to folders and to
files that are no pages of the site into what the site has.  At the end it
fails the build if a public name has no entry, or if a page loads a script, a
style, a font or a picture from another host.
"""

import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import api_pages
import docstrings
import method_pages
import public_names
from docutils import nodes
from sphinx import addnodes, errors, util
from sphinx.ext import intersphinx

# Pages of the repository of which the site shows parts on pages of its own.
_ELSEWHERE = {
  "experiments": "docs/experiments",
  "README": "docs/index",
  "CONTRIBUTING": "docs/extending",
  "SECURITY": "docs/promises",
}
_LOADED = re.compile(
  r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"(?:https?:)?//"
  r"[^\"]+\"[^>]*>|url\((?:https?:)?//[^)]*\)|@import\s+[\"']https?:[^\"']+"
)
_ANNOTATED = re.compile(r"~?(?:\w+\.)*Annotated\[")
# No page of a room may show objects by their address in memory, nor types by
# their private path, as signatures do that Sphinx cannot read.
_UNREAD = {
  "Objects without a name": '<span class="pre">0x',
  "Signatures that Sphinx cannot read": '<span class="pre">~',
  "Types with private modules": "<em>jdist.",
}
_SIGNATURE = re.compile(r'<dl>\n(<dd><em class="sig-param">.*?)</dl>', re.S)
_ARRAY_LIKE = (
  "Array", "ndarray", "bool", "number", "bool", "int", "float", "complex",
)  # fmt: skip
# Types of these packages stand in annotations.
_FOREIGN = {"jax", "jaxlib", "jdist", "flax", "np", "numpy", "optax", "ray"}


def write_pages(app: Any) -> None:
  """Writes the generated pages, and removes those that are out of date."""
  source = pathlib.Path(app.srcdir)
  pages = dict(api_pages.pages()) | dict(method_pages.pages())
  for folder in ("api", "methods"):
    for old in (source / "docs" / folder).glob("*.rst"):
      if str(old.relative_to(source)) not in pages:
        old.unlink()
  for path, text in pages.items():
    file = source / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != text:
      file.write_text(text)


def turn_links(app: Any, doctree: nodes.document) -> None:
  """Turns links to files of the repository into links of the site."""
  for node in list(doctree.findall(addnodes.pending_xref)):
    if node.get("reftype") != "myst" or node["reftarget"].startswith("#"):
      continue
    target, _, anchor = node["reftarget"].partition("#")
    if node.get("refdomain") == "doc":
      path, anchor = target, node["reftargetid"]
    else:
      path = _find_file(pathlib.Path(app.srcdir), node["refdoc"], target)
    docname = _ELSEWHERE.get(path.removesuffix(".md"), path.removesuffix(".md"))
    if f"{path}/README" in app.env.found_docs:
      docname = f"{path}/README"
    if docname in app.env.found_docs:
      kept = anchor if docname == path.removesuffix(".md") else None
      node["refdomain"], node["reftarget"] = "doc", docname
      node["reftargetid"] = kept or None
    elif path:  # A folder, or a file that is no page.
      node.replace_self(nodes.literal(path, path))


def shorten_types(app: Any, doctree: nodes.document) -> None:
  """Shows the type of an argument or a field without its private modules."""
  for node in doctree.findall(addnodes.pending_xref):
    for shown in node.findall(addnodes.literal_emphasis):
      if shown.astext() == node["reftarget"]:
        shown[:] = [nodes.Text(shown.astext().rpartition(".")[2])]


def _find_file(root: pathlib.Path, docname: str, target: str) -> str:
  """Returns the path of a link's file below the repository's root, or ""."""
  # An included part of README.md has links that begin there.
  for start in (pathlib.PurePosixPath(docname).parent, pathlib.PurePosixPath()):
    path = os.path.normpath(start / target)
    if (root / path).exists():
      return path
  return ""


def name_role(role: str, raw: str, text: str, *_: Any) -> tuple[list, list]:
  """Shows a name in backticks as code, with a link if it is public."""
  found = public_names.find(text.removesuffix("()"))
  code = nodes.literal(raw, text)
  # A docstring may mean an argument of the same name.
  if found is None or text in public_names.arguments():
    return [code], []
  link = addnodes.pending_xref(
    raw, code, refdomain="py", reftype="obj", reftarget=found, refexplicit=True
  )
  return [link], []


def resolve(app: Any, env: Any, node: Any, content: Any) -> nodes.Node | None:
  """Resolves names in annotations by the place where users find them."""
  target = node.get("reftarget", "")
  if node.get("refdomain") != "py":
    return None
  found = public_names.find(target)
  if found is not None and found != target:
    domain = env.get_domain("py")
    return domain.resolve_xref(
      env, node.get("refdoc"), app.builder, "obj", found, node, content
    )
  if "._src." in target and "sphinx.ext.intersphinx" in app.extensions:
    # Optax's own pages have the names without the private modules.
    root, *_, last = target.split(".")
    node["reftarget"] = f"{root}.{last}"
    return intersphinx.missing_reference(app, env, node, content) or content
  # Types of other projects, and private ones, are shown without a link.
  known = _FOREIGN | sys.stdlib_module_names | {"ArrayLike", "ArrayTree"}
  foreign = re.split(r"\W", target)[0] in known or "[" in target
  foreign |= node["reftype"] == "exc"
  return content if foreign else None


def skip(app: Any, what: str, name: str, value: Any, *rest: Any) -> bool | None:
  """Leaves fields of named tuples to the class's own `Attributes:`."""
  text = getattr(value, "__doc__", None) or ""
  return True if text.startswith("Alias for field number") else None


def clean(
  app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
  """Turns Markdown of a docstring into reStructuredText."""
  lines[:] = docstrings.to_rest(lines)


def shorten(
  app: Any,
  what: str,
  name: str,
  value: Any,
  options: Any,
  signature: str | None,
  returned: str | None,
) -> tuple[str | None, str | None]:
  """Writes types as a reader would, in place of what they consist of.

  `ArrayLike` is a union of eight types, and `PositiveInt` is an int with the
  function that checks it.
  """
  union = r" \| ".join(rf"~?(?:\w+\.)*{x}\b" for x in _ARRAY_LIKE)
  if signature:
    signature = docstrings.name_defaults(signature)
    signature = re.sub(union, "ArrayLike", signature)
    while found := _ANNOTATED.search(signature):
      start, depth, commas, end = found.end(), 1, [], found.end()
      while depth:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(signature[end], 0)
        commas += [end] * (depth == 1 and signature[end] == ",")
        end += 1
      kept = signature[start : commas[0]]
      signature = signature[: found.start()] + kept + signature[end:]
  return signature, returned


def check(app: Any, error: Exception | None) -> None:
  """Raises an error if a name has no entry, or a page needs another host."""
  if error is not None or app.builder.format != "html":
    return
  entries = app.env.get_domain("py").objects
  missing = [
    name.path
    for names in public_names.rooms().values()
    for name in names
    if public_names.find(name.path) not in entries
  ]
  if missing:
    raise errors.ExtensionError(f"Not documented: {', '.join(missing)}")
  make_accessible(pathlib.Path(app.outdir))
  rooms = pathlib.Path(app.outdir) / "docs" / "api"
  for what, mark in _UNREAD.items():
    if raw := [x.name for x in rooms.glob("*.html") if mark in x.read_text()]:
      raise errors.ExtensionError(f"{what}: {', '.join(raw)}")
  loaded = sorted(set(_loaded(pathlib.Path(app.outdir))))
  if loaded:
    raise errors.ExtensionError("From other hosts:\n" + "\n".join(loaded))
  util.logging.getLogger(__name__).info(
    f"{len(entries)} names have entries; no page loads from another host."
  )


def make_accessible(folder: pathlib.Path) -> None:
  """Mends what readers of the screen cannot use in the pages of the theme.

  The arrows of the navigation have no words, its side is no landmark, the
  search button has another name than its text, and a signature is a list of
  descriptions without terms.  A picture leads to its file, which a reader with
  a narrow screen enlarges.
  """
  label = 'aria-label="Show or hide the pages below"'
  for page in folder.rglob("*.html"):
    text = page.read_text()
    named = text.replace(
      '<summary><span class="toctree-toggle"',
      f'<summary {label}><span class="toctree-toggle"',
    )
    side = '<div id="pst-primary-sidebar"'
    named = named.replace(
      side, f'{side} role="navigation" aria-label="All pages"'
    )
    named = re.sub(
      r'(<button\b[^>]*search-button-field[^>]*?)\s+aria-label="Search"',
      r"\1",
      named,
    )
    named = re.sub(
      r'(<img\b[^>]*?\bsrc="([^"]*_images/[^"]+)"[^>]*>)',
      r'<a href="\2">\1</a>',
      named,
    )
    named = _SIGNATURE.sub(
      lambda found: (
        '<ul class="sig-params">\n'
        + re.sub(r"(</?)dd>", r"\1li>", found[1])
        + "</ul>"
      ),
      named,
    )
    if named != text:
      page.write_text(named)


def _loaded(folder: pathlib.Path) -> Iterator[str]:
  for path in [*folder.rglob("*.html"), *folder.rglob("*.css")]:
    for found in _LOADED.findall(path.read_text()):
      # A link that a reader may follow loads nothing.
      if 'rel="canonical"' not in found:
        yield f"{path.relative_to(folder)}: {found}"


def setup(app: Any) -> dict[str, Any]:
  """Registers the extension."""
  app.add_role("name", name_role)
  app.connect("builder-inited", write_pages)
  app.connect("doctree-read", turn_links)
  app.connect("doctree-read", shorten_types)
  app.connect("missing-reference", resolve, priority=900)
  app.connect("autodoc-skip-member", skip)
  # Before Napoleon reads the sections.
  app.connect("autodoc-process-docstring", clean, priority=400)
  app.connect("autodoc-process-signature", shorten)
  # Before an extension that tidies up, which an error would repeat.
  app.connect("build-finished", check, priority=400)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
