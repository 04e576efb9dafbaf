"""The optimizers whose bits are kept, as they are built now."""

import jax.numpy as jnp
import optax

import jdist
from jdist import codecs, methods, reducers, transforms
from jdist.transforms import intervals

SGD = optax.sgd(0.05, momentum=0.9)
PLAIN = optax.sgd(0.05)
ERROR = reducers.ErrorFeedback()
INT4 = jdist.Compression(codecs.Quantize(4), ERROR)
INT8 = jdist.Compression(codecs.Quantize(8), ERROR)
STREAM = transforms.Stream(max_bytes=512)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)


class Halves:
  """Cuts the tree between its two layers."""

  split = staticmethod(
    lambda t: ({"a": t["a"], "b": t["b"]}, {"c": t["c"], "d": t["d"]})
  )
  join = staticmethod(lambda front, rest: front | rest)


def predict(theta, front):
  return {
    "c": theta * front["a"].T[:, :5],
    "d": theta * front["b"].mean(),
  }


CASES = {
  "ssgd": lambda axis: jdist.ssgd(SGD, axis=axis),
  "ssgd adam": lambda axis: jdist.ssgd(optax.adam(1e-2), axis=axis),
  "local_sgd": lambda axis: jdist.local_sgd(SGD, 4, axis=axis),
  "post_local_sgd": lambda axis: jdist.post_local_sgd(SGD, 4, 10, axis=axis),
  "diloco": lambda axis: jdist.diloco(optax.adamw(1e-2), 4, axis=axis),
  "msdpu": lambda axis: jdist.msdpu(
    SGD,
    intervals.msdpu(4, 0.05),
    0.05,
    axis=axis,
    overlap=transforms.Delayed(carry=None),
  ),
  "msdpu fixed": lambda axis: jdist.msdpu(
    SGD,
    intervals.fixed(4),
    0.05,
    axis=axis,
    overlap=transforms.Delayed(carry=None),
  ),
  "fed_prox": lambda axis: methods.fed_prox(SGD, 4, axis=axis),
  "easgd": lambda axis: methods.easgd(SGD, 4, axis=axis),
  "scaffold": lambda axis: methods.scaffold(PLAIN, 4, 0.05, axis=axis),
  "scaffold momentum": lambda axis: methods.scaffold(
    SGD, 4, 0.5, 0.8, axis=axis
  ),
  "slow_mo": lambda axis: methods.slow_mo(SGD, 4, 0.05, axis=axis),
  "slow_mo average": lambda axis: methods.slow_mo(
    SGD,
    4,
    optax.cosine_decay_schedule(0.05, 30),
    0.9,
    0.6,
    axis=axis,
    buffers="average",
  ),
  "slow_mo reset": lambda axis: methods.slow_mo(
    SGD, 4, 0.05, axis=axis, buffers="reset"
  ),
  "cocod": lambda axis: methods.cocod(SGD, 4, axis=axis),
  "overlap_local_sgd": lambda axis: methods.overlap_local_sgd(
    SGD, 4, 0.6, 0.3, axis=axis
  ),
  "od_sgd": lambda axis: methods.od_sgd(SGD, 0.05, axis=axis),
  "od_sgd warm-up": lambda axis: methods.od_sgd(
    SGD, 0.05, axis=axis, warmup_steps=5
  ),
  "streaming_diloco": lambda axis: methods.streaming_diloco(
    SGD, 4, 2, axis=axis
  ),
  "streaming_diloco at once": lambda axis: methods.streaming_diloco(
    SGD, 4, 3, axis=axis, delay_steps=0
  ),
  "qsgd": lambda axis: methods.qsgd(SGD, axis=axis),
  "qsgd exchange": lambda axis: methods.qsgd(SGD, axis=axis, wire="all_to_all"),
  "terngrad": lambda axis: methods.terngrad(SGD, axis=axis),
  "signsgd": lambda axis: methods.signsgd(optax.sgd(1e-3), 0.9, axis=axis),
  "ef_signsgd": lambda axis: methods.ef_signsgd(SGD, axis=axis),
  "one_bit_adam": lambda axis: methods.one_bit_adam(1e-3, 5, axis=axis),
  "topk_sgd": lambda axis: methods.topk_sgd(SGD, 0.05, axis=axis),
  "dgc": lambda axis: methods.dgc(
    PLAIN, 0.05, axis=axis, threshold=1.0, steps_per_phase=4
  ),
  "powersgd": lambda axis: methods.powersgd(SGD, axis=axis),
  "demo": lambda axis: methods.demo(optax.sgd(1e-3), axis=axis),
  "sparse_loco": lambda axis: methods.sparse_loco(
    SGD, 4, 1 / 8, axis=axis, chunk=64
  ),
  "muloco": lambda axis: methods.muloco(0.02, 4, axis=axis),
  "mp2": lambda axis: methods.mp2(
    optax.adam(1e-2), Halves, predict, jnp.float32(0.5), axis=axis
  ),
  "diloco int4": lambda axis: jdist.diloco(SGD, 4, axis=axis, compression=INT4),
  "diloco int4 bfloat16": lambda axis: jdist.diloco(
    SGD, 4, axis=axis, compression=INT4
  ),
  "local int8": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, compression=INT8
  ),
  "local topk": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    compression=jdist.Compression(codecs.TopK(0.1), ERROR),
  ),
  "local powersgd": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    compression=jdist.Compression(reducers.PowerSGD(2), ERROR),
  ),
  "local stochastic": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    compression=jdist.Compression(
      codecs.Quantize(4, rounding="stochastic"), seed=3
    ),
  ),
  "delayed outer": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    rule=NESTEROV,
    overlap=transforms.Delayed(carry=None),
  ),
  "delayed warm-up": lambda axis: jdist.local_steps(
    SGD,
    intervals.post_local(6, 4),
    axis=axis,
    overlap=transforms.Delayed(carry=0.3, after_step=6),
  ),
  "steps late": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, overlap=transforms.Delayed(2)
  ),
  "steps late int8": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    overlap=transforms.Delayed(2, carry=0.5),
    compression=INT8,
  ),
  "streamed cocod": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, overlap=transforms.Delayed(carry=1.0, stream=STREAM)
  ),
  "streamed msdpu": lambda axis: jdist.msdpu(
    SGD,
    intervals.fixed(4),
    0.05,
    axis=axis,
    overlap=transforms.Delayed(carry=None, stream=STREAM),
  ),
  "streamed msdpu int8": lambda axis: jdist.msdpu(
    SGD,
    intervals.fixed(4),
    0.05,
    axis=axis,
    overlap=transforms.Delayed(carry=None, stream=STREAM),
    compression=INT8,
  ),
  "streamed adaptive": lambda axis: jdist.msdpu(
    SGD,
    intervals.msdpu(4, 0.05),
    0.05,
    axis=axis,
    overlap=transforms.Delayed(carry=None, stream=STREAM),
  ),
  "streamed adaptive int4": lambda axis: jdist.msdpu(
    SGD,
    intervals.msdpu(4, 0.05),
    0.05,
    axis=axis,
    overlap=transforms.Delayed(carry=None, stream=STREAM),
    compression=INT4,
  ),
  "streamed steps late": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, overlap=transforms.Delayed(2, stream=STREAM)
  ),
  "host local_sgd": lambda axis: jdist.local_sgd(SGD, 4, axis=axis),
  "host diloco": lambda axis: jdist.diloco(SGD, 4, axis=axis),
  "host streamed msdpu": lambda axis: jdist.msdpu(
    SGD,
    intervals.fixed(4),
    0.05,
    axis=axis,
    overlap=transforms.Delayed(carry=None, stream=STREAM),
  ),
  "update_first": lambda axis: transforms.update_first(
    SGD, axis=axis, max_bytes=512
  ),
  "update_first scatter": lambda axis: transforms.update_first(
    SGD, axis=axis, max_bytes=512, scatter=True
  ),
  "delay_gradients": lambda axis: transforms.delay_gradients(
    jdist.ssgd(SGD, axis=axis), 2
  ),
  "ef21": lambda axis: optax.chain(
    jdist.average_gradients(
      axis, jdist.Compression(codecs.TopK(0.1), reducers.EF21())
    ),
    SGD,
  ),
}
# Run by the trainer, with these options.
FITTED = {
  "streamed adaptive": {"stream_steps": (1, 2, 4), "host_rounds": False},
  "streamed adaptive int4": {"stream_steps": (1, 2, 4), "host_rounds": False},
  "streamed steps late": {"stream_steps": (1, 2), "host_rounds": False},
  "host local_sgd": {"host_rounds": True},
  "host diloco": {"host_rounds": True},
  "host streamed msdpu": {"host_rounds": True},
  "update_first": {},
  "update_first scatter": {},
}
