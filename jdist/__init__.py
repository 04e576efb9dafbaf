"""Training deep networks where communication is dear and machines unequal.

The parts are modules: `jdist.collectives` (workers and their communication),
`jdist.transforms` (Optax transformations), `jdist.training`, `jdist.models`,
`jdist.data`.  Names that most training loops need are here, too.  An argument
that breaks its rule raises a ValueError that names it, the rule and a remedy,
and a part whose package is missing an ImportError that names what to install.
"""

from jdist import collectives as collectives
from jdist import methods as methods
from jdist import reducers as reducers
from jdist import transforms as transforms
from jdist._version import __version__ as __version__
from jdist.collectives import workers as workers
from jdist.methods import diloco as diloco
from jdist.methods import local_sgd as local_sgd
from jdist.methods import msdpu as msdpu
from jdist.methods import post_local_sgd as post_local_sgd
from jdist.methods import ssgd as ssgd
from jdist.reducers import Compression as Compression
from jdist.transforms import anchor as anchor
from jdist.transforms import apply_updates as apply_updates
from jdist.transforms import average_gradients as average_gradients
from jdist.transforms import evaluation_params as evaluation_params
from jdist.transforms import local_steps as local_steps
