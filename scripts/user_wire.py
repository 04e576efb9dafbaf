"""A switch in user space, whose links have long queues and delays.

A packet that waits in the kernel still counts as its socket's own, and TCP
keeps next to none of them there, so that the queue of a home router cannot be
had by a limit on a device of the sender.  Here each host's device ends in this
process, which holds packets until links would have sent them.  It carries some
100 Mbit/s.
"""

import fcntl
import heapq
import itertools
import os
import select
import struct
import threading
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 2048


class Links:
  """Computes when packets arrive over an up-link and a down-link.

  Args:
    bytes_per_s: The rate of each host's link, both ways; None has no limit.
    delay_s: The time on the way from host to host.
    queue_s: The time in which a link sends a full queue; what comes while its
      queue is full is dropped.
  """

  def __init__(
    self, bytes_per_s: list[float | None], delay_s: float, queue_s: float
  ):
    self._rates, self._delay_s, self._queue_s = bytes_per_s, delay_s, queue_s
    self._up, self._down = ([0.0] * len(bytes_per_s) for _ in range(2))

  def arrival_s(
    self, now_s: float, size: int, source: int, target: int
  ) -> float | None:
    """Returns when a packet arrives, or None if it is dropped."""
    for free, host in ((self._up, source), (self._down, target)):
      rate = self._rates[host]
      if rate is None:
        continue
      begins_s = max(now_s, free[host])
      if begins_s - now_s > self._queue_s:
        return None
      now_s = free[host] = begins_s + size / rate
    return now_s + self._delay_s


def possible() -> bool:
  """Returns whether this Python and this machine can make the devices."""
  return hasattr(os, "setns") and os.path.exists("/dev/net/tun")


def open_device(namespace: str, name: str = "eth0") -> int:
  """Makes a device of a namespace, and returns the file of its other end."""
  made = []

  def enter() -> None:
    # A thread's own: the process stays where it is.
    with open(f"/var/run/netns/{namespace}") as place:
      os.setns(place.fileno(), os.CLONE_NEWNET)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, wanted)
    made.append(device)

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  return made[0]


def carry(devices: list[int], links: Links) -> None:
  """Carries packets between hosts 10.77.0.1, 10.77.0.2, ..., for ever."""
  poll, numbers, waiting = select.poll(), itertools.count(), []
  source = {device: i for i, device in enumerate(devices)}
  for device in devices:
    poll.register(device, select.POLLIN)
  while True:
    left_s = waiting[0][0] - time.monotonic() if waiting else 1.0
    ready = poll.poll(max(1000 * left_s, 0.0))
    now_s = time.monotonic()
    for device, _ in ready:
      packet = os.read(device, _PACKET_BYTES)
      target = packet[19] - 1  # The last byte of the address of IPv4.
      if packet[0] >> 4 != 4 or not 0 <= target < len(devices):
        continue
      at_s = links.arrival_s(now_s, len(packet), source[device], target)
      if at_s is not None:
        heapq.heappush(waiting, (at_s, next(numbers), target, packet))
    while waiting and waiting[0][0] <= now_s:
      *_, target, packet = heapq.heappop(waiting)
      try:
        os.write(devices[target], packet)
      except OSError:
        return  # The host is gone, and the network with it.
