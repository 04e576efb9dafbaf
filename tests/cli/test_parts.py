"""Parts of others: by `--import`, by MODULE:NAME, and by entry points."""

import importlib
import json
import pathlib
import sys
import tomllib

import jax.numpy as jnp
import pytest

from jdist import cli, codecs, methods, reducers, server, training
from jdist.cli import _methods

_MODULE = '''
import dataclasses, functools
import jax, jax.numpy as jnp, optax
from flax import nnx
from jdist import codecs, data, methods, models, pipeline, reducers, server
from jdist import transforms

@dataclasses.dataclass(frozen=True)
class Half(codecs.Codec):
  """Sends 16-bit floats."""

  def encode(self, x, state=(), key=None):
    return x.reshape(-1).astype(jnp.float16), state

  def decode(self, payload, state, like):
    return payload.reshape(like.shape).astype(like.dtype)

  def num_bits(self, like):
    return 16 * like.size

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(server.Protocol):
  """Asynchronous SGD by another name."""

def slow(outer_learning_rate=0.5):
  return optax.sgd(outer_learning_rate)

class Linear(nnx.Module):
  def __init__(self, input_shape, num_classes, *, scale=1.0, rngs):
    self.size = input_shape[0] * input_shape[1] * input_shape[2]
    self.layer = nnx.Linear(self.size, num_classes, rngs=rngs)

  def __call__(self, x):
    return self.layer(x.reshape(-1, self.size))

def few(split):
  return data.load("synthetic", split)

class SignedOuterStep(transforms.OuterStep):
  """Moves the anchor by the signs of the mean pseudo-gradient."""

  def move(self, end, mean, exact, relative):
    return super().move(end, jax.tree.map(jnp.sign, mean), exact, relative)

signed = methods.Method(
  "local steps; the signs of their mean are an outer gradient",
  functools.partial(
    transforms.local_steps, rule=SignedOuterStep(optax.sgd(0.01))
  ),
)
order = pipeline.TableEntry(
  lambda s, m, *, num_iterations=1: pipeline.make_table("gpipe", s, m),
  "gpipe by another name",
)
'''
_ADDED = """
methods.PARTS["codecs"]["half"] = Half
methods.PARTS["rules"]["slow"] = slow
methods.PARTS["reducers"]["vote"] = reducers.MajorityVote()
methods.registry["signed"] = signed
models.MODELS["linear"] = Linear
data.DATASETS["few"] = few
server.PROTOCOLS["mine"] = Mine
pipeline.TABLES["order"] = order
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """An empty current directory; what is imported from it is forgotten."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
  yield tmp_path
  names = "outside", "outside_parts", "powers_of_two", "test_powers", "hollow"
  for name in names:
    sys.modules.pop(name, None)


def _options(words):
  name, *rest = words.split()
  return cli._parse_own(name, rest)


def test_module_of_ones_own_brings_parts_to_every_command(folder, capsys):
  (folder / "outside.py").write_text(_MODULE + _ADDED)
  words = (
    "train --import outside --method signed --codec half --outer slow "
    "--outer-learning-rate 0.25 --model linear --dataset few --steps 4 "
    "--interval 2 --workers 2 --batch-size 16 --warmup-epochs 0 "
    "--substrate vmap --output out"
  )
  assert cli.main(words.split()) == 0
  (row,) = training.read_rows(folder / "out" / "rows.jsonl")
  assert row["method"] == "signed" and row["rounds"] == 2
  # Two rounds of sixteen bits for each of 650 parameters.
  assert row["sent_bytes"] == pytest.approx(2 * 2 * 650, rel=0.01)
  status = json.loads((folder / "out" / "status.json").read_text())
  assert "--import outside" in status["command"]
  for words in (
    "pipeline check order --import outside",
    "train --import=outside --help",
  ):
    assert cli.main(words.split()) == 0
  told = capsys.readouterr().out
  assert "gpipe" in told and "the signs of their mean" in told


def test_parts_are_named_by_their_modules(folder):
  (folder / "outside.py").write_text(_MODULE)
  options = _options(
    "train --method outside:signed --codec outside:Half --outer outside:slow "
    "--model outside:Linear --dataset outside:few --outer-learning-rate 0.25"
  )
  _methods.check("--method", options, [options.method])
  assert _methods.compression(options).reducer.codec.num_bits(jnp.ones(2)) == 32
  rule = _methods.outer_optimizer(options)
  assert rule.update(1.0, rule.init(1.0))[0] == -0.25


def test_installed_package_brings_parts_by_entry_points(
  folder, monkeypatch, capsys
):
  (folder / "outside_parts.py").write_text(_MODULE)
  about = folder / "outside-1.0.dist-info"
  about.mkdir()
  (about / "METADATA").write_text(
    "Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n"
  )
  (about / "entry_points.txt").write_text(
    "[jdist.codecs]\nhalf = outside_parts:Half\n"
    "[jdist.protocols]\nmine = outside_parts:Mine\n"
  )
  monkeypatch.syspath_prepend(str(folder))
  assert _options("bytes --codec half").codec == "half"
  assert methods.PARTS["codecs"]["half"].__name__ == "Half"
  assert server.PROTOCOLS["mine"].__name__ == "Mine"
  (about / "entry_points.txt").write_text(
    "[jdist.codecs]\nint4 = outside_parts:Half\n"
  )
  assert cli.main(["train"]) == 2
  told = capsys.readouterr().err
  assert "'int4' of codecs must have another name" in told


