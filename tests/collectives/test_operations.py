"""Collectives match NumPy on every substrate."""

import functools
import re

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jdist import collectives
from tests.profiling import _reading


@functools.cache
def make_team(name):
  """The substrates that a step must not notice."""
  if name == "mesh_2x2":
    mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"), jax.devices()[:4])
    return collectives.workers(2, mesh=mesh)
  if name == "mesh_2x2_of_4":
    mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"), jax.devices()[:4])
    return collectives.workers(4, mesh=mesh)
  return {
    "none": lambda: collectives.workers(1, substrate="none"),
    "one_of_vmap": lambda: collectives.workers(1, substrate="vmap"),
    "vmap": lambda: collectives.workers(8, substrate="vmap"),
    "shard_map": lambda: collectives.workers(8, substrate="shard_map"),
    "two_a_device": lambda: collectives.workers(16),
    "four_a_device": lambda: collectives.workers(
      8, mesh=collectives.make_mesh((2,), ("worker",))
    ),
  }[name]()


TEAMS = (
  "none",
  "one_of_vmap",
  "vmap",
  pytest.param("shard_map", marks=pytest.mark.smoke),
  pytest.param("two_a_device", marks=pytest.mark.smoke),
  "four_a_device",
  "mesh_2x2",
  "mesh_2x2_of_4",
)


def say_everything(x, axis):
  """All that one worker can say about `x` of shape [workers, ...]."""
  return {
    "mean": collectives.mean(x, axis),
    "sum": collectives.sum(x, axis),
    "gather": collectives.gather(x, axis),
    "all_to_all": collectives.all_to_all(x, axis),
    "scatter": collectives.reduce_scatter(x, axis),
    "index": collectives.index(axis),
    "size": jnp.asarray(collectives.size(axis)),
  }


def reference(x):
  """The same for all workers, `x` of shape [workers, workers, ...]."""
  n = len(x)

  def everyone(value):
    return np.broadcast_to(value, (n, *value.shape))

  wide = x.astype(np.float64)
  return {
    "mean": everyone(wide.mean(0)),
    "sum": everyone(wide.sum(0)),
    "gather": everyone(x),
    "all_to_all": x.swapaxes(0, 1),
    "scatter": wide.mean(0),
    "index": np.arange(n),
    "size": np.full(n, n),
  }


def tolerance(dtype):
  return {"float32": 1e-6, "bfloat16": 2**-7, "int32": 1e-6}[dtype]


@pytest.mark.smoke
def test_two_workers_match_hand_computation():
  team = collectives.workers(2, substrate="vmap")
  said = team.jit(lambda x: say_everything(x, team.axis))(
    team.place(np.array([[1.0, 2.0], [3.0, 6.0]], np.float32))
  )
  assert said["mean"].tolist() == [[2, 4], [2, 4]]
  assert said["sum"].tolist() == [[4, 8], [4, 8]]
  assert said["gather"].tolist() == [[[1, 2], [3, 6]]] * 2
  assert said["all_to_all"].tolist() == [[1, 3], [2, 6]]
  assert said["scatter"].tolist() == [2, 4]
  assert said["index"].tolist() == [0, 1]
  assert said["size"].tolist() == [2, 2]


@pytest.mark.parametrize("name", TEAMS)
def test_operations_match_numpy(name):
  team = make_team(name)
  n = team.num_workers
  rng = np.random.default_rng(0)
  trees = {
    f"{dtype}{list(shape)}": np.asarray(
      rng.integers(-9, 9, (n, n, *shape)) * (1 if dtype == "int32" else 0.37)
    ).astype(jnp.dtype(dtype))
    # The shapes are a scalar and odd sizes.
    for dtype, shape in (
      ("float32", ()),
      ("float32", (5, 7)),
      ("bfloat16", (3,)),
      ("int32", (3,)),
    )
  }
  step = team.jit(
    lambda tree: {k: say_everything(x, team.axis) for k, x in tree.items()}
  )
  said = team.gather(step(team.place(trees)))
  for key, x in trees.items():
    dtype = key.split("[")[0]
    for what, wanted in reference(x).items():
      got, error = said[key][what], f"{what} of {key}"
      if what in ("mean", "sum", "scatter"):
        scale = np.abs(x.astype(np.float64)).max() * n
        np.testing.assert_allclose(
          got.astype(np.float64),
          wanted,
          atol=scale * tolerance(dtype),
          err_msg=error,
        )
        for row in (
          got if what != "scatter" else ()
        ):  # Equal on all workers, to the bit.
          assert row.tobytes() == got[0].tobytes(), error
      else:
        np.testing.assert_array_equal(got, wanted, err_msg=error)
    floating = "float32" if dtype == "int32" else dtype
    assert said[key]["mean"].dtype == floating
    assert said[key]["sum"].dtype == dtype
    assert said[key]["gather"].dtype == said[key]["all_to_all"].dtype == dtype


