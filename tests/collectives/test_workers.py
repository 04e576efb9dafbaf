"""Workers run one step on every substrate, and place its arrays."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jdist import collectives, transforms
from jdist.collectives import _substrate
from tests import _processes
from tests.profiling import _reading


def mesh_2x2():
  return collectives.make_mesh((2, 2), ("worker", "fsdp"), jax.devices()[:4])


def make_team(name):
  return {
    "none": lambda: collectives.workers(1, substrate="none"),
    "vmap": lambda: collectives.workers(4, substrate="vmap"),
    "shard_map": lambda: collectives.workers(4),
    "two_a_device": lambda: collectives.workers(
      4, mesh=collectives.make_mesh((2,), ("worker",))
    ),
    "mesh_2x2": lambda: collectives.workers(2, mesh=mesh_2x2()),
  }[name]()


TEAMS = ("none", "vmap", "shard_map", "two_a_device", "mesh_2x2")


def test_view_of_a_sharded_worker_has_all_its_parts():
  team = make_team("mesh_2x2")
  x = np.arange(2 * 3 * 4).reshape(2, 3, 4)
  spec = PartitionSpec("worker", None, "fsdp")
  placed = jax.device_put(x, NamedSharding(team.mesh, spec))
  for worker in range(2):
    np.testing.assert_array_equal(team.view(placed, worker), x[worker])


@pytest.mark.smoke
@pytest.mark.parametrize("name", TEAMS)
def test_every_worker_gets_its_rows(name):
  team = make_team(name)
  n = team.num_workers
  assert team.local_workers == tuple(range(n))
  samples = np.arange(2 * n * 3, dtype=np.float32).reshape(2 * n, 3)
  batch = team.shard({"x": samples, "y": samples[:, 0]})
  assert batch["x"].shape == (n, 2, 3)
  assert batch["y"].shape == (n, 2)
  for worker in range(n):
    mine = team.view(batch, worker)
    np.testing.assert_array_equal(
      mine["x"], samples[2 * worker : 2 * worker + 2]
    )
  np.testing.assert_array_equal(team.view(batch)["x"], samples[:2])
  gathered = team.gather(batch)
  assert isinstance(gathered["x"], np.ndarray)
  np.testing.assert_array_equal(gathered["x"].reshape(-1, 3), samples)
  again = team.place(gathered)
  np.testing.assert_array_equal(team.gather(again)["y"], gathered["y"])
  if team.mesh is None:
    first = SingleDeviceSharding(jax.local_devices()[0])
    assert batch["x"].sharding == first
  else:  # A device holds the rows of its own workers only.
    for shard in batch["x"].addressable_shards:
      assert shard.data.shape[0] == team.workers_per_device


@pytest.mark.parametrize("name", TEAMS)
def test_replicating_gives_every_worker_a_copy_of_its_own(name):
  team = make_team(name)
  tree = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "step": 7}
  copies = team.replicate(tree)
  assert copies["w"].shape == (team.num_workers, 2, 3)
  assert copies["w"].sharding.is_equivalent_to(team.sharding(), 3)
  np.testing.assert_array_equal(
    team.gather(copies)["w"], [tree["w"]] * team.num_workers
  )
  assert team.gather(copies)["step"].tolist() == [7] * team.num_workers


def test_worker_is_split_over_the_other_axes_of_its_mesh():
  team = make_team("mesh_2x2")
  specs = {"rows": PartitionSpec("fsdp", None), "whole": PartitionSpec()}
  value = np.arange(12.0, dtype=np.float32).reshape(4, 3)
  copies = team.replicate({"rows": value, "whole": value}, specs)
  assert {s.data.shape for s in copies["rows"].addressable_shards} == {
    (1, 2, 3)
  }
  assert {s.data.shape for s in copies["whole"].addressable_shards} == {
    (1, 4, 3)
  }
  assert team.specs(copies) == {
    "rows": PartitionSpec("fsdp"),
    "whole": PartitionSpec(),
  }
  # One spec holds for all leaves.
  both = team.replicate([value, value], PartitionSpec("fsdp"))
  assert team.specs(both) == [PartitionSpec("fsdp")] * 2
  for worker in (0, 1):
    np.testing.assert_array_equal(team.view(copies, worker)["rows"], value)


def test_without_a_mesh_nothing_is_split():
  team = make_team("vmap")
  assert team.specs(team.place(np.zeros((4, 2)))) == PartitionSpec()


@pytest.mark.parametrize("name", TEAMS)
def test_typed_keys_are_placed_like_other_leaves(name):
  team = make_team(name)
  n = team.num_workers
  key = {"key": jax.random.key(3)}
  same = team.replicate(key, laws={"key": "constant"})
  own = team.place(jax.random.split(jax.random.key(4), n))

  def step(tree, own):
    key = jax.random.fold_in(tree["key"], collectives.index(team.axis))
    return {"key": key}, jax.random.normal(own, (2,))

  keys, values = team.jit(step)(same, own)
  assert keys["key"].shape == (n,)
  for worker in range(n):
    np.testing.assert_array_equal(
      jax.random.key_data(team.view(keys, worker)["key"]),
      jax.random.key_data(jax.random.fold_in(jax.random.key(3), worker)),
    )
  assert len({row.tobytes() for row in team.gather(values)}) == n
  # By default the number of a worker is folded into its key.
  apart = team.replicate(key)["key"]
  wanted = keys["key"] if n > 1 else same["key"]
  np.testing.assert_array_equal(*map(jax.random.key_data, (apart, wanted)))
  with pytest.raises(ValueError, match="typed PRNG key"):
    team.gather(keys)


@pytest.mark.smoke
@pytest.mark.parametrize("name", TEAMS)
def test_step_compiles_once_and_keeps_state_sharding(
  name,
):
  team = make_team(name)
  traces = 0

  def step(state, x):
    nonlocal traces
    traces += 1

    def loss(params):
      return jnp.sum((x @ params["w"] + params["b"]) ** 2)

    grads = collectives.mean(jax.grad(loss)(state["params"]), team.axis)
    state = {
      "params": jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads),
      # This leaf starts whole, and depends on one that is split.
      "momentum": jax.tree.map(
        lambda m, g: 0.9 * m + g, state["momentum"], grads
      ),
      "step": state["step"] + 1,
    }
    return state, loss(state["params"])

  params = {
    "w": np.arange(12.0, dtype=np.float32).reshape(4, 3),
    "b": np.ones(3, np.float32),
  }
  specs = PartitionSpec()
  if name == "mesh_2x2":
    specs = {"w": PartitionSpec("fsdp", None), "b": PartitionSpec()}
  state = {
    "params": team.replicate(params, specs),
    "momentum": team.replicate(jax.tree.map(np.zeros_like, params)),
    "step": team.replicate(np.int32(0)),
  }
  x = team.place(np.ones((team.num_workers, 2, 4), np.float32))
  run = team.jit(step, donate_argnums=0, out_specs=(team.specs(state), None))
  shardings = jax.tree.map(lambda x: x.sharding, state)
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: (
      compiled.append(event) if "backend_compile" in event else None
    )
  )
  try:
    for _ in range(3):
      old, (state, _) = state, run(state, x)
      assert jax.tree.map(lambda x: x.sharding, state) == shardings
      # The state is donated, and its memory used by the new one.
      assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
  finally:
    jax.monitoring.clear_event_listeners()
  assert traces == 1
  assert len(compiled) == 1
  assert team.gather(state["step"]).tolist() == [3] * team.num_workers


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize("put", ["replicate", "place", "shard"])
def test_number_without_a_dtype_of_its_own_compiles_no_second_step(name, put):
  # `jnp.asarray(1.0)`, the usual start of a learned temperature, is weakly
  # typed, and no longer so after an update.
  team = make_team(name)
  one = jnp.full(() if put == "replicate" else team.num_workers, 1.0)
  assert one.weak_type
  w, traces = getattr(team, put)(one), 0

  def step(w):
    nonlocal traces
    traces += 1
    return w - jnp.ones(w.shape, w.dtype)

  run = team.jit(step)
  for _ in range(3):
    w = run(w)
  assert traces == 1
  np.testing.assert_array_equal(team.gather(w), np.full(w.shape, -2.0))


def test_state_without_a_named_sharding_may_compile_again():
  """Why `out_specs` is there."""
  team = make_team("mesh_2x2")
  split = team.replicate(np.ones((4, 3), np.float32), PartitionSpec("fsdp"))
  whole = team.replicate(np.ones((4, 3), np.float32))
  add = lambda split, whole: (split, split + whole)  # noqa: E731
  _, moved = team.jit(add)(split, whole)
  assert team.specs(moved) == PartitionSpec("fsdp")
  _, stays = team.jit(add, out_specs=(None, PartitionSpec()))(split, whole)
  assert team.specs(stays) == PartitionSpec()
  np.testing.assert_array_equal(team.gather(stays), team.gather(moved))


@pytest.mark.parametrize("name", TEAMS)
def test_donated_argument_is_aliased_and_another_one_kept(name):
  team = make_team(name)
  x = team.place(np.ones((team.num_workers, 1000), np.float32))
  y = team.place(np.ones((team.num_workers, 1000), np.float32))
  step = team.jit(lambda x, y: x + y, donate_argnums=0)
  assert "input_output_alias={" in step.lower(x, y).compile().as_text()
  step(x, y)
  assert x.is_deleted() and not y.is_deleted()


@pytest.mark.parametrize("name", TEAMS)
def test_gradient_holds_no_collective(name):
  team = make_team(name)
  n = team.num_workers

  def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

  arguments = (
    jnp.ones((n, 4, 3)),
    jnp.arange(n * 8.0).reshape(n, 2, 4),
  )
  traced = jax.make_jaxpr(team.spmd(jax.value_and_grad(loss)))(*arguments)
  for word in ("psum", "all_gather", "all_to_all", "ppermute", "pmax"):
    assert word not in str(traced)
  compiled = team.jit(jax.grad(loss)).lower(*arguments).compile()
  assert _reading.groups(compiled.as_text()) == []


def scanned(w, x):
  """A recurrent network whose carry begins with a constant."""
  last, _ = jax.lax.scan(
    lambda h, x: (jnp.tanh(h * w + x), None), jnp.zeros(()), x
  )
  return last


def looped(w, x):
  body = lambda i, h: jnp.tanh(h * w + x[i])  # noqa: E731
  return jax.lax.fori_loop(0, 3, body, jnp.zeros(()))


def chosen(w, x):
  return jax.lax.cond(x[0] > 1, lambda: w**2, lambda: jnp.zeros(()))


def switched(w, x):
  cases = [lambda: jnp.ones(()), lambda: w, lambda: w**3]
  return jax.lax.switch(x[0].astype(jnp.int32), cases)


def rematerialized(w, x):
  return jax.checkpoint(scanned)(w, x)


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize(
  "loss", [scanned, looped, chosen, switched, rematerialized]
)
def test_loop_or_branch_with_constants_differentiates(name, loss):
  team = make_team(name)
  n = team.num_workers
  w = jnp.linspace(0.5, 1.5, n)
  x = jnp.arange(n, dtype=jnp.float32)[:, None] + jnp.array([0.1, 0.2, 0.3])
  found = team.jit(jax.grad(loss))(team.place(w), team.place(x))
  wanted = [jax.grad(loss)(*both) for both in zip(w, x, strict=True)]
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", TEAMS)
def test_sharding_constraint_needs_an_axis_of_its_own(name):
  team = make_team(name)

  def step(x):
    return jax.lax.with_sharding_constraint(x, PartitionSpec())

  named = PartitionSpec("model")
  x = team.place(np.ones((team.num_workers, 3), np.float32))
  if name in ("shard_map", "mesh_2x2"):
    np.testing.assert_array_equal(team.jit(step)(x), x)
  else:
    with pytest.raises(ValueError, match=r"if workers\.inner_axes"):
      team.jit(step)(x)
  # The axis of a Flax model with partitions, for instance.
  with pytest.raises(ValueError, match=r"axes of the mesh.*with \["):
    team.jit(lambda x: jax.lax.with_sharding_constraint(x, named))(x)
  guarded = lambda x: step(x) if team.inner_axes else x  # noqa: E731
  np.testing.assert_array_equal(team.jit(guarded)(x), x)


@pytest.mark.parametrize("name", TEAMS[1:])
@pytest.mark.parametrize(
  "mean",
  [collectives.mean, jax.lax.pmean],
)
def test_gradient_through_a_collective_counts_every_worker(name, mean):
  """It is that of the sum of all workers' losses, as under `vmap`."""
  team = make_team(name)
  n = team.num_workers
  w = jnp.arange(1.0, n + 1)

  def loss(w):
    return mean(mean(w**2, team.axis) * w, team.axis)

  found = team.jit(jax.grad(loss))(team.place(w))
  # d/dw_i of sum_j m w_j, with m the mean of squares.
  wanted = 2 * w * w.mean() + (w**2).mean()
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["vmap", "shard_map", "two_a_device"])
def test_every_substrate_trains_alike(name):
  def train(team):
    def step(w, x):
      grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
      return w - 0.1 * collectives.mean(grad, team.axis)

    rng = np.random.default_rng(0)
    w = team.replicate(rng.normal(size=(4, 3)).astype(np.float32))
    x = team.place(rng.normal(size=(4, 2, 4)).astype(np.float32))
    run = team.jit(step, donate_argnums=0)
    for _ in range(20):
      w = run(w, x)
    return team.gather(w)

  ours, wanted = train(make_team(name)), train(make_team("shard_map"))
  np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-7)
  for row in ours:  # After every mean the workers are equal to the bit.
    assert row.tobytes() == ours[0].tobytes()


