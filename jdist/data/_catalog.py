"""The known data sets, with facts that their files do not hold."""

import dataclasses

SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class Source:
  """A data set, and its place in TensorFlow Datasets.

  Mean and deviation are per channel, over all pixels of the train split, in raw
  units; a test computes them again from the data.  If None, they are measured
  when the set is decoded, and cached with it.
  """

  num_classes: int
  tfds_name: str = ""
  # One file of the download, which shows whether the server answers.
  url: str = ""
  test_split: str = "test"
  mean: tuple[float, ...] | None = None
  std: tuple[float, ...] | None = None
  # Images of different sizes are cropped to this one.
  size: int | None = None
  text: bool = False


def _cifar(
  num_classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Source:
  name = f"cifar{num_classes}"
  url = f"https://www.cs.toronto.edu/~kriz/cifar-{num_classes}-binary.tar.gz"
  return Source(num_classes, name, url, mean=mean, std=std)


SOURCES = {
  "synthetic": Source(10, mean=(127.0444140625,), std=(56.06049651562633,)),
  "digits": Source(10, mean=(4.882173,), std=(6.018521,)),
  "mnist": Source(
    num_classes=10,
    tfds_name="mnist",
    url=(
      "https://storage.googleapis.com/cvdf-datasets/mnist/"
      "train-labels-idx1-ubyte.gz"
    ),
    mean=(33.31842,),
    std=(78.56749,),
  ),
  "fashion_mnist": Source(
    num_classes=10,
    tfds_name="fashion_mnist",
    url=(
      "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
      "train-labels-idx1-ubyte.gz"
    ),
  ),
  "cifar10": _cifar(
    10, (125.3069, 122.9504, 113.8654), (62.99322, 62.08871, 66.70490)
  ),
  "cifar100": _cifar(
    100, (129.3042, 124.0700, 112.4341), (68.17024, 65.39181, 70.41837)
  ),
  "imagenette": Source(
    num_classes=10,
    tfds_name="imagenette/160px-v2",
    url="https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz",
    test_split="validation",
    size=160,
  ),
  **{
    f"imagenet_resized/{size}x{size}": Source(
      1000,
      f"imagenet_resized/{size}x{size}",
      f"http://www.image-net.org/data/downsample/Imagenet{size}_val_npz.zip",
      "validation",
    )
    for size in (8, 16, 32, 64)
  },
  "tiny_shakespeare": Source(
    num_classes=256,
    tfds_name="tiny_shakespeare",
    url=(
      "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
      "tinyshakespeare/input.txt"
    ),
    text=True,
  ),
}

# `load` reads sets of images, and `load_text` reads texts.
NAMES = tuple(name for name, source in SOURCES.items() if not source.text)
TEXT_NAMES = tuple(name for name, source in SOURCES.items() if source.text)


def find(name: str, names: tuple[str, ...] = tuple(SOURCES)) -> Source:
  """Returns the entry of a set; raises a ValueError for an unknown name."""
  if name not in names:
    remedy = "For data of your own make a `jdist.data.Dataset`."
    if name in TEXT_NAMES:
      remedy = "It is a text, which `jdist.data.load_text` reads."
    raise ValueError(
      f"`name` must be one of {', '.join(names)}, got {name!r}. {remedy}"
    )
  return SOURCES[name]


def check_split(split: str) -> None:
  """Raises a ValueError for an unknown split."""
  if split not in SPLITS:
    raise ValueError(
      f'`split` must be "train" or "test", got {split!r}. To validate, hold '
      "back samples of train by index."
    )
