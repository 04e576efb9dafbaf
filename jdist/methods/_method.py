"""Methods as data: what the command line, experiments and tests read."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from jdist import collectives, transforms

_GROUPS: dict[str, tuple[str, ...]] = {
  "rounds": (
    "interval", "max_interval", "overlap", "stream", "delay_steps", "mix",
    "fragments", "switch_step", "warmup_steps",
  ),
  "mean": (
    "compression", "wire", "bits", "block", "ratio", "density", "rank",
    "factors", "feedback", "decay", "chunk", "k", "seed",
  ),
  "outer": ("rule", "outer_learning_rate", "outer_momentum"),
  "run": ("optimizer", "inner", "axis", "learning_rate", "local_learning_rate"),
}  # fmt: skip
_CITATION = re.compile(
  r'References: (.+?), "(.+?)" \((?:(.+?) )?(\d{4}), ((?:\w+ )?[^ )]+)\)'
)


class Paper(NamedTuple):
  """Publication of a method.

  Attributes:
    author: the first, or all of few.
    title: of the paper.
    venue: a conference or journal, or arXiv.
    year: of publication there.
    url: of an open copy, or its doi.
  """

  author: str
  title: str
  venue: str
  year: int
  url: str


class Option(NamedTuple):
  """An argument of a method's factory.

  Attributes:
    name: of the argument.
    kind: its annotation.
    default: `inspect.Parameter.empty` where it must be given.
    meaning: the first sentence of its documentation.
    group: "run" for what a run knows, "rounds", "mean", "outer", or "own".
  """

  name: str
  kind: Any
  default: Any
  meaning: str
  group: str


class Run(NamedTuple):
  """A training run, as far as methods depend on it.

  Attributes:
    num_steps: local steps of the whole run.
    warmup_steps: of the learning rate.
    learning_rate: a schedule of the local step.
    steps_per_epoch: in a pass over the training set, rounded up.
    interval: local steps of the first round.
    optimizer: the kind of each worker's optimizer, "sgd" or "adamw".
    momentum: of SGD.
    weight_decay: decoupled.
  """

  num_steps: int
  warmup_steps: int
  learning_rate: optax.Schedule
  steps_per_epoch: int = 1
  interval: int = 1
  optimizer: str = "sgd"
  momentum: float = 0.0
  weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Method:
  """A method by name: where it is published, and how it is built.

  Attributes:
    summary: a line of help.
    factory: a function of `jdist.methods`, or another of that form, for
      instance `functools.partial(transforms.local_steps, rule=...)`.
    from_run: arguments of the factory that follow from a run.  An argument
      `learning_rate` is the run's and needs no entry.
    interval_policy: what decides the interval, a name of
      `jdist.transforms.intervals`.
    late: the overlap of a method whose means are late by definition.
    own_momentum: whether the momentum is the method's own, and the optimizer
      that it is given plain SGD.

  >>> def mean_sgd(optimizer, *, axis, compression=None):
  ...   mean = transforms.average_gradients(axis, compression)
  ...   return optax.chain(mean, optimizer)
  >>> method = Method("a mean in every step", mean_sgd)
  >>> sorted(method.takes)
  ['compression', 'feedback', 'reducer']
  """

  summary: str
  factory: Callable[..., optax.GradientTransformationExtraArgs]
  from_run: Mapping[str, Callable[[Run], Any]] = dataclasses.field(
    default_factory=dict
  )
  interval_policy: str = "fixed"
  late: transforms.Delayed | None = None
  own_momentum: bool = False

  @functools.cached_property
  def options(self) -> tuple[Option, ...]:
    """The factory's arguments."""
    meanings = _meanings(inspect.getdoc(self.factory) or "")
    return tuple(
      Option(
        name,
        one.annotation,
        one.default,
        meanings.get(name, ""),
        next((group for group, of in _GROUPS.items() if name in of), "own"),
      )
      for name, one in inspect.signature(self.factory).parameters.items()
    )

  @property
  def paper(self) -> Paper | None:
    """The paper that the factory's references begin with, if any.

    As in: Stich, "Local SGD Converges Fast" (ICLR 2019, arXiv 1805.09767).
    """
    text = " ".join((inspect.getdoc(self.factory) or "").split())
    found = _CITATION.search(text)
    if found is None:
      return None
    author, title, venue, year, place = found.groups()
    place = place.replace("arXiv ", "https://arxiv.org/abs/")
    url = place.replace("doi ", "https://doi.org/")
    return Paper(author, title, venue or "arXiv", int(year), url)

  @property
  def arguments(self) -> frozenset[str]:
    """The names of the factory's arguments."""
    return frozenset(option.name for option in self.options)

  @property
  def takes(self) -> frozenset[str]:
    """Of overlap, stream, compression, reducer, feedback, outer those it takes.

    A reducer and a feedback are a compression's, and only a mean that is late
    is streamed.
    """
    found = {"overlap", "stream", "compression"} & self.arguments
    if "overlap" in found:
      found.add("stream")
    if "compression" in found:
      found |= {"reducer", "feedback"}
    if "rule" in self.arguments:
      found.add("outer")
    return frozenset(found)

  @property
  def in_rounds(self) -> bool:
    """Returns whether a run's interval is the method's."""
    return any(
      option.name == "interval" and option.default is inspect.Parameter.empty
      for option in self.options
    )

  @property
  def fixed_rounds(self) -> bool:
    """Returns whether the interval must be a number, and no policy."""
    return any(o.name == "interval" and o.kind is int for o in self.options)

  def build(
    self,
    optimizer: optax.GradientTransformation,
    run: Run,
    *,
    axis: collectives.Axis,
    **options: Any,
  ) -> optax.GradientTransformationExtraArgs:
    """Builds the method's chain for a run.

    Args:
      optimizer: each worker's own; dropped by a method that has its own.
      run: gives what `options` do not.
      axis: the workers' axis.
      **options: arguments of the factory.
    """
    found: dict[str, Any] = {
      "optimizer": optimizer,
      "inner": optimizer,  # As `local_steps` calls it.
      "learning_rate": run.learning_rate,
    }
    if self.in_rounds:
      found["interval"] = run.interval
    found = {k: v for k, v in found.items() if k in self.arguments}
    found |= {name: of(run) for name, of in self.from_run.items()}
    return self.factory(**(found | options), axis=axis)


def _meanings(document: str) -> dict[str, str]:
  """Returns the first sentence about each argument in a docstring."""
  section = re.search(r"^Args:\n((?:  .*\n?|\n)+)", document, re.MULTILINE)
  if section is None:
    return {}
  entries = re.split(r"^  (?=\w+: )", section[1], flags=re.MULTILINE)[1:]
  found = {}
  for entry in entries:
    name, _, text = entry.partition(":")
    found[name] = re.split(r"\.\s", " ".join(text.split()) + " ")[0].strip()
  return found
