"""The way of a codec option from the command line to the wire.

A call of a library's function counts when one of its arguments, or a variable
of the functions around it, is the parsed options, the codec that they name, or
an object that holds one of them within two levels.  The way ends where the
codec's compression is first asked for its state: the table of updates shows the
rest.
"""

import importlib
import json
import os
import pathlib
import pkgutil
import subprocess
import sys
from typing import Any

_WORDS = (
  "train", "--method", "diloco", "--codec", "int4", "--feedback", "error",
  "--dataset", "synthetic", "--steps", "2", "--interval", "2", "--workers", "2",
  "--batch-size", "16", "--substrate", "vmap",
)  # fmt: skip


class _BegunError(BaseException):
  """Ends the run where the way ends."""


def trace_option(tree: pathlib.Path) -> dict[str, Any]:
  """Follows `--codec int4` through a tree's library, in a process of its own.

  Returns:
    `files`, by their paths below jdist/; `frames`, the number of calls; and
    `check_frames`, those of the check of unused options.

  Raises:
    RuntimeError: when the run ends before its compression is used.
  """
  answer = subprocess.run(
    [sys.executable, str(pathlib.Path(__file__).resolve())],
    cwd=tree,
    env={**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  if answer.returncode:
    raise RuntimeError(f"Following `--codec` failed:\n{answer.stderr}")
  found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
  return found


def _follow() -> dict[str, Any]:
  import tempfile

  import tyro

  import jdist
  from jdist import cli, codecs, reducers

  package = f"{pathlib.Path(jdist.__file__).resolve().parent}/"
  parse = tyro.cli
  # Keeping the frames keeps Python from using one for two calls.
  calls: dict[Any, None] = {}

  def path(frame: Any) -> str:
    return str(frame.f_code.co_filename).removeprefix(package)

  def parse_and_watch(*words: Any, **given: Any) -> Any:
    options = parse(*words, **given)

    def holds(value: Any, depth: int = 2) -> bool:
      if isinstance(value, (type(options), codecs.Codec)):
        return True
      inside = value if isinstance(value, dict) else None
      if type(value).__module__.startswith("jdist."):
        inside = getattr(value, "__dict__", None)
      if not depth or inside is None:
        return False
      return any(holds(x, depth - 1) for x in inside.values())

    def watch(frame: Any, event: str, _: Any) -> None:
      own = frame.f_code.co_filename.startswith(package)
      if event == "call" and own and any(map(holds, frame.f_locals.values())):
        calls[frame] = None

    sys.setprofile(watch)
    return options

  def begin(*arguments: Any, **given: Any) -> Any:
    sys.setprofile(None)
    raise _BegunError

  # Otherwise modules that load late would add what they do when they load.
  for module in pkgutil.walk_packages(cli.__path__, "jdist.cli."):
    importlib.import_module(module.name)
  tyro.cli = parse_and_watch
  reducers.Compression.init = begin
  with tempfile.TemporaryDirectory() as folder:
    try:
      cli.main([*_WORDS, "--output", folder])
    except _BegunError:
      return {
        "files": sorted(set(map(path, calls))),
        "frames": len(calls),
        "check_frames": sum(map(_is_check, calls)),
      }
  raise RuntimeError("The run has ended, and its compression was not used.")


def _is_check(frame: Any) -> bool:
  """Returns whether a call was made by the check of unused options."""
  while frame is not None:
    if frame.f_code.co_name == "check_used":
      return True
    frame = frame.f_back
  return False


if __name__ == "__main__":
  print(json.dumps(_follow()))
