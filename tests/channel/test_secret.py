"""The secret that a user's runs share where none is given."""

import concurrent.futures

import pytest

from jdist import channel
from jdist.channel import _identity


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  for name in channel.draw().environment():
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("HOME", str(tmp_path))
  channel.identity.cache_clear()
  yield tmp_path
  channel.identity.cache_clear()


def test_secret_is_drawn_once_and_readable_by_its_owner_alone(home):
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    calls = [pool.submit(channel.identity.__wrapped__) for _ in range(8)]
  (found,) = {call.result().secret for call in calls}
  path = home / ".config" / "jdist" / "secret"
  assert path.read_bytes() == found and len(found) == 64
  assert path.stat().st_mode & 0o777 == 0o600
  assert path.parent.stat().st_mode & 0o777 == 0o700
  assert [x.name for x in path.parent.iterdir()] == ["secret"]


def test_secret_that_another_process_draws_meanwhile_counts(home, monkeypatch):
  path = home / ".config" / "jdist" / "secret"
  path.parent.mkdir(parents=True)
  path.write_text("another's")
  # It was not there yet when this process looked.
  monkeypatch.setattr(type(path), "exists", lambda _: False)
  assert channel.identity().secret == b"another's"
  assert list(path.parent.iterdir()) == [path]


def test_given_secret_and_run_id_are_used(home, monkeypatch):
  for name, value in channel.Identity("7", b"given").environment().items():
    monkeypatch.setenv(name, value)
  assert channel.identity() == channel.Identity("7", b"given")
  assert not list(home.iterdir())


def test_run_id_is_given_or_drawn_once_and_then_that_of_the_joined_run(
  monkeypatch,
):
  ids = []
  monkeypatch.setattr(_identity, "_run_ids", ids)
  drawn = channel.run_id()
  assert len(drawn) == 12 and drawn == channel.run_id()
  # A process has its own id before it hears that of the run.
  for other in ("7", "8"):
    channel.adopt(other)
    assert channel.run_id() == other
  ids.clear()
  monkeypatch.setenv("JDIST_RUN_ID", "given")
  assert channel.run_id() == "given"


def test_home_that_cannot_keep_a_secret_names_the_remedy(home):
  (home / ".config").write_text("a file")
  with pytest.raises(OSError, match="Set `JDIST_SECRET` to the same long"):
    channel.identity()


def test_keys_differ_by_run_secret_and_purpose():
  one = channel.Identity("a", b"b").key("c")
  others = [
    channel.Identity("x", b"b").key("c"),
    channel.Identity("a", b"x").key("c"),
    channel.Identity("a", b"b").key("x"),
  ]
  assert len({one, *others}) == 4
  assert channel.Identity("a", b"b").key("c") == one


def test_directory_of_ones_own_is_closed_to_others(tmp_path):
  folder = tmp_path / "open"
  folder.mkdir(mode=0o755)
  assert channel.private_directory(folder) == folder
  assert folder.stat().st_mode & 0o777 == 0o700


def test_directory_of_another_user_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
  with pytest.raises(PermissionError, match="belongs to another user"):
    channel.private_directory(tmp_path / "own")


@pytest.mark.parametrize(
  ("ours", "theirs", "told"),
  [
    ({"a": 1}, {"a": 1}, None),
    ({"a": (1, 2)}, {"a": [1, 2]}, None),
    ({"a": float("nan")}, {"a": float("nan")}, None),
    ({"a": 1}, {"a": 2}, "a is 1 in A and 2 in B"),
    ({"a": None}, {}, "a is null in A and missing in B"),
    ({}, {"a": None}, "a is missing in A and null in B"),
    (
      {"b": 1, "a": ""},
      {"b": 2, "a": "x"},
      'a is "" in A and "x" in B, b is 1 in A and 2 in B',
    ),
  ],
)
def test_disagreement_is_that_of_json(ours, theirs, told):
  text = channel.disagreement(ours, theirs, "A", "B")
  if told is None:
    assert text == ""
  else:
    assert text.startswith(f"all processes of a run must agree, but {told}. ")


def test_many_differences_are_shortened():
  ours, theirs = ({str(i): x for i in range(7)} for x in "ab")
  text = channel.disagreement(ours, theirs, "A", "B")
  assert '4 is "a" in A and "b" in B, and 2 more differ. Start all' in text
