"""Checkpoints that are damaged, or of something else."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from jdist import collectives, training
from tests import _refusals
from tests.training import _tiny


@pytest.fixture(autouse=True, scope="module")
def _standard_promotion():
  """Optax's own chains mix dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def _save(folder, team, state, step):
  with training.Checkpoints(folder, team) as checkpoints:
    checkpoints.save(step, state)


def _restore(folder, team, template):
  with training.Checkpoints(folder, team) as checkpoints:
    return checkpoints.restore(template)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
  """A directory with the checkpoints of steps 1, 2, 3, and their states."""
  folder = tmp_path_factory.mktemp("three")
  team = _tiny.team("vmap")
  states = {}
  with training.Checkpoints(folder, team) as checkpoints:
    for step in (1, 2, 3):
      states[step] = _tiny.trained(team, "diloco", step)
      checkpoints.save(step, states[step])
  return folder, states


@pytest.fixture
def folder(three, tmp_path):
  """A copy to damage."""
  return pathlib.Path(shutil.copytree(three[0], tmp_path / "copy"))


def _largest(folder, step):
  files = (folder / f"step_{step:08d}").rglob("*")
  return max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size)


def _truncate(folder, step):
  path = _largest(folder, step)
  path.write_bytes(path.read_bytes()[:-1])


def _alter(folder, step):
  path = _largest(folder, step)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(bytes(content))


def _remove_a_file(folder, step):
  _largest(folder, step).unlink()


def _remove_all_files(folder, step):
  shutil.rmtree(folder / f"step_{step:08d}")


def _rewrite(change):
  def damage(folder, step):
    path = folder / f"step_{step:08d}.json"
    path.write_text(change(path.read_text()))

  damage.__name__ = change.__name__
  return damage


def cut_manifest(text):
  return text[: len(text) // 2]


def empty_manifest(text):
  del text
  return ""


def manifest_of_another_kind(text):
  del text
  return '{"files": {}}'


def manifest_that_is_a_list(text):
  del text
  return "[]"


def altered_manifest(text):
  return text.replace('"step": 3', '"step": 4')  # Its shape is right.


@pytest.mark.parametrize(
  "damage",
  [
    _truncate,
    _alter,
    _remove_a_file,
    _remove_all_files,
    _rewrite(cut_manifest),
    _rewrite(empty_manifest),
    _rewrite(manifest_of_another_kind),
    _rewrite(manifest_that_is_a_list),
    _rewrite(altered_manifest),
  ],
  ids=lambda damage: damage.__name__,
)
def test_damaged_checkpoint_warns_and_the_previous_one_is_used(
  damage, folder, three
):
  team = _tiny.team("vmap")
  template = _tiny.init(team, "diloco")
  damage(folder, 3)
  with pytest.warns(UserWarning, match="step_00000003 is damaged"):
    found = _restore(folder, team, template)
  assert found.step == 2
  _tiny.assert_same_bits(found.state, three[1][2])
  # Later saves overwrite it.
  _save(folder, team, three[1][3], 3)
  found = _restore(folder, team, template)
  assert found.step == 3
  _tiny.assert_same_bits(found.state, three[1][3])


@pytest.mark.filterwarnings("ignore:Checkpoint .* is damaged")
def test_only_damaged_checkpoints_raise(folder):
  team = _tiny.team("vmap")
  for step in (1, 2, 3):
    _truncate(folder, step)
  with pytest.raises(ValueError, match="all are damaged"):
    _restore(folder, team, _tiny.init(team, "diloco"))


def test_checkpoint_of_another_optimizer_raises_by_name(folder):
  team = _tiny.team("vmap")
  with pytest.raises(ValueError, match=r"`\.opt_state.*same model and optim"):
    _restore(folder, team, _tiny.init(team, "adam"))


def test_checkpoint_of_another_model_raises_by_name(folder):
  team = _tiny.team("vmap")
  params = _tiny.params() | {"kernel": np.zeros((6, 4), np.float32)}
  template = training.init_state(
    team, _tiny.optimizers(team.axis)["diloco"], params
  )
  with pytest.raises(ValueError, match=r"kernel.*\(4, 6, 3\).*\(4, 6, 4\)"):
    _restore(folder, team, template)


def test_checkpoint_of_other_workers_raises(folder):
  team = collectives.workers(3, substrate="vmap")
  with _refusals.refused("workers", "got 3"):
    _restore(folder, team, _tiny.init(team, "diloco"))


@pytest.mark.parametrize("form", [1, 3])
def test_other_format_raises_and_is_not_called_damaged(folder, form):
  team = _tiny.team("vmap")
  path = folder / "step_00000003.json"
  path.write_text(path.read_text().replace('"format": 2', f'"format": {form}'))
  with pytest.raises(ValueError, match=rf"has format {form}.*the version"):
    _restore(folder, team, _tiny.init(team, "diloco"))


def test_files_of_a_killed_write_are_harmless_and_removed(folder, three):
  team = _tiny.team("vmap")
  half = folder / "step_00000004.orbax-checkpoint-tmp"
  shutil.copytree(folder / "step_00000003", half)
  stamped = folder / "step_00000005.orbax-checkpoint-tmp-1234"
  shutil.copytree(folder / "step_00000003", stamped)
  shutil.copytree(folder / "step_00000003", folder / "step_00000006")
  (folder / "step_00000007.json.partial").write_text('{"for')
  (folder / "mine").mkdir()
  found = _restore(folder, team, _tiny.init(team, "diloco"))
  assert found.step == 3
  _save(folder, team, three[1][3], 6)  # Over the directory that lies there.
  assert sorted(p.name for p in folder.iterdir()) == [
    "mine",
    *(
      f"step_0000000{step}{end}" for step in (2, 3, 6) for end in ("", ".json")
    ),
  ]
  found = _restore(folder, team, _tiny.init(team, "diloco"))
  assert found.step == 6
  _tiny.assert_same_bits(found.state, three[1][3])
