"""The registry: every method once, with its paper."""

import inspect
import pathlib
import re
import tomllib

import optax
import pytest

from jdist import methods
from jdist.methods import registry

_DOCS = pathlib.Path(__file__).parents[2] / "docs"
_PAGE = _DOCS / "methods.md"
_PAPERS = tomllib.loads((_DOCS / "_ext" / "papers.toml").read_text())
_RUN = methods.Run(
  100, 10, optax.constant_schedule(0.1), interval=4, momentum=0.9
)
# Methods that need a network trained in advance.
_PREDICTED = {"mp2"}


def test_registry_has_every_method_under_its_name():
  functions = {
    name for name, one in vars(methods).items() if inspect.isfunction(one)
  }
  assert set(registry) == functions
  for name, method in registry.items():
    assert method.factory is getattr(methods, name)


@pytest.mark.parametrize("name", registry)
def test_from_run_names_only_arguments_of_the_factory(name):
  assert set(registry[name].from_run) <= registry[name].arguments


# Values of a run that methods take: 100 steps, 10 of them of the warm-up,
# intervals of 4, a rate of 0.1 and a momentum of 0.9.
_FROM_RUN = {
  "post_local_sgd": {"switch_step": 50},
  "scaffold": {"learning_rate": 1.0},
  "streaming_diloco": {"fragments": 4, "delay_steps": 1},
  "signsgd": {"momentum": 0.9},
  "dgc": {"momentum": 0.9, "nesterov": True, "steps_per_phase": 10},
  "muloco": {"weight_decay": 0.0},
}
# Other runs, in which a value differs.
_CHANGED = [
  ("post_local_sgd", {"num_steps": 9}, {"switch_step": 4}),
  ("scaffold", {"optimizer": "adamw"}, {"learning_rate": 0.1}),
  ("streaming_diloco", {"interval": 9}, {"fragments": 4, "delay_steps": 1}),
  ("streaming_diloco", {"interval": 1}, {"fragments": 1, "delay_steps": 0}),
  ("dgc", {"warmup_steps": 0}, {"steps_per_phase": None}),
  ("muloco", {"weight_decay": 0.5}, {"weight_decay": 0.5}),
]


@pytest.mark.parametrize(
  ("name", "changed", "wanted"),
  [(name, {}, {}) for name in registry] + _CHANGED,
)
def test_arguments_follow_from_the_run(name, changed, wanted):
  run = _RUN._replace(**changed)
  found = {k: of(run) for k, of in registry[name].from_run.items()}
  for key, value in found.items():
    if callable(value):  # A schedule of the step.
      found[key] = pytest.approx(float(value(3)), 1e-6)
  assert found == {**_FROM_RUN.get(name, {}), **wanted}


@pytest.mark.parametrize("name", sorted(set(registry) - _PREDICTED))
def test_method_can_be_built_from_a_run_alone(name):
  registry[name].build(optax.sgd(0.1), _RUN, axis=None)


@pytest.mark.parametrize("name", sorted(set(registry) - {"ssgd"}))
def test_page_of_methods_has_the_method_and_its_paper(name):
  method = registry[name]
  rows = [
    line
    for line in _PAGE.read_text().splitlines()
    if re.search(rf"^\| .*`(methods|jdist)\.{name}\(", line)
  ]
  assert len(rows) == 1
  call = re.search(rf"\.{name}\(([^`]*)\)`", rows[0])[1]
  required = [
    name
    for name in inspect.signature(method.factory).parameters
    if name in method.required - {"axis"}
  ]
  named = call.split(", ")
  if name not in _PREDICTED:
    assert named[: len(required)] == required
    assert set(named) <= method.arguments
    assert f"]({_PAPERS[name]['url']})" in rows[0]


@pytest.mark.parametrize("name", sorted(set(registry) - {"ssgd", "mp2"}))
def test_docstring_cites_the_paper(name):
  paper = _PAPERS[name]
  text = " ".join(inspect.getdoc(registry[name].factory).split())
  place = paper["url"].replace("https://arxiv.org/abs/", "arXiv ")
  place = place.replace("https://doi.org/", "doi ")
  references = text.partition("References: ")[2]
  assert references.startswith(f"{paper['author']}, ")
  assert f"({place})" in references.partition(";")[0]
  assert int(paper["venue"].rpartition(" ")[2]) > 1980
