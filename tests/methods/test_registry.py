"""The registry: every method once, and what is read of it."""

import inspect
import pathlib
import re

import optax
import pytest

from jdist import methods
from jdist.methods import registry

_README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
_RUN = methods.Run(
  100, 10, optax.constant_schedule(0.1), interval=4, momentum=0.9
)
# Whose networks are trained before.
_PREDICTED = {"mp2"}


def test_every_method_of_the_package_is_in_it_under_its_name():
  functions = {
    name for name, one in vars(methods).items() if inspect.isfunction(one)
  }
  assert set(registry) == functions
  for name, method in registry.items():
    assert method.factory is getattr(methods, name)


@pytest.mark.parametrize("name", registry)
def test_every_argument_is_explained(name):
  for option in registry[name].options:
    assert option.meaning, option.name
    assert option.kind is not inspect.Parameter.empty, option.name


@pytest.mark.parametrize("name", registry)
def test_arguments_from_a_run_are_the_factorys(name):
  assert set(registry[name].from_run) <= registry[name].arguments


@pytest.mark.parametrize("name", sorted(set(registry) - _PREDICTED))
def test_a_run_is_all_that_a_method_needs(name):
  registry[name].build(optax.sgd(0.1), _RUN, axis=None)


@pytest.mark.parametrize(
  ("name", "taken"),
  [
    ("qsgd", set()),
    ("ssgd", {"compression", "reducer", "feedback"}),
    ("cocod", {"stream", "compression", "reducer", "feedback"}),
    (
      "diloco",
      {"overlap", "stream", "compression", "reducer", "feedback", "outer"},
    ),
  ],
)
def test_what_a_method_takes_follows_from_its_arguments(name, taken):
  assert registry[name].takes == taken


@pytest.mark.parametrize("name", sorted(set(registry) - {"ssgd"}))
def test_the_readmes_table_has_the_method_and_its_paper(name):
  method = registry[name]
  rows = [
    line
    for line in _README.splitlines()
    if re.search(rf"^\| .*`(methods|jdist)\.{name}\(", line)
  ]
  assert len(rows) == 1
  call = re.search(rf"\.{name}\(([^`]*)\)`", rows[0])[1]
  required = [
    option.name
    for option in method.options
    if option.default is inspect.Parameter.empty and option.name != "axis"
  ]
  named = call.split(", ")
  if name not in _PREDICTED:
    assert named[: len(required)] == required
    assert set(named) <= method.arguments
    assert f"]({method.paper.url})" in rows[0]


def test_papers_can_be_cited():
  for name, method in registry.items():
    if method.paper is not None:
      assert 1980 < method.paper.year < 2100
      assert all(method.paper), name
