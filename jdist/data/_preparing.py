"""Downloading a set, once per machine, with TensorFlow Datasets."""

import importlib.util
import urllib.error
import urllib.request

from jdist.data import _loading, _optional

# One file that TensorFlow Datasets will download for each set.
_URLS = {
  "mnist": (
    "https://storage.googleapis.com/cvdf-datasets/mnist/"
    "train-labels-idx1-ubyte.gz"
  ),
  "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
  "cifar100": "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
}


def prepare(name: str, *, timeout_s: float = 10.0) -> None:
  """Downloads a data set and prepares it as array_record.

  Does nothing for a set that is there, or that needs no preparing (digits).
  Preparing needs TensorFlow (about 1.3 GB); reading afterwards does not. The
  command is `python -m jdist.data prepare NAME`.

  Args:
    name: as in `load`.
    timeout_s: how long to wait for the data set's server to answer at all,
      seconds, default 10: TensorFlow Datasets itself retries for minutes.

  Raises:
    ValueError: if there is no such set.
    ImportError: if TensorFlow or TensorFlow Datasets is not installed.
    ConnectionError: if the server does not answer.
  """
  _loading.check_name(name)
  if name not in _URLS or _loading.find_prepared(name):
    return
  tfds = _optional.import_optional("tensorflow_datasets", "tensorflow-datasets")
  if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
      f"Preparing {name!r} needs TensorFlow (reading it afterwards does not), "
      "which is not installed. Install it with: "
      'pip install tensorflow "jdist[data]"'
    )
  _check_reachable(name, timeout_s)
  builder = tfds.builder(
    name, data_dir=_loading.tfds_dir(), file_format="array_record"
  )
  builder.download_and_prepare(file_format="array_record")


def _check_reachable(name: str, timeout_s: float) -> None:
  request = urllib.request.Request(_URLS[name], method="HEAD")
  try:
    with urllib.request.urlopen(request, timeout=timeout_s):
      pass
  except urllib.error.HTTPError:
    # It answered; what it has is for TensorFlow Datasets to find out.
    pass
  except OSError as error:
    raise ConnectionError(
      f"The data set {name!r} cannot be downloaded: {_URLS[name]} did not "
      f"answer ({error}). Prepare it where there is a network, with "
      f"`python -m jdist.data prepare {name}`, and copy its folder to "
      f"{_loading.tfds_dir() / name}."
    ) from error
