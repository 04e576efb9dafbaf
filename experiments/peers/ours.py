"""Runs jdist's methods as one process of several, by requests; see run.py."""

import functools
import os
import platform
import time

os.environ["XLA_FLAGS"] = " ".join(
  (os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false")
)

import jax
import numpy as np
import optax
import problem

import jdist
from jdist import (
  codecs,
  collectives,
  methods,
  models,
  reducers,
  training,
  transforms,
)
from jdist.transforms import intervals

_H = problem.INTERVAL
_STREAM_STEPS = (1, 2, 4, 8)


def sgd(learning_rate):
  return optax.sgd(learning_rate, momentum=problem.MOMENTUM, nesterov=True)


def int4():
  return jdist.Compression(codecs.Quantize(4), reducers.ErrorFeedback())


def msdpu(learning_rate, axis, compression=None):
  late = transforms.Delayed(carry=None, stream=transforms.Stream())
  return methods.msdpu(
    sgd(learning_rate), intervals.fixed(_H), learning_rate, axis=axis,
    overlap=late, compression=compression,
  )  # fmt: skip


def diloco(learning_rate, axis, interval, compression=None):
  return methods.diloco(
    sgd(learning_rate), interval, problem.OUTER_RATE, problem.OUTER_MOMENTUM,
    axis=axis, compression=compression,
  )  # fmt: skip


METHODS = {
  "SSGD": lambda r, a: methods.ssgd(sgd(r), axis=a),
  "SSGD int4": lambda r, a: methods.ssgd(sgd(r), axis=a, compression=int4()),
  "PowerSGD": lambda r, a: methods.powersgd(sgd(r), problem.RANK, axis=a),
  "Local SGD": lambda r, a: methods.local_sgd(sgd(r), _H, axis=a),
  "Local SGD int4": lambda r, a: methods.local_sgd(
    sgd(r), _H, axis=a, compression=int4()
  ),
  "MSDPU streamed": msdpu,
  "MSDPU streamed int4": lambda r, a: msdpu(r, a, int4()),
  "DiLoCo int4": lambda r, a: diloco(r, a, _H, int4()),
  "DiLoCo int4 H=16": lambda r, a: diloco(r, a, 2 * _H, int4()),
}


class Process:
  """This process's worker, and what all methods share."""

  def __init__(self, options):
    collectives.start_processes(
      options.address, options.hosts, options.host, cpu_devices_per_process=1
    )
    self.workers = jdist.workers(options.hosts)
    self.problem = found = problem.Problem(options.problem)
    self.host, self.hosts = options.host, options.hosts
    self.model = models.build(
      "cnn", input_shape=(32, 32, 1), num_classes=10, hidden_sizes=(512,),
      seed=0,
    )  # fmt: skip
    self.normalize = lambda images: (images - found.mean) / found.std
    self.loss_fn = training.classification_loss(
      self.model.apply, normalize=self.normalize
    )
    self.placed = functools.cache(self._placed)
    self.runs = {}

  def _placed(self, seed, step):
    """Returns the batch of a step, on the devices."""
    images, labels = self.problem.batch(seed, step, self.host, self.hosts)
    return self.workers.place({"image": images[None], "label": labels[None]})

  def params(self, seed):
    """Returns a seed's initial weights."""
    weights = self.problem.weights(seed)
    return {
      layer: {kind: weights[f"{layer}/{kind}"] for kind in kinds}
      for layer, kinds in self.model.params.items()
    }

  def run(self, method):
    """Returns the programs of a method, made once."""
    if method not in self.runs:
      make = Alone if method == "alone" else Run
      self.runs[method] = make(self, method)
    return self.runs[method]

  def answer(self, request):
    """Answers a request of `run.py`."""
    if request["do"] == "versions":
      return {"python": platform.python_version(), "jax": jax.__version__}
    run = self.run(request["method"])
    if request["do"] == "count":
      return {"counted": run.counted_bytes()}
    if request["do"] == "train":
      run.begin(request["seed"], request["rate"])
      return {
        "curve": problem.train(
          run, request["limit"], request["target"], request["every"]
        )
      }
    started_s = time.perf_counter()
    run.steps(request["steps"])
    return {"seconds": time.perf_counter() - started_s}


class Run:
  """A method's training, whose programs serve all rates and seeds."""

  def __init__(self, process, method):
    self.process, self.make = process, METHODS[method]
    self.interval = problem.interval(method)
    self.optimizer = self.at(0.01)
    step = training.make_step(
      process.loss_fn, self.optimizer, axis=process.workers.axis
    )
    self.trainer = training.Trainer(process.workers, step)

    @functools.cache
    def program(control):
      return process.workers.jit(
        functools.partial(step, control=control), donate_argnums=0
      )

    self.program, self.evaluator = program, None
    self.begin(0, 0.01)

  def at(self, rate):
    """Returns the method at a rate."""

    # The rate is a part of the state, so that a new rate compiles nothing.
    @optax.inject_hyperparams
    def made(learning_rate):
      return self.make(learning_rate, self.process.workers.axis)

    return made(learning_rate=rate)

  def begin(self, seed, rate):
    """Begins a run anew."""
    process, self.seed, self.step = self.process, seed, 0
    self.state = training.init_state(
      process.workers, self.at(rate), process.params(seed), process.model.state
    )
    opt_state = self.state.opt_state
    streams = transforms.streams(opt_state)
    self.host = training.RoundHost(
      process.workers, opt_state, stream_steps=_STREAM_STEPS if streams else ()
    )

  def steps(self, number):
    """Takes steps, and waits for the last one."""
    for _ in range(number):
      program = self.program(self.host.control())
      batch = self.process.placed(self.seed, self.step)
      self.state, metrics = program(self.state, batch)
      self.host.follow(self.state.opt_state)
      jax.block_until_ready(metrics)
      self.step += 1
    jax.block_until_ready(self.state)

  def counted_bytes(self):
    """Returns the mean bytes that a worker sends in a step, by `num_bits`."""
    batch = self.process.placed(self.seed, self.step)
    traffic = self.trainer.traffic(self.state, batch)
    steps = 2 * _H
    return traffic.sent_bytes(steps, steps // self.interval) / steps

  def accuracy(self):
    """Returns the test accuracy after all pending updates."""
    if self.evaluator is None:
      process = self.process
      parts = [
        process.problem.test(i, process.hosts) for i in range(process.hosts)
      ]
      images, labels = (np.stack(x) for x in zip(*parts, strict=True))
      batch = {"image": images, "label": labels}
      batch["mask"] = np.ones(labels.shape, np.float32)
      self.evaluator = training.Evaluator(
        process.workers, process.model.apply, [batch],
        normalize=process.normalize, optimizer=self.optimizer,
      )  # fmt: skip
    return self.evaluator(self.state)["accuracy"]


class Alone:
  """The worker's own optimizer, without any message."""

  def __init__(self, process, method):
    del method
    self.process, self.step = process, 0
    self.params, optimizer = process.params(0), sgd(0.01)
    self.opt_state = optimizer.init(self.params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
      def loss_fn(params):
        return process.loss_fn(params, process.model.state, batch, None)[0]

      loss, grads = jax.value_and_grad(loss_fn)(params)
      updates, opt_state = optimizer.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, loss

    self.program = step

  def steps(self, number):
    """Takes steps, and waits for the last one."""
    process = self.process
    for _ in range(number):
      images, labels = process.problem.batch(
        0, self.step, process.host, process.hosts
      )
      self.params, self.opt_state, loss = self.program(
        self.params, self.opt_state, {"image": images, "label": labels}
      )
      loss.block_until_ready()
      self.step += 1
    jax.block_until_ready(self.params)

  def counted_bytes(self):
    """Returns 0: nothing is sent."""
    return 0


if __name__ == "__main__":
  problem.main(__doc__, Process)
