"""Imports of packages that a bare installation does not have."""

import importlib
from typing import Any


def import_optional(module: str, package: str) -> Any:
  """Imports a module of the `data` extra, or says how to get it.

  Args:
    module: dotted name to import, such as "sklearn.datasets".
    package: what it is called on the package index, such as "scikit-learn".

  Returns:
    The module.

  Raises:
    ImportError: if it cannot be imported; the message names the extra.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f"`jdist.data` needs {package} here, and importing {module} failed "
      f'({error}). Install it with: pip install "jdist[data]"'
    ) from error
