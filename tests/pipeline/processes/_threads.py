"""Processes of a pipeline as threads of one, with real connections."""

import concurrent.futures

from jdist import channel, pipeline

TOKEN = "a secret"


def in_threads(number, work, **options):
  """Returns `work(peers)` of each device."""
  listeners = [channel.listen() for _ in range(number)]
  addresses = [x.getsockname()[:2] for x in listeners]

  def run(device):
    with pipeline.connect(
      device,
      addresses,
      TOKEN,
      listener=listeners[device],
      connect_s=60,
      **{"timeout_s": 60, **options},
    ) as peers:
      return work(peers)

  with concurrent.futures.ThreadPoolExecutor(number) as pool:
    futures = [pool.submit(run, i) for i in range(number)]
    concurrent.futures.wait(futures)
    # The first error is the cause of the others.
    errors = [x.exception() for x in futures]
    for error in errors:
      if error is not None and not isinstance(error, ConnectionError):
        raise error
    return [x.result() for x in futures]
