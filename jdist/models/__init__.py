"""Networks as pure functions of plain parameter trees.

`build` returns one by name, and `functional` turns any Flax NNX module into the
same form, a `Model`, whose use needs no Flax.
"""

from jdist.models._build import build as build
from jdist.models._build import MODELS as MODELS
from jdist.models._functional import functional as functional
from jdist.models._functional import Layer as Layer
from jdist.models._functional import Model as Model
from jdist.models._functional import num_params as num_params
from jdist.models._normalization import BatchNorm as BatchNorm