@pytest.mark.parametrize("name", TEAMS)
def test_values_that_are_equal_on_all_workers_are_treated_as_their_own(name):
  """A constant and a captured array, which no worker holds for itself."""
  team = make_team(name)
  n = team.num_workers
  constant = np.arange(3.0 * n, dtype=np.float32).reshape(n, 3)

  def step(x):
    own = say_everything(jnp.asarray(constant), team.axis)
    # A conditional requires the types of a worker's own values.
    other = jax.tree.map(
      lambda y: collectives.varying(jnp.zeros_like(y), team.axis), own
    )
    own = collectives.varying(own, team.axis)
    return jax.lax.cond(x > 0, lambda: own, lambda: other)

  said = team.gather(team.jit(step)(team.place(np.ones(n, np.float32))))
  for what, wanted in reference(np.stack([constant] * n)).items():
    np.testing.assert_allclose(said[what], wanted, rtol=1e-6, err_msg=what)


@pytest.mark.parametrize("name", TEAMS)
def test_collectives_work_in_conditionals_and_scans(name):
  team = make_team(name)
  n = team.num_workers

  def step(x, rounds_end):
    def body(carry, is_end):
      carry = jax.lax.cond(
        is_end,
        lambda: collectives.mean(carry, team.axis),
        lambda: carry + 1.0,
      )
      return carry, collectives.gather(carry, team.axis)

    return jax.lax.scan(body, x, rounds_end)

  x = np.arange(n, dtype=np.float32)
  ends = np.broadcast_to([False, True, False], (n, 3))
  last, seen = team.gather(team.jit(step)(team.place(x), team.place(ends)))
  np.testing.assert_allclose(last, np.full(n, x.mean() + 2))
  np.testing.assert_allclose(
    seen[0], [x + 1, np.full(n, x.mean() + 1), np.full(n, x.mean() + 2)]
  )


@pytest.mark.parametrize("name", TEAMS)
def test_empty_tree_has_no_words(name):
  team = make_team(name)

  def step(x):
    for say in (
      collectives.mean,
      collectives.sum,
      collectives.gather,
      collectives.all_to_all,
      collectives.varying,
    ):
      assert say({}, team.axis) == {}
      assert say((None, []), team.axis) == (None, [])
    return x

  team.jit(step)(team.place(np.zeros(team.num_workers)))


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float16", "complex64"])
@pytest.mark.parametrize("name", ["none", "vmap", "shard_map", "two_a_device"])
def test_payloads_of_any_dtype_are_sent_unchanged(name, dtype):
  team = make_team(name)
  n = team.num_workers
  x = np.arange(n * n * 3).reshape(n, n, 3).astype(dtype)
  step = team.jit(
    lambda x: (
      collectives.gather(x, team.axis),
      collectives.all_to_all(x, team.axis),
      collectives.mean(x, team.axis),
    )
  )
  gathered, exchanged, mean = team.gather(step(team.place(x)))
  assert gathered.dtype == exchanged.dtype == x.dtype
  np.testing.assert_array_equal(gathered[0], x)
  np.testing.assert_array_equal(exchanged, x.swapaxes(0, 1))
  # The dtype of a mean of integers does not depend on the substrate.
  assert mean.dtype == (x.dtype if x.dtype.kind in "fc" else np.float32)


@hypothesis.settings(max_examples=15)
@hypothesis.given(n=st.integers(1, 5), shape=st.lists(st.integers(0, 3)))
def test_all_to_all_is_its_own_inverse(n, shape):
  shape = shape[:3]
  x = jnp.arange(n * n * np.prod(shape, dtype=int)).reshape(n, n, *shape)
  twice = jax.vmap(
    lambda x: collectives.all_to_all(
      collectives.all_to_all(x, "worker"), "worker"
    ),
    axis_name="worker",
  )
  np.testing.assert_array_equal(twice(x), x)


def loss(params, x):
  return jnp.sum(params["w"] * x["w"]) ** 2


def gradient_of_shared(check):
  """The gradient of parameters that all workers share, under shard_map."""
  team = make_team("shard_map")

  def step(params, x):
    grads = jax.grad(loss)(params, jax.tree.map(lambda x: x[0], x))
    if check:
      collectives.check_local(grads, team.axis, what="`updates`")
    return grads

  return jax.jit(
    jax.shard_map(
      step,
      mesh=team.mesh,
      in_specs=(PartitionSpec(), PartitionSpec("worker")),
      out_specs=PartitionSpec(),
    )
  )


