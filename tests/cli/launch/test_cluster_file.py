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
from jdist.cli import _commands

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_COMMAND = ["train", "--method", "diloco", "--workers", "16"]
_COMMAND += ["--batch-size", "1024", "--checkpoints"]
_FILES = {
  "slurm": ("jdist.sbatch", "checkpoints"),
  "mpi": ("jdist.sh", "checkpoints"),
  "kubernetes": ("jdist.yaml", "/checkpoints"),
}
_RAY = "train --protocol h_ps --driver ray --cluster {} --checkpoints /ckpt"


def _print(capsys, kind, *command, options=("--gpus-per-node", "8")):
  words = ["launch", "-n", "16", "--print", kind, *options, "--", *command]
  assert cli.main(words) == 0
  return capsys.readouterr().out


@pytest.mark.parametrize("kind", _FILES)
def test_examples_match_the_printed_files(kind, capsys):
  name, checkpoints = _FILES[kind]
  told = _print(capsys, kind, *_COMMAND, checkpoints)
  assert (_ROOT / "scripts" / "cluster" / name).read_text() == told
  assert "JAX_COMPILATION_CACHE_DIR" in told  # Restarts take seconds.


def test_slurm_starts_the_image_of_a_container(capsys):
  told = _print(capsys, "slurm", *_COMMAND, "ckpt", options=("--image", "a:b"))
  assert (
    "srun --kill-on-bad-exit=0 --wait=60 --container-image=a:b bash" in told
  )


def _ray_manifest(capsys, file, *options):
  words = [*_RAY.format(file).split(), *options]
  assert cli.main(["launch", "--print", "kuberay", "--name", "jdist-ray",
                   "--", *words]) == 0  # fmt: skip
  return capsys.readouterr().out


def test_ray_cluster_has_the_cores_of_its_machines(capsys):
  """Four workers with 12, 12, 8 and 16 cores, as published, by the token."""
  file = _ROOT / "scripts" / "cluster" / "cluster.toml"
  told = _ray_manifest(capsys, file)
  assert told == (_ROOT / "scripts/cluster/jdist-ray.yaml").read_text()
  config, cluster, job = yaml.safe_load_all(told)
  assert config["data"]["cluster.toml"] == file.read_text()
  # KubeRay's own schemas, made as JobSet's below of version 1.7.
  packed = pathlib.Path(__file__).parent / "ray_schemas.json.gz"
  schemas = json.loads(gzip.decompress(packed.read_bytes()))
  for one in (cluster, job):
    schema = {**schemas[one["kind"]], "$defs": schemas["$defs"]}
    jsonschema.validate(one, schema)
    one["spec"]["authOption"] = {}
    with pytest.raises(jsonschema.ValidationError, match="authOption"):
      jsonschema.validate(one, schema)
  assert cluster["spec"]["authOptions"] == {"mode": "token"}
  workers = cluster["spec"]["workerGroupSpecs"]
  pods = [x["template"]["spec"]["containers"][0] for x in workers]
  assert [x["resources"]["limits"]["cpu"] for x in pods] == [
    "12", "12", "8", "16",
  ]  # fmt: skip
  # One worker a pod, as each takes one CPU of Ray's count.
  assert {x["rayStartParams"]["num-cpus"] for x in workers} == {"1"}
  assert job["spec"]["clusterSelector"] == {
    "ray.io/cluster": cluster["metadata"]["name"]
  }
  assert job["spec"]["entrypoint"].endswith(
    "--cluster /etc/jdist/cluster.toml --checkpoints /ckpt --no-paced "
    '--address "$RAY_ADDRESS"'
  )


def test_ray_cluster_has_memory_and_gpus(capsys, tmp_path):
  file = tmp_path / "c.toml"
  file.write_text(
    '[[nodes]]\nname = "A_b"\nspeed = 0.3\nmemory_gb = 2\n[profile]\n'
    "seconds_per_sample = 1\n"
  )
  told = _ray_manifest(capsys, file, "--gpus-per-worker", "0.5", "--no-paced")
  _, cluster, job = yaml.safe_load_all(told)
  (worker,) = cluster["spec"]["workerGroupSpecs"]
  assert worker["groupName"] == "a-b"
  (pod,) = worker["template"]["spec"]["containers"]
  assert pod["resources"]["limits"] == {
    "cpu": "1", "memory": "2000000000", "nvidia.com/gpu": "1",
  }  # fmt: skip
  assert job["spec"]["entrypoint"].count("--no-paced") == 1


@pytest.mark.parametrize(
  ("names", "groups"),
  [
    ("_a 1-", ["a-1"]),
    ("机", ["machine-0"]),
    ("1", ["machine-0"]),
    ("ä b,ö b", ["machine-0", "machine-1"]),
    ("a_b,a-b", ["machine-0", "machine-1"]),
  ],
)
def test_ray_cluster_has_a_group_for_each_machine(
  names, groups, capsys, tmp_path
):
  file = tmp_path / "c.toml"
  tables = [f'[[nodes]]\nname = "{x}"\n' for x in names.split(",")]
  file.write_text("".join(tables) + "[profile]\nseconds_per_sample = 1\n")
  told = _ray_manifest(capsys, file)
  workers = list(yaml.safe_load_all(told))[1]["spec"]["workerGroupSpecs"]
  assert [x["groupName"] for x in workers] == groups


@pytest.mark.parametrize("words", [
  "train --checkpoints /ckpt",
  f"{_RAY} --address a:1",
  f"{_RAY} --cpus-per-worker 0.5",
  _RAY.replace("ray --", "threads --"),
  _RAY.replace("--cluster {} ", ""),
])  # fmt: skip
def test_ray_cluster_needs_a_protocol_on_ray(words, capsys):
  file = _ROOT / "scripts" / "cluster" / "cluster.toml"
  words = ["launch", "--print", "kuberay", "--", *words.format(file).split()]
  assert cli.main(words) == 2
  error = capsys.readouterr().err
  assert "for KubeRay" in error or "`--print kuberay` must be given" in error


_OTHERS = {
  "restarts": "7", "backoff_s": "9", "name": "other", "gpus_per_node": "1",
  "image": "a:b", "claim": "mine", "num_processes": "2",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*_FILES, "kuberay"])
@pytest.mark.parametrize("option", _OTHERS)
def test_file_contains_an_option_or_refuses_it(kind, option, capsys):
  file = _ROOT / "scripts" / "cluster" / "cluster.toml"
  command = "train --workers 4 --checkpoints /ckpt"
  command = _RAY.format(file) if kind == "kuberay" else command
  name = f"--{option.replace('_', '-')}"

  def printed(*given):
    words = ["launch", "--print", kind, *given, "--", *command.split()]
    return cli.main(words), *capsys.readouterr()

  status, told, error = printed(name, _OTHERS[option])
  if status:
    assert f"`{name}` must be" in error and not told
    assert option != "num_processes" or kind == "kuberay"
  else:
    assert told != printed()[1]


def test_every_option_of_launch_is_tried():
  fields = set(_commands.Launch.__dataclass_fields__)
  assert fields == {*_OTHERS, "print", "command", "train"}


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
