"""Prepares data sets: `python -m jdist.data prepare NAME ...`."""

import argparse
import sys

from jdist.data import _load, _prepare


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m jdist.data",
    description=(
      "Prepares data sets for `jdist.data.load`, once per machine. Needs a "
      "network and TensorFlow, which reading them afterwards does not."
    ),
  )
  commands = parser.add_subparsers(dest="command", required=True)
  command = commands.add_parser("prepare", help="download, prepare and decode")
  command.add_argument("names", nargs="+", metavar="NAME", help="data set")
  names = parser.parse_args(arguments).names
  try:
    for name in names:
      _prepare.find(name)
    for name in names:
      _prepare.prepare(name)
      for split in _prepare.SPLITS:
        if name in _prepare.TEXT_NAMES:
          found = f"{len(_load.read_bytes(name, split)):,} bytes"
        else:
          found = f"{len(_load.load(name, split)):,} images"
        print(f"{name} {split}: {found}", flush=True)
  except (ConnectionError, FileNotFoundError, ImportError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