def test_gradients_of_shared_parameters_are_refused_as_already_summed():
  params = {"w": jnp.ones(3)}
  x = {"w": jnp.arange(24.0).reshape(8, 3)}
  # The trap exists: JAX sums the gradients of all workers by itself.
  wanted = sum(jax.grad(loss)(params, {"w": row})["w"] for row in x["w"])
  np.testing.assert_allclose(gradient_of_shared(False)(params, x)["w"], wanted)
  with pytest.raises(
    ValueError, match="`updates` must be each worker's own"
  ) as e:
    gradient_of_shared(True)(params, x)
  assert "leaf `['w']`" in str(e.value)
  assert "replicate(params)" in str(e.value)


@pytest.mark.parametrize("name", TEAMS)
def test_gradients_of_own_parameters_are_local(name):
  team = make_team(name)
  n = team.num_workers
  params = {"w": np.ones(3, np.float32)}
  x = {"w": np.arange(3.0 * n, dtype=np.float32).reshape(n, 3)}

  def step(params, x):
    grads = jax.grad(loss)(params, x)
    collectives.check_local(grads, team.axis, what="`updates`")
    return grads, collectives.mean(grads, team.axis)

  local, mean = team.gather(
    team.jit(step)(team.replicate(params), team.place(x))
  )
  wanted = np.stack([2 * row.sum() * row for row in x["w"]])
  np.testing.assert_allclose(local["w"], wanted, rtol=1e-6)
  np.testing.assert_allclose(
    mean["w"], np.broadcast_to(wanted.mean(0), (n, 3)), rtol=1e-5
  )


@pytest.mark.parametrize("name", ["shard_map", "two_a_device"])
def test_mean_of_gradients_is_one_reduction_of_the_right_size(name):
  """The sum that `jax.grad` would add of itself would be a second one."""
  team = make_team(name)
  params = team.replicate({"w": np.ones(3, np.float32)})
  step = team.jit(
    lambda params, x: collectives.mean(jax.grad(loss)(params, x), team.axis)
  )
  text = step.lower(params, params).compile().as_text()
  kinds = [kind for kind, _ in _reading.groups(text)]
  assert kinds == ["all-reduce"]
  (line,) = (line for line in text.splitlines() if " all-reduce(" in line)
  assert re.search(r"= f32\[(1,)?3\]", line), line


SPLIT = {
  "rows": PartitionSpec("fsdp"),
  "columns": PartitionSpec(None, "fsdp"),
  "whole": PartitionSpec(),
}


def groups_on_a_2x2_mesh(say):
  """The groups of the collectives of `say` on leaves split within a worker."""
  team = make_team("mesh_2x2")
  tree = {name: np.ones((4, 6), np.float32) for name in SPLIT}
  step = team.jit(lambda tree: say(tree, team.axis))
  placed = team.replicate(tree, SPLIT)
  return _reading.groups(step.lower(placed).compile().as_text())


# Devices 0 and 1 are worker 0, devices 2 and 3 are worker 1.
@pytest.mark.smoke
@pytest.mark.parametrize("say", [collectives.mean, collectives.sum])
def test_no_reduction_crosses_the_inner_axis(say):
  """Of a worker that is itself sharded, every device speaks for its part."""
  found = groups_on_a_2x2_mesh(say)
  assert found
  for kind, groups in found:
    assert (kind, groups) == ("all-reduce", [[0, 2], [1, 3]])


def test_group_reader_parses_every_notation():
  inner, outer = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
  texts = {
    "all-reduce(y), replica_groups={{0,2},{1,3}}, z": outer,
    "all-gather-start(y), replica_groups=[2,2]<=[4], z": inner,
    "all-to-all(y), replica_groups=[2,2]<=[2,2]T(1,0)": outer,
    "all-reduce(y), replica_groups=mesh['a'=2,'b'=2] {'a'}, z": outer,
    "all-reduce(y), replica_groups=mesh['a'=2,'b'=2] {'b'}": inner,
    "collective-permute(y), source_target_pairs={{0,1},{2,3}}": inner,
  }
  for text, wanted in texts.items():
    ((_, found),) = _reading.groups(f"  x = f32[] {text}")
    assert found == wanted, text


@pytest.mark.parametrize("name", ["shard_map", "two_a_device"])
def test_leaves_share_a_message_between_cpu_hosts(monkeypatch, name):
  team = make_team(name)
  rng = np.random.default_rng(0)
  tree = {
    str(i): rng.normal(size=(team.num_workers, *shape)).astype(dtype)
    for i, (shape, dtype) in enumerate(
      [
        ((3,), "float32"),
        ((), "float32"),
        ((2, 5), "float32"),
        ((0,), "float32"),
        ((4,), "int32"),
        ((3,), jnp.bfloat16),
      ]
    )
  }
  placed = team.place(tree)

  def program():
    means = team.jit(lambda tree: collectives.mean(tree, team.axis))
    return means.lower(placed), means(placed)

  alone, wanted = program()
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(collectives._axis, "_BUCKET_BYTES", 48)
  merged, found = program()
  chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
  chex.assert_trees_all_close(found, wanted, rtol=1e-6)

  def number(lowered):
    return lowered.as_text().count('all_reduce"')

  # The merged messages are two of float32 and one each of integers and
  # bfloat16.
  assert number(alone) == 6
  assert number(merged) == 4