@pytest.mark.parametrize(
  ("num_workers", "devices", "axis"),
  [
    (1, 1, "worker"),
    (3, 3, "worker"),
    (8, 8, "worker"),
    (12, 6, ("worker_local", "worker")),
    (16, 8, ("worker_local", "worker")),
    (11, 1, ("worker_local", "worker")),
  ],
)
def test_workers_share_as_many_devices_as_divide_them(
  num_workers, devices, axis
):
  team = collectives.workers(num_workers)
  assert (team.num_workers, team.substrate, team.axis) == (
    num_workers,
    "shard_map",
    axis,
  )
  assert dict(team.mesh.shape) == {"worker": devices}
  assert team.workers_per_device * devices == num_workers


def test_on_one_device_workers_are_mapped_and_one_needs_no_axis(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  assert collectives.workers(3).substrate == "vmap"
  alone = collectives.workers(1)
  assert (alone.substrate, alone.axis, alone.mesh) == ("none", None, None)


def test_user_mesh_is_used_unchanged():
  mesh = collectives.make_mesh((2, 4), ("replica", "fsdp"))
  team = collectives.workers(2, mesh=mesh, axis="replica")
  assert (team.axis, team.mesh, team.mesh_axis) == ("replica", mesh, "replica")
  team = collectives.workers(6, mesh=mesh, axis="replica")
  assert team.axis == ("replica_local", "replica")
  assert team.workers_per_device == 3


def test_explicit_axes_become_automatic():
  mesh = jax.make_mesh((2,), ("worker",), (jax.sharding.AxisType.Explicit,))
  team = collectives.workers(2, mesh=mesh)
  assert set(team.mesh.axis_types) == {jax.sharding.AxisType.Auto}
  # A batch on such a mesh is split as any other.
  spec = NamedSharding(mesh, PartitionSpec("worker"))
  batch = jax.device_put(np.arange(4), spec)
  np.testing.assert_array_equal(team.shard(batch), [[0, 1], [2, 3]])


def test_meshes_have_automatic_axes():
  mesh = collectives.make_mesh((2, 4), ("a", "b"))
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  assert collectives.make_mesh((3,), ("a",)).size == 3


def test_devices_are_fixed_once_jax_has_started():
  assert jax.device_count() == 8
  assert [collectives.make_cpu_devices(x) for x in (3, 9)] == [8, 8]


def test_platform_without_cpus_has_none(monkeypatch):
  def none(backend):
    raise RuntimeError(f"Unknown backend {backend}")

  monkeypatch.setattr(jax, "local_devices", none)
  assert collectives.make_cpu_devices(9) == 0


def test_pool_has_a_thread_for_each_core(monkeypatch):
  monkeypatch.setattr(
    os, "sched_getaffinity", lambda _: range(20), raising=False
  )
  found = [_substrate._pool_threads(number) for number in (1, 4, 8)]
  assert found == ["20", "20", "32"]


@pytest.mark.parametrize(
  ("cores", "given", "threads"),
  [
    (1, None, "1 2 4 16 4 16"),
    (2, None, "1 2 4 16 4 16"),
    (1, "3", "1 3 4 3 4 3"),
  ],
)
def test_pool_of_one_device_is_small_and_others_enlarge_it(
  cores, given, threads
):
  """A device computes under a collective; a larger pool makes it slower."""
  mine = sorted(os.sched_getaffinity(0))
  if cores > len(mine):
    pytest.skip(f"{len(mine)} cores are fewer than {cores}")
  script = (
    f"import os; os.sched_setaffinity(0, {mine[:cores]})\n"
    "from jdist import collectives\n"
    "for number in (1, 4, 2):\n"  # The highest number of them counts.
    "  print(collectives.make_cpu_devices(number), os.environ['NPROC'])\n"
  )
  own = _processes.environment() | ({"NPROC": given} if given else {})
  done = subprocess.run(
    (sys.executable, "-c", script), env=own, capture_output=True, text=True
  )
  assert done.stdout.split() == threads.split(), done.stderr


def test_empty_batch_is_split():
  team = collectives.workers(2, substrate="vmap")
  assert team.shard(np.zeros((0, 3))).shape == (2, 0, 3)
  assert team.shard(np.zeros((4, 0))).shape == (2, 2, 0)


def test_shardings_name_the_workers_axis_first():
  team = make_team("mesh_2x2")
  for spec, wanted in (
    (PartitionSpec(), PartitionSpec("worker")),
    (PartitionSpec(None, "fsdp"), PartitionSpec("worker", None, "fsdp")),
    # Compiled programs use these names, so that inputs have equal shardings.
    (PartitionSpec("fsdp", None), PartitionSpec("worker", "fsdp")),
  ):
    assert team.sharding(spec) == NamedSharding(team.mesh, wanted)


@pytest.mark.parametrize("checked", [True, False])
def test_parts_vary_over_workers_where_the_step_tracks_it(checked):
  # Otherwise branches of a conditional in the step have different types.
  mesh, split = mesh_2x2(), PartitionSpec("fsdp")

  def step(x):
    twice = collectives.map_shards(
      lambda x: 2 * x, ["fsdp"], in_specs=(split,), out_specs=split
    )(x)
    return jax.lax.cond(x[0] > 0, lambda: twice, lambda: x)

  with jax.set_mesh(mesh):
    run = jax.shard_map(
      step, in_specs=PartitionSpec("worker"), out_specs=PartitionSpec("worker"),
      axis_names={"worker"}, check_vma=checked,
    )  # fmt: skip
    found = jax.jit(run)(jnp.array([1.0, 2.0, -1.0, 2.0]))
  np.testing.assert_array_equal(found, [2.0, 4.0, -1.0, 2.0])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_step_of_one_worker_may_leave_out_the_axis(num_workers):
  team = collectives.workers(num_workers, substrate="vmap")
  update = transforms.average_gradients(None).update
  step = team.jit(lambda g: update(g, optax.EmptyState())[0])
  rows = team.place(np.ones((num_workers, 3), np.float32))
  if num_workers == 1:
    np.testing.assert_array_equal(step(rows), rows)
  else:
    with pytest.raises(ValueError, match="`axis` must be 'worker' where sev"):
      step(rows)
