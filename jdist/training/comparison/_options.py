"""Options that the commands of all comparisons have."""

import dataclasses
import os
from collections.abc import Collection
from typing import Any, ClassVar

from jdist.training.comparison import _rows, _study


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a comparison's command, by which it finds its rows again.

  Rows that are older than an option had its default.
  """

  FREE: ClassVar[tuple[str, ...]] = ("rates", "extensions", "seeds", "variants")
  """Options in which rows of one comparison may differ."""

  rates: tuple[float, ...] = (0.0125, 0.025, 0.05)
  """The grid of highest learning rates; each variant uses its own best one, by
  a run of the same length on held-out training samples."""

  extensions: int = 2
  """Further rates that a variant is tuned with at most, beyond an end of the
  grid that is its best."""

  seeds: tuple[int, ...] = (0, 1, 2)
  """One run each at a variant's best rate."""

  variants: tuple[str, ...] = ()
  """Of the experiment's, in this order; all if none are named."""

  def ignores(self, variant: str) -> Collection[str]:
    """Returns options that a variant's runs do not depend on."""
    del variant
    return ()

  def rows(
    self, path: str | os.PathLike[str], setting: Any = None
  ) -> _rows.Rows:
    """Opens the rows of the command.

    Args:
      path: of the file; it need not be there.
      setting: a dataclass of what else names the comparison, where the command
        runs several.
    """
    config, defaults = (
      dataclasses.asdict(self),
      dataclasses.asdict(type(self)()),
    )
    if setting is not None:
      config |= dataclasses.asdict(setting)
      defaults |= {
        field.name: field.default
        for field in dataclasses.fields(setting)
        if field.default is not dataclasses.MISSING
      }
    return _rows.Rows(
      path, config, defaults=defaults, free=self.FREE, ignores=self.ignores
    )

  def study(self, variants: Collection[str]) -> _study.Study:
    """Returns what is compared, of an experiment's variants.

    Raises:
      ValueError: when a named variant is none of the experiment's.
    """
    unknown = set(self.variants) - set(variants)
    if unknown:
      raise ValueError(
        f"`--variants` must be of {', '.join(variants)}, got "
        f"{', '.join(sorted(unknown))}."
      )
    return _study.Study(
      self.variants or tuple(variants), self.rates, self.seeds, self.extensions
    )