def test_sharded_leaves_share_no_buffer(monkeypatch):
  """A buffer of them would first be gathered."""
  team = make_team("mesh_2x2")
  placed = team.place({"a": np.ones((2, 4)), "b": np.ones((2, 6))})
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  means = team.jit(lambda tree: collectives.mean(tree, team.axis))
  assert means.lower(placed).as_text().count('all_reduce"') == 2


def test_parts_of_a_model_end_with_their_block():
  with collectives.model_parts("stage"):
    pass
  assert collectives.sum_of_parts(jnp.array(2.0)) == 2


def test_sum_of_bools_is_an_integer():
  alone = collectives.sum(jnp.array([True, False]), None)
  two = jax.vmap(lambda x: collectives.sum(x, "worker"), axis_name="worker")(
    jnp.array([[True, False], [True, True]])
  )
  assert alone.tolist() == [1, 0] and two[0].tolist() == [2, 1]
  assert alone.dtype == two.dtype


@pytest.mark.parametrize("changed", [1 + 3j, 2 + 2j])
def test_fingerprint_sees_both_parts_of_complex_numbers(changed):
  one, other = (
    collectives.fingerprint([jnp.array([x, 2j], jnp.complex64)])
    for x in (1 + 2j, changed)
  )
  assert (one != other).all()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32"])
def test_fingerprint_sees_which_two_entries_are_one(dtype):
  """In every shape; of weights in even steps many pairs have the same sum."""
  pairs = np.stack(np.triu_indices(40, 1), 1)
  masks = np.zeros((len(pairs), 40), dtype)
  np.put_along_axis(masks, pairs, 1, 1)
  for shape in ((40,), (5, 8)):
    rows = jax.vmap(collectives.fingerprint)([masks.reshape(-1, *shape)])
    assert len({tuple(row) for row in rows[:, 0].tolist()}) == len(pairs)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int32"])
def test_two_cpu_hosts_exchange_by_a_sum(monkeypatch, dtype):
  """Gloo would send the two messages one after the other."""
  size = collectives._exchange._SUMMED_BYTES // np.dtype(dtype).itemsize
  rows = np.random.default_rng(0).integers(0, 256, 4 * size * 8, np.uint8)
  rows = rows[: 4 * size * np.dtype(dtype).itemsize].view(dtype)
  rows = rows.reshape(2, 2, size)

  def exchange(x):
    x = x[0]
    return {
      "gather": collectives.gather(x, "worker"),
      "all_to_all": collectives.all_to_all(x, "worker"),
    }

  def run(processes):
    monkeypatch.setattr(jax, "process_count", lambda *_: processes)
    mesh = collectives.make_mesh((2,), ("worker",))
    program = jax.jit(
      jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], exchange(x)),
        mesh=mesh, in_specs=PartitionSpec("worker"),
        out_specs=PartitionSpec("worker"),
      )
    )  # fmt: skip
    text = program.lower(rows).as_text()
    return jax.device_get(program(rows)), text

  (one, one_text), (two, two_text) = run(1), run(2)
  bits = f"uint{8 * np.dtype(dtype).itemsize}"
  for name, expected in one.items():
    np.testing.assert_array_equal(two[name].view(bits), expected.view(bits))
  assert "stablehlo.all_gather" in one_text and "all_reduce" not in one_text
  assert "stablehlo.all_gather" not in two_text
  assert two_text.count("stablehlo.all_reduce") == 2
  assert "stablehlo.all_to_all" not in two_text


def test_small_messages_and_other_axes_are_exchanged_as_they_are(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda *_: 2)
  for workers, size, dtype in (
    (2, 1000, np.uint8), (4, 1 << 16, np.uint8), (2, 1 << 16, bool),
  ):  # fmt: skip
    x = np.zeros((workers, size), dtype)
    program = jax.jit(
      jax.shard_map(
        lambda y: collectives.gather(y[0], "worker")[None],
        mesh=collectives.make_mesh((workers,), ("worker",)),
        in_specs=PartitionSpec("worker"), out_specs=PartitionSpec("worker"),
      )
    )  # fmt: skip
    assert "all_reduce" not in program.lower(x).as_text()
