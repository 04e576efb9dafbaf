"""The optimizers whose bits are kept, as they were built before the rebuild."""

import jax.numpy as jnp
import optax

import jdist
from jdist import codecs, collectives, transforms
from jdist.transforms import intervals

SGD = optax.sgd(0.05, momentum=0.9)
PLAIN = optax.sgd(0.05)
INT4 = collectives.carry(codecs.Quantize(4))
INT8 = collectives.carry(codecs.Quantize(8))
ERROR = transforms.ErrorFeedback()
STREAM = transforms.Stream(max_bytes=512)


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
  "msdpu": lambda axis: jdist.msdpu(SGD, 4, 0.05, axis=axis),
  "msdpu fixed": lambda axis: jdist.msdpu(
    SGD, intervals.fixed(4), 0.05, axis=axis
  ),
  "fed_prox": lambda axis: transforms.fed_prox(SGD, 4, axis=axis),
  "easgd": lambda axis: transforms.easgd(SGD, 4, axis=axis),
  "scaffold": lambda axis: transforms.scaffold(PLAIN, 4, 0.05, axis=axis),
  "scaffold momentum": lambda axis: transforms.scaffold(
    SGD, 4, 0.5, 0.8, axis=axis
  ),
  "slow_mo": lambda axis: transforms.slow_mo(SGD, 4, 0.05, axis=axis),
  "slow_mo average": lambda axis: transforms.slow_mo(
    SGD,
    4,
    optax.cosine_decay_schedule(0.05, 30),
    0.9,
    0.6,
    axis=axis,
    buffers="average",
  ),
  "slow_mo reset": lambda axis: transforms.slow_mo(
    SGD, 4, 0.05, axis=axis, buffers="reset"
  ),
  "cocod": lambda axis: transforms.cocod(SGD, 4, axis=axis),
  "overlap_local_sgd": lambda axis: transforms.overlap_local_sgd(
    SGD, 4, 0.6, 0.3, axis=axis
  ),
  "od_sgd": lambda axis: transforms.od_sgd(SGD, 0.05, axis=axis),
  "od_sgd warm-up": lambda axis: transforms.od_sgd(
    SGD, 0.05, axis=axis, warmup_steps=5
  ),
  "streaming_diloco": lambda axis: transforms.streaming_diloco(
    SGD, 4, 2, axis=axis
  ),
  "streaming_diloco at once": lambda axis: transforms.streaming_diloco(
    SGD, 4, 3, axis=axis, delay_steps=0
  ),
  "qsgd": lambda axis: transforms.qsgd(SGD, axis=axis),
  "qsgd exchange": lambda axis: transforms.qsgd(
    SGD, axis=axis, wire="exchange"
  ),
  "terngrad": lambda axis: transforms.terngrad(SGD, axis=axis),
  "signsgd": lambda axis: transforms.signsgd(optax.sgd(1e-3), 0.9, axis=axis),
  "ef_signsgd": lambda axis: transforms.ef_signsgd(SGD, axis=axis),
  "one_bit_adam": lambda axis: transforms.one_bit_adam(1e-3, 5, axis=axis),
  "topk_sgd": lambda axis: transforms.topk_sgd(SGD, 0.05, axis=axis),
  "dgc": lambda axis: transforms.dgc(
    PLAIN, 0.05, axis=axis, threshold=1.0, steps_per_phase=4
  ),
  "powersgd": lambda axis: transforms.powersgd(SGD, axis=axis),
  "demo": lambda axis: transforms.demo(optax.sgd(1e-3), axis=axis),
  "sparse_loco": lambda axis: transforms.sparse_loco(
    SGD, 4, 1 / 8, axis=axis, chunk=64
  ),
  "muloco": lambda axis: transforms.muloco(0.02, 4, axis=axis),
  "mp2": lambda axis: transforms.mp2(
    optax.adam(1e-2), Halves, predict, jnp.float32(0.5), axis=axis
  ),
  "diloco int4": lambda axis: jdist.diloco(
    SGD, 4, axis=axis, reducer=INT4, feedback=ERROR
  ),
  "diloco int4 bfloat16": lambda axis: jdist.diloco(
    SGD, 4, axis=axis, reducer=INT4, feedback=ERROR
  ),
  "local int8": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, reducer=INT8, feedback=ERROR
  ),
  "local topk": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    reducer=collectives.carry(codecs.TopK(0.1)),
    feedback=ERROR,
  ),
  "local powersgd": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, reducer=collectives.PowerSGD(2), feedback=ERROR
  ),
  "local stochastic": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    seed=3,
    reducer=collectives.carry(codecs.Quantize(4, rounding="stochastic")),
  ),
  "delayed outer": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    outer=optax.sgd(0.7, 0.9, nesterov=True),
    delay_rounds=1,
    carry=None,
  ),
  "delayed warm-up": lambda axis: jdist.local_steps(
    SGD,
    intervals.post_local(6, 4),
    axis=axis,
    delay_rounds=1,
    carry=0.3,
    delay_after_step=6,
  ),
  "steps late": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, delay_rounds=1, delay_steps=2
  ),
  "steps late int8": lambda axis: jdist.local_steps(
    SGD,
    4,
    axis=axis,
    delay_rounds=1,
    delay_steps=2,
    carry=0.5,
    reducer=INT8,
    feedback=ERROR,
  ),
  "streamed cocod": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, delay_rounds=1, carry=1.0, stream=STREAM
  ),
  "streamed msdpu": lambda axis: jdist.msdpu(
    SGD, intervals.fixed(4), 0.05, axis=axis, stream=STREAM
  ),
  "streamed msdpu int8": lambda axis: jdist.msdpu(
    SGD,
    intervals.fixed(4),
    0.05,
    axis=axis,
    stream=STREAM,
    reducer=INT8,
    feedback=ERROR,
  ),
  "streamed adaptive": lambda axis: jdist.msdpu(
    SGD, 4, 0.05, axis=axis, stream=STREAM
  ),
  "streamed adaptive int4": lambda axis: jdist.msdpu(
    SGD, 4, 0.05, axis=axis, stream=STREAM, reducer=INT4, feedback=ERROR
  ),
  "streamed steps late": lambda axis: jdist.local_steps(
    SGD, 4, axis=axis, delay_rounds=1, delay_steps=2, stream=STREAM
  ),
  "host local_sgd": lambda axis: jdist.local_sgd(SGD, 4, axis=axis),
  "host diloco": lambda axis: jdist.diloco(SGD, 4, axis=axis),
  "host streamed msdpu": lambda axis: jdist.msdpu(
    SGD, intervals.fixed(4), 0.05, axis=axis, stream=STREAM
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
      axis, collectives.carry(codecs.TopK(0.1)), transforms.EF21()
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
