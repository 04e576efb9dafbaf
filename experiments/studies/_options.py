"""Options of an experiment's command, and its warning about rates."""

import dataclasses
import os
from collections.abc import Collection
from typing import Any, ClassVar, TypeAlias

from jdist.training import comparison


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a comparison's command, by which it finds its rows again.

  A row that lacks an option, because it is older, had the option's default.
  """

  FREE: ClassVar[tuple[str, ...]] = (
    "rates", "extensions", "seeds", "tuning_seeds", "variants",
  )  # fmt: skip
  """Options in which rows of one comparison may differ."""

  rates: tuple[float, ...] = (0.0125, 0.025, 0.05)
  """Grid of highest learning rates. Each variant uses its own best one, found
  by runs of the same length on held-out training samples."""

  extensions: int = 2
  """Further rates, at most, beyond an end of the grid that is a variant's
  best."""

  seeds: tuple[int, ...] = (0, 1, 2)
  """Seeds of the runs at a variant's best rate."""

  tuning_seeds: tuple[int, ...] = (10_000,)
  """Seeds of the runs that choose a rate."""

  variants: tuple[str, ...] = ()
  """Variants of the experiment to run, in this order; all if not given."""

  def ignores(self, variant: str) -> Collection[str]:
    """Returns options on which a variant's runs do not depend."""
    del variant
    return ()

  def rows(
    self, path: str | os.PathLike[str], setting: Any = None
  ) -> comparison.Rows:
    """Opens the rows of the command.

    Args:
      path: The file, which need not exist.
      setting: A dataclass of further options that identify a comparison, if the
        command runs several.
    """
    # The defaults are those of the command's own class, which may differ from
    # those of its base classes.
    config = dataclasses.asdict(self)
    defaults = dataclasses.asdict(type(self)())
    if setting is not None:
      config |= dataclasses.asdict(setting)
      defaults |= {
        field.name: field.default
        for field in dataclasses.fields(setting)
        if field.default is not dataclasses.MISSING
      }
    return comparison.Rows(
      path, config, defaults=defaults, free=self.FREE, ignores=self.ignores
    )

  def study(self, variants: Collection[str]) -> comparison.Study:
    """Returns the study of an experiment's variants.

    Raises:
      ValueError: If the experiment has no variant of a given name.
    """
    unknown = set(self.variants) - set(variants)
    if unknown:
      raise ValueError(
        f"`--variants` must be of {', '.join(variants)}, got "
        f"{', '.join(sorted(unknown))}."
      )
    return comparison.Study(
      self.variants or tuple(variants),
      self.rates,
      self.seeds,
      self.extensions,
      self.tuning_seeds,
    )


Presets: TypeAlias = dict[str, tuple[str, Any]]
"""Options by the name of a command's preset, each with a line of help."""


def warn_of_end(variant: str, tuned: comparison.Tuned) -> None:
  """Prints a warning if a variant's best rate lies at an end of the grid."""
  if tuned.diverged:
    print(
      f"Warning: {variant} is left out: it diverged at every learning rate "
      f"tried, from {tuned.tried[0]:g}. Add lower ones.",
      flush=True,
    )
  elif tuned.end is not None:
    print(
      f"Warning: {variant} is best at the {tuned.end} of the learning rates "
      f"tried, {tuned.best:g}; a better one may lie beyond. Widen the grid.",
      flush=True,
    )
