"""Refusals of meshes, workers, collectives and buckets, and the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist import collectives
from jdist.collectives import Buckets
from tests import _refusals

STRUCT = jax.ShapeDtypeStruct((2,), jnp.float32)
TREE = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}
NONE, FSDP = PartitionSpec(), PartitionSpec("fsdp")


def buckets(**options):
  return Buckets.of({"a": STRUCT, "b": STRUCT}, **options)


def pack(**leaves):
  return Buckets.of(TREE).pack({"a": jnp.ones(2), **leaves})


def unpack(change, like=TREE):
  made = Buckets.of(TREE)
  return made.unpack(change(made.pack(TREE)), like)


def mesh():
  return collectives.make_mesh((2, 2), ("worker", "fsdp"), jax.devices()[:4])


def workers(num_workers=2, **options):
  return collectives.workers(num_workers, **options)


def step_of(*args, substrate="vmap"):
  team = workers(substrate=substrate)
  return team.jit(lambda *given: given)(*args)


def among_two(call, x):
  return jax.vmap(lambda x: call(x, "worker"), axis_name="worker")(x)


def keys():
  team = workers(substrate="vmap")
  return team.gather(team.place(jax.random.split(jax.random.key(0), 2)))


def place(shape):
  return workers(substrate="shard_map").place(np.zeros(shape))


def shard(shape):
  return workers(substrate="vmap").shard({"x": np.zeros(shape)})


def place_host(dtype, call="place"):
  """Hands over a number that does not fit into 32 bits."""
  large = np.array([5_000_000_000] * 2).astype(dtype)
  return getattr(workers(substrate="vmap"), call)({"id": large})


def shard_host(dtype):
  return place_host(dtype, "shard")


def replicate_host(dtype):
  return place_host(dtype, "replicate")


def view(worker):
  team = workers(substrate="shard_map")
  return team.view(team.place(np.zeros(2)), worker)


@_refusals.table(
  ("args[0]", lambda: step_of(jnp.ones((3, 4))), "of 2 rows, got shape (3, 4)"),
  ("args[1]", lambda: step_of(jnp.ones(2), 0.1), "of 2 rows, got shape ()"),
  (
    "worker",
    lambda: workers(substrate="vmap").view(jnp.ones((2, 3)), np.array([0])),
    "run in this process, one of (0, 1), got int64[1]",
  ),
  (
    "args[0]",
    lambda: step_of({"w": jnp.ones((4, 2))}, substrate="shard_map"),
    "`workers.shard`",
  ),
  ("args[0]", lambda: step_of({"a": 1.0}), "at 'a'"),
  # Meshes and devices.
  ("names", lambda: collectives.make_mesh((2, 2), ("worker",)), "one"),
  ("names", lambda: collectives.make_mesh((2, 2), ("a", "a")), "names once"),
  (
    "shape",
    lambda: collectives.make_mesh((16,), ("worker",)),
    "16, there are 8",
  ),
  ("num_devices", lambda: collectives.make_cpu_devices(0), "an int >= 1"),
  # Workers.
  ("num_workers", lambda: workers(0), "an int >= 1, got 0"),
  ("num_workers", lambda: workers(3, mesh=mesh()), "2 places"),
  ("axis", lambda: workers(axis=""), "None, a name"),
  ("axis", lambda: workers(axis=None), "a string, got None"),
  ("axis", lambda: workers(axis=("a", "b")), "a string, got ('a', 'b')"),
  ("axis", lambda: workers(mesh=mesh(), axis="fsdp2"), "an axis of the mesh"),
  ("substrate", lambda: workers(substrate="pmap"), "got 'pmap'"),
  ("substrate='none'", lambda: workers(substrate="none"), "one worker"),
  ("mesh", lambda: workers(substrate="vmap", mesh=mesh()), "got 'vmap'"),
  ("tree", lambda: place(()), "one row for each"),
  ("tree", lambda: place((3, 2)), "one row for each"),
  ("tree", keys, "typed PRNG key"),
  ("batch", lambda: shard(()), "divide evenly over"),
  ("batch", lambda: shard((3, 2)), "divide evenly over"),
  (
    "tree",
    lambda: workers(substrate="vmap").place(np.ones((2, 1), object)),
    "arrays of numbers",
  ),
  *(
    ("tree", lambda d=d: place_host(d), "Encode text, dates and")
    for d in ("datetime64[s]", ">f4", "longdouble", "f4, i4", "U3")
  ),
  (
    "tree",
    lambda: workers(substrate="vmap").place(np.ma.ones((2, 1))),
    "fill masked entries",
  ),
  *(
    ("tree", lambda f=f, d=d: f(d), "hold numbers of 32 bits")
    for d in ("int64", "uint64")
    for f in (place_host, shard_host, replicate_host)
  ),
  ("worker", lambda: view(-1), "run in this process"),
  ("worker", lambda: view(2), "run in this process"),
  (
    "tree",
    lambda: workers(substrate="vmap").view({"a": jnp.ones(())}),
    "a scalar at 'a'",
  ),
  # Collectives.
  (
    "axis",
    lambda: collectives.mean(jnp.ones(2), "worker"),
    "of the workers that run this, got 'worker'; there is none",
  ),
  *(
    ("tree", lambda f=f, s=s: among_two(f, jnp.zeros(s)), "one row a worker")
    for f in (collectives.all_to_all, collectives.reduce_scatter)
    for s in ((2, 3), (2,))
  ),
  *(
    ("axis", lambda x=x: collectives.mean(jnp.ones(2), x), "None, a name")
    for x in ("", (), ("a",), ("a", "a"), ("a", "b", "c"), ("a", ""), 3, ["a"])
  ),
  ("start", lambda: collectives.phase(-1, None), "an int >= 0, got -1"),
  ("start", lambda: collectives.phase(1.5, None), "an int >= 0, got 1.5"),
  ("start", lambda: collectives.phase(True, None), "an int >= 0, got True"),
  ("stop", lambda: collectives.phase(0, 2.5), "an int or None, got 2.5"),
  ("stop", lambda: collectives.phase(5, 2), "above `start`, 5, or None, got 2"),
  # Buckets.
  ("max_bytes", lambda: buckets(max_bytes=0), "an int >= 1, got 0"),
  ("max_bytes", lambda: buckets(max_bytes=1.5), "an int >= 1, got 1.5"),
  ("max_bytes", lambda: buckets(max_bytes=True), "an int >= 1, got True"),
  (
    "max_bytes",
    lambda: buckets(max_bytes=3),
    "an int >= 4, got 3. An element of 'a'",
  ),
  ("num_rows", lambda: buckets(num_rows=None), "an int >= 1, got None"),
  ("max_row_bytes", lambda: buckets(max_row_bytes=0), "an int >= 1, got 0"),
  (
    "max_row_bytes",
    lambda: buckets(max_row_bytes=3),
    "an int >= 4, got 3. An element of 'a'",
  ),
  ("order", lambda: buckets(order="random"), "'front_first', "),
  *(
    ("order", lambda x=x: buckets(order=x), "the number of each leaf once")
    for x in ((0,), (0, 5), (0, 0, 1), (1, 2), (0.0, 1.0), ())
  ),
  ("order", lambda: buckets(order=3), "a list of the leaves' numbers"),
  (
    "order",
    lambda: buckets(order={"a": 0, "b": "one"}.get),
    "keys that can be compared",
  ),
  ("specs", lambda: buckets(specs={"a": NONE}), "each leaf"),
  ("specs", lambda: buckets(specs={"a": NONE, "b": "fsdp"}), "PartitionSpec"),
  (
    "specs",
    lambda: buckets(specs=[NONE, PartitionSpec("worker", None)]),
    "Leave out the axis of workers",
  ),
  ("specs", lambda: buckets(specs=[NONE, FSDP]), "the workers' mesh"),
  (
    "specs",
    lambda: collectives.map_shards(
      jnp.sin, ["x"], in_specs=(NONE,), out_specs=NONE
    ),
    "the workers' mesh, (), got ['x']",
  ),
  ("tree", lambda: Buckets.of({"a": [1.0]}), "got float at 'a/0'"),
  (
    "tree",
    lambda: Buckets.of({"key": jax.random.key(0)}),
    "got dtype key<fry> at 'key'",
  ),
  ("tree", lambda: pack(b=jnp.ones((3, 2))), "leaf 1 was (2, 3), got (3, 2)"),
  ("tree", lambda: pack(), "leaf 1 was (2, 3), got no leaf"),
  ("tree", lambda: pack(b=jnp.ones((2, 3), "int32")), "the dtypes"),
  (
    "like",
    lambda: unpack(list, {"a": jnp.ones(2), "b": jnp.ones(6)}),
    "the shapes",
  ),
  ("buffers", lambda: unpack(lambda x: x * 2), "one for each"),
  ("buffers", lambda: unpack(lambda x: [x[0][:, :4]]), "has shape (1, 8), got"),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


@pytest.mark.parametrize("axis", [None, "worker", ("inner", "outer")])
def test_valid_axes_are_accepted(axis):
  collectives.check_axis(axis)


@pytest.mark.parametrize(
  ("argument", "options", "rule"),
  [
    ("substrate='vmap'", {"substrate": "vmap"}, "has 2 processes"),
    ("num_workers", {}, "multiple of the number of devices"),
  ],
)
def test_workers_of_several_processes_need_every_device(
  argument, options, rule, monkeypatch
):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with _refusals.refused(argument, rule):
    workers(6, **options)
