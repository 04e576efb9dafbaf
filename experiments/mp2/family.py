"""Measures one predictor for several networks that begin alike.

    python experiments/mp2/family.py

The members of a family have the same front, and other layers behind it.  Of
their predictor everything is shared but the decoders, and an update is one
member's, in turn.  Beside it stand predictors of one member, with as many
updates in all and with as many for a member; and a member that it has not seen,
for which decoders are trained behind its frozen body, behind that of one member
and one as it was drawn.  Stands alone, of public parts only; no variant of the
comparison uses it.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from jdist import data, models, prediction, training

Params = dict[str, Any]
Fronts = list[np.ndarray]
_PURPOSE = "family"
# In the tree of parameters, beside the members' decoders.
_BODY = "body"


@dataclasses.dataclass(frozen=True)
class Config:
  """One measurement."""

  dataset: str = "mnist"
  """A name of `jdist.data`."""

  front: int = 32
  """Units of the first layer, which is sent."""

  rears: tuple[int, ...] = (64, 48, 96)
  """Units of the second layer, a member each; the last one is the new one."""

  runs: tuple[int, ...] = (1, 8)
  """Of how many runs of each member the fronts are."""

  batch_size: int = 256
  """Of the members' runs, a pass each."""

  learning_rate: float = 1e-3
  """Highest, of the members' Adam; the predictor's is 0.001."""

  samples: int = 64
  """Fronts of a run."""

  updates: int = 200
  """Of a member's predictor."""

  new_updates: int = 60
  """For the new member."""

  fit_samples: int = 4
  """Fronts in an update."""

  fit_images: int = 64
  """Images in an update."""

  held_out: int = 1500
  """Training images that accuracy is measured on."""

  seeds: tuple[int, ...] = (0, 1, 2)
  """Of the predictors."""


