"""A process for each device matches the unsplit model, late or not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import channel, models, pipeline, transforms
from jdist.pipeline.processes import _device_part, _segment
from jdist.pipeline.runtime import _stages
from jdist.pipeline.schedule import _table
from tests import _refusals
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_MICRO = _training.MICRO


def _momentum():
  return optax.sgd(0.1, momentum=0.9)


def _train(layers, table, batches, *, sizes=small.SIZES, mask=False, **options):
  """Returns the whole model's parameters and state, and all losses."""

  def work(process, _):
    state = process.init_state(_momentum())
    state, metrics = process.run(state, _training.of_first(batches))
    programs = process._part.programs.values()
    counts = {x._forward_program._cache_size() for x in programs}
    return process.gather(state), [x["loss"] for x in metrics], counts

  shapes = _training.microbatch(sizes, mask=mask)
  found = _training.processes(layers, table, work, microbatch=shapes, **options)
  for model, losses, counts in found:
    assert small.error(model, found[0][0]) == 0.0
    assert losses == found[0][1] and counts == {1}
  return found[0][:2]


def _reference(layers, batches, count, chain=None, loss=None):
  chain = _training.momentum() if chain is None else chain
  state, losses = _training.unsplit(
    layers, lambda axis: chain, batches, count, loss=loss
  )
  return _training.of_worker(state), losses[:, 0]


def _slow(*values):
  """Returns a case of the slow set."""
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("table", "sizes", "recompute"),
  [
    _slow(("1f1b", 4, 8), small.UNLIKE, "none"),
    (("gpipe", 2, 4), small.SIZES, "stage"),
    (("zb_h1", 4, 4), small.UNLIKE, "none"),
    _slow(("zb_h1", 2, 4), small.SIZES, "layers"),
    _slow(("zb_h1", 2, 2), small.SIZES, "stage"),
    (("interleaved", 2, 4), small.UNLIKE, "layers"),
    _slow(("naive", 2, 1), small.UNLIKE, "none"),
    _slow(("1f1b", 1, 4), small.SIZES, "none"),
  ],
  ids=str,
)
def test_synchronous_table_matches_unsplit_model(table, sizes, recompute):
  made = pipeline.make_table(*table)
  layers = small.layers(sizes, statistics=True)
  batches = small.batches(3, 1, _MICRO * made.num_microbatches, sizes)
  found, losses = _train(
    layers, made, batches, sizes=sizes, recompute=recompute
  )
  wanted, wanted_losses = _reference(layers, batches, made.num_microbatches)
  assert small.error(found, wanted) < 1e-5
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)


@pytest.mark.parametrize(
  ("name", "devices", "clip_norm"),
  # A V refuses to clip, see `check_barriers`.
  [("zb_h2", 3, None), ("zb_h2", 3, 0.05), ("zb_v", 2, None)],
)
def test_overlapping_iterations_match_the_unsplit_model(
  name, devices, clip_norm
):
  table = pipeline.make_table(name, devices, 4, num_iterations=5)
  layers = small.layers(small.UNLIKE, statistics=True)
  batches = small.batches(5, 1, _MICRO * 4, small.UNLIKE)
  found, losses = _train(
    layers, table, batches, sizes=small.UNLIKE, clip_norm=clip_norm
  )
  chain = _momentum()
  if clip_norm is not None:
    chain = optax.chain(optax.clip_by_global_norm(clip_norm), chain)
  wanted, wanted_losses = _reference(layers, batches, 4, chain)
  assert small.error(found, wanted) < 1e-5
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)


@pytest.mark.parametrize("window", [_slow(2), 3])
def test_window_matches_delayed_gradients_on_one_device(window):
  table = pipeline.ours(3, 4, window=window, num_iterations=6)
  layers = small.layers(small.UNLIKE)
  batches = small.batches(12, 1, _MICRO * 4, small.UNLIKE)
  # The table runs twice, and the pipeline is drained in between.
  for part in (batches[:6], batches):
    _, losses = _train(layers, table, part, sizes=small.UNLIKE)
  optimizer = transforms.delay_gradients(_momentum(), window - 1)
  _, wanted = _reference(layers, batches[:6], 4, optimizer)
  np.testing.assert_allclose(losses[:6], wanted, rtol=1e-5)


