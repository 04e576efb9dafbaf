"""Pages of the API: a page for each room, and an entry for each public name."""

import textwrap
from collections.abc import Iterator

import public_names

from jdist import methods

# Chapters of the API, by what a user does.
_GROUPS = {
  "Training loops": (
    "jdist",
    "jdist.collectives",
    "jdist.transforms",
    "jdist.transforms.intervals",
    "jdist.methods",
    "jdist.conformance",
    "jdist.states",
    "jdist.training",
    "jdist.training.comparison",
  ),
  "Messages": ("jdist.codecs", "jdist.reducers"),
  "Machines": (
    "jdist.cluster",
    "jdist.server",
    "jdist.elastic",
    "jdist.channel",
    "jdist.pipeline",
  ),
  "Measurement": ("jdist.advice", "jdist.profiling"),
  "Models and data": ("jdist.models", "jdist.data", "jdist.prediction"),
}
_HEADINGS = {"function": "Functions", "class": "Classes", "data": "Data"}


def pages() -> Iterator[tuple[str, str]]:
  """Yields the path and the text of the index and of each room's page."""
  grouped = [room for rooms in _GROUPS.values() for room in rooms]
  if set(grouped) != set(public_names.rooms()):
    raise ValueError(
      "`_GROUPS` of docs/_ext/api_pages.py must list each room with public "
      f"names once, {set(grouped) ^ set(public_names.rooms())} differ."
    )
  yield "docs/api/index.rst", _index()
  for room, names in public_names.rooms().items():
    yield f"docs/api/{room}.rst", _page(room, names)


def title(text: str, mark: str = "=") -> str:
  """Returns a heading of reStructuredText."""
  return f"{text}\n{mark * len(text)}\n"


def _index() -> str:
  parts = [
    title("API"),
    "Every public name, by room. A room is a module with one subject; the "
    "table in :doc:`/docs/extending` says which room may use which.",
  ]
  for group, rooms in _GROUPS.items():
    entries = "\n".join(f"   {room}" for room in rooms)
    parts.append(f".. toctree::\n   :caption: {group}\n\n{entries}")
  return "\n\n".join(parts) + "\n"


def _page(room: str, names: tuple[public_names.Name, ...]) -> str:
  parts = [title(f"``{room}``"), f".. automodule:: {room}\n   :no-members:"]
  if room == "jdist":
    rows = [(name, public_names.find(name.path)) for name in names]
    return "\n\n".join([*parts, _table(rows)]) + "\n"
  for kind, heading in _HEADINGS.items():
    own = [x for x in names if x.kind == kind]
    moved = [x for x in own if room == "jdist.methods" and _is_method(x)]
    kept = [x for x in own if x not in moved]
    if own:
      parts.append(title(heading, "-"))
    if moved:
      parts.append("Each published method has :doc:`a page </docs/methods>`.")
      parts.append(_table([(x, x.path) for x in moved]))
    parts += [_entry(x) for x in kept]
  return "\n\n".join(parts) + "\n"


def _is_method(name: public_names.Name) -> bool:
  factories = [x.factory for x in methods.registry.values()]
  return name.value in factories


def _table(rows: list[tuple[public_names.Name, str | None]]) -> str:
  lines = [".. list-table::", "   :widths: 30 70", ""]
  for name, target in rows:
    kind = "mod" if name.kind == "module" else "obj"
    lines.append(f"   * - :py:{kind}:`{name.path} <{target}>`")
    sentence = " ".join(_text(name).split())
    lines.append(f"     - {sentence}")
  return "\n".join(lines)


def _text(name: public_names.Name) -> str:
  return name.sentence.split("\n\n")[0]


def _entry(name: public_names.Name) -> str:
  if name.kind == "data":
    text = textwrap.indent(textwrap.fill(name.text, 76), "   ")
    return f".. py:data:: {name.name}\n   :module: {name.room}\n\n{text}"
  home = public_names.find(name.path)
  if home not in (None, name.path):  # Of another room.
    return (
      f".. py:{name.kind}:: {name.path}\n\n   The same as :py:obj:`{home}`."
    )
  if name.kind == "class":
    return f".. autoclass:: {name.path}\n   :members:"
  return f".. autofunction:: {name.path}"
