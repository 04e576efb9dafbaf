"""Real data, split over workers and batched by step number.

`load` gives a whole data set as arrays in memory, `partition` splits it over
workers, `Batches` cuts it into steps and `evaluation_batches` walks over it
once. The room imports NumPy only; scikit-learn, Grain and TensorFlow Datasets
load where they are used.
"""

from jdist.data._batching import Batches as Batches
from jdist.data._batching import evaluation_batches as evaluation_batches
from jdist.data._batching import EvaluationBatches as EvaluationBatches
from jdist.data._dataset import Dataset as Dataset
from jdist.data._loading import load as load
from jdist.data._loading import NAMES as NAMES
from jdist.data._partitioning import partition as partition
from jdist.data._preparing import prepare as prepare
