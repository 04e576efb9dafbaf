"""Measures how the library is built: folders, imports, words, traced updates.

    python scripts/measure_house.py [TREE] [--against TREE] [--notes] [--json F]

Reads the files of TREE/jdist (default: this repository) without importing
them.  Only the table of updates runs the library, in a process of its own.
With `--against` a cell shows the other tree's figure first: "45 -> 14".

Folders: a folder is a room or a sub-room.  A file stands one *floor* above the
highest file of its folder that it imports, at its top or in a function; files
that import each other in a circle share a floor.  `__init__.py` counts as a
file, as a floor and with its imports, but not for the most room-mates that one
file imports.  "transforms/**" is a room with its sub-rooms: there an import of
an `__init__.py` counts as one of the file that defines the name.

Updates: `trace_updates.py` says what is traced and counted.  "others" are the
files besides `collectives`, then also besides codecs and argument checks, then
also besides reducers.

Same features: the lines by room without those of features that came after the
tree b390ebc, named in `house/_later_features.py`: whole folders, files and
definitions only, so lines that a later feature put into an older function count
as older ones.  Rooms among which files moved are one row.
"""

import argparse
import json
import pathlib

import house


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument(
    "tree",
    nargs="?",
    type=pathlib.Path,
    default=pathlib.Path(__file__).resolve().parents[1],
  )
  parser.add_argument("--against", type=pathlib.Path, help="another tree")
  parser.add_argument("--json", type=pathlib.Path, help="where to write all")
  parser.add_argument(
    "--notes", action="store_true", help="names what the tables count"
  )
  options = parser.parse_args()
  figures = house.measure(options.tree.resolve())
  tables = house.make_tables(figures)
  written = {"tree": figures}
  if options.against is not None:
    written["against"] = house.measure(options.against.resolve())
    for title, (columns, before) in house.make_tables(
      written["against"]
    ).items():
      tables[title] = (columns, house.put_beside(tables[title][1], before))
  columns, folders = tables["folder"]
  kept = {name: folders[name] for name in house.with_sub_rooms(sorted(folders))}
  tables["folder"] = (columns, kept)
  print(
    "\n\n".join(
      house.draw_table(title, *table) for title, table in tables.items()
    )
  )
  if options.notes:
    print("", *house.notes(figures), sep="\n")
  if options.json is not None:
    options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
  main()
