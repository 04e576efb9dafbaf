"""A `FragmentSyncer` and a `FragmentRunner` for each name, in tests."""

from jdist import server


def fragment_pair(
  loss_fn, optimizer, params, samples, *, workers, outer=None, seed=0, **options
):
  """Returns a pair; `options` are those of both sides."""
  syncer = server.FragmentSyncer(
    params, workers=workers, outer=outer, shared=samples.shared, **options
  )
  runners = {
    name: server.FragmentRunner(
      loss_fn, optimizer, params, samples, number=number,
      num_workers=len(workers), seed=seed, **options,
    )
    for number, name in enumerate(workers)
  }  # fmt: skip
  return server.Pair(syncer, runners)
