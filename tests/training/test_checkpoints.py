"""Checkpoints come back to the bit and hold nothing twice."""

import itertools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jdist import collectives, methods, training
from jdist.storage import lease
from jdist.training import _checkpoint_directory
from tests import _refusals, _thinned
from tests.training import _tiny

_NAMES = tuple(_tiny.optimizers(None))


@pytest.fixture(autouse=True, scope="module")
def _standard_promotion():
  """Optax's own chains mix dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def _save(folder, team, state, step=1, **metadata):
  with training.Checkpoints(folder, team) as checkpoints:
    checkpoints.save(step, state, metadata=metadata)


def _restore(folder, team, template):
  with training.Checkpoints(folder, team) as checkpoints:
    return checkpoints.restore(template)


def _num_bytes(folder):
  return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _manifest(folder, step=1):
  return json.loads((folder / f"step_{step:08d}.json").read_text())["body"]


def _assert_gradients_are_pending(state):
  """Gradients of which each worker has its own."""
  assert np.asarray(state.opt_state.in_flight).all()
  held = np.asarray(state.opt_state.pending["kernel"])
  assert held.any() and (held != held[:1]).any()


# A program each. Other states go through a file in the tests below.
_OFTEN = [
  ("adam", "vmap"),
  ("msdpu", "shard_map"),
  ("update_first", "shard_map"),
  ("typed_key", "two_on_each"),
]


@pytest.mark.parametrize(
  ("name", "kind"),
  _thinned.some([*itertools.product(_NAMES, _tiny.TEAMS)], _OFTEN),
)
def test_every_state_is_restored_to_the_bit(name, kind, tmp_path):
  team = _tiny.team(kind)
  state = _tiny.trained(team, name, 7)
  if name == "msdpu":  # In the middle of a round, with a mean in flight.
    assert bool(state.opt_state.sync.flight.in_flight[0])
    assert not bool(state.opt_state.clock.synchronized[0])
    assert np.any(
      np.asarray(state.opt_state.sync.flight.held.message["kernel"])
    )
  if name == "update_first":  # With gradients that are still to be applied.
    _assert_gradients_are_pending(state)
  _save(tmp_path, team, state, 7, note="hello")
  found = _restore(tmp_path, team, _tiny.init(team, name))
  assert (found.step, found.metadata) == (7, {"note": "hello"})
  _tiny.assert_same_bits(found.state, state)
  for new, old in zip(
    jax.tree.leaves(found.state), jax.tree.leaves(state), strict=True
  ):
    assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


@pytest.mark.smoke
@pytest.mark.parametrize(
  "name", ["diloco", "msdpu", "update_first", "typed_key"]
)
def test_resumed_run_matches_uninterrupted_run(name, tmp_path):
  team = _tiny.team("shard_map")
  with training.Checkpoints(tmp_path, team) as checkpoints:
    for stop in (5, 11):  # 5: in the middle of a round of three.
      trainer = _tiny.trainer(team, name)
      state, _ = trainer.fit(
        _tiny.init(team, name),
        _tiny.batches(team),
        stop,
        checkpoints=checkpoints,
        checkpoint_every=2,
      )
  _tiny.assert_same_bits(state, _tiny.trained(team, name, 11))


def test_checkpoint_is_restored_on_other_substrates(tmp_path):
  saved = _tiny.trained(_tiny.team("vmap"), "msdpu", 7)
  _save(tmp_path, _tiny.team("vmap"), saved)
  for kind in _tiny.TEAMS:
    team = _tiny.team(kind)
    found = _restore(tmp_path, team, _tiny.init(team, "msdpu"))
    _tiny.assert_same_bits(found.state, saved)


def test_single_worker_without_axis_is_restored(tmp_path):
  team = _tiny.team("none")
  state = _tiny.trained(team, "diloco", 4)
  _save(tmp_path, team, state)
  found = _restore(tmp_path, team, _tiny.init(team, "diloco"))
  _tiny.assert_same_bits(found.state, state)


@pytest.mark.parametrize("name", _thinned.some(["adam", "msdpu"], ["msdpu"]))
def test_leaves_split_over_the_inner_axis_are_restored_split(name, tmp_path):
  mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"))
  team = collectives.workers(2, mesh=mesh)
  optimizer = _tiny.optimizers(team.axis)[name]
  specs = {
    name: PartitionSpec("fsdp") if name == "kernel" else PartitionSpec()
    for name in _tiny.params()
  }
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  trainer = training.Trainer(team, step)

  def init():
    return training.init_state(team, optimizer, _tiny.params(), specs=specs)

  state, _ = trainer.fit(init(), _tiny.batches(team), 5)
  whole = jax.sharding.NamedSharding(mesh, PartitionSpec("worker"))
  split = jax.sharding.NamedSharding(mesh, PartitionSpec("worker", "fsdp"))
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    wanted = split if "kernel" in jax.tree_util.keystr(path) else whole
    assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), path
  _save(tmp_path, team, state)
  found = _restore(tmp_path, team, init())
  _tiny.assert_same_bits(found.state, state)
  for new, old in zip(
    jax.tree.leaves(found.state), jax.tree.leaves(state), strict=True
  ):
    assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


def test_run_continues_while_its_state_is_written(tmp_path):
  """What is saved is the state at the call, though its memory is reused."""
  for kind in _tiny.TEAMS:
    team = _tiny.team(kind)
    optimizer = methods.diloco(optax.adam(0.1), 2, axis=team.axis)
    wide = {"w": np.ones((512, 512), np.float32)}
    state = training.init_state(team, optimizer, wide)
    step = training.make_step(
      lambda params, model_state, batch, key: (
        jnp.sum(params["w"] ** 2) * jnp.mean(batch),
        (model_state, {}),
      ),
      optimizer,
      axis=team.axis,
    )
    program = team.jit(step, donate_argnums=0)
    batch = team.place(np.ones((4, 1), np.float32))
    state, _ = program(state, batch)
    wanted = _tiny.digest(jax.tree.map(lambda x: np.array(x), state))
    with training.Checkpoints(tmp_path / kind, team) as checkpoints:
      checkpoints.save(1, state)
      for _ in range(5):
        state, _ = program(state, batch)
      jax.block_until_ready(state)
    found = _restore(
      tmp_path / kind, team, training.init_state(team, optimizer, wide)
    )
    assert _tiny.digest(found.state) == wanted, kind


def test_shared_leaves_are_stored_once(tmp_path):
  team = collectives.workers(8, substrate="shard_map")
  rng = np.random.default_rng(0)
  # Random bits, which cannot be compressed.
  params = {"w": rng.normal(size=(300, 400)).astype(np.float32)}
  one = params["w"].nbytes

  def on_disk(name, optimizer):
    state = training.init_state(team, optimizer, params)
    # Momentum and anchor of random bits, the same on all workers.
    opt_state = jax.tree.map(
      lambda x: (
        team.replicate(rng.normal(size=x.shape[1:]).astype(np.float32))
        if x.shape[1:] == params["w"].shape
        else x
      ),
      state.opt_state,
    )
    state = state._replace(opt_state=opt_state)
    _save(tmp_path / name, team, state)
    entries = _manifest(tmp_path / name)["leaves"]
    shared = {e["name"] for e in entries if e["shared"]}
    return _num_bytes(tmp_path / name) / one, shared, entries

  copies, shared, entries = on_disk(
    "ssgd", methods.ssgd(optax.sgd(0.1, momentum=0.9), axis=team.axis)
  )
  assert shared == {entry["name"] for entry in entries}
  assert 1.7 < copies < 2.2  # Parameters and momentum, compressed a bit.
  copies, shared, _ = on_disk(
    "local_sgd",
    methods.local_sgd(optax.sgd(0.1, momentum=0.9), 8, axis=team.axis),
  )
  assert ".opt_state.sync.anchor['w']" in shared
  assert ".params['w']" not in shared
  # All workers' parameters and momenta, and one anchor; not 24. Orbax may
  # compress the eight equal copies, so no lower bound.
  assert copies < 17.3


class _Net(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.last = nnx.Linear(3, 2, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.last(self.drop(self.norm(x)))


def test_tree_of_a_loop_of_ones_own_is_saved_as_it_is(tmp_path):
  team = collectives.workers(4, substrate="shard_map")
  optimizer = methods.local_sgd(optax.adam(0.1), 2, axis=team.axis)
  _, params, rest = nnx.split(_Net(nnx.Rngs(0)), nnx.Param, ...)
  params, rest = team.replicate((params, rest))
  state = {
    "average": jax.tree.map(jnp.copy, params),
    "list": [params, (rest, team.place(np.arange(4)))],
    "optimizer": (team.jit(optimizer.init)(params), {}),
  }
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(3, state)
    found = checkpoints.restore(jax.tree.map(lambda x: x, state))
  assert found.step == 3
  _tiny.assert_same_bits(found.state, state)
  # A method's state declares what is equal; nothing else is taken as equal.
  shared = {
    entry["name"]: entry["shared"] for entry in _manifest(tmp_path, 3)["leaves"]
  }
  anchors = [name for name in shared if "anchor" in name]
  assert anchors and all(shared[name] for name in anchors)
  assert not any(shared[x] for x in shared if not x.startswith("['optimizer']"))


@pytest.mark.parametrize("dtype", ["int2", "int4", "float4_e2m1fn"])
def test_frozen_weights_of_few_bits_are_saved(dtype, tmp_path):
  team = collectives.workers(2, substrate="vmap")
  optimizer = methods.ssgd(optax.sgd(0.1), axis=team.axis)
  params = {"frozen": jnp.ones((3, 5), dtype), "w": jnp.zeros(2)}
  state = training.init_state(team, optimizer, params)
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(1, state)
    found = checkpoints.restore(state).state
  _tiny.assert_same_bits(found, state)


@pytest.mark.parametrize("kind", ["vmap", "none", "shard_map"])
def test_tree_of_which_workers_share_nothing_is_saved(kind, tmp_path):
  team = _tiny.team(kind)
  state = {"w": team.place(np.arange(4.0)[: team.num_workers])}
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(1, state)
    _tiny.assert_same_bits(checkpoints.restore(state).state, state)


def test_tree_that_can_be_called_is_a_template(tmp_path):
  """As a module of Equinox can; other functions make one."""
  state = jax.tree_util.Partial(jnp.add, jnp.ones((1, 2)))
  with training.Checkpoints(tmp_path, _tiny.team("none")) as checkpoints:
    checkpoints.save(3, state)
    for template in (state, lambda step: state if step == 3 else None):
      _tiny.assert_same_bits(checkpoints.restore(template).state, state)
    other = {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 3))}
    with _refusals.refused("template", "3 in all: `['a']` is None in"):
      checkpoints.restore(other)


def test_host_number_that_would_be_cut_is_not_saved(tmp_path):
  team = collectives.workers(2, substrate="vmap")
  state = {"tokens": np.array([2_000_000_000] * 2), "w": team.replicate(1.0)}
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(1, state)
    assert checkpoints.restore(state).state["tokens"].tolist() == [2e9] * 2
    with _refusals.refused("state", "numbers of 32 bits, got int64[2] at 'tok"):
      checkpoints.save(2, state | {"tokens": 2 * state["tokens"]})
    with _refusals.refused("state", "of 32 bits, got float64[2] at 'tokens'"):
      checkpoints.save(2, state | {"tokens": np.array([1 / 3, 0.5])})
    exact = state | {"tokens": np.array([np.nan, 0.5])}
    checkpoints.save(3, exact)
    found = checkpoints.restore(exact).state["tokens"]
    np.testing.assert_array_equal(found, exact["tokens"])


def test_saving_diverged_workers_raises(tmp_path):
  team = _tiny.team("shard_map")
  state = _tiny.trained(team, "diloco", 6)
  _save(tmp_path, team, state)
  before = sorted(p.name for p in tmp_path.iterdir())

  def nudge(anchor):
    index = collectives.index(team.axis)
    last = jnp.where(index == 3, jnp.float32(1e-7), jnp.float32(0.0))
    return {**anchor, "bias": anchor["bias"] + last}

  anchor = team.jit(nudge)(state.opt_state.anchor)
  sync = state.opt_state.sync._replace(anchor=anchor)
  wrong = state._replace(opt_state=state.opt_state._replace(sync=sync))
  with training.Checkpoints(tmp_path, team) as checkpoints:
    with pytest.raises(RuntimeError, match=r"anchor\['bias'\]"):
      checkpoints.save(9, wrong)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    # And the object is still good for the next one.
    found = checkpoints.restore(_tiny.init(team, "diloco"))
  _tiny.assert_same_bits(found.state, state)


def test_five_of_the_leaves_that_differ_are_named(tmp_path):
  team = _tiny.team("vmap")
  rows = team.place(np.arange(team.num_workers))
  state = {f"w{i}": rows for i in range(7)}
  checkpoints = training.Checkpoints(tmp_path, team)
  with checkpoints, pytest.raises(RuntimeError) as error:
    checkpoints.save(1, state, shared=True)
  named = "['w0'], ['w1'], ['w2'], ['w3'], ['w4'] and more. Nothing"
  assert named in str(error.value)


def test_first_write_that_fails_says_so(tmp_path, monkeypatch):
  def fail(self, step, body):
    raise OSError

  kind = _checkpoint_directory.CheckpointDirectory
  monkeypatch.setattr(kind, "complete", fail)
  team = _tiny.team("vmap")
  checkpoints = training.Checkpoints(tmp_path, team)
  checkpoints.save(1, {"w": team.replicate(jnp.ones(2))})
  said = r": OSError\. There is no other one: make room"
  with pytest.raises(OSError, match=said):
    checkpoints.close()


def test_rest_of_a_failed_write_is_removed(tmp_path):
  rest = tmp_path / "step_00000004.orbax-checkpoint-tmp"
  with training.Checkpoints(tmp_path, _tiny.team("none")) as checkpoints:
    rest.mkdir()
    with (
      pytest.raises(
        OSError, match=r"of step 4 could not be written to .*: full"
      ),
      checkpoints._written(4),
    ):
      raise OSError("full\nof files")
  assert not rest.exists()


def test_empty_or_new_directory_has_no_checkpoint(tmp_path):
  team = _tiny.team("vmap")
  template = _tiny.init(team, "adam")
  assert _restore(tmp_path / "new" / "deep", team, template) is None
  (tmp_path / "step_by_step.json").write_text("mine")
  (tmp_path / "notes.txt").write_text("mine")
  assert _restore(tmp_path, team, template) is None
  _save(tmp_path, team, template, 0)
  assert (tmp_path / "step_by_step.json").read_text() == "mine"
  assert _restore(tmp_path, team, template).step == 0


def test_directory_of_a_server_is_refused(tmp_path):
  """A run that starts anew there would leave two runs in one directory."""
  team = _tiny.team("vmap")
  (tmp_path / "update_0000000004").mkdir()
  with pytest.raises(ValueError, match="of trainers or of servers alone, got"):
    _restore(tmp_path, team, _tiny.init(team, "adam"))


def test_other_metadata_raise_by_name(tmp_path):
  team = _tiny.team("vmap")

  def fit(steps, **metadata):
    with training.Checkpoints(tmp_path, team) as checkpoints:
      return _tiny.trainer(team, "adam").fit(
        _tiny.init(team, "adam"),
        _tiny.batches(team),
        steps,
        checkpoints=checkpoints,
        metadata=metadata,
      )

  fit(2, rate=0.1, sizes=(1, 2))
  with _refusals.refused("rate", "is 0.1 there and 0.2 here"):
    fit(4, rate=0.2, sizes=(1, 2))
  with _refusals.refused("new", "is None there and 1 here"):
    fit(4, rate=0.1, sizes=(1, 2), new=1)
  fit(4, rate=0.1, sizes=(1, 2))  # A tuple, which JSON does not have.


def test_metadata_that_json_cannot_hold_are_refused_before_a_file_changes(
  tmp_path,
):
  team = _tiny.team("vmap")
  state = team.replicate(_tiny.params())
  _save(tmp_path, team, state, note="hello")
  with training.Checkpoints(tmp_path, team) as checkpoints:
    for step in (1, 2):
      with _refusals.refused("metadata", "JSON"):
        checkpoints.save(step, state, metadata={"note": object()})
  (manifest,) = tmp_path.glob("step_*.json")
  assert manifest.name == "step_00000001.json"
  assert _restore(tmp_path, team, state).metadata == {"note": "hello"}


def test_nan_in_metadata_equals_itself(tmp_path):
  team = _tiny.team("vmap")
  for steps, resumed in ((1, None), (2, 1)):
    seen = []
    with training.Checkpoints(tmp_path, team) as checkpoints:
      _tiny.trainer(team, "adam").fit(
        _tiny.init(team, "adam"),
        _tiny.batches(team),
        steps,
        checkpoints=checkpoints,
        metadata={"threshold": float("nan")},
        on_resume=seen.append,
      )
    assert [x.step for x in seen] == ([] if resumed is None else [resumed])


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_last_checkpoints_are_kept(keep, tmp_path):
  team = _tiny.team("vmap")
  state = _tiny.init(team, "adam")
  with training.Checkpoints(tmp_path, team, keep=keep) as checkpoints:
    for step in (3, 10, 20, 100):
      checkpoints.save(step, state)
  kept = [3, 10, 20, 100][-keep:]
  wanted = {f"step_{s:08d}{end}" for s in kept for end in ("", ".json")}
  assert {p.name for p in tmp_path.iterdir()} == wanted


def test_failed_background_write_raises(tmp_path):
  team = _tiny.team("vmap")
  state = _tiny.init(team, "adam")
  folder = tmp_path / "checkpoints"
  checkpoints = training.Checkpoints(folder, team)
  checkpoints.save(1, state)
  checkpoints.wait()
  # A directory where the manifest of the next one will be.
  (folder / "step_00000002.json.partial").mkdir()
  checkpoints.save(2, state)
  with pytest.raises(OSError):
    checkpoints.wait()
  assert checkpoints.restore(state).step == 1
  (folder / "step_00000003.json.partial").mkdir()
  checkpoints.save(3, state)
  # Another run may take the directory, although the last write has failed.
  with pytest.raises(OSError):
    checkpoints.close()
  assert not (folder / "lease.json").exists()


def test_checkpoint_that_is_replaced_is_none_until_it_is_whole(
  tmp_path, monkeypatch
):
  team = _tiny.team("vmap")
  state = _tiny.init(team, "adam")
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(1, state)
    checkpoints.save(2, state)
    checkpoints.wait()

    def full(*args, **options):
      raise OSError("No space left on device")

    monkeypatch.setattr(checkpoints._writer, "save", full)
    with pytest.raises(OSError):
      checkpoints.save(2, state)
    assert checkpoints.restore(state).step == 1


def test_directory_of_another_living_run_is_refused(tmp_path):
  team = _tiny.team("none")
  parent = os.getppid()
  entry = {"run": "other", "machine": lease._machine(), "process": parent}
  entry["began"] = lease._began(parent)
  (tmp_path / "lease.json").write_text(json.dumps(entry))
  with training.Checkpoints(tmp_path, team) as checkpoints:
    # A run that only reads needs no lease.
    assert checkpoints.restore({"x": jnp.zeros((1, 2))}) is None
    with pytest.raises(ValueError, match="is in use by run other"):
      checkpoints.claim()
  assert [path.name for path in tmp_path.iterdir()] == ["lease.json"]


def test_run_that_lost_its_lease_completes_no_checkpoint(tmp_path):
  state = {"x": jnp.zeros((1, 2))}
  checkpoints = training.Checkpoints(tmp_path, _tiny.team("none"))
  checkpoints.save(1, state)
  checkpoints.wait()
  # Another run takes the lease while this one is suspended.
  (tmp_path / "lease.json").write_text(json.dumps({"run": "other"}))
  checkpoints.save(2, state)
  with pytest.raises(ValueError, match="is in use by run other"):
    checkpoints.wait()
  checkpoints.close()
  assert not (tmp_path / "step_00000002.json").exists()


@pytest.mark.parametrize(
  "shared", [{"a": True}, [True], "yes", {"a": 1, "b": 0}], ids=str
)
def test_shared_that_does_not_fit_the_state_is_refused(tmp_path, shared):
  team = collectives.workers(2, substrate="vmap")
  state = team.replicate({"a": jnp.ones(2), "b": {"c": jnp.zeros(1)}})
  with (
    training.Checkpoints(tmp_path, team) as checkpoints,
    _refusals.refused("shared", "a tree of bools"),
  ):
    checkpoints.save(1, state, shared=shared)


def test_one_bool_stands_for_a_subtree(tmp_path):
  team = collectives.workers(2, substrate="vmap")
  state = team.replicate({"a": jnp.ones(2), "b": {"c": jnp.zeros(1)}})
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(1, state, shared={"a": False, "b": True})
  found = [x["shared"] for x in _manifest(tmp_path)["leaves"]]
  assert found == [False, True]


def test_renamed_checkpoint_is_no_later_step(tmp_path):
  # Later saves would never be found again.
  directory = _checkpoint_directory.CheckpointDirectory(tmp_path)
  for step in (2, 4):
    directory.target(step).mkdir(parents=True)
    directory.complete(step, {"step": step})
  for path in tmp_path.glob("step_00000004*"):
    path.rename(tmp_path / path.name.replace("4", "9"))
  with pytest.warns(UserWarning, match="step_00000009 is of step 4"):
    assert directory.newest_whole() == 2


def test_forgotten_checkpoint_does_not_count_and_is_tidied(tmp_path):
  """It is forgotten before it is written again, which may be interrupted."""
  directory = _checkpoint_directory.CheckpointDirectory(tmp_path)
  for step in (2, 4):
    directory.target(step).mkdir(parents=True)
    (directory.target(step) / "arrays").write_text(f"{step}")
    directory.complete(step, {"step": step})
  (tmp_path / "notes.txt").write_text("a user's own")
  assert directory.steps() == [4, 2] and directory.newest_whole() == 4
  rest = tmp_path / "step_00000002.orbax-checkpoint-tmp-7"
  rest.mkdir()
  for _ in range(2):
    directory.forget(4)
  assert directory.steps() == [2] and directory.newest_whole() == 2
  directory.tidy()
  assert directory.target(2).exists() and not directory.target(4).exists()
  assert not rest.exists()
  assert (tmp_path / "notes.txt").exists()
