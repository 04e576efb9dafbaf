"""Writes a repository's address into a checkout that is to be released.

    python scripts/addresses.py CHECKOUT https://host/owner/jdist COMMIT

An index shows the README alone, so that its links to other files must name the
repository; and `[project.urls]` becomes the index's own links.  Both are known
only to whoever publishes, and so are not kept in the repository.
"""

import pathlib
import re
import sys

# The text of a link, with the mark of a picture, and its target.
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
_TABLE = "[project.optional-dependencies]"


def readme(text: str, address: str, commit: str) -> str:
  """Returns a page of the repository whose relative links are whole."""

  def whole(found: re.Match[str]) -> str:
    mark, label, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
      return found[0]
    kind = "raw" if mark else "blob"
    return f"{mark}{label}({address}/{kind}/{commit}/{target})"

  return _LINK.sub(whole, text)


def metadata(text: str, address: str) -> str:
  """Returns a pyproject.toml with the addresses that an index shows."""
  urls = {
    "Repository": address,
    "Issues": f"{address}/issues",
    "Changelog": f"{address}/blob/main/CHANGELOG.md",
  }
  table = "".join(f'{name} = "{value}"\n' for name, value in urls.items())
  before, found, after = text.partition(_TABLE)
  if not found:
    raise ValueError(f"pyproject.toml must have the table {_TABLE}.")
  return f"{before}[project.urls]\n{table}\n{found}{after}"


def main(checkout: str, address: str, commit: str) -> None:
  """Changes the two files of a checkout."""
  if not re.fullmatch(r"https://[^\s\"]+[^\s\"/]", address):
    raise SystemExit(
      f"The address must be https://HOST/OWNER/NAME, got {address!r}."
    )
  root = pathlib.Path(checkout)
  page, project = root / "README.md", root / "pyproject.toml"
  page.write_text(readme(page.read_text(), address, commit))
  project.write_text(metadata(project.read_text(), address))


if __name__ == "__main__":
  main(*sys.argv[1:])