def _by_versions(layers, table, batches, same_in_backward=True):
  """Trains one model whose stages read the table's versions."""
  stages = pipeline.cut_layers(layers, table.num_stages)
  versions = _table.read_versions(table).read
  count, optimizer = table.num_microbatches, _momentum()
  params = [[stage.params] for stage in stages]
  kept = [optimizer.init(stage.params) for stage in stages]
  losses = []
  for k in range(table.num_iterations):
    total = [jax.tree.map(jnp.zeros_like, x.params) for x in stages]
    loss_sum = 0.0
    for m in range(count):
      batch = jax.tree.map(
        lambda x, m=m: x[0].reshape(count, _MICRO, -1)[m], batches[k]
      )
      x, pulls = batch["x"], []
      for s, stage in enumerate(stages):
        read = {
          op: params[s][versions[pipeline.Action(op, s, m, k)]]
          for op in (pipeline.Op.FORWARD, pipeline.Op.BACKWARD)
        }

        def run(p, x, stage=stage):
          return stage.apply(p, stage.state, x, train=True)[0]

        pulls.append(jax.vjp(run, read[pipeline.Op.BACKWARD], x)[1])
        x = run(read[pipeline.Op.FORWARD], x)
      loss, pull = jax.vjp(lambda y, b=batch: small.loss(y, b)[0], x)
      (cotangent,) = pull(jnp.ones(()))
      loss_sum += float(loss)
      for s in reversed(range(len(stages))):
        grads, cotangent = pulls[s](cotangent)
        total[s] = jax.tree.map(jnp.add, total[s], grads)
    losses.append(loss_sum / count)
    for s in range(len(stages)):
      grads = jax.tree.map(lambda x: x / count, total[s])
      updates, kept[s] = optimizer.update(grads, kept[s])
      params[s].append(optax.apply_updates(params[s][-1], updates))
  return _stages.merge([x[-1] for x in params]), losses


@pytest.mark.parametrize(
  ("name", "microbatches", "delays"),
  [
    ("pipedream", 1, (2, 1, 0)),
    _slow("2bw", 4, (1, 1, 1)),
    ("paci", 2, None),
  ],
)
def test_asynchronous_table_reads_the_versions_that_it_names(
  name, microbatches, delays
):
  table = pipeline.make_table(name, 3, microbatches, num_iterations=12)
  layers = small.layers(small.UNLIKE[:4])
  batches = small.batches(12, 1, _MICRO * microbatches, small.UNLIKE[:4])
  found, losses = _train(layers, table, batches, sizes=small.UNLIKE[:4])
  wanted, wanted_losses = _by_versions(layers, table, batches)
  assert small.error(found[0], wanted) < 1e-6
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
  if delays is not None:
    assert pipeline.check_table(table).delays == delays


def test_held_versions_match_the_report(monkeypatch):
  drop, held = _segment.Segment._drop, [0, 0, 0]

  def recorded(self, place):
    drop(self, place)
    for stage, versions in self._params.items():
      held[stage] = max(held[stage], len(versions))

  monkeypatch.setattr(_segment.Segment, "_drop", recorded)
  table = pipeline.make_table("pipedream", 3, 1, num_iterations=8)
  layers = small.layers(small.UNLIKE[:4])
  batches = small.batches(8, 1, _MICRO, small.UNLIKE[:4])
  _train(layers, table, batches, sizes=small.UNLIKE[:4], recompute="stage")
  assert tuple(held) == pipeline.check_table(table).versions


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["", "clipped"])
@pytest.mark.parametrize(
  "table",
  [
    _slow(pipeline.make_table("1f1b", 3, 4)),
    pipeline.ours(3, 4, window=2, num_iterations=4),
    pipeline.make_table("interleaved", 1, 2, num_chunks=3),
  ],
  ids=lambda x: x.name,
)
def test_tied_parameters_receive_the_sum_of_their_gradients(table, clip_norm):
  layers = small.tied_layers()
  batches = small.batches(4, 1, _MICRO * table.num_microbatches)
  found, losses = _train(layers, table, batches, clip_norm=clip_norm)
  chain = _momentum()
  if clip_norm is not None:
    chain = optax.chain(optax.clip_by_global_norm(clip_norm), chain)
  chain = transforms.delay_gradients(chain, table.window - 1)
  wanted_model, wanted = _reference(
    layers, batches, table.num_microbatches, chain, small.chain_loss(layers)
  )
  np.testing.assert_allclose(losses, wanted, rtol=1e-5)
  if table.window == 1:
    assert small.error(found[0], wanted_model[0]) < 1e-5


