"""Real processes train as four workers in one process do."""

import pathlib
from typing import Any, NamedTuple

import jax
import optax
import pytest

from jdist import collectives, data, methods, models, training
from jdist.transforms import intervals
from tests import _processes
from tests.training import _tiny

# Methods, dtypes and processes, which share four workers, and whether the host
# ends rounds (four programs in place of one) and `vmap` is compared, too.
# Trained together, because starting the processes takes longer.
_GROUPS = (
  (("msdpu",), ("float32",), 2, False),
  pytest.param(
    (
      ("msdpu", "diloco", "local_sgd", "ssgd"),
      ("float32", "bfloat16"),
      4,
      True,
    ),
    marks=pytest.mark.slow,
  ),
)
_STEPS = 20


def train(names, dtypes, steps, every_way, folder):
  """Trains with every method; the same code in one process or in several."""
  import hashlib
  import pathlib

  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from jdist import collectives, data, methods, models, training, transforms
  from jdist.transforms import intervals

  if jax.process_count() > 1:
    jax.config.update("jax_numpy_dtype_promotion", "standard")
  kinds = ["shard_map"]
  if jax.process_count() == 1 and every_way:
    kinds.append("vmap")
  digits = data.load("digits")
  model = models.build("mlp", input_shape=digits.input_shape, num_classes=10)
  results = {}
  for kind in kinds:
    team = collectives.workers(4, substrate=kind)
    batches = data.Batches(digits, 4, 8, seed=3, worker_ids=team.local_workers)
    axis, inner = team.axis, optax.sgd(0.05, momentum=0.9)
    chains = {
      "ssgd": methods.ssgd(inner, axis=axis),
      "local_sgd": methods.local_sgd(inner, 3, axis=axis),
      "diloco": methods.diloco(inner, 3, axis=axis),
      "msdpu": methods.msdpu(
        inner, intervals.msdpu(4, 0.05, max_interval=6), 0.05, axis=axis
      ),
    }
    for name in names:
      for dtype in map(jnp.dtype, dtypes):
        if dtype == jnp.bfloat16 and (name == "ssgd" or kind == "vmap"):
          continue  # The first has no anchor.
        loss = training.classification_loss(
          model.apply, normalize=digits.normalize
        )
        trainer = training.Trainer(
          team,
          training.make_step(loss, chains[name], axis=axis),
          host_rounds=None if every_way else False,
        )
        params = training.cast(model.params, dtype)

        state = training.init_state(team, chains[name], params)
        template = jax.tree.map(jnp.copy, state)  # A step takes the memory.
        state, records = trainer.fit(state, batches.iterate, steps)
        anchor = transforms.anchor(state.opt_state, state.params)
        everyone = team.gather(anchor)
        digests = {
          hashlib.sha256(
            b"".join(x[worker].tobytes() for x in jax.tree.leaves(everyone))
          ).hexdigest()
          for worker in range(4)
        }
        label = f"{kind} {name} {dtype.name}"
        results[label] = {
          "digests": sorted(digests),
          "rounds": records[-1].rounds,
          "sent_bytes": records[-1].sent_bytes,
          "interval": int(
            team.view(
              jnp.asarray(transforms.interval(state.opt_state) + 0 * state.step)
            )
          ),
          "anchor": [
            np.asarray(x[0], np.float64).ravel().tolist()
            for x in jax.tree.leaves(everyone)
          ],
        }
        if folder is None or dtype != jnp.float32:
          continue
        # Saved by all processes, restored by all, to the bit.
        place = pathlib.Path(folder) / name
        with training.Checkpoints(place, team) as checkpoints:
          checkpoints.save(steps, state)
          found = checkpoints.restore(template)
        assert found.step == steps
        before, after = team.gather(state), team.gather(found.state)
        for x, y in zip(
          jax.tree.leaves(before), jax.tree.leaves(after), strict=True
        ):
          assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), label
        results[label]["state"] = hashlib.sha256(
          b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(before))
        ).hexdigest()
        # The run continues from there.
        with training.Checkpoints(place, team) as checkpoints:
          more, _ = trainer.fit(
            template, batches.iterate, steps + 2, checkpoints=checkpoints
          )
        assert int(team.view(more.step)) == steps + 2
  return results


class _Results(NamedTuple):
  """What training gave: in processes, and in one on both substrates."""

  names: tuple[str, ...]
  processes: list[dict[str, Any]]
  one: dict[str, Any]
  folder: pathlib.Path


@pytest.fixture(
  scope="module", params=_GROUPS, ids=lambda group: " ".join(group[0])
)
def results(request, tmp_path_factory):
  names, dtypes, number, every_way = request.param
  folder = tmp_path_factory.mktemp("processes")
  processes = _processes.run(
    train, names, dtypes, _STEPS, every_way, str(folder), num_processes=number,
    devices_per_process=4 // number,
  )  # fmt: skip
  with jax.numpy_dtype_promotion("standard"):
    one = train(names, dtypes, _STEPS, every_way, None)
  return _Results(names, processes, one, folder)


