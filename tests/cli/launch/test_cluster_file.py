"""Files for clusters are valid, and equal to those of scripts/cluster."""

import copy
import gzip
import json
import pathlib
import subprocess

import jsonschema
import pytest
import yaml

from jdist import cli

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_COMMAND = ["train", "--method", "diloco", "--workers", "16"]
_COMMAND += ["--batch-size", "1024", "--checkpoints"]
_FILES = {
  "slurm": ("jdist.sbatch", "checkpoints"),
  "mpi": ("jdist.sh", "checkpoints"),
  "kubernetes": ("jdist.yaml", "/checkpoints"),
}


def _print(capsys, kind, *command, options=("--gpus-per-node", "8")):
  words = ["launch", "-n", "16", "--print", kind, *options, "--", *command]
  assert cli.main(words) == 0
  return capsys.readouterr().out


@pytest.mark.parametrize("kind", _FILES)
def test_examples_match_the_printed_files(kind, capsys):
  name, checkpoints = _FILES[kind]
  told = _print(capsys, kind, *_COMMAND, checkpoints)
  assert (_ROOT / "scripts" / "cluster" / name).read_text() == told


@pytest.mark.parametrize("kind", ["slurm", "mpi"])
@pytest.mark.parametrize("options", [(), ("--gpus-per-node", "4")])
def test_shell_parses_the_scripts(kind, options, capsys):
  told = _print(capsys, kind, *_COMMAND, "it's a $HOME", options=options)
  done = subprocess.run(["bash", "-n"], input=told, text=True, timeout=60)
  assert done.returncode == 0
  assert "gpus-per-node" not in told or options


def test_script_restarts_its_ranks_until_the_run_ends(tmp_path, capsys):
  # This `python` writes its arguments down, and exits with 75 twice and then
  # with 3.
  (tmp_path / "mpirun").write_text(
    '#!/bin/bash\nshift 2\nexport OMPI_COMM_WORLD_RANK=3\n"$@"\n'
  )
  (tmp_path / "python").write_text(
    '#!/bin/bash\nprintf "<%s>" "$@" >>told\necho >>told\n'
    "[ $(wc -l <told) -lt 3 ] || exit 3\nexit 75\n"
  )
  (tmp_path / "sleep").write_text("#!/bin/bash\necho wait $1\n")
  for name in ("mpirun", "python", "sleep"):
    (tmp_path / name).chmod(0o755)
  script = _print(capsys, "mpi", *_COMMAND, "my $HOME", options=())
  done = subprocess.run(
    ["bash", "-s", "host7"],
    input=script.replace("mpirun", "./mpirun"),
    cwd=tmp_path,
    env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    capture_output=True,
    text=True,
    timeout=60,
  )
  told = (tmp_path / "told").read_text().splitlines()
  assert told == [told[0]] * 3, done.stderr
  assert told[0].startswith("<-m><jdist><train><--method><diloco>")
  assert told[0].endswith(
    "<my $HOME><--coordinator-address><host7:29400><--num-processes><16>"
    "<--process-id><3>"
  )
  assert done.stdout == "wait 1\nwait 2\n"
  assert done.returncode == 3


def _closed(told):
  """The JobSet, checked by JobSet's own schema, which knows no other field.

  Made of the CustomResourceDefinition of JobSet v0.13 (Apache-2.0), without its
  descriptions, and with "additionalProperties": false.
  """
  folder = pathlib.Path(__file__).parent
  schema = json.loads(
    gzip.decompress((folder / "jobset_schema.json.gz").read_bytes())
  )
  jsonschema.validate(told, schema)
  return told


@pytest.mark.parametrize("options", [(), ("--gpus-per-node", "8")])
def test_jobset_is_valid_for_kubernetes(options, capsys):
  told = yaml.safe_load(
    _print(
      capsys, "kubernetes", *_COMMAND, '/it\'s "$HOME"',
      options=(*options, "--name", "mine", "--image", "a/b:c"),
    )
  )  # fmt: skip
  _closed(told)
  job = told["spec"]["replicatedJobs"][0]["template"]["spec"]
  (container,) = job["template"]["spec"]["containers"]
  assert container["image"] == "a/b:c"
  assert container["volumeMounts"][0]["mountPath"] == '/it\'s "$HOME"'
  assert ("resources" in container) == bool(options)
  assert (
    "--coordinator-address mine-run-0-0.mine:29400" in (container["command"][2])
  )
  # The schema refuses a misspelled word.
  wrong = copy.deepcopy(told)
  wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
  with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
    _closed(wrong)