def _noisy_layers(sizes):
  def noisy(layer):
    def apply(params, state, x, *, train, mask=None, key=None):
      y, state = layer.apply(params, state, x, train=train, mask=mask)
      kept = jax.random.bernoulli(key, 0.8, y.shape)
      return jnp.where(kept, y / 0.8, 0.0), state

    return models.Layer(layer.name, layer.params, layer.state, apply)

  return [noisy(x) for x in small.layers(sizes)]


def _plain_inputs(batch, key):
  del key
  return batch["x"]


def _noisy_inputs(batch, key):
  return batch["x"] + jax.random.normal(key, batch["x"].shape)


def _noisy_reference(layers, batches, count, inputs=_plain_inputs):
  """Trains the unsplit model with the keys that each layer derives."""
  (stage,) = pipeline.cut_layers(layers, 1)

  def loss_fn(params, state, batch, key):
    x = inputs(batch, key)
    y, state = stage.apply(params, state, x, train=True, key=key)
    loss, metrics = small.loss(y, batch)
    return loss, (state, metrics)

  (params, _), _ = _reference(layers, batches, count, _momentum(), loss_fn)
  return params


@pytest.mark.parametrize("recompute", ["none", "layers", _slow("stage")])
def test_dropout_is_replayed_in_the_backward_pass(recompute):
  table = pipeline.make_table("1f1b", 2, 2)
  layers = _noisy_layers(small.UNLIKE)
  batches = small.batches(3, 1, _MICRO * 2, small.UNLIKE)
  found, _ = _train(
    layers, table, batches, sizes=small.UNLIKE, recompute=recompute
  )
  wanted = _noisy_reference(layers, batches, 2)
  assert small.error(found[0], wanted) < 1e-5


@pytest.mark.parametrize("recompute", [_slow("none"), "stage"])
def test_inputs_draw_from_their_key(recompute):
  table = pipeline.make_table("1f1b", 2, 2)
  layers = small.layers(small.UNLIKE)
  batches = small.batches(2, 1, _MICRO * 2, small.UNLIKE)
  found, _ = _train(
    layers,
    table,
    batches,
    sizes=small.UNLIKE,
    inputs=_noisy_inputs,
    recompute=recompute,
  )
  wanted = _noisy_reference(layers, batches, 2, _noisy_inputs)
  assert small.error(found[0], wanted) < 1e-5


def test_each_run_draws_the_numbers_of_its_own_steps():
  table = pipeline.make_table("1f1b", 1, 2)
  batches = _training.of_first(small.batches(1, 1, _MICRO * 2, small.UNLIKE))

  def work(process, _):
    state, losses = process.init_state(optax.sgd(0.0)), []
    for _ in range(2):
      state, (metrics,) = process.run(state, batches)
      losses.append(metrics["loss"])
    return losses

  ((first, second),) = _training.processes(
    _noisy_layers(small.UNLIKE), table, work,
    microbatch=_training.microbatch(small.UNLIKE),
  )  # fmt: skip
  # The parameters and the batch stay, and only the dropout changes.
  assert first != second


def test_one_program_draws_the_same_numbers():
  table = pipeline.make_table("1f1b", 2, 2)
  layers = _noisy_layers(small.UNLIKE)
  batches = small.batches(3, 1, _MICRO * 2, small.UNLIKE)
  pipe = _training.one_program(layers, table, small.UNLIKE)
  state, _ = _training.train(pipe, lambda axis: _momentum(), batches)
  wanted = _noisy_reference(layers, batches, 2)
  assert small.error(_training.split(pipe, state)[0], wanted) < 1e-5


def test_masked_micro_batches_count_by_their_samples():
  table = pipeline.make_table("1f1b", 2, 2)
  layers = small.layers(statistics=True)
  batches = small.batches(2, 1, _MICRO * 2)
  for batch in batches:
    batch["mask"] = np.array([[1, 1, 0, 1, 0, 0]], np.float32)
  found, losses = _train(layers, table, batches, mask=True)
  wanted, wanted_losses = _reference(layers, batches, 2)
  assert small.error(found, wanted) < 1e-5
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)


