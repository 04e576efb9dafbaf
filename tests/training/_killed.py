"""Trains through the public API and prints a hash of where it ends.

    python -m tests.training._killed DIRECTORY METHOD STEPS

Started again and again by `test_killing`, and killed in between.
"""

import sys

import jax

from jdist import training
from tests.training import _tiny


def main(directory, method, steps):
  team = _tiny.team("vmap")
  state = _tiny.init(team, method)
  with training.Checkpoints(directory, team) as checkpoints:
    state, _ = _tiny.trainer(team, method).fit(
      state,
      _tiny.batches(team),
      steps,
      checkpoints=checkpoints,
      checkpoint_every=2,
      metadata={"method": method},
    )
  print("hash", _tiny.digest(state), flush=True)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
