"""Runs PyTorch's and torchft's methods as one process of several; see run.py.

It needs Python with torch, torchft and numpy, and nothing of jdist.
"""

import datetime
import functools
import platform
import socket
import time
from importlib import metadata

import numpy as np
import problem
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
  default_hooks,
  powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer

_H = problem.INTERVAL
_MINUTES = datetime.timedelta(minutes=10)


class Net(nn.Module):
  """jdist's `cnn` with a dense layer of 512."""

  def __init__(self):
    super().__init__()
    self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
    self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
    self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
    self.dense4 = nn.Linear(2048, 512)
    self.dense5 = nn.Linear(512, 10)

  def forward(self, x):
    """Returns logits."""
    for conv in (self.conv1, self.conv2, self.conv3):
      x = nn.functional.max_pool2d(torch.relu(conv(x)), 2)
    # In jdist's order of height, width and channels.
    x = x.permute(0, 2, 3, 1).flatten(1)
    return self.dense5(torch.relu(self.dense4(x)))


def network(weights):
  """Returns the network with the weights of jdist's."""
  net = Net()
  with torch.no_grad():
    for name, value in weights.items():
      layer, kind = name.split("/")
      part = getattr(net, layer)
      if kind == "bias":
        part.bias.copy_(torch.from_numpy(value))
      elif value.ndim == 4:
        part.weight.copy_(torch.from_numpy(value.transpose(3, 2, 0, 1).copy()))
      else:
        part.weight.copy_(torch.from_numpy(value.T.copy()))
  # PyTorch computes this net faster in this order of axes.
  return net.to(memory_format=torch.channels_last)


class Run:
  """A training run of one worker, without any message.

  Args:
    process: What all methods share.
    seed: The seed of weights and data.
    rate: The learning rate of the worker's SGD.
  """

  def __init__(self, process, seed, rate):
    self.process, self.seed, self.step = process, seed, 0
    self.net = network(process.problem.weights(seed))
    self.optimizer = torch.optim.SGD(
      self.net.parameters(), rate, momentum=problem.MOMENTUM, nesterov=True
    )
    self.model = self.net

  def steps(self, number):
    """Takes steps, and waits for the last one."""
    process = self.process
    for _ in range(number):
      images, labels = process.problem.batch(
        self.seed, self.step, process.host, process.hosts
      )
      self.optimizer.zero_grad()
      found = self.model(process.inputs(images))
      labels = torch.from_numpy(labels.astype(np.int64))
      nn.functional.cross_entropy(found, labels).backward()
      self.optimizer.step()
      self.step += 1

  @torch.no_grad()
  def accuracy(self):
    """Returns the test accuracy, to which each worker adds a part."""
    process = self.process
    images, labels = process.problem.test(process.host, process.hosts)
    found = self.net(process.inputs(images)).argmax(1).numpy()
    both = torch.tensor([float((found == labels).sum()), len(labels)])
    dist.all_reduce(both)
    return float(both[0] / both[1])

  def close(self):
    """Ends what the run has started."""


class Synchronous(Run):
  """DistributedDataParallel, with a hook if one is given."""

  def __init__(self, process, seed, rate, hook=None, bucket_mb=None):
    super().__init__(process, seed, rate)
    self.model = nn.parallel.DistributedDataParallel(
      self.net, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )
    if hook is not None:
      self.model.register_comm_hook(*hook())


def power():
  """Returns the hook of PowerSGD, synchronous for the first steps."""
  state = powerSGD_hook.PowerSGDState(
    None, matrix_approximation_rank=problem.RANK,
    start_powerSGD_iter=problem.WARMUP,
  )  # fmt: skip
  return state, powerSGD_hook.powerSGD_hook


class Averaged(Run):
  """Local steps and a mean of the parameters, by post-local SGD."""

  def __init__(self, process, seed, rate):
    super().__init__(process, seed, rate)
    averager = averagers.PeriodicModelAverager(period=_H, warmup_steps=0)
    averager.step = 1  # Otherwise the first mean is that of the first step.
    self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)