class Family:
  """The members, their fronts, and how predictors are trained on them."""

  def __init__(self, options: Config):
    self.options = options
    self.data = data.load(options.dataset)
    order = np.random.default_rng(0).permutation(len(self.data))
    self.rows, self.held_out = np.split(order, [-options.held_out])
    self.members = range(len(options.rears))
    self.models = [self.build(member, 0) for member in self.members]
    self.predictors = [
      prediction.predictor(
        prediction.cut(model, 1, name=f"rear {options.rears[member]}"),
        grid=8,
        dense_from="hidden",
      )
      for member, model in enumerate(self.models)
    ]
    # The last run of each is not learned from.
    self.fronts = [
      [self.collect(member, seed) for seed in range(max(options.runs) + 1)]
      for member in self.members
    ]
    self.images = jnp.asarray(self.data.images)
    self.labels = jnp.asarray(self.data.labels)

  def build(self, member: int, seed: int) -> models.Model:
    """A member's network; no two have a seed in common."""
    return models.build(
      "mlp",
      input_shape=self.data.input_shape,
      num_classes=self.data.num_classes,
      seed=1000 * member + seed,
      hidden_sizes=(self.options.front, self.options.rears[member]),
    )

  def collect(self, member: int, seed: int) -> np.ndarray:
    """The fronts of an ordinary run of one worker."""
    options = self.options
    num_steps = len(self.rows) // options.batch_size
    steps = prediction.choose_steps(
      1, num_steps, min(options.samples, num_steps), seed=seed
    )
    params = self.build(member, seed).params
    state = _optimizer(options.learning_rate, num_steps).init(params)
    drawn = np.random.default_rng((member, seed)).permutation(self.rows)
    found = []
    for step in range(num_steps):
      rows = drawn[step * options.batch_size :][: options.batch_size]
      inputs = self.data.normalize(self.data.images[rows])
      params, state = _step(
        self.models[member].apply, options.learning_rate, num_steps,
        params, state, inputs, self.data.labels[rows],
      )  # fmt: skip
      if step + 1 in steps:
        found.append(self.predictors[member].cut.flatten_front(params))
    return np.stack(found)

  def draw(self, seed: int) -> Params:
    """The predictor: a body, and the decoders of every member."""
    own = [
      predictor.init(jax.random.key(1000 * member + seed))
      for member, predictor in enumerate(self.predictors)
    ]
    body = {name: x for name, x in own[0].items() if name != "layers"}
    return {_BODY: body} | {str(i): x["layers"] for i, x in enumerate(own)}

  def fit(
    self,
    params: Params,
    members: Sequence[int],
    runs: int,
    seed: int,
    updates: int,
    *,
    frozen: bool = False,
  ) -> Params:
    """Trains body and decoders, or only decoders, one member in turn."""
    options = self.options
    params = jax.tree.map(jnp.copy, params)
    state = optax.adam(1e-3).init(params)
    for i in range(updates):
      member = members[i % len(members)]
      known = np.concatenate(self.fronts[member][:runs])
      draw = np.random.default_rng((seed, i))
      vectors = known[draw.choice(len(known), options.fit_samples)]
      rows = draw.choice(self.rows, options.fit_images, replace=False)
      params, state = _update(
        self.predictors[member], self.models[member].apply,
        self.data.normalize, str(member), frozen, params, state, vectors,
        self.images[rows], self.labels[rows],
        jax.random.fold_in(jax.random.key(seed), i),
      )  # fmt: skip
    return params

  def accuracy(self, params: Params, member: int, runs: Fronts) -> float:
    """Of the networks with fronts of the last half of runs."""
    late = []
    for fronts in runs:
      half = fronts[len(fronts) // 2 :]
      late.extend(half[:: max(1, len(half) * len(runs) // 8)])
    found = prediction.evaluate_predictor(
      self.predictors[member],
      _of_member(params, str(member)),
      self.models[member],
      np.stack(late[:8]),
      self.data.images[self.held_out],
      self.data.labels[self.held_out],
      normalize=self.data.normalize,
      samples_per_batch=8,
    )
    return float(found.mean())


def _optimizer(rate: float, num_steps: int) -> optax.GradientTransformation:
  return optax.adam(
    optax.warmup_cosine_decay_schedule(
      rate / 10, rate, num_steps // 10, num_steps, rate / 100
    )
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(
  apply: Any, rate: float, num_steps: int, params: Params, state: Any,
  inputs: jax.Array, labels: jax.Array,
) -> tuple[Params, Any]:  # fmt: skip
  def loss(params: Params) -> jax.Array:
    logits, _ = apply(params, {}, inputs, train=True)
    return _cross_entropy(logits, labels)

  updates, state = _optimizer(rate, num_steps).update(
    jax.grad(loss)(params), state, params
  )
  return optax.apply_updates(params, updates), state


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _of_member(params: Params, member: str) -> Params:
  return params[_BODY] | {"layers": params[member]}


@functools.partial(jax.jit, static_argnums=range(5))
def _update(
  predictor: prediction.Predictor, apply: Any, normalize: Any, member: str,
  frozen: bool, params: Params, state: Any, vectors: jax.Array,
  images: jax.Array, labels: jax.Array, key: jax.Array,
) -> tuple[Params, Any]:  # fmt: skip
  """By the assembled networks' loss with mixup, as `fit_predictor`."""
  keys = jax.random.split(key)
  order = jax.random.permutation(keys[0], len(images))
  share = jax.random.uniform(keys[1])
  inputs = normalize(images)
  inputs = share * inputs + (1 - share) * inputs[order]

  def loss(params: Params) -> jax.Array:
    if frozen:
      params = params | {_BODY: jax.lax.stop_gradient(params[_BODY])}

    def one(vector: jax.Array) -> jax.Array:
      rear = predictor.apply_vector(_of_member(params, member), vector)
      whole = predictor.cut.join(predictor.cut.unflatten_front(vector), rear)
      logits, _ = apply(whole, {}, inputs, train=True)
      mixed = _cross_entropy(logits, labels[order])
      return share * _cross_entropy(logits, labels) + (1 - share) * mixed

    return jax.vmap(one)(vectors).mean()

  updates, state = optax.adam(1e-3).update(jax.grad(loss)(params), state)
  return optax.apply_updates(params, updates), state


def measure(family: Family, runs: int, seed: int) -> list[dict[str, Any]]:
  """All predictors of a seed, with fronts of so many runs of each member."""
  options, found = family.options, []
  *known, new = family.members
  num = options.updates

  def tell(what: str, params: Params, members: Sequence[int]) -> None:
    for member in members:
      fronts = family.fronts[member]
      found.append(
        {
          "predictor": what,
          "runs": runs,
          "rear": options.rears[member],
          "accuracy_own_runs": family.accuracy(params, member, fronts[:runs]),
          "accuracy_other_seed": family.accuracy(params, member, fronts[-1:]),
        }
      )
      print(found[-1], flush=True)

  drawn = family.draw(seed)
  for member in known:
    alone = family.fit(drawn, [member], runs, seed, num)
    tell(f"one member's, {num} updates", alone, [member])
  few = family.fit(drawn, known, runs, seed, num)
  tell(f"family, {num} updates in all", few, known)
  learned = family.fit(drawn, known, runs, seed, num * len(known))
  tell(f"family, {num} updates a member", learned, known)
  bodies = {"drawn": drawn, "one member's": alone, "the family's": learned}
  for (what, begin), frozen in itertools.product(bodies.items(), (True, False)):
    fitted = family.fit(
      drawn | {_BODY: begin[_BODY]},
      [new],
      runs,
      seed,
      options.new_updates,
      frozen=frozen,
    )
    after = "frozen" if frozen else "trained on"
    tell(f"new member, body: {what}, {after}", fitted, [new])
  return found


def report(rows: Sequence[dict[str, Any]]) -> str:
  """Markdown: means over members and seeds, with the spread over seeds."""
  lines = [
    "| predictor | runs | own runs, % | another seed, % |",
    "|---|---|---|---|",
  ]
  groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
  for row in rows:
    groups.setdefault((row["predictor"], row["runs"]), []).append(row)
  for (what, runs), same in groups.items():
    cells = []
    for key in ("accuracy_own_runs", "accuracy_other_seed"):
      by_seed = [
        100 * np.mean([row[key] for row in same if row["seed"] == seed])
        for seed in dict.fromkeys(row["seed"] for row in same)
      ]
      spread = np.std(by_seed, ddof=1) if len(by_seed) > 1 else 0.0
      cells.append(f"{np.mean(by_seed):.1f} ± {spread:.1f}")
    lines.append(f"| {what} | {runs} | {' | '.join(cells)} |")
  return "\n".join(lines)


def main() -> None:
  """Measures, leaves rows, and prints their table."""
  options = tyro.cli(Config)
  results = pathlib.Path(__file__).resolve().parent / "results"
  path = results / f"{options.dataset}-family.jsonl"
  family, rows = Family(options), []
  for runs in options.runs:
    for seed in options.seeds:
      for found in measure(family, runs, seed):
        rows.append(
          training.make_row(
            dataclasses.asdict(options), seed, purpose=_PURPOSE, **found
          )
        )
  training.append_rows(path, rows)
  print(report(rows))


if __name__ == "__main__":
  main()