def _distance(a, b):
  """Largest difference, and that relative to the largest entry of a leaf."""
  pairs = [
    (max(abs(x - y) for x, y in zip(p, q, strict=True)), max(map(abs, p)))
    for p, q in zip(a, b, strict=True)
  ]
  return max(d for d, _ in pairs), max(d / (m or 1.0) for d, m in pairs)


def test_processes_match_workers_in_one_process(results):
  for name in results.names:
    ours = results.processes[0][f"shard_map {name} float32"]
    here = results.one[f"shard_map {name} float32"]
    others = [here]
    assert _distance(ours["anchor"], here["anchor"])[0] < 1e-6, name
    if vmap := results.one.get(f"vmap {name} float32"):
      assert _distance(vmap["anchor"], here["anchor"])[1] < 1e-5, name
      others.append(vmap)
    for other in others:
      for count in ("rounds", "sent_bytes", "interval"):
        assert ours[count] == other[count], (name, count)


def test_anchors_are_equal_to_the_bit_everywhere(results):
  for label, found in results.one.items():
    assert len(found["digests"]) == 1
    if not label.startswith("shard_map"):
      continue
    first, *others = [told[label]["digests"] for told in results.processes]
    assert len(first) == 1 and others
    assert all(digests == first for digests in others)


def test_processes_saved_and_restored_the_same_state(results):
  for name in results.names:
    label = f"shard_map {name} float32"
    assert len({told[label]["state"] for told in results.processes}) == 1
    assert sorted(p.name for p in (results.folder / name).iterdir()) == [
      f"step_{step:08d}{end}" for step in (20, 22) for end in ("", ".json")
    ]


def test_one_process_restores_a_checkpoint_of_several(results, tmp_path):
  name = results.names[0]
  for end in ("", ".json"):  # Step 20 alone, as the newest.
    (tmp_path / f"step_00000020{end}").symlink_to(
      results.folder / name / f"step_00000020{end}"
    )
  team = collectives.workers(4, substrate="vmap")
  digits = data.load("digits")
  model = models.build("mlp", input_shape=digits.input_shape, num_classes=10)
  inner = optax.sgd(0.05, momentum=0.9)
  optimizer = {
    "msdpu": lambda: methods.msdpu(
      inner, intervals.msdpu(4, 0.05, max_interval=6), 0.05, axis=team.axis
    ),
    "diloco": lambda: methods.diloco(inner, 3, axis=team.axis),
  }[name]()
  template = training.init_state(team, optimizer, model.params)
  with training.Checkpoints(tmp_path, team) as checkpoints:
    found = checkpoints.restore(template)
  digest = _tiny.digest(found.state)
  assert digest == results.processes[0][f"shard_map {name} float32"]["state"]


def restore_damaged(folder):
  import warnings

  import numpy as np
  import optax

  from jdist import collectives, methods, training

  warnings.simplefilter("ignore")
  team = collectives.workers(2)
  optimizer = methods.ssgd(optax.sgd(0.1), axis=team.axis)
  state = training.init_state(team, optimizer, np.ones(3, np.float32))
  with training.Checkpoints(folder, team) as checkpoints:
    try:
      checkpoints.restore(state)
    except ValueError as error:
      return str(error)


def test_every_process_raises_if_all_checkpoints_are_damaged(tmp_path):
  (tmp_path / "step_00000001.json").write_text("{")
  told = _processes.run(restore_damaged, str(tmp_path), num_processes=2)
  assert all("all are damaged" in text for text in told), told


def begin_apart():
  """Fits from parameters of each process's own; returns the error."""
  import itertools

  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from jdist import collectives, methods, training

  def loss(params, model_state, batch, key):
    return jnp.mean((batch["x"] @ params["w"]) ** 2), (model_state, {})

  team = collectives.workers(2)
  chain = methods.diloco(optax.sgd(0.1), 2, axis=team.axis)
  own = {"w": jnp.full(3, 1.0 + jax.process_index(), jnp.float32)}
  state = training.init_state(team, chain, own)
  step = training.make_step(loss, chain, axis=team.axis)
  batch = {"x": np.ones((1, 4, 3), np.float32)}
  try:
    training.Trainer(team, step).fit(
      state, lambda i: itertools.repeat(batch), 4
    )
  except ValueError as error:
    return str(error)
  return "trained"


def test_processes_with_other_first_states_do_not_train():
  errors = _processes.run(begin_apart, num_processes=2)
  assert errors[0] == errors[1]
  assert errors[0].startswith("all processes of a run must agree, but `")
  assert "`params" in errors[0] or "anchor" in errors[0]