class Elastic(Run):
  """A method of torchft, whose lighthouse is on host 0."""

  def __init__(self, process, seed, rate, wrap):
    import torchft
    from torchft import coordination

    super().__init__(process, seed, rate)
    self.lighthouse = None
    where = [""]
    if not process.host:
      self.lighthouse = coordination.LighthouseServer(
        bind=f"0.0.0.0:{process.free_port()}", min_replicas=process.hosts,
        join_timeout_ms=60000, quorum_tick_ms=10,
      )  # fmt: skip
      port = self.lighthouse.address().rpartition(":")[2]
      where = [f"http://{process.address}:{port}"]
    dist.broadcast_object_list(where)
    # Each host is a replica group of one process, with a store of its own that
    # the others connect to.
    self.store = dist.TCPStore(
      process.own_address, 0, is_master=True, wait_for_workers=False
    )
    self.manager = torchft.Manager(
      pg=torchft.ProcessGroupGloo(timeout=_MINUTES),
      load_state_dict=lambda state: None, state_dict=lambda: {},
      min_replica_size=process.hosts, use_async_quorum=False,
      timeout=_MINUTES, quorum_timeout=_MINUTES, rank=0, world_size=1,
      store_addr=process.own_address, store_port=self.store.port,
      lighthouse_addr=where[0], replica_id=f"host{process.host}",
      hostname=process.own_address, init_sync=False,
    )  # fmt: skip
    self.wrapped = wrap(self)
    self.wrapped.__enter__()

  def close(self):
    """Ends the manager and the lighthouse."""
    self.wrapped.__exit__(None, None, None)
    dist.barrier()
    self.manager.shutdown(wait=False)
    dist.barrier()
    if self.lighthouse is not None:
      self.lighthouse.shutdown()


def torchft_local(run):
  """Returns torchft's Local SGD around a run."""
  from torchft import local_sgd

  return local_sgd.LocalSGD(run.manager, run.net, run.optimizer, _H)


def torchft_diloco(run, parts=1, **options):
  """Returns torchft's DiLoCo around a run, in one or two fragments."""
  from torchft import local_sgd

  fragments = [run.net]
  if parts == 2:
    # The dense layer has nine tenths of the weights.
    rest = [run.net.conv1, run.net.conv2, run.net.conv3, run.net.dense5]
    fragments = [run.net.dense4, nn.ModuleList(rest)]
  outer = [
    torch.optim.SGD(
      x.parameters(), problem.OUTER_RATE, momentum=problem.OUTER_MOMENTUM,
      nesterov=True,
    )
    for x in fragments
  ]  # fmt: skip
  return local_sgd.DiLoCo(
    run.manager, fragments, run.optimizer, outer, _H, use_bucketization=True,
    **options,
  )  # fmt: skip


def _elastic(**options):
  wrap = functools.partial(torchft_diloco, **options)
  return functools.partial(Elastic, wrap=wrap)


METHODS = {
  "alone": Run,
  "DDP": Synchronous,
  "DDP fp16": functools.partial(
    Synchronous, hook=lambda: (None, default_hooks.fp16_compress_hook)
  ),
  # One bucket: with two, the hook's callbacks start their sums in any order,
  # and gloo ends the processes.
  "PowerSGD": functools.partial(Synchronous, hook=power, bucket_mb=100),
  "averaging": Averaged,
  "torchft Local SGD": functools.partial(Elastic, wrap=torchft_local),
  "torchft DiLoCo": _elastic(),
  "torchft DiLoCo quantized": _elastic(should_quantize=True),
  # All of a round's mean is sent under the last seven steps of its own.
  "torchft DiLoCo late": _elastic(fragment_sync_delay=_H - 1),
}


class Process:
  """This process's worker, and what all methods share."""

  def __init__(self, options):
    torch.set_num_threads(1)
    self.address, _, port = options.address.rpartition(":")
    self.host, self.hosts = options.host, options.hosts
    dist.init_process_group(
      "gloo", init_method=f"tcp://{self.address}:{port}", rank=self.host,
      world_size=self.hosts, timeout=_MINUTES,
    )  # fmt: skip
    self.problem = problem.Problem(options.problem)
    name = socket.gethostname()
    network = self.address.startswith("10.")
    self.own_address = name if network else self.address
    self.runs = {}

  def free_port(self):
    """Returns a port that nothing uses."""
    with socket.socket() as found:
      found.bind(("", 0))
      return found.getsockname()[1]

  def inputs(self, images):
    """Returns images as the network takes them."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    return (x - self.problem.mean) / self.problem.std

  def answer(self, request):
    """Answers a request of `run.py`."""
    if request["do"] == "versions":
      names = ("torch", "torchft", "numpy")
      found = {name: metadata.version(name) for name in names}
      return found | {"python": platform.python_version()}
    if request["do"] == "count":
      return {"counted": None}  # They count nothing.
    method = request["method"]
    if request["do"] == "train":
      run = METHODS[method](self, request["seed"], request["rate"])
      curve = problem.train(
        run, request["limit"], request["target"], request["every"]
      )
      run.close()
      return {"curve": curve}
    if method not in self.runs:
      self.runs[method] = METHODS[method](self, 0, 0.01)
    run = self.runs[method]
    started_s = time.perf_counter()
    run.steps(request["steps"])
    return {"seconds": time.perf_counter() - started_s}


if __name__ == "__main__":
  problem.main(__doc__, Process)
