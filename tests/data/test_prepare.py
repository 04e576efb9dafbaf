"""Requirements of a preparation are checked before it begins."""

import importlib.util
import sys
import types
import urllib.error
import urllib.request

import pytest

from jdist import data
from jdist.data import __main__ as command
from jdist.data import _prepare


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Nothing is prepared; TensorFlow and the server are there, made up."""
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  monkeypatch.setenv("JDIST_CACHE_DIR", str(tmp_path / "cache"))
  prepared = []

  class Builder:
    def __init__(self, name, data_dir, file_format):
      assert (data_dir, file_format) == (tmp_path, "array_record")
      self.name = name

    def download_and_prepare(self, file_format):
      assert file_format == "array_record"
      prepared.append(self.name)

  tfds = types.SimpleNamespace(builder=Builder)
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", tfds)
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name: name == "tensorflow" or None
  )
  answer(monkeypatch, None)
  return prepared


def answer(monkeypatch, error):
  def urlopen(request, timeout):
    assert request.get_method() == "HEAD" and timeout <= 10
    if error:
      raise error
    return open("/dev/null")

  monkeypatch.setattr(urllib.request, "urlopen", urlopen)


BUNDLED = {"digits", "synthetic"}


@pytest.mark.parametrize(
  "name", sorted(set(data.DATASETS) - BUNDLED - {*data.TEXT_NAMES})
)
def test_set_is_prepared_as_array_record(machine, name):
  data.prepare(name)
  assert machine == [data.DATASETS[name].tfds_name]


def test_every_set_is_bundled_or_can_be_prepared():
  for name, source in data.DATASETS.items():
    bundled = name in BUNDLED
    assert bundled == (not source.tfds_name) == (not source.url)
    # Either both are stated, or both are measured.
    assert (source.mean is None) == (source.std is None)


def test_tensorflow_datasets_has_every_set():
  tfds = pytest.importorskip("tensorflow_datasets")
  for source in data.DATASETS.values():
    if source.tfds_name:
      name, _, config = source.tfds_name.partition("/")
      assert config in tfds.builder_cls(name).builder_configs or not config


def test_server_that_answers_with_an_error_is_reachable(machine, monkeypatch):
  error = urllib.error.HTTPError("url", 403, "forbidden", {}, None)
  answer(monkeypatch, error)
  data.prepare("mnist")
  assert machine == ["mnist"]
  error.close()


def test_unreachable_server_raises_before_preparation(machine, monkeypatch):
  answer(monkeypatch, urllib.error.URLError("no route to host"))
  with pytest.raises(ConnectionError, match="no route to host"):
    data.load("mnist", download=True)
  assert machine == []


def test_missing_tensorflow_names_the_package(machine, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match="pip install tensorflow"):
    data.load("mnist", download=True)
  assert machine == []


def test_prepared_sets_are_not_prepared_again(machine, monkeypatch):
  monkeypatch.setattr(_prepare, "find_prepared", lambda name: "somewhere")
  data.prepare("mnist")
  data.prepare("digits")
  assert machine == []


@pytest.mark.parametrize(
  ("load", "name"),
  [(data.load, "mnist"), (data.load_text, "tiny_shakespeare")],
)
def test_loading_with_download_prepares_first(load, name, machine):
  for _ in range(2):
    with pytest.raises(FileNotFoundError):
      load(name)
    assert machine == []
  # The fake builder writes nothing, so the load fails afterwards.
  with pytest.raises(FileNotFoundError):
    load(name, download=True)
  assert machine == [name]


def test_command_prints_its_sets(capsys):
  assert command.main(["prepare", "digits"]) == 0
  lines = ["digits train: 1,442 images", "digits test: 355 images"]
  assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("names", [["imagenet"], ["mnist", "imagenet"]])
def test_command_refuses_in_one_line_before_it_begins(machine, names, capsys):
  assert command.main(["prepare", *names]) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and machine == []
  assert captured.err.startswith("error: `name` must be 'synthetic'")
  assert captured.err.count("\n") == 1
