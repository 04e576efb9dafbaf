"""Measures the virtual clock: processor time of a simulated update.

    python scripts/bench_clock.py [--output ROWS.jsonl]

Time alone goes by: no gradients.  For asynchronous and stale-synchronous
workers without links, with first-come and with fairly shared ones: 1,000
workers and 1,000 updates of each on the average, and what an update takes with
100 and with 10,000 workers, the median of interleaved repetitions; and the
memory that a run ten times as long takes beside.
"""

import argparse
import dataclasses
import statistics
import time
import tracemalloc

from jdist import cluster, server, training

_PROTOCOLS = {
  "asp": server.ASP(batches=server.FixedBatches(32)),
  "ssp": server.SSP(bound=3, batches=server.FixedBatches(32)),
}
_LINKS = {
  "none": None,
  "first_come": cluster.Link(1e10, 1e-4),
  "fair": cluster.Link(1e10, 1e-4, sharing="fair"),
}
_COSTS = cluster.Profile(1e-3, pull_bytes=1e5, push_bytes=1e5)


def simulate(protocol: str, link: str, workers: int) -> server.Simulation:
  """Returns a simulation at its beginning: speeds of 1 to 8, with jitter."""
  speeds = [1 + i % 8 for i in range(workers)]
  own = _LINKS[link]
  # The server's link as fast as all of theirs.
  shared = own and dataclasses.replace(
    own, bandwidth_bits_per_s=workers * own.bandwidth_bits_per_s
  )
  machines = cluster.workers(speeds, jitter=0.1, link=own, server_link=shared)
  return server.Simulation(machines, _PROTOCOLS[protocol], _COSTS)


def per_update_s(run: server.Simulation, updates: int, warm: int = 0) -> float:
  """Returns processor seconds of an update, after the first ones."""
  run.run(updates=run.state.version + warm)
  first, started_s = run.state.version, time.process_time()
  run.run(updates=first + updates)
  return (time.process_time() - started_s) / (run.state.version - first)


def main() -> None:
  """Measures all and prints a line each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--output", help="a file to append rows to")
  parser.add_argument("--updates", type=int, default=1_000_000)
  chosen = parser.parse_args()
  rows = []
  for protocol in _PROTOCOLS:
    for link in _LINKS:
      workers = 1000
      started_s = time.process_time()
      per_update_s(simulate(protocol, link, workers), chosen.updates)
      whole_s = time.process_time() - started_s
      few, many = (
        simulate(protocol, link, 100),
        simulate(protocol, link, 10_000),
      )
      per_update_s(few, 20_000)
      per_update_s(many, 20_000)
      taken = [
        (per_update_s(few, 20_000), per_update_s(many, 20_000))
        for _ in range(5)
      ]
      ratios = [b / a for a, b in taken]
      tracemalloc.start()
      run = simulate(protocol, link, 100)
      run.run(updates=3000)
      before = tracemalloc.get_traced_memory()[0]
      run.run(updates=30_000)
      grown = tracemalloc.get_traced_memory()[0] / before
      tracemalloc.stop()
      row = {
        "protocol": protocol,
        "link": link,
        "workers": workers,
        "updates": chosen.updates,
        "processor_s": whole_s,
        "us_per_update_of_100": 1e6 * statistics.median(a for a, _ in taken),
        "ratio_of_10000_to_100": statistics.median(ratios),
        "ratios": sorted(ratios),
        "memory_of_ten_times": grown,
      }
      rows.append(training.make_row(vars(chosen) | {"output": None}, 0, **row))
      print(
        f"{protocol}, links {link}: {chosen.updates:,} updates of {workers:,} "
        f"workers in {whole_s:.1f} s; an update with 10,000 workers takes "
        f"{row['ratio_of_10000_to_100']:.2f} times that with 100 "
        f"({min(ratios):.2f} to {max(ratios):.2f}); memory of ten times the "
        f"updates {grown:.2f}",
        flush=True,
      )
  if chosen.output:
    training.append_rows(chosen.output, rows)


if __name__ == "__main__":
  main()
