"""What a release consists of: versions with hashes, and no host."""

import importlib.util
import pathlib
import re
import shutil
import tomllib

import pytest

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


def _addresses():
  path = _ROOT / "scripts" / "addresses.py"
  spec = importlib.util.spec_from_file_location("addresses", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_released_readme_has_no_relative_link():
  text = (_ROOT / "README.md").read_text()
  found = _addresses().readme(text, "https://host/me/jdist", "abc")
  links = re.findall(r"\]\(([^)\s]+)\)", found)
  assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", text)) > 15
  assert all(x.startswith("https://") for x in links)
  assert "](https://host/me/jdist/blob/abc/docs/servers.md#members" in found
  (picture,) = re.findall(r"!\[[^\]]*\]\((\S+)\)", found)
  path = picture.removeprefix("https://host/me/jdist/raw/abc/")
  assert (_ROOT / path).is_file()
  # Links to other sites stay as they are.
  kept = "[a](https://x.y/z) [b](#part)"
  assert _addresses().readme(kept, "https://host", "abc") == kept


def test_released_metadata_has_addresses():
  text = (_ROOT / "pyproject.toml").read_text()
  released = _addresses().metadata(text, "https://host/me/jdist")
  # An archive of a release can be released from another address.
  moved = _addresses().metadata(released, "https://host/you/jdist")
  assert moved == released.replace("/me/", "/you/")
  found, kept = tomllib.loads(released), tomllib.loads(text)
  kept["project"].pop("urls", None)
  assert found["project"].pop("urls") == {
    "Repository": "https://host/me/jdist",
    "Issues": "https://host/me/jdist/issues",
    "Changelog": "https://host/me/jdist/blob/main/CHANGELOG.md",
  }
  page = {"file": "README.index", "content-type": "text/markdown"}
  assert found["project"].pop("readme") == page
  del kept["project"]["readme"]
  assert found == kept


def test_release_leaves_the_readme_that_its_tests_check(tmp_path):
  for name in ("README.md", "pyproject.toml"):
    shutil.copy(_ROOT / name, tmp_path)
  _addresses().main(str(tmp_path), "https://host/me/jdist", "abc")
  text = (_ROOT / "README.md").read_text()
  assert (tmp_path / "README.md").read_text() == text
  assert (
    "](https://host/me/jdist/blob/abc/LICENSE)"
    in (tmp_path / "README.index").read_text()
  )


def test_wrong_address_is_refused(tmp_path):
  for address in ("http://host/x", "https://host/x/", 'https://h"x', ""):
    with pytest.raises(SystemExit, match="must be https://HOST/OWNER/NAME"):
      _addresses().main(str(tmp_path), address, "abc")
