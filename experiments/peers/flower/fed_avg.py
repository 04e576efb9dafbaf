"""FedAvg of the peers' net as a Flower app, which `on_hosts.py` runs.

Rounds have the steps of jdist's Local SGD. A worker's momentum begins anew in
each round: Flower starts a process for each message.
"""

import json
import os
import sys
import time

from flwr.app import (
  ArrayRecord,
  ConfigRecord,
  Message,
  MetricRecord,
  RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

# Where PEERS_FOLDER says: Flower copies this file elsewhere.
sys.path.append(os.environ["PEERS_FOLDER"])

client = ClientApp()
server = ServerApp()


class Worker:
  """What `theirs.Run` needs of a process."""

  def __init__(self, host):
    import problem
    import torch

    torch.set_num_threads(1)
    self.problem = problem.Problem(os.environ["PEERS_PROBLEM"])
    self.host, self.hosts = host, 2

  def inputs(self, images):
    """Returns images as the network takes them."""
    import theirs

    return theirs.Process.inputs(self, images)


def run_of(host, rate, arrays=None):
  """Returns a run of a worker, from the server's weights if given."""
  import problem
  import theirs

  run = theirs.Run(Worker(host), problem.SEEDS[0], rate)
  if arrays is not None:
    run.net.load_state_dict(arrays.to_torch_state_dict())
  return run


@client.train()
def train(message, context):
  """Takes the steps of a round."""
  import problem

  host, rate = context.node_config["host"], context.run_config["rate"]
  run = run_of(host, rate, message.content["arrays"])
  before = message.content["config"]["server-round"] - 1
  run.step = before * problem.INTERVAL
  began_s = time.perf_counter()
  run.steps(problem.INTERVAL)
  seconds = time.perf_counter() - began_s
  metrics = MetricRecord({"num-examples": 1, "seconds": seconds})
  found = {"arrays": ArrayRecord(run.net.state_dict()), "metrics": metrics}
  return Message(content=RecordDict(found), reply_to=message)


@server.main()
def main(grid, context):
  """Runs the rounds, and records when each model was there."""
  rate = context.run_config["rate"]

  def record(number, arrays):
    del arrays
    with open(os.environ["PEERS_OUTPUT"], "a") as out:
      print(json.dumps([number, time.time()]), file=out)
    return MetricRecord({"round": number})

  strategy = FedAvg(
    fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=2,
    min_available_nodes=2,
  )  # fmt: skip
  strategy.start(
    grid=grid, initial_arrays=ArrayRecord(run_of(0, rate).net.state_dict()),
    num_rounds=context.run_config["rounds"], train_config=ConfigRecord(),
    evaluate_fn=record,
  )  # fmt: skip
