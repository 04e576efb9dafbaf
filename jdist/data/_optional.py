"""Imports of packages that a bare installation does not have."""

import importlib
from typing import Any


def import_optional(module: str, package: str) -> Any:
  """Imports a module of `package`, which the extra `data` brings."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f"`jdist.data` needs {package} here, and importing {module} failed "
      f'({error}). Install it with: pip install "jdist[data]"'
    ) from error
