"""Messages share links in the order of arrival, or fairly."""

import fractions

import hypothesis
import pytest
from hypothesis import strategies as st

from jdist import cluster

simpy = pytest.importorskip("simpy")


def arrivals(topology, messages, trace=None):
  """Returns when each of (start_s, source, target, bytes) arrives."""
  environment = simpy.Environment()
  network = cluster.Network(environment, topology, trace)
  found = [None] * len(messages)

  def send(i, source, target, num_bytes):
    def note(_):
      found[i] = environment.now

    network.send(source, target, num_bytes).callbacks.append(note)

  for i, (start, *message) in enumerate(messages):
    environment.timeout(start).callbacks.append(
      lambda _, i=i, message=message: send(i, *message)
    )
  environment.run()
  return found


def byte_link(sharing="first_come", latency_s=0.0, rate=1.0):
  return cluster.Link(8.0 * rate, latency_s, sharing)


def two(sharing):
  return cluster.Topology({("a", "b"): byte_link(sharing)})


def test_first_come_links_keep_the_order():
  messages = [(0, "a", "b", 3), (1, "a", "b", 1), (1, "b", "a", 1)]
  assert arrivals(two("first_come"), messages) == [3, 4, 2]


def test_fair_links_give_each_an_equal_part():
  # The first message is alone for a second; then two share the link until the
  # second one has passed its byte, at second 3.
  messages = [(0, "a", "b", 3), (1, "a", "b", 1), (1, "b", "a", 1)]
  assert arrivals(two("fair"), messages) == [4, 3, 2]


def test_trace_shows_each_message_once_until_its_last_byte():
  # The first message would have ended at second 2, had it been alone.
  trace = cluster.Trace()
  arrivals(two("fair"), [(0, "a", "b", 2), (1, "a", "b", 2)], trace)
  spans = [(x.resource, x.start_s, x.end_s) for x in trace]
  assert spans == [("a->b", 0, 3), ("a->b", 1, 4)]


@pytest.mark.parametrize("sharing", ["first_come", "fair"])
def test_message_flows_over_all_links_at_once(sharing):
  links = {
    ("a", "x"): byte_link(sharing, 0.5, rate=4.0),
    ("x", "y"): byte_link(sharing, 0.25),
    ("y", "b"): byte_link(sharing, 0.25, rate=2.0),
  }
  (found,) = arrivals(cluster.Topology(links), [(0, "a", "b", 8)])
  assert found == pytest.approx(8 + 1)


@pytest.mark.parametrize("sharing", ["first_come", "fair"])
def test_message_to_its_own_sender_takes_no_time(sharing):
  assert arrivals(two(sharing), [(2, "a", "a", 3)]) == [2]


def test_without_a_topology_messages_take_no_time():
  assert arrivals(None, [(2, "a", "b", 1e9)]) == [2]


def shared(messages):
  """Steps from one change to the next, in fractions; messages (start, bytes).

  The link carries a byte a second.
  """
  left, ends, now = {}, {}, fractions.Fraction(0)
  todo = sorted((start, i) for i, (start, _) in enumerate(messages))
  while todo or left:
    steps = [min(left.values()) * len(left)] if left else []
    steps += [todo[0][0] - now] if todo else []
    now += min(steps)
    left = {i: each - min(steps) / len(left) for i, each in left.items()}
    for i in [i for i, each in left.items() if not each]:
      ends[i] = now
      del left[i]
    while todo and todo[0][0] == now:
      _, i = todo.pop(0)
      left[i] = fractions.Fraction(messages[i][1])
  return [float(ends[i]) for i in range(len(messages))]


@hypothesis.given(
  st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=12
  )
)
def test_fair_links_agree_with_a_plain_reference(messages):
  found = arrivals(
    two("fair"), [(start, "a", "b", size) for start, size in messages]
  )
  assert found == pytest.approx(shared(messages), rel=1e-6)


@hypothesis.given(
  st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from("abc"), st.integers(1, 30)),
    min_size=1,
    max_size=12,
  )
)
def test_route_of_fair_links_takes_the_time_of_the_slowest(messages):
  link = byte_link("fair", latency_s=0.5)
  ways = cluster.star(dict.fromkeys("abc", link) | {"z": link}, "switch")
  found = arrivals(ways, [(start, a, "z", size) for start, a, size in messages])
  last = shared([(start, size) for start, _, size in messages])
  for i, (_, name, _) in enumerate(messages):
    own = [(j, x) for j, x in enumerate(messages) if x[1] == name]
    ends = shared([(start, size) for _, (start, _, size) in own])
    end = ends[[j for j, _ in own].index(i)]
    assert found[i] == pytest.approx(max(end, last[i]) + 1.0, rel=1e-6)


@hypothesis.given(
  st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=12
  )
)
def test_link_works_at_its_bandwidth_while_it_has_messages(messages):
  for sharing in ("first_come", "fair"):
    trace = cluster.Trace()
    found = arrivals(
      two(sharing),
      [(start, "a", "b", size) for start, size in messages],
      trace,
    )
    busy = trace.utilisation()["a->b"] * trace.end_s
    assert busy == pytest.approx(sum(size for _, size in messages), rel=1e-6)
    assert max(found) == pytest.approx(trace.end_s)


def test_messages_end_late_in_a_long_run():
  topology = cluster.Topology({("a", "b"): byte_link("fair", rate=1e9)})
  messages = [(1e9, "a", "b", 1 / 3), (1e9, "a", "b", 1e6)]
  assert arrivals(topology, messages) == pytest.approx([1e9, 1e9])


def test_routes_have_the_fewest_hops():
  link = byte_link()
  names = "abcdef"
  pairs = zip(names, names[1:] + names[:1], strict=True)
  found = cluster.Topology(dict.fromkeys(pairs, link))
  assert found.route("a", "c") == (("a", "b"), ("b", "c"))
  # By the search for the way there.
  assert found.route("c", "a") == (("c", "b"), ("b", "a"))
  assert found.route("f", "a") == (("f", "a"),)
  assert found.route("d", "d") == ()
  for one in names:
    for other in names:
      there, back = found.route(one, other), found.route(other, one)
      assert len(there) == len(back) <= 3


def test_missing_route_raises():
  apart = cluster.Topology({("a", "b"): byte_link(), ("c", "d"): byte_link()})
  with pytest.raises(ValueError, match="no route between 'a' and 'd'"):
    apart.route("a", "d")


def test_links_that_do_not_say_are_shared_as_the_network_says():
  messages = [(0, "a", "b", 1), (0, "a", "b", 2)]
  link = cluster.Link(8.0)
  for sharing, wanted in (("fair", [2, 3]), ("first_come", [1, 3])):
    environment = simpy.Environment()
    network = cluster.Network(
      environment, cluster.Topology({("a", "b"): link}), sharing=sharing
    )
    found = []
    for _, source, target, size in messages:
      network.send(source, target, size).callbacks.append(
        lambda _, clock=environment, found=found: found.append(clock.now)
      )
    environment.run()
    assert found == wanted
