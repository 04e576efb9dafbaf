"""Commands on texts: trained, resumed and refused runs."""

import json
import shutil

import pytest

from jdist import cli
from jdist.cli import _commands, _workload
from jdist.training import comparison

pytest.importorskip("grain")
_SMALL = (
  "--model transformer --num-layers 1 --width 8 --num-heads 2 "
  "--window-length 8 --batch-size 16 --workers 2 --warmup-epochs 0"
)


@pytest.fixture
def text(tmp_path):
  file = tmp_path / "mine.txt"
  file.write_bytes(b"abacbc" * 400)
  return file


def _run(words, folder, capsys):
  assert cli.main(f"{words} --output {folder}".split()) == 0
  rows = (folder / "rows.jsonl").read_text().splitlines()
  return json.loads(rows[-1]), capsys.readouterr().out


def test_name_of_a_text_contains_its_hash(text, tmp_path):
  name = _named(text)
  assert name.startswith("mine-")
  moved = tmp_path / "moved" / "mine.txt"
  moved.parent.mkdir()
  text.rename(moved)
  assert _named(moved) == name
  moved.write_bytes(b"abcabc" * 400)
  assert _named(moved) != name


def _named(text):
  return _workload.named(_commands.Train(text=str(text))).dataset


@pytest.mark.slow
def test_stages_of_a_transformer_train_as_the_whole(text, tmp_path, capsys):
  words = f"train --method ssgd --steps 3 --text {text} {_SMALL}"
  whole, _ = _run(f"{words} --accumulate 2", tmp_path / "a", capsys)
  words += " --stages 3 --microbatches 2 --table 1f1b"
  cut, _ = _run(words, tmp_path / "b", capsys)
  for name in ("test_loss", "train_loss"):
    assert cut[name] == pytest.approx(whole[name], rel=1e-5)


@pytest.mark.slow
def test_late_pipeline_on_a_text_resumes(text, tmp_path, capsys):
  kept = tmp_path / "kept"
  words = (
    f"train --method local_sgd --interval 1 --text {text} {_SMALL} --stages 2 "
    f"--table ours --window 2 --microbatches 2 --steps 4 --checkpoints {kept} "
    "--checkpoint-every-epochs 0.12 --no-host-rounds"
  )
  whole, out = _run(words, tmp_path / "a", capsys)
  assert " bits per byte  accuracy " in out and " bytes/s" in out
  assert whole["config"]["dataset"] == _named(text)
  assert 4 < whole["bits_per_token"] < 9 and whole["perplexity"] > 16
  # The run is left as if it had been killed before its last checkpoint.
  _, last = sorted(x for x in kept.iterdir() if x.is_dir())
  shutil.rmtree(last)
  last.with_suffix(".json").unlink()
  again, _ = _run(words, tmp_path / "b", capsys)
  assert last.exists()
  for name in ("test_loss", "accuracy", "sent_bytes"):
    assert again[name] == whole[name]


@pytest.mark.parametrize(
  "rates",
  [
    "0.1",
    pytest.param("0.1 0.2 --grid-extensions 0", marks=pytest.mark.slow),
  ],
)
def test_methods_are_tuned_and_compared_on_a_text(
  rates, text, tmp_path, capsys
):
  words = (
    f"compare --methods ssgd --steps 4 --seeds 0 1 --text {text} "
    f"--learning-rate {rates} {_SMALL}"
  )
  row, out = _run(words, tmp_path / "a", capsys)
  assert "test windows of 8 bytes" in out and "16 windows a step" in out
  assert "bits per byte" in out and "windows/s" in out
  assert "test bits per byte" in (tmp_path / "a" / "report.html").read_text()
  if rates == "0.1":
    return
  tuning = (tmp_path / "a" / "tuning.jsonl").read_text().splitlines()
  tried = {x["learning_rate"]: x["test_loss"] for x in map(json.loads, tuning)}
  assert row["learning_rate"] == min(tried, key=tried.get)


@pytest.mark.parametrize(
  ("words", "told"),
  [
    ("--text TEXT", "`--model` must be transformer for a text, got mlp"),
    ("--dataset tiny_shakespeare", "`--model` must be transformer for a text"),
    ("--model transformer", "must be one for images with digits, got tran"),
    ("--text TEXT --dataset mnist", "`--dataset` must be left out with `--te"),
    ("--text none.txt", "`--text` must be a file with bytes, got"),
    ("--text TEXT --model transformer --augment", "`--augment` must be left"),
    ("--text TEXT --model transformer --alpha 1", "`--alpha` must be left out"),
    ("--window-length 9", "`--window-length` must be left out with images"),
    ("--num-layers 2", "`num_layers` is no option of mlp"),
    ("--num-heads 2 --model cnn", "`num_heads` is no option of cnn"),
    ("--width 9", "`width` is no option of mlp"),
    (
      "--text TEXT --model transformer --norm batch --batch-size 8",
      "`norm` is no option of",
    ),
    (
      "--text TEXT --model transformer --num-heads 3 --batch-size 8",
      "`num_heads` must divide the width 128, got 3",
    ),
    (
      "--text TEXT --model transformer --window-length 300",
      "`window_length` must be an int from 1 to 239, got",
    ),
    (
      "--text TEXT --model transformer --window-length 0",
      "`--window-length` must be at least 1, got 0",
    ),
    (
      "--text TEXT --model transformer --workers 256 --batch-size 256 "
      "--window-length 10",
      "`--batch-size` must be an int from 1 to 215, got",
    ),
  ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_options_that_do_not_match_are_refused(
  command, words, told, text, refusal
):
  assert told in refusal(
    f"{command} --steps 1 {words.replace('TEXT', str(text))}"
  )


def test_rates_of_a_text_are_chosen_by_its_loss(text, tmp_path, monkeypatch):
  ranks = []

  class KnownError(Exception):
    pass

  def compare(*_, rank, **__):
    ranks.append(rank)
    raise KnownError

  monkeypatch.setattr(comparison, "compare", compare)
  words = f"compare --methods ssgd --output {tmp_path} --text {text} {_SMALL}"
  with pytest.raises(KnownError):
    cli.main(words.split())
  assert ranks == [comparison.by_loss]
