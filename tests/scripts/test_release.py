"""What a release consists of: versions with hashes, and no host."""

import pathlib
import re
import tomllib

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_constraints_have_hashes_and_no_host():
  text = (_ROOT / "constraints.txt").read_text()
  assert "://" not in text and not re.search("^-", text, re.MULTILINE)
  lines = text.replace("\\\n", " ").splitlines()
  pinned = {re.split("[=\\[ ]", x)[0] for x in lines}
  assert all("==" in x and "--hash=sha256:" in x for x in lines)
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
  extras = project["optional-dependencies"]
  wanted = [*project["dependencies"], *extras["data"], *extras["plots"]]
  names = {re.split("[>\\[;]", x)[0].replace("_", "-") for x in wanted}
  assert names <= pinned


def test_archive_has_what_its_tests_and_its_image_need():
  build = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
  included = build["build"]["targets"]["sdist"]["include"]
  for name in ("constraints.txt", "Dockerfile", "tests", "docs", "scripts"):
    assert f"/{name}" in included
    assert (_ROOT / name).exists()
