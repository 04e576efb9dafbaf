"""Models of other frameworks and meshes, as users write them."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from tests.experiments import _loading

FOLDER = _loading.FOLDER / "own_models"


def run(name, monkeypatch, num_steps):
  pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
  monkeypatch.syspath_prepend(FOLDER)
  for module in ("digits", "functions"):
    monkeypatch.setitem(
      __import__("sys").modules,
      module,
      _loading.load(module, f"own_models/{module}.py", monkeypatch),
    )
  with jax.numpy_dtype_promotion("standard"):  # As a user has it.
    module = _loading.load(f"own_{name}", f"own_models/{name}.py", monkeypatch)
    return module.main(num_steps)


@pytest.mark.parametrize(
  ("name", "num_steps"),
  [
    ("functions", 60),
    ("linen_network", 20),
    ("nnx_network", 40),
    ("equinox_network", 30),
  ],
)
def test_network_learns_digits(name, num_steps, monkeypatch, capsys):
  if name == "equinox_network" and not importlib.util.find_spec("equinox"):
    pytest.skip("Equinox is not installed: pip install equinox")
  assert run(name, monkeypatch, num_steps) > 0.7
  assert "kB sent by each worker" in capsys.readouterr().out


def test_only_adapters_are_sent(monkeypatch):
  accuracy, sent = run("lora", monkeypatch, 20)
  adapters = 4 * (64 * 4 + 4 * 128 + 128 * 10)
  # 4 rounds of a ring of 4 workers.
  assert sent == 4 * 2 * 3 / 4 * adapters
  assert accuracy > 0.7


def test_sharded_worker_takes_the_same_steps(monkeypatch):
  accuracy, apart = run("fsdp_mesh", monkeypatch, 20)
  assert apart < 1e-5
  assert accuracy > 0.5


@pytest.mark.smoke
@pytest.mark.slow
def test_whole_loop_resumes_with_the_same_losses(monkeypatch, tmp_path, capsys):
  loop = _loading.load("whole_loop", "own_models/whole_loop.py", monkeypatch)
  with jax.numpy_dtype_promotion("standard"):
    whole, found = loop.main(tmp_path / "whole", num_epochs=4)
    loop.main(tmp_path / "part", num_epochs=2)
    rest, again = loop.main(tmp_path / "part", num_epochs=4)
  assert "resumed after epoch 2" in capsys.readouterr().out
  assert rest == whole[2 * loop.STEPS :]
  assert again == found
  assert found["anchor"] > 0.7 and found["ema"] > 0.7


def plain_loop(loop, num_epochs, dtype):
  """The same training by Flax and Optax alone, on one worker's samples."""
  net = loop.Network(dtype, nnx.Rngs(0))
  graph, params, stats, rest = nnx.split(net, nnx.Param, nnx.BatchStat, ...)
  optimizer = loop.optimize()

  @jax.jit
  def step(number, params, stats, state, batch):
    def loss_fn(params):
      net = nnx.merge(graph, params, stats, rest, copy=True)
      net.train()
      key = jax.random.fold_in(jax.random.key(2), number)
      nnx.reseed(net, dropout=jax.random.fold_in(key, 0))
      losses = optax.softmax_cross_entropy_with_integer_labels(
        net(batch["x"]).astype(jnp.float32), batch["label"]
      )
      return losses.mean(), nnx.state(net, nnx.BatchStat)

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    # The average is that of the parameters after the last whole round.
    ends = (number % loop.STEPS + 1) % loop.INTERVAL == 0
    return loss, params, new, state, ends

  state, number, losses = optimizer.init(params), 0, []
  anchor = ema = params
  own, test = loop.samples(1)
  for epoch in range(num_epochs):
    for batch in loop.batches(own, epoch):
      batch = {name: x[0] for name, x in batch.items()}
      loss, params, stats, state, ends = step(
        number, params, stats, state, batch
      )
      anchor = params if ends else anchor
      ema = jax.tree.map(
        lambda e, a: loop.DECAY * e + (1 - loop.DECAY) * a, ema, anchor
      )
      losses.append(float(loss))
      number += 1
    anchor = params

  def accuracy(params):
    net = nnx.merge(graph, params, stats, rest, copy=True)
    net.eval()
    return float((jnp.argmax(net(test["x"]), -1) == test["label"]).mean())

  return losses, {"anchor": accuracy(anchor), "ema": accuracy(ema)}


@pytest.mark.parametrize(
  ("dtype", "rtol"),
  # A rounding of bfloat16 that falls the other way is 0.4 %.
  [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)],
)
def test_whole_loop_of_one_worker_is_plain_jax(
  dtype, rtol, monkeypatch, tmp_path
):
  loop = _loading.load("whole_loop", "own_models/whole_loop.py", monkeypatch)

  # DiLoCo's outer momentum and four bits act on one worker, too; averaging,
  # also at an epoch's early end, leaves its steps as they are.
  def average(inner, axis):
    return jdist.local_sgd(inner, loop.INTERVAL, axis=axis)

  monkeypatch.setattr(loop, "distribute", average)
  with jax.numpy_dtype_promotion("standard"):
    losses, found = loop.main(tmp_path, 1, 3, dtype)
    wanted, figures = plain_loop(loop, 3, dtype)
  np.testing.assert_allclose(losses, wanted, rtol=rtol)
  for name, value in figures.items():
    # Ten samples of 1,000 may lie on the other side in bfloat16.
    assert abs(found[name] - value) <= (1e-6 if dtype == jnp.float32 else 0.01)
