"""Tables of the command line: an entry that is lost is missed here."""

import errno
import json
import os
import re
import types

import pytest

from jdist import cli, cluster, server, training
from jdist.cli import _commands, _compare, _parts, _run_end
from jdist.cli.programs import _advise
from jdist.cli.report import _page
from jdist.cli.servers import _server_run


def test_advice_without_names_compares_eight_methods():
  found = [_advise._label(*choice, 8) for choice in _advise._CHOICES]
  assert found == [
    "ssgd", "ssgd int4", "powersgd", "topk_sgd", "local_sgd H=8",
    "diloco H=8 int4", "msdpu H=8 streamed", "msdpu H=8 int4 streamed",
  ]  # fmt: skip
  for _, more in _advise._CHOICES:
    # Few bits keep what they leave out, and a stream has rounds of one length.
    assert more.get("feedback") == ("error" if "codec" in more else None)
    policy = "fixed" if "stream" in more else None
    assert more.get("interval_policy") == policy


def test_rows_of_a_comparison_may_differ_in_these_options_alone():
  assert {*_compare._FREE} == {
    "methods", "learning_rate", "grid_extensions", "seeds", "output", "preset",
    "tuning_seeds", "bandwidth_mbit_per_s", "latency_ms", "text", "files",
  }  # fmt: skip
  assert {*_compare._FREE} < {*_commands.Compare.__dataclass_fields__}


@pytest.mark.parametrize(
  "name",
  [
    "ENOSPC", "EDQUOT", "EIO", "ESTALE", "EADDRINUSE", "EAGAIN", "EMFILE",
    "ENFILE", "ETIMEDOUT",
  ],
)  # fmt: skip
def test_error_that_passes_may_be_tried_again(name):
  number = getattr(errno, name)
  assert _run_end.passes(OSError(number, "it failed"))
  # A library passes the system's words on in an error of its own.
  outer = RuntimeError("cannot go on")
  outer.__cause__ = ValueError(f"writing: {os.strerror(number).upper()}")
  assert _run_end.passes(outer)
  assert not _run_end.passes(RuntimeError("cannot go on"))


@pytest.mark.parametrize(
  ("error", "passes"),
  [
    (OSError(errno.ENOENT, "no file"), False),
    (OSError(errno.EACCES, "not yours"), False),
    # Another run has the port, or a file is not this user's.
    (PermissionError("another run"), True),
    (PermissionError(errno.EACCES, "not yours"), False),
    (TimeoutError(), True), (ConnectionResetError(), True),
    (_run_end.LostError(), True), (ValueError("wrong"), False), (None, False),
  ],
)  # fmt: skip
def test_only_what_others_may_free_passes(error, passes):
  assert _run_end.passes(error) == passes


def test_checkpoint_of_another_run_names_what_differs():
  differences = {
    "cluster": ({"a": 1}, {"a": 2}), "networks": ("1", "2"), "every": (1, 2),
    "unit": ("updates", "samples"), "clock": ("virtual", "wall"),
    "seed": (1, 2), "outer": (None, "sgd"), "cuts": ([1, 2], [3]),
  }  # fmt: skip
  error = training.OtherRunError(differences)
  assert str(_run_end._refusal(error)) == (
    "`--cluster` is of other machines than in the checkpoint, `--predictor` is "
    "of another network than in the checkpoint, `--seed` is 1 in the "
    "checkpoint and 2 here, `--outer` is not given in the checkpoint and sgd "
    "here, `--cuts` is 1 2 in the checkpoint and 3 here. Resume with the same "
    "options, or start again in another directory."
  )


