"""Ringleader ASGD, a protocol of one's own; in this folder it runs by.

jdist simulate cluster.toml --protocols ringleader:Ringleader asp
jdist train --protocol ringleader:Ringleader --cluster cluster.toml
"""

import dataclasses

from jdist import server

Table = dict[server.Worker, list[server.Assignment]]


@dataclasses.dataclass
class RingleaderState(server.ServerState):
  """The state of `Ringleader`.

  Attributes:
    table: The gradients of this round, by worker.
    later: Those of the next round.
    owing: Members whose next gradient makes an update of this round; none until
      the table has a gradient of every member.
    held: Version of the parameters that each worker has.
  """

  table: Table = dataclasses.field(default_factory=dict)
  later: Table = dataclasses.field(default_factory=dict)
  owing: dict[server.Worker, None] = dataclasses.field(default_factory=dict)
  held: dict[server.Worker, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ringleader(server.Protocol[RingleaderState]):
  r"""Asynchronous SGD whose updates weigh all workers' data alike.

  .. math:: \theta \leftarrow \theta - \frac{\alpha}{n} \sum_{i=1}^n
            \frac{1}{b_i} \sum_{j=1}^{b_i} g_{ij}

  A table has the b gradients of each of n workers.  A round first collects,
  without an update, until each worker has given one.  From then on every worker
  makes one update of the round: its next gradient joins the table, whose mean
  is applied, and it gets the new parameters; what it sends after that is for
  the next round.  The one that was awaited makes the first update.  No worker
  waits, each computes on the same parameters until its update, and no gradient
  is more than 2 n - 2 updates old.

  References:
    Maranjyan and Richtarik, Ringleader ASGD: The First Asynchronous SGD with
    Optimal Time Complexity under Data Heterogeneity (arXiv 2509.22860).
    Reconstruction: members that come and go, and that no parameters are sent
    to a worker that has them.
  """

  state_type = RingleaderState

  def on_leave(
    self,
    state: RingleaderState,
    worker: server.Worker,
    actions: list[server.Action],
  ) -> None:
    """Stops waiting for the member, whose gradients stay in the table."""
    state.held.pop(worker, None)
    if worker in state.owing:
      del state.owing[worker]
      if not state.owing:  # The last update of the round will not be made.
        for push in _listed(state.table):
          self.discard(state, push, actions, "left")
        state.table, state.later = state.later, {}

  def on_pull(
    self,
    state: RingleaderState,
    worker: server.Worker,
    actions: list[server.Action],
  ) -> None:
    """Has the member compute, on new parameters only after its update."""
    sent = worker not in state.held
    task = self.reply(state, worker, actions, pull_plan=0 if sent else None)
    task.version = state.held.setdefault(worker, state.version)
    actions[-1] = actions[-1]._replace(version=task.version)

  def on_push(
    self,
    state: RingleaderState,
    push: server.Assignment,
    actions: list[server.Action],
  ) -> None:
    """Adds a gradient to a table, and makes the update that it is due."""
    worker = push.worker
    late = state.owing and worker not in state.owing
    own = state.later if late else state.table
    own.setdefault(worker, []).append(push)
    if not state.owing and state.members.keys() <= state.table.keys():
      state.owing = dict.fromkeys(state.members)
    if worker in state.owing:
      del state.owing[worker], state.held[worker]
      self._update(state, actions)
      if not state.owing:
        state.table, state.later = state.later, {}

  def _update(
    self, state: RingleaderState, actions: list[server.Action]
  ) -> None:
    pushes = _listed(state.table)
    weights = tuple(
      1 / len(state.table) / len(state.table[push.worker]) for push in pushes
    )
    staleness = tuple(state.version - push.version for push in pushes)
    tasks = tuple(push.task for push in pushes)
    # All stay for the next update of the round, but not after its last one.
    kept = frozenset(tasks if state.owing else ())
    actions.append(server.Apply(tasks, weights, staleness, kept))
    state.version += 1
    state.applied += len(tasks)


def _listed(table: Table) -> list[server.Assignment]:
  return [push for own in table.values() for push in own]
