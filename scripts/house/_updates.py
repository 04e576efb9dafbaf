"""Files that a traced update enters."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

_TRACER = pathlib.Path(__file__).resolve().parents[1] / "trace_updates.py"


def trace_updates(tree: pathlib.Path) -> dict[str, Any]:
  """Runs `trace_updates.py` with a tree's library and returns what it prints.

  Raises:
    RuntimeError: when a method cannot be made or traced.
  """
  answer = subprocess.run(
    [sys.executable, str(_TRACER)],
    cwd=tree,
    env={**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  if answer.returncode:
    raise RuntimeError(f"Tracing failed:\n{answer.stderr}")
  found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
  return found
