"""The tables of one GPU, from its rows, on the pages between their markers.

python experiments/gpu/report.py          # prints them
python experiments/gpu/report.py --write  # writes them into the pages
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import training

Row: TypeAlias = Mapping[str, Any]
# A result this near differs by the order of sums alone.
_SAME = 1e-5
_PARTS = ("agreement", "codecs", "tax", "logical", "streamed")


def agreement(rows: Sequence[Row]) -> str:
  """Returns how many cases agree, and by how much the others differ."""
  lines = []
  for row in rows:
    for dtype in ("float32", "bfloat16"):
      own = [x for x in row["cases"] if x.get("dtype") == dtype]
      told = [x for x in own if "relative" in x]
      same = [x for x in told if x["relative"] <= _SAME]
      others = sorted(
        (x for x in told if x["relative"] > _SAME),
        key=lambda x: -x["relative"],
      )
      worst = ", ".join(f"{x['case']} {x['relative']:.1e}" for x in others[:5])
      more = f" and {len(others) - 5} more" if len(others) > 5 else ""
      lines.append((
        row["group"], dtype, len(own), len(same),
        len(own) - len(told), (worst or "none") + more,
      ))  # fmt: skip
  return studies.table(
    "group | dtype | cases | within 1e-5 | failed | the others, the largest "
    "first",
    lines,
  )


def in_copies(rows: Sequence[Row]) -> str:
  """Returns the times of encoding, decoding and means."""
  (row,) = rows
  lines = [
    (name, f"{one['compression']:.1f}x", f"{one['encode']['median']:.2f}",
     f"{one['decode']['median']:.2f}")
    for name, one in row["codecs"].items()
  ]  # fmt: skip
  means = [
    (f"mean of {row['config']['workers']} workers, {name}", "",
     f"{one['median']:.2f}", "")
    for name, one in row["means"].items()
  ]  # fmt: skip
  copy_ms = 1e3 * row["copy_s"]["median"]
  again = row["copy_again"]["median"]
  table = studies.table(
    "codec | smaller by | encode, copies | decode, copies", lines + means
  )
  note = (
    f"A copy of the {row['tensor_bytes'] / 2**20:.0f} MiB takes "
    f"{copy_ms:.3f} ms, and a second one {again:.2f} of it."
  )
  return f"{table}\n\n{note}"


def tax(rows: Sequence[Row]) -> str:
  """Returns what each method adds to a step."""
  (row,) = rows
  config = row["config"]
  lines = []
  for name, one in row["ratios"].items():
    low, high = one["quartiles"]
    lines.append((name, f"{one['ratio']:.3f} ({low:.3f} to {high:.3f})"))
  table = studies.table("method | step, of the plain one (quartiles)", lines)
  return (
    f"{table}\n\nThe plain step of {config['model']} with "
    f"{config['batch_size']} images in {config['dtype']} takes "
    f"{1e3 * row['plain_step_s']:.2f} ms; rounds have {config['interval']} "
    "steps."
  )


def logical(rows: Sequence[Row]) -> str:
  """Returns the speed of logical workers by each way."""
  ways = list(dict.fromkeys(x["config"]["way"] for x in rows))
  lines = []
  for model, own in studies.group(rows, lambda x: x["config"]["model"]).items():
    speeds = {x["config"]["way"]: f"{x['speed']:.2f}" for x in own}
    lines.append((
      model, own[0]["config"]["batch"], f"{own[0]['alone_ms']:.2f}",
      *(speeds.get(way, "") for way in ways),
    ))  # fmt: skip
  return studies.table(
    " | ".join(["model", "whole batch", "one worker's step, ms", *ways]), lines
  )


def streamed(rows: Sequence[Row]) -> str:
  """Returns how far a streamed step is from the simple one."""
  lines = [
    (
      x["config"]["sent"], f"{x['relative']:.1e}", f"{x['simple_ms']:.2f}",
      f"{x['streamed_ms']:.2f}", f"{x['ratio']:.2f}",
    )
    for x in rows
  ]  # fmt: skip
  return studies.table(
    "sent as | relative difference | simple step, ms | streamed step, ms | "
    "ratio",
    lines,
  )


def between(texts: dict[pathlib.Path, str], name: str, new: str) -> None:
  """Prints a text and puts it between its markers on the page that has them."""
  print(f"{name}:\n\n{new}\n")
  begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
  for path, text in texts.items():
    if begin in text and end in text:
      before, rest = text.split(begin)
      texts[path] = f"{before}{begin}{new}\n{end}{rest.split(end)[1]}"
      return
  raise SystemExit(f"No page has the marker {begin.strip()}.")


def main(folder: pathlib.Path) -> None:
  """Prints the tables of all parts that have rows, or writes them."""
  makers = dict(
    zip(_PARTS, (agreement, in_copies, tax, logical, streamed), strict=True)
  )
  page = folder / "README.md"
  tables = folder / "TABLES.md"
  texts = {path: path.read_text() for path in (page, tables) if path.exists()}
  kinds = dict[str, None]()
  for part, make in makers.items():
    path = folder / "results" / f"{part}.jsonl"
    if not path.exists():
      continue
    rows = training.read_rows(path)
    kinds |= {
      f"{x['device']}, jax {x['versions']['jax']}, commit {x['commit']}": None
      for x in rows
    }
    between(texts, part, make(rows))
  between(texts, "circumstances", f"Measured on {'; '.join(kinds)}.")
  if "--write" in sys.argv:
    for path, text in texts.items():
      path.write_text(text)


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
