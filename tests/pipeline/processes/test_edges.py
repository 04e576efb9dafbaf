"""Codes of the messages between stages, with feedback on each edge."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, pipeline, reducers, states
from jdist.pipeline.processes import _edges, _segment
from tests import _refusals
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

INT4 = reducers.MessageCodec(codecs.Quantize(4, 4), reducers.ErrorFeedback())
_MICRO = _training.MICRO


def _edge(message, like, samples=None, batch=None):
  return _edges.Edge(message, samples, like, batch, jax.jit)


def _int4(x):
  """Rounds to -7..7 steps of the largest entry, for one block of NumPy."""
  scale = np.abs(x).max() / np.float32(7)
  return np.round(x / scale).clip(-7, 7) * scale if scale else 0 * x


def test_one_message_by_hand():
  like = jax.ShapeDtypeStruct((1, 4), jnp.float32)
  edge = _edge(INT4, like)
  sender, receiver = edge.init("OUTPUT", 0), edge.init("GRADIENT", 1)
  x = np.array([[7.0, -3.3, 0.4, 1.6]], np.float32)
  sent = edge.encode("OUTPUT", jnp.asarray(x), sender, None)
  found = edge.decode("GRADIENT", sent, receiver, None)
  np.testing.assert_allclose(found, [[7.0, -3.0, 0.0, 2.0]])
  residual = sender["OUTPUT"].feedback.residual[0]
  np.testing.assert_allclose(residual, [[0.0, -0.3, 0.4, -0.4]], atol=1e-6)
  # Two bytes of codes, four of the scale, and one that all is finite.
  assert (
    states.num_bytes(edge.kinds) == sum(np.asarray(x).nbytes for x in sent) == 7
  )
  again = edge.encode("OUTPUT", jnp.asarray(x), sender, None)
  found = edge.decode("GRADIENT", again, receiver, None)
  np.testing.assert_allclose(found, _int4(x + residual), rtol=1e-6)


def test_change_of_a_sample_by_hand():
  like = jax.ShapeDtypeStruct((2, 4), jnp.float32)
  batch = {"index": jax.ShapeDtypeStruct((2,), jnp.int32)}
  message = reducers.MessageCodec(codecs.Quantize(4, 4))
  edge = _edge(message, like, ("index", 5), batch)
  sender, receiver = edge.init("OUTPUT", 0), edge.init("GRADIENT", 1)
  x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
  known = np.zeros((5, 4), np.float32)
  for index in ([0, 3], [1, 4], [3, 0], [4, 2], [0, 3]):
    numbers = {"index": np.array(index, np.int32)}
    sent = edge.encode("OUTPUT", jnp.asarray(x[index]), sender, numbers)
    found = edge.decode("GRADIENT", sent, receiver, numbers)
    for i in index:
      known[i] += _int4(x[i] - known[i])
    np.testing.assert_allclose(found, known[index], atol=1e-6)
    tables = sender["known to OUTPUT"], receiver["known to GRADIENT"]
    np.testing.assert_array_equal(*(x[0] for x in tables))
  # An output that stays as it is becomes exact.
  assert np.abs(known[[0, 3]] - x[[0, 3]]).max() < 0.01


def test_what_is_known_of_narrow_outputs_has_their_small_changes():
  like = jax.ShapeDtypeStruct((1, 4), jnp.bfloat16)
  batch = {"index": jax.ShapeDtypeStruct((1,), jnp.int32)}
  message = reducers.MessageCodec(codecs.Quantize(2, 4))
  edge = _edge(message, like, ("index", 1), batch)
  sender, numbers = edge.init("OUTPUT", 0), {"index": np.zeros(1, np.int32)}
  x = jnp.asarray([[1.0, 0.3, 0.7, 0.2]], jnp.bfloat16)
  for _ in range(12):
    edge.encode("OUTPUT", x, sender, numbers)
  (known,) = sender["known to OUTPUT"]
  assert known.dtype == jnp.float32
  np.testing.assert_allclose(known[0], x[0].astype(jnp.float32), atol=1e-3)


@pytest.mark.parametrize("feedback", [None, reducers.ErrorFeedback()])
def test_mean_error_of_a_constant_output_vanishes_with_feedback(feedback):
  message = reducers.MessageCodec(codecs.Quantize(2, 8), feedback)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)
  edge = _edge(message, x)
  sender, errors = edge.init("OUTPUT", 0), []
  for _ in range(64):
    sent = edge.encode("OUTPUT", x, sender, None)
    errors.append(edge.decode("GRADIENT", sent, {}, None) - x)
  means = [float(jnp.abs(sum(errors[:n]) / n).max()) for n in (4, 16, 64)]
  if feedback is None:
    assert min(means) > 0.3
  else:
    # The sum of all errors is the last residual, so the mean falls as 1 / n.
    assert means[2] < means[1] < means[0] and means[2] < 0.03


def test_edges_of_other_numbers_draw_other_random_numbers():
  codec = codecs.Quantize(2, 64, rounding="stochastic")
  x = jnp.linspace(-1.0, 1.0, 64)
  edge = _edge(reducers.MessageCodec(codec), x)
  first, same, other = (
    [y.tolist() for y in edge.encode("OUTPUT", x, edge.init("OUTPUT", n), None)]
    for n in (0, 0, 1)
  )
  assert first == same != other


def test_each_edge_of_a_table_draws_by_a_number_of_its_own():
  """Outputs for stage s have 2 s + 1, and gradients for it 2 s + 2."""
  table = pipeline.make_table("1f1b", 3, 2)

  def work(process, peers):
    del peers
    coded = process.init_state(optax.sgd(0.1)).edges
    return {
      (stage, sends): int(state.step) >> 24
      for stage, edges in coded.items()
      for sends, state in edges.items()
    }

  found = _training.processes(
    small.layers(small.UNLIKE), table, work, small.UNLIKE, edges=INT4
  )
  assert found == [
    {(0, "OUTPUT"): 3},
    {(1, "OUTPUT"): 5, (1, "GRADIENT"): 2},
    {(2, "GRADIENT"): 4},
  ]


def test_integers_cross_as_they_are():
  value = {
    "ids": jnp.arange(3), "there": jnp.array([True, False, True]),
    "x": jnp.array([7.0, 1.0]), "y": jnp.array([5, 4, 3]),
  }  # fmt: skip
  edge = _edge(INT4, value)
  sent = edge.encode("OUTPUT", value, edge.init("OUTPUT", 0), None)
  found = edge.decode("GRADIENT", sent, {}, None)
  assert jax.tree.map(lambda x: x.tolist(), found) == {
    "ids": [0, 1, 2], "there": [True, False, True],
    "x": [7.0, 1.0], "y": [5, 4, 3],
  }  # fmt: skip


def _train(table, batches, *, edges=None, folder=None, resume=False, **options):
  """Returns the bits of each process's end, the losses and sent bytes."""

  def work(process, peers):
    sent, send = [0], peers.send

    def counted(to, tag, arrays):
      if tag.kind in (1, 2):
        sent[0] += sum(np.asarray(x).nbytes for x in arrays)
      send(to, tag, arrays)

    peers.send = counted
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = process.init_state(optimizer)
    if resume:
      state = process.restore(folder, optimizer)
    count, losses = table.num_iterations, []
    for i in range(state.step, len(batches), count):
      state, metrics = process.run(state, batches[i : i + count])
      losses += [x["loss"] for x in metrics]
      if folder is not None and not resume and i == count:
        process.save(folder, state)
    bits = [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]
    return bits, losses, sent[0], process.edge_bytes

  return _training.processes(
    small.layers(small.UNLIKE), table, work, small.UNLIKE, edges=edges,
    **options,
  )  # fmt: skip


