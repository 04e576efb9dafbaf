"""The compiled programs of a server's updates, shared by equal learners."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import training, transforms
from jdist.server import _message_codec
from jdist.server.h_ps import _local_step

PyTree = Any


class ServerModel(NamedTuple):
  """State that a server keeps of a model.

  Attributes:
    params: the parameters.
    opt_state: the server's optimizer.
    model_state: batch statistics and the like.
  """

  params: PyTree
  opt_state: PyTree
  model_state: PyTree


class ServerPrograms(NamedTuple):
  """Compiled programs: an update of one task, or of several one by one.

  Attributes:
    step: `(model, *task) -> model, push state, loss`.
    first: `(model, *task) -> total, push state`.
    add: `(total, model, *task) -> total, push state`.
    update: `(model, total) -> model, loss`.
    send: `(params, pull state) -> params as the worker has them, pull state`.
  """

  step: Callable[..., tuple[ServerModel, PyTree, jax.Array]]
  first: Callable[..., tuple[PyTree, PyTree]]
  add: Callable[..., tuple[PyTree, PyTree]]
  update: Callable[..., tuple[ServerModel, jax.Array]]
  send: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


@functools.lru_cache(maxsize=16)
def server_programs(
  loss_fn: Callable[..., Any],
  optimizer: optax.GradientTransformation,
  compensation: float,
  push: _message_codec.MessageCodec | None,
  pull: _message_codec.MessageCodec | None,
  local_step: _local_step.LocalStep | None = None,
) -> ServerPrograms:
  """Builds the programs of `GradientLearner`, once for equal arguments.

  With a local step a worker's push state is the codec's and that of the step.
  """
  optimizer = optax.with_extra_args_support(optimizer)
  compute = training.make_gradient(loss_fn)

  def zeros(model: ServerModel) -> PyTree:
    tree = (model.params, model.model_state)
    return (*jax.tree.map(jnp.zeros_like, tree), jnp.zeros(()))

  def add(
    total: PyTree,
    model: ServerModel,
    read: PyTree,
    state_read: PyTree,
    batch: PyTree,
    push_state: PyTree,
    key: jax.Array,
    number: jax.Array,
    weight: jax.Array,
    share: jax.Array,
    control: jax.Array,
  ) -> tuple[PyTree, PyTree]:
    if local_step is not None:
      push_state, last = push_state
      held = read
      read, velocity = local_step.move(held, last, control)
    gradient = compute(read, state_read, batch, jax.random.fold_in(key, number))
    grads = gradient.grads
    if push is not None:
      buffer, push_state = push.encode(grads, push_state)
      grads = push.decode(buffer, grads)
    if local_step is not None:
      last = _local_step.LocalStepState(gradient.grads, held, velocity)
      push_state = (push_state, last)

    def one(total: Any, g: Any, old: Any, new: Any) -> Any:
      if compensation:
        g = transforms.compensated(g, compensation, new, old)
      return total + weight.astype(g.dtype) * g

    sums = jax.tree.map(one, total[0], grads, read, model.params)
    change = jax.tree.map(
      lambda t, new, old: (
        t + share.astype(t.dtype) * (new - old)
        if jnp.issubdtype(t.dtype, jnp.floating)
        else new
      ),
      total[1], gradient.model_state, state_read,
    )  # fmt: skip
    return (sums, change, total[2] + share * gradient.loss), push_state

  def update(
    model: ServerModel, total: PyTree
  ) -> tuple[ServerModel, jax.Array]:
    grads, change, loss = total
    updates, opt_state = optimizer.update(
      grads, model.opt_state, model.params, loss=loss, value=loss
    )
    model_state = jax.tree.map(
      lambda x, c: x + c if jnp.issubdtype(x.dtype, jnp.floating) else c,
      model.model_state, change,
    )  # fmt: skip
    params = optax.apply_updates(model.params, updates)
    return ServerModel(params, opt_state, model_state), loss

  def first(model: ServerModel, *task: Any) -> tuple[PyTree, PyTree]:
    return add(zeros(model), model, *task)

  # Most updates are of one task: one program and not three.
  def step(
    model: ServerModel, *task: Any
  ) -> tuple[ServerModel, PyTree, jax.Array]:
    total, push_state = first(model, *task)
    model, loss = update(model, total)
    return model, push_state, loss

  def send(params: PyTree, pull_state: PyTree) -> tuple[PyTree, PyTree]:
    assert pull is not None
    buffer, pull_state = pull.encode(params, pull_state)
    return pull.decode(buffer, params), pull_state

  return ServerPrograms(
    *(jax.jit(one) for one in (step, first, add, update, send))
  )
