"""Tables as text, and as pictures of text."""

import dataclasses

import pytest

from jdist import pipeline


def test_hand_written_table_is_parsed(tmp_path):
  path = tmp_path / "mine.txt"
  path.write_text(  # Windows writes the mark of UTF-8 in front.
    "\ufeff# Two devices.\nwindow 2  # of iterations\n"
    "iterations 2\n"
    "device F0 F0@1 B0 U B0@1 U@1\n\n"
    "device F0 B0 U F0@1 B0@1 U@1\n"
  )
  table = pipeline.load_table(path)
  assert (table.name, table.num_stages, table.num_microbatches) == (
    "mine", 2, 1,
  )  # fmt: skip
  assert (table.num_iterations, table.window) == (2, 2)
  assert pipeline.check_table(table).delays == (1, 1)


def test_stage_on_another_device_is_named():
  table = pipeline.make_table("interleaved", 2, 2)
  text = pipeline.format_table(table)
  assert "device F0 F1 F0/2 F1/2 B0/2 B1/2 U/2 B0 B1 U" in text
  assert pipeline.parse_table(text) == table


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("device F0 G1", "line 1 must have actions such as F0"),
    ("name a\ndevice F0 B", "line 2 must have actions"),
    ("device U0", "line 1 must have actions"),
    ("devise F0", "line 1 must be `device` and its actions, or one of name"),
    ("window 1\nwindow 2\ndevice F0", "line 2 must be `device`"),
    ("window 1 2\ndevice F0", "line 1 must be `device`"),
    ("stages two\ndevice F0", "`stages` must be a number"),
    ("stages ²\ndevice F0", "`stages` must be a number"),
    pytest.param(f"stages {'9' * 5000}\ndevice F0", "`stages`", id="digits"),
    pytest.param(f"device F{'9' * 5000}", "line 1 must have", id="a long pass"),
    ("stages 200000\ndevice F0", "`num_stages` times .* at most 100,000"),
    ("device F0 F9999999 B0 U", "`num_stages` times .* at most 100,000"),
    ("iterations 99999999\ndevice F0", "at most 100,000"),
    ("", "`devices` must be one at least"),
  ],
)
def test_wrong_text_raises(tmp_path, text, words):
  path = tmp_path / "wrong.txt"
  path.write_text(text)
  with pytest.raises(ValueError, match=words) as caught:
    pipeline.load_table(path)
  assert str(caught.value).startswith(str(path))


def test_long_drawing_is_cut_off():
  table = pipeline.make_table("2bw", 2, 4, num_iterations=9)
  lines = pipeline.draw_table(table, max_ticks=10).splitlines()
  assert all(line.endswith(" ...") for line in lines)
  assert len(lines[0].split()) == 2 + 10 + 1


def test_stage_numbers_with_equal_first_digits_are_distinguished():
  # Device 1 runs stages 1, 6 and 11.
  table = pipeline.make_table("interleaved", 5, 5, num_chunks=3)
  assert pipeline.parse_table(pipeline.format_table(table)) == table


@pytest.mark.parametrize("weights", ["newest", "stashed", "delayed"])
def test_versions_of_the_weights_are_written(weights):
  table = dataclasses.replace(
    pipeline.make_table("1f1b", 2, 2), weights=weights
  )
  text = pipeline.format_table(table)
  assert (f"weights {weights}" in text) is (weights != "delayed")
  assert pipeline.parse_table(text) == table


def test_table_without_actions_has_one_of_all():
  table = pipeline.parse_table("device")
  counts = table.num_stages, table.num_microbatches, table.num_iterations
  assert counts == (1, 1, 1)


def test_update_on_another_device_is_not_drawn():
  table = pipeline.parse_table("device F0 B0\ndevice U/0")
  drawn = pipeline.draw_table(table).splitlines()
  assert drawn[0] == "device 0 |F0 B0 B0"


def test_updates_are_marked_once_and_iterations_are_counted_through():
  drawn = pipeline.draw_table(pipeline.make_table("interleaved", 2, 2))
  assert "*" in drawn and "**" not in drawn
  several = pipeline.make_table("gpipe", 1, 2, num_iterations=2)
  assert pipeline.draw_table(several) == (
    "device 0 |F0  F1  B0  B0  B1  B1* F2  F3  B2  B2  B3  B3*"
  )
  assert str(several).endswith("2 micro-batches, 2 iterations")


def test_drawing_is_cut_off_and_its_devices_are_aligned():
  table = pipeline.make_table("gpipe", 1, 2)  # Six ticks.
  assert "..." not in pipeline.draw_table(table, max_ticks=6)
  assert pipeline.draw_table(table, max_ticks=5).endswith("B1  ...")
  many = pipeline.draw_table(pipeline.make_table("naive", 11, 1)).splitlines()
  assert many[0].startswith("device  0 |") and many[10][:11] == "device 10 |"