def _batches(number, table):
  rows = _MICRO * table.num_microbatches
  return _training.of_first(small.batches(number, 1, rows, small.UNLIKE))


@pytest.mark.parametrize(
  ("table", "number"),
  [
    (("1f1b", 2, 2), 2),
    pytest.param(("1f1b", 3, 4), 4, marks=pytest.mark.slow),
    pytest.param(("zb_h1", 3, 4), 4, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_coded_edges_train_and_dense_ones_have_the_same_bits(table, number):
  table = pipeline.make_table(*table)
  batches = _batches(number, table)
  plain = _train(table, batches)
  dense = _train(table, batches, edges=reducers.MessageCodec(codecs.Dense()))
  coded = _train(table, batches, edges=INT4)
  for one, other in zip(plain, dense, strict=True):
    assert one[0] == other[0][: len(one[0])] and one[1] == other[1]
  losses = plain[0][1], coded[0][1]
  assert losses[0] != losses[1]
  np.testing.assert_allclose(*losses, rtol=0.2)
  for found in (plain, dense, coded):
    assert sum(x[2] for x in found) == len(batches) * found[0][3]


def test_outputs_that_are_known_cross_a_table_as_their_changes():
  """Without loss in the codec a stage receives what was sent."""
  table = pipeline.make_table("1f1b", 2, 2)
  batches = _batches(2, table)
  rows = _MICRO * table.num_microbatches
  numbered = [x | {"index": np.arange(rows, dtype=np.int32)} for x in batches]
  microbatch = _training.microbatch(small.UNLIKE)
  microbatch |= {"index": jax.ShapeDtypeStruct((_MICRO,), jnp.int32)}
  dense = reducers.MessageCodec(codecs.Dense())
  _, wanted, *_ = _train(table, batches)[0]
  for coded, same in ((dense, True), (INT4, False)):
    _, found, *_ = _train(
      table, numbered, edges=coded, edge_samples=("index", rows),
      microbatch=microbatch,
    )[0]  # fmt: skip
    assert np.allclose(found, wanted, rtol=1e-5) == same


@pytest.mark.slow
def test_resumed_edges_have_the_same_bits(tmp_path):
  table = pipeline.ours(2, 2, window=2, num_iterations=2)
  batches = _batches(6, table)
  edges = reducers.MessageCodec(
    codecs.Quantize(4, 4, rounding="stochastic"), reducers.ErrorFeedback()
  )
  wanted = _train(table, batches, edges=edges, folder=tmp_path)
  found = _train(table, batches, edges=edges, folder=tmp_path, resume=True)
  assert [x[0] for x in found] == [x[0] for x in wanted]


def test_bits_of_the_codec_are_the_bytes_on_the_wire():
  codec = codecs.Quantize(4)
  like = jax.ShapeDtypeStruct((16, 512), jnp.float32)
  edge = _edge(reducers.MessageCodec(codec), like)
  assert abs(8 * states.num_bytes(edge.kinds) / codec.num_bits(like) - 1) < 0.03


def test_wrong_edges_raise():
  def make(**options):
    table = pipeline.make_table("1f1b", 2, 2)

    def work(peers):
      _training.process(small.layers(), table, peers=peers, **options)

    in_threads(2, work)

  with pytest.raises(ValueError, match=r"`edges` must be .*MessageCodec"):
    make(edges=codecs.Quantize(4))
  with pytest.raises(ValueError, match="`edge_samples` must name a key"):
    make(edges=INT4, edge_samples=("index", 5))
  # The numbers of other samples than those of the outputs.
  shapes = _training.microbatch()
  shapes |= {"index": jax.ShapeDtypeStruct((7,), jnp.int32)}
  with pytest.raises(ValueError, match="`edge_samples` must name a key"):
    make(edges=INT4, edge_samples=("index", 5), microbatch=shapes)


@pytest.mark.parametrize("last", [-1, 0, 1, 2])
def test_sample_numbers_beyond_the_last_are_refused(last, monkeypatch):
  class Segment:
    def __init__(self, part, updates, state, batches, timeline):
      self.state = state

    def run(self):
      return self.state, ["ran"]

  monkeypatch.setattr(_segment, "Segment", Segment)
  table = pipeline.make_table("1f1b", 1, 2)
  batch = _batches(1, table)[0] | {"index": np.array([0, 1, 1, last])}
  micro = jax.tree.map(lambda x: x[: len(x) // 2], batch)
  process = pipeline.StageProcess(
    pipeline.cut_layers(small.layers(small.UNLIKE), 1),
    small.loss, table, micro, inputs="x", edges=INT4,
    edge_samples=("index", 2),
  )  # fmt: skip
  state = process.init_state(optax.sgd(0.1))
  if last in (0, 1):
    assert process.run(state, [batch]) == (state, ["ran"])
    return
  with _refusals.refused("batches", "from 0 to 1 in 'index', the `edge_"):
    process.run(state, [batch])
