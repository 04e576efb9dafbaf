"""Writes a repository's address into a checkout that is to be released.

    python scripts/addresses.py CHECKOUT https://host/owner/jdist COMMIT

An index shows the README alone, so that its links to other files must name the
repository; and `[project.urls]` becomes the index's own links.  Both are known
only to the publisher, and so are not kept in the repository.  The index's
page is a file of its own: the archive's README stays the one that its tests
check, and its links lead to the archive's other files.
"""

import pathlib
import re
import sys

# The text of a link, with the mark of a picture, and its target.
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
_TABLE = "[project.optional-dependencies]"
_PAGE = "README.index"


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
  """Returns a pyproject.toml with the addresses and the page of an index."""
  urls = {
    "Repository": address,
    "Issues": f"{address}/issues",
    "Changelog": f"{address}/blob/main/CHANGELOG.md",
  }
  table = "".join(f'{name} = "{value}"\n' for name, value in urls.items())
  # An archive that was released has a table and a page already.
  text = re.sub(r"^\[project\.urls\]\n(.+\n)*\n", "", text, flags=re.MULTILINE)
  page = f'readme = {{file = "{_PAGE}", content-type = "text/markdown"}}'
  text, pages = re.subn(r"^readme = .+$", page, text, flags=re.MULTILINE)
  before, found, after = text.partition(_TABLE)
  if not (found and pages):
    raise ValueError(f"pyproject.toml must have `readme` and {_TABLE}.")
  return f"{before}[project.urls]\n{table}\n{found}{after}"


def main(checkout: str, address: str, commit: str) -> None:
  """Writes the index's page into a checkout, and changes its metadata."""
  if not re.fullmatch(r"https://[^\s\"]+[^\s\"/]", address):
    raise SystemExit(
      f"The address must be https://HOST/OWNER/NAME, got {address!r}."
    )
  root = pathlib.Path(checkout)
  page, project = root / "README.md", root / "pyproject.toml"
  released = readme(page.read_text(), address, commit)
  (root / _PAGE).write_text(released)
  project.write_text(metadata(project.read_text(), address))


if __name__ == "__main__":
  main(*sys.argv[1:])
