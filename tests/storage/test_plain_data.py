"""Dataclasses as JSON: the same values, and nothing that a file names."""

import collections
import dataclasses
import json
import math
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple, TypedDict

import numpy as np
import pytest

from jdist.storage import json_lines, plain_data
from tests import _refusals


class Point(NamedTuple):
  x: int
  label: str | None = None


class Notes(TypedDict):
  more: dict[str, Any]


@dataclasses.dataclass
class State:
  kind: ClassVar[str] = "none"
  speed: float
  members: dict[Hashable, list[Point]]
  ages: collections.Counter[int]
  last: tuple[int, ...]
  pair: tuple[int, float]
  queue: collections.deque[bool]
  notes: Notes


def state():
  return State(
    speed=math.inf,
    members={"b": [Point(1)], "a": [], 3: [Point(2, "two")]},
    ages=collections.Counter({4: 2, 0: 1}),
    last=(1, 2, 3),
    pair=(1, 0.1),
    queue=collections.deque([True]),
    notes={"more": {"rows": [{"3": None}]}},
  )


def test_values_and_their_order_are_the_same_after_json():
  plain = json.loads(json.dumps(plain_data.to_plain(state())))
  found = plain_data.from_plain(plain, State)
  assert found == state()
  assert list(found.members) == ["b", "a", 3]
  assert list(map(type, found.queue)) == [bool]


@pytest.mark.parametrize(
  ("changed", "rule"),
  [
    ({"speed": "fast"}, r"`value.speed` must be a float"),
    ({"speed": True}, r"`value.speed` must be a float"),
    ({"last": [1, 2.5]}, r"`value.last\[1\]` must be a int"),
    ({"pair": [1]}, r"`value.pair` must be a tuple\[int, float\]"),
    ({"members": {"a": [{"x": 1}]}}, r"`value.members\[a\]\[0\]` .* lacks 'l"),
    ({"members": [[["a"], []]]}, r"`value.members's key` must be a str"),
    ({"ages": [[1, 2, 3]]}, r"`value.ages` must be a .*Counter\[int\]"),
    ({"ages": 3}, r"`value.ages` must be a .*Counter\[int\]"),
    ({"ages": [1]}, r"`value.ages` must be a .*Counter\[int\]"),
    ({"queue": {"type": "os.system"}}, r"`value.queue` must be a "),
    ({"other": 1}, r"the fields of a State, but has 'other'"),
  ],
)
def test_values_of_other_types_are_refused(changed, rule):
  plain = plain_data.to_plain(state()) | changed
  with pytest.raises(plain_data.PlainDataError, match=rule):
    plain_data.from_plain(plain, State)


def test_ordered_sets_are_dicts_of_none():
  """Python keeps such a None in a container as it is written."""
  found = plain_data.from_plain([["b", None], ["a", None]], dict[str, None])
  assert list(found.items()) == [("b", None), ("a", None)]
  with pytest.raises(plain_data.PlainDataError, match="must be a None"):
    plain_data.from_plain({"a": 0}, dict[str, None])


def test_scalars_of_numpy_are_saved_and_arrays_refused():
  assert plain_data.to_plain([np.float64(0.1), np.int32(3)]) == [0.1, 3]
  with pytest.raises(ValueError, match=r"got a ndarray\. Arrays are saved by"):
    plain_data.to_plain({"w": np.zeros(2)})
  with pytest.raises(ValueError, match="got"):
    plain_data.to_plain(State)


@pytest.mark.parametrize("rest", ("", '{"a"', "x" * 100_000))
def test_line_after_a_cut_off_one_is_whole(rest, tmp_path):
  path = tmp_path / "new" / "rows.jsonl"
  json_lines.append(path, [{"a": 1}])
  path.write_text(path.read_text() + rest)
  assert list(json_lines.read(path)) == [{"a": 1}]
  json_lines.append(path, [[2]])
  assert list(json_lines.read(path)) == [{"a": 1}, [2]]


@pytest.mark.parametrize(
  "content", [b'{"a"\n', b"[" * 100_000 + b"\n", b"\xff\n"]
)
def test_file_without_json_in_its_lines_is_refused(content, tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(b"1\n\n2\n")
  assert list(json_lines.read(path)) == [1, 2]  # An empty line is no value.
  path.write_bytes(b"1\n" + content)
  with _refusals.refused("path", "be a file of JSON in lines"):
    list(json_lines.read(path))
