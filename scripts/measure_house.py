"""Measures how the library is built, and prints the limits that tests hold.

    python scripts/measure_house.py [TREE] [--notes] [--json FILE]

Reads the files of TREE/jdist (default: this repository) without importing
them.  Only the traced ways run the library, each in a process of its own.

Folders: a folder is a room or a sub-room.  A file stands one *floor* above the
highest file of its folder that it imports, at its top or in a function; files
that import each other in a circle share a floor.  "transforms/**" is a room
with its sub-rooms: there an import of an `__init__.py` counts as one of the
file that defines the name.

Comments are counted in lines per 100 lines of code; docstrings are neither.
A public name has a user if another room, an experiment, a script, the signature
of another public name, or a Python example on a page mentions it.

Traced: an update (by `trace_updates.py`, `collectives` included), a push from
a worker to the merged model, and a codec option from the command line to the
wire.  A *hop* is a call that enters another file than the call before.
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
  parser.add_argument("--json", type=pathlib.Path, help="file for all figures")
  parser.add_argument(
    "--notes", action="store_true", help="names what the tables count"
  )
  options = parser.parse_args()
  tree = options.tree.resolve()
  figures, traces = house.measure(tree), house.trace(tree)
  held = house.file_limits(figures) | house.trace_limits(traces)
  tables = house.make_tables(figures, held)
  print(
    "\n\n".join(
      house.draw_table(title, *table) for title, table in tables.items()
    )
  )
  if options.notes:
    print("", *house.notes(figures, traces), sep="\n")
  if options.json is not None:
    written = {**figures, **traces}
    options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
  main()