_UNUSED = {
  "method": "ssgd", "workers": 2, "substrate": "vmap", "accumulate": 2,
  "host_rounds": False, "steps": 3, "interval_policy": "fixed",
  "reducer": "gather", "coordinator_address": "a:1", "num_processes": 2,
  "process_id": 1, "skip_nonfinite": True, "checkpoint_every_epochs": 3.0,
  "final_params": "a.safetensors", "tensorboard": "b", "stages": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", _UNUSED)
def test_option_that_a_server_does_not_use_is_refused(name):
  given = {"protocol": "asp", "cluster": "c.toml", "driver": "clock"}
  _server_run._check(_commands.Train(**given))
  options = _commands.Train(**given, **{name: _UNUSED[name]})
  with pytest.raises(ValueError, match=f"`--{name.replace('_', '-')}` must be"):
    _server_run._check(options)
  assert {*_server_run._UNUSED} == {*_UNUSED}
  # An elastic run has a method with rounds, for as many workers.
  options = _commands.Train(elastic=True, **{name: _UNUSED[name]})
  if name not in ("method", "workers", "interval_policy"):
    with pytest.raises(ValueError, match="with `--elastic`, which does not"):
      _server_run._check(options)
  elif name != "method":
    _server_run._check(options)


@pytest.mark.parametrize(
  ("option", "kind"),
  [
    ("method", "methods"), ("methods", "methods"), ("protocol", "protocols"),
    ("protocols", "protocols"), ("table", "tables"), ("tables", "tables"),
    ("model", "models"), ("dataset", "datasets"), ("codec", "codecs"),
    ("reducer", "reducers"), ("feedback", "feedbacks"), ("outer", "rules"),
    ("edge_codec", "codecs"),
  ],
)  # fmt: skip
def test_part_of_ones_own_is_named_by_its_option(option, kind, monkeypatch):
  asked, added = [], []
  monkeypatch.setattr(
    _parts._options, "load",
    lambda *given: asked.append(given[:2]) or "the part",
  )  # fmt: skip
  monkeypatch.setattr(_parts, "_add", lambda *given: added.append(given))
  monkeypatch.setattr(_parts._options, "check_name", lambda *given: None)
  several = option.endswith("s")
  _parts.resolve({option: ("own:Part",) if several else "own:Part"})
  word = f"--{option.replace('_', '-')}"
  assert asked == [(word, "own:Part")]
  assert added == [(kind, "own:Part", "the part")]


def _row(**more):
  point = {
    "step": 2, "sent_bytes": 8e3, "rounds": 2, "train_s": 1.0, "loss": 0.5,
    "accuracy": 0.25, "bits_per_token": 3.0, "train_loss": 0.75, "other": 7,
  }  # fmt: skip
  return {"workers": 2, "seed": 3, "method": "ssgd", "curve": [point]} | more


def test_curves_may_be_drawn_by_these_axes():
  link = cluster.Link(8e6, 0.25)
  text = _page._curves([_row(), _row(method="diloco", seed=4)], link)
  data = json.loads(re.search(r"\{.*\"points\".*\}", text)[0])
  assert dict(data["x"]) == {
    "step": "steps", "sent_bytes": "bytes sent by a worker",
    "rounds": "rounds", "train_s": "seconds of training",
    "link_s": "seconds with sending at 8 Mbit/s and 250 ms",
  }  # fmt: skip
  assert dict(data["y"]) == {
    "accuracy": "test accuracy", "bits_per_token": "test bits per byte",
    "loss": "test loss", "train_loss": "training loss",
  }  # fmt: skip
  assert [x["run"] for x in data["points"]] == [0, 1]
  assert [x["method"] for x in data["points"]] == [0, 1]
  assert all("other" not in x for x in data["points"])
  assert data["methods"] == ["ssgd", "diloco"] and data["ends"] == [2, 2]
  assert data["runs"] == ["ssgd, seed 3", "diloco, seed 4"]
  # Two messages a round of a ring of two.
  assert data["points"][0]["link_s"] == pytest.approx(1 + 8e-3 + 4 * 0.25)
  # An axis that no curve has is not offered.
  point = {"step": 1, "sent_bytes": 8.0, "rounds": 2, "train_s": 1.0}
  assert _page._curves([_row(curve=[point])], link) == ""
  text = _page._curves([_row(curve=[point | {"loss": 1.0}])], link)
  data = json.loads(re.search(r"\{.*\"points\".*\}", text)[0])
  assert dict(data["y"]) == {"loss": "test loss"}


def test_page_shows_the_state_of_a_run():
  status = {
    "state": "running", "doing": "training", "command": "jdist train",
    "step": 1200, "num_steps": 2400, "train_loss": 0.5, "workers": 4,
    "samples_per_s": 1500.0, "sent_bytes": 2e6, "updated": "now",
  }  # fmt: skip
  shown = _page._state(status)
  for words in (
    ">running<", "training · step 1,200 of 2,400", " · loss 0.5",
    "1,500 samples/s", "2 MB sent", "4 workers", "now", "<pre>jdist train<",
  ):  # fmt: skip
    assert words in shown, words
  shown = _page._state(status | {"train_loss": None})
  assert "loss" not in shown


@pytest.mark.parametrize(
  ("error", "folder", "kind", "said"),
  [
    (
      server.LostRunError("Worker b is lost."), None, _run_end.LostError,
      "Worker b is lost. The same command starts from the beginning.",
    ),
    (
      server.LostRunError("Worker b is lost."), "c", _run_end.LostError,
      "Worker b is lost. The same command starts from the last checkpoint.",
    ),
    (
      KeyboardInterrupt(), None, KeyboardInterrupt,
      "its status is in out; as there is no `--checkpoints DIR`, nothing is "
      "saved. This starts again: go",
    ),
    (
      KeyboardInterrupt(), "c", KeyboardInterrupt,
      "its status is in out; step 4 is saved in c. This resumes: go",
    ),
    (
      training.PreemptedError(7, saved=True), "c", _run_end.TerminatedError,
      "ended after step 7 of 9, which is saved in c. This resumes: go",
    ),
    (
      training.PreemptedError(7, saved=False), "c", _run_end.TerminatedError,
      "ended after step 7 of 9, and step 4 is saved in c. This resumes: go",
    ),
    (
      training.PreemptedError(7, saved=False), None, _run_end.TerminatedError,
      "ended after step 7 of 9, and nothing is saved. This starts again: go",
    ),
  ],
)  # fmt: skip
def test_end_of_a_run_says_how_to_continue(error, folder, kind, said):
  status = types.SimpleNamespace(command="go", output="out")
  newest = (lambda: "step 4") if folder else (lambda: None)
  with (
    pytest.raises(kind) as told,
    _run_end.explained(folder, newest, "step", 9, status),
  ):
    raise error
  assert str(told.value) == said


def test_method_of_which_one_seed_diverged_is_named():
  tuned = types.SimpleNamespace(diverged=False)
  rows = {
    "ssgd": [{"test_loss": 1.0}, {"test_loss": 2.0}],
    "diloco": [{"test_loss": 1.0}, {"test_loss": None}],
  }
  found = types.SimpleNamespace(tuned=dict.fromkeys(rows, tuned), rows=rows)
  with pytest.raises(_run_end.DivergedError, match=r"^diloco ended with"):
    _compare._raise_diverged(found)


def test_error_of_a_library_is_one_line_where_it_passes(monkeypatch):
  def fail(words):
    raise OSError(errno.ENOSPC if words else errno.EXDEV, "It failed")

  monkeypatch.setattr(cli, "_run", fail)
  assert cli._status(["train"]) == (75, "error: [Errno 28] It failed")
  with pytest.raises(OSError, match="It failed"):
    cli._status([])
