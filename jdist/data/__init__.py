"""Real data, split over workers and batched by step number.

`load` returns a set of images as arrays in memory, and `load_text` a text as
windows of bytes. `partition` splits a set over workers, `Batches` cuts it into
steps and `evaluation_batches` iterates over it once. Augmentations such as
`random_crop` run inside the step, on the device. The room imports NumPy and JAX
only; scikit-learn, Grain and TensorFlow Datasets load where they are used.
"""

from jdist.data._augmentation import compose as compose
from jdist.data._augmentation import random_crop as random_crop
from jdist.data._augmentation import random_flip as random_flip
from jdist.data._batches import Batches as Batches
from jdist.data._batches import evaluation_batches as evaluation_batches
from jdist.data._dataset import Dataset as Dataset
from jdist.data._dataset import TextDataset as TextDataset
from jdist.data._load import load as load
from jdist.data._load import load_text as load_text
from jdist.data._prepare import DATASETS as DATASETS
from jdist.data._prepare import prepare as prepare
from jdist.data._prepare import TEXT_NAMES as TEXT_NAMES
from jdist.data._sample_stream import partition as partition
from jdist.data._sample_stream import SampleStream as SampleStream
