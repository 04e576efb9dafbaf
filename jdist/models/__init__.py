"""Networks as pure functions of plain parameter trees.

`build` makes one by name; `functional` turns any Flax NNX module into the
same form, a `Model`, which needs no Flax to use.
"""

from jdist.models._building import build as build
from jdist.models._building import NAMES as NAMES
from jdist.models._functional import functional as functional
from jdist.models._functional import Model as Model
from jdist.models._functional import num_params as num_params
from jdist.models._normalizing import BatchNorm as BatchNorm
from jdist.models._normalizing import GroupNorm as GroupNorm
from jdist.models._normalizing import LayerNorm as LayerNorm
