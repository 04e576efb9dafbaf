"""Parts of `jdist overlap`, with programs that no compiler has made."""

import dataclasses
import json
import pathlib
import types

import pytest

from jdist import cluster, collectives, profiling, training
from jdist.cli import _commands, _output
from jdist.cli.programs import _overlap, _overlap_inputs

_DEVICE = cluster.Device("toy", 2 * 1024**3, memory_bytes_per_s=1e30)
_LINK = cluster.Link(8e9)


@pytest.fixture(scope="module")
def step():
  folder = pathlib.Path(__file__).parent.parent / "profiling"
  text = (folder / "delayed_on_8_h200.hlo").read_text()
  return profiling.forecast(text, _DEVICE, _LINK)


@pytest.fixture
def task():
  return _overlap_inputs.make_task(_commands.Overlap(model="mlp", batch_size=3))


@pytest.mark.parametrize(
  ("method", "conditional", "interval"),
  [
    (["ssgd"], False, 1),
    # The messages of a round are in a branch, or in a program of their own.
    (["local_sgd"], True, 5),
    (["end of local_sgd", "local_sgd"], False, 5),
    # A stream sends in each step.
    (["msdpu"], False, 5),
    (["msdpu:simple"], True, 5),
  ],
)
def test_step_of_a_round_and_its_end_are_forecast(
  method, conditional, interval, monkeypatch
):
  *_, name = programs = method
  sent, asked = types.SimpleNamespace(conditional=conditional), []

  def compiled(*given):
    asked.append(given)
    return [types.SimpleNamespace(as_text=lambda x=x: x) for x in programs]

  def forecast(text, device, link, branch=None):
    assert (device, link) == (_DEVICE, _LINK)
    return types.SimpleNamespace(text=text, branch=branch, collectives=[sent])

  monkeypatch.setattr(_overlap, "_programs", compiled)
  monkeypatch.setattr(profiling, "forecast", forecast)
  sizes = {"end of local_sgd": 7, programs[-1]: 5}
  monkeypatch.setattr(
    _overlap_inputs, "memory_bytes", lambda program: sizes[program.as_text()]
  )
  options = _commands.Overlap(interval=5)
  found = _overlap._read(name, options, "task", "team", _DEVICE, _LINK)
  assert asked == [(name, name == "msdpu", options, "task", "team")]
  assert (found.method, found.interval) == (name, interval)
  assert (found.meeting.text, found.meeting.branch) == (programs[0], None)
  assert (found.between.text, found.between.branch) == (programs[-1], "idles")
  assert found.memory_bytes == max(sizes[x] for x in programs)
  assert 0 <= found.compile_s < 5


@pytest.mark.parametrize(
  ("method", "host_rounds", "controls"),
  [
    ("ssgd", True, [(None, "fixed")]),
    ("local_sgd", True, [(True, "fixed"), (False, "fixed")]),
    ("local_sgd", False, [(None, "fixed")]),
    ("msdpu", True, [(True, 5), (False, 5)]),
    ("msdpu:simple", False, [(None, "fixed")]),
    # Fragments end their rounds in other steps.
    ("streaming_diloco", True, [(None, "fixed")]),
  ],
)
def test_programs_are_those_of_the_ends_of_rounds(
  method, host_rounds, controls, task, monkeypatch
):
  seen, team = [], collectives.workers(2)

  def make_step(loss, optimizer, *, axis):
    assert loss is task.loss and axis == team.axis

    def step(state, batch, control):
      assert batch["image"].shape == (3, 28, 28, 1)
      seen.append((control.round_ends, control.stream_steps))
      return state

    return step

  monkeypatch.setattr(training, "make_step", make_step)
  options = _commands.Overlap(model="mlp", interval=5, host_rounds=host_rounds)
  streamed = method == "msdpu"
  made = _overlap._programs(method, streamed, options, task, team)
  assert len(made) == len(controls) and seen == controls
  # The state is given away, as in training.
  assert "input_output_alias" in made[0].as_text().splitlines()[0]


def test_heading_has_the_sizes_of_a_step(task):
  options = _commands.Overlap(model="mlp", batch_size=3, dtype="float32")
  target = types.SimpleNamespace(num_gpus=16)
  text = _overlap._heading(options, target, task, _DEVICE, _LINK)
  size = 784 * 128 + 128 + 128 * 10 + 10
  assert text == (
    f"mlp, {size:,} parameters, 3 images of 28x28x1 a GPU and step, float32; "
    f"16 x toy.\n{_overlap.rates(_DEVICE, _LINK)}\n"
  )


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_each_method_has_a_line_a_row_and_a_timeline(
  several, tells, step, tmp_path, monkeypatch, capsys
):
  told = []
  config = types.SimpleNamespace(
    jax_platforms="cuda" if several else None,
    update=lambda *given: told.append(given),
  )
  monkeypatch.setattr(_overlap, "jax", types.SimpleNamespace(config=config))
  target = types.SimpleNamespace(
    num_gpus=2, mesh=lambda: None, memory_bytes=7e9
  )
  monkeypatch.setattr(
    _overlap_inputs, "check", lambda options: (target, _DEVICE, _LINK)
  )
  monkeypatch.setattr(
    profiling, "check_compiler", lambda: told.append("compiler")
  )
  monkeypatch.setattr(
    profiling, "set_link_rates", lambda *rates: told.append(rates)
  )
  monkeypatch.setattr(
    collectives, "workers", lambda number, mesh: f"{number} workers"
  )
  monkeypatch.setattr(
    _output, "finish", lambda *given, **more: told.append((*given, more))
  )

  def read(method, options, task, workers, device, link):
    assert (workers, device, link) == ("2 workers", _DEVICE, _LINK)
    return _overlap.Found(method, step, step, 8, 10**9, 3.0)

  monkeypatch.setattr(_overlap, "_read", read)
  methods = ("msdpu", "msdpu:simple")[: 1 + several]
  options = _commands.Overlap(
    methods=methods, model="mlp", output=str(tmp_path), tell_compiler=tells
  )
  _overlap.overlap(options)
  # XLA reads the rates before JAX starts.
  assert told == [
    *[(8e9, 0.0)] * tells,
    *[("jax_platforms", "cpu")] * (not several),
    ("jax_enable_compilation_cache", False),
    "compiler",
    (tmp_path, options, {"timelines": True}),
  ]
  printed = capsys.readouterr().out
  assert "mlp, 101,770 parameters, 32 images" in printed
  for method in methods:
    assert f"{method}: compiled in 3 s, 1 GB of a GPU's 7 GB" in printed
    trace = json.loads(
      (tmp_path / f"{method.replace(':', '-')}.json").read_text()
    )
    assert trace["traceEvents"]
  rows = training.read_rows(tmp_path / "rows.jsonl")
  assert [row["method"] for row in rows] == [*methods]
  # The messages are listed of a single method.
  assert ("Collectives of msdpu" in printed) == (not several)
  assert "Steps at the stated rates" in printed
  assert dataclasses.asdict(options)["model"] == rows[0]["config"]["model"]
