"""Published methods, each as one chain of transformations.

Every method takes the optimizer of a worker first, any Optax chain, and the
axis of the workers by name, and raises a ValueError if an argument is out of
its range.  Methods with rounds take `axis`, `overlap` and `compression` as
`transforms.local_steps` does; `transforms.drain` describes how each ends.
`registry` has all methods by name, with the facts of a run that they need.
"""

from jdist.methods._compressed_gradients import demo as demo
from jdist.methods._compressed_gradients import dgc as dgc
from jdist.methods._compressed_gradients import ef_signsgd as ef_signsgd
from jdist.methods._compressed_gradients import powersgd as powersgd
from jdist.methods._compressed_gradients import qsgd as qsgd
from jdist.methods._compressed_gradients import signsgd as signsgd
from jdist.methods._compressed_gradients import ssgd as ssgd
from jdist.methods._compressed_gradients import terngrad as terngrad
from jdist.methods._compressed_gradients import topk_sgd as topk_sgd
from jdist.methods._diloco import diloco as diloco
from jdist.methods._diloco import muloco as muloco
from jdist.methods._diloco import sparse_loco as sparse_loco
from jdist.methods._diloco import streaming_diloco as streaming_diloco
from jdist.methods._local_sgd import easgd as easgd
from jdist.methods._local_sgd import fed_prox as fed_prox
from jdist.methods._local_sgd import local_sgd as local_sgd
from jdist.methods._local_sgd import post_local_sgd as post_local_sgd
from jdist.methods._local_sgd import scaffold as scaffold
from jdist.methods._local_sgd import slow_mo as slow_mo
from jdist.methods._method_registry import Method as Method
from jdist.methods._method_registry import PARTS as PARTS
from jdist.methods._method_registry import registry as registry
from jdist.methods._method_registry import Run as Run
from jdist.methods._mp2 import mp2 as mp2
from jdist.methods._overlapped import cocod as cocod
from jdist.methods._overlapped import msdpu as msdpu
from jdist.methods._overlapped import overlap_local_sgd as overlap_local_sgd