def test_scanned_stage_raises_only_if_its_backward_pass_is_split():
  def apply(params, state, x, **_):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, params)[0], state

  loop = models.Layer("loop", jnp.ones((2, 8, 8)), {}, apply)
  layers = [small.layers()[0], loop]
  whole = pipeline.parse_table("device F0/0 F0/1 B0/1 B0/0 U/0 U/1")
  _training.process(layers, whole)
  split = pipeline.parse_table("device F0/0 F0/1 I0/1 W0/1 B0/0 U/0 U/1")
  with pytest.raises(ValueError, match="got a 'scan' that computes both"):
    _training.process(layers, split)


def test_processes_with_unlike_tables_raise():
  def work(peers):
    name = "1f1b" if peers.device else "gpipe"
    with pytest.raises(ValueError, match="must agree, but the table is"):
      _training.process(
        small.layers(), pipeline.make_table(name, 2, 4), peers=peers
      )

  in_threads(2, work)


def test_processes_with_other_versions_raise(monkeypatch):
  def work(peers):
    table = pipeline.make_table("1f1b", 2, 4)
    with pytest.raises(ValueError, match=r"but jax is \"\d\" in the p"):
      _training.process(small.layers(), table, peers=peers)

  # Threads share a function, and so each call gets another version.
  versions = itertools.count(1)
  monkeypatch.setattr(
    channel, "package_versions", lambda: {"jax": f"{next(versions)}"}
  )
  in_threads(2, work)


@pytest.mark.parametrize(
  ("name", "options"), [("zb_v", {}), ("interleaved", {"num_iterations": 2})]
)
def test_stages_of_a_device_have_no_barrier_where_iterations_overlap(
  name, options
):
  table = pipeline.make_table(name, 2, 2, **options)
  _device_part.check_barriers(table, 1, "`clip_norm`")
  with pytest.raises(ValueError, match="`clip_norm` must be left out where a"):
    _device_part.check_barriers(table, 2, "`clip_norm`")
  flushed = pipeline.make_table("interleaved", 2, 2)
  _device_part.check_barriers(flushed, 2, "`clip_norm`")


def test_optimizers_that_a_process_cannot_run_raise():
  table = pipeline.make_table("zb_v", 1, 2)
  with pytest.raises(ValueError, match="`clip_norm` must be left out where"):
    _training.process(small.layers(), table, clip_norm=0.5)
  process = _training.process(small.layers(), table)
  clipped = optax.chain(optax.clip_by_global_norm(0.5), _momentum())
  with pytest.raises(ValueError, match="by all leaves must be left out where"):
    process.init_state(clipped)
  with _refusals.refused("optimizer", "an Optax transformation, for instance"):
    process.init_state("sgd")


def test_passes_that_may_read_other_versions_run_the_stage_again():
  for name, recompute in (("paci", "stage"), ("2bw", "none")):
    table = pipeline.make_table(name, 1, 2)
    process = _training.process(small.layers((8, 8)), table, (8, 8))
    assert process._part.programs[0].recompute == recompute


def test_bytes_between_processes_go_both_ways_for_each_micro_batch():
  table = pipeline.make_table("1f1b", 2, 4)

  def work(process, _):
    return process.edge_bytes

  # Outputs of 12 numbers in float32, and their gradients.
  found = _training.processes(small.layers((8, 4, 8)), table, work, (8, 8))
  assert found == [2 * 4 * _MICRO * 4 * 4] * 2


def test_timeline_begins_after_the_last_trace():
  table = pipeline.make_table("1f1b", 1, 2)
  process = _training.process(small.layers(), table, timeline=True)
  state = process.init_state(_momentum())
  batches = _training.of_first(small.batches(1, 1, _MICRO * 2))
  for _ in range(2):
    state, _ = process.run(state, batches)
    assert len(process.trace()) == len(list(table))


def test_timeline_has_every_action_of_all_processes():
  table = pipeline.make_table("1f1b", 2, 2)
  batches = _training.of_first(small.batches(2, 1, _MICRO * 2))

  def work(process, _):
    process.run(process.init_state(_momentum()), batches)
    return process.trace()

  first, second = _training.processes(
    small.layers(), table, work, timeline=True
  )
  assert list(first) == list(second) and len(first) == 2 * len(list(table))
  assert min(x.start_s for x in first) == 0.0
  assert {x.resource for x in first} == {"device 0", "device 1"}
  assert {x.kind for x in first} == {"forward", "backward", "update"}