_OWN = pathlib.Path(__file__).resolve().parents[2] / "docs" / "own_codec"


def test_package_of_the_page_has_a_codec_for_every_command(
  folder, monkeypatch, capsys
):
  """The example of docs/extending.md, as pip would have installed it."""
  project = tomllib.loads((_OWN / "pyproject.toml").read_text())["project"]
  (group,) = project["entry-points"]
  about = folder / "powers_of_two-0.1.0.dist-info"
  about.mkdir()
  (about / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n"
  )
  points = [f"{x} = {y}" for x, y in project["entry-points"][group].items()]
  (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]))
  monkeypatch.syspath_prepend(str(folder))
  monkeypatch.syspath_prepend(str(_OWN))
  words = "bytes --methods ssgd --codec powers --model lenet --workers 2"
  assert cli.main(words.split()) == 0
  # A byte each of 61,706 parameters, there and back.
  assert "ssgd" in capsys.readouterr().out
  codec = methods.PARTS["codecs"]["powers"]()
  assert codec.num_bits(jnp.ones(61_706)) == 8 * 61_706
  importlib.import_module("test_powers").test_powers_keep_the_laws()


@pytest.mark.parametrize(
  ("words", "told"),
  [
    ("--import nowhere", "`--import` must be a module that can be imported"),
    ("--import", "`--import` must be a module that can be imported, got ''"),
    ("--codec none_such", "`--codec` must be one of float16, bfloat16"),
    ("--codec os:none", "`--codec` must be MODULE:NAME of one of its codecs"),
    ("--method os:path", "'os:path' of methods must be a `methods.Method`"),
    ("--outer os:none", "`--outer` must be MODULE:NAME of one of its rules"),
    (
      "--outer collections:OrderedDict",
      "'collections:OrderedDict' of rules cannot be used: no signature",
    ),
    (
      "--import ../parts",
      "`--import` must be a module that can be imported, got '../parts'",
    ),
    (
      "--outer fileinput:_state",
      "'fileinput:_state' of rules must be callable, got NoneType",
    ),
    (
      "--codec jdist.codecs:Codec",
      "`--codec jdist.codecs:Codec` failed: Can't instantiate abstract class",
    ),
    (
      "--dataset gc:collect",
      "`gc:collect` must take 'train', but raised TypeError: 'str' object",
    ),
    (
      "--dataset builtins:repr",
      "`builtins:repr` must be a function that returns a `data.Dataset` or a "
      "`data.TextDataset`, got \"'train'\".",
    ),
    (
      "--import builtins:none_such",
      "'builtins:none_such': module 'builtins' has no attribute 'none_such'.",
    ),
    (
      "--model re:match",
      "`--model re:match` failed: match() got an unexpected",
    ),
  ],
)
def test_what_is_no_part_is_refused(words, told, folder, refusal):
  assert told in refusal(f"train {words}")


def test_folder_without_code_is_no_module(folder, refusal, monkeypatch):
  (folder / "hollow").mkdir()
  monkeypatch.syspath_prepend(str(folder))
  told = refusal("train --import hollow")
  assert "got 'hollow': it is a folder without `__init__.py`." in told


def test_error_inside_a_part_keeps_its_traceback(folder, capsys):
  broken = _MODULE.replace("jnp.float16), state", "jnp.float17), state")
  (folder / "outside.py").write_text(broken)
  words = "train --codec outside:Half --dataset synthetic --steps 1"
  with pytest.raises(AttributeError, match="float17") as raised:
    cli.main(words.split())
  assert pathlib.Path(raised.traceback[-1].path).name == "outside.py"
  assert capsys.readouterr().err.startswith(
    "jdist: error: `--codec outside:Half` raised AttributeError, whose "
    "traceback follows.\n"
  )


def test_exit_of_a_part_is_no_status_of_a_run(folder, capsys):
  (folder / "leaving.py").write_text("def half():\n  raise SystemExit(3)\n")
  words = "train --codec leaving:half --dataset synthetic --steps 1"
  assert cli.main(words.split()) == 1  # And not that of a divergence.
  told = capsys.readouterr().err
  assert told.startswith("jdist: error: `--codec leaving:half` raised SystemE")
  assert told.endswith("SystemExit: 3\n")


@pytest.mark.parametrize(
  "words", ["--codec int4 --reducer gather", "--codec int4 --feedback none"]
)
def test_words_that_name_no_part_are_taken(words):
  found = _methods.compression(_options(f"train --method ssgd {words}"))
  assert found.feedback is None
  wire = "gather" if "gather" in words else "all_to_all"
  assert found.reducer == reducers.compressed(codecs.Quantize(4), wire=wire)
