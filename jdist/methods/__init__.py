"""Published methods, each as one chain of transformations.

All take the optimizer of a worker first, any Optax chain, and the workers'
axis by name.
"""

from jdist.methods._chains import diloco as diloco
from jdist.methods._chains import local_sgd as local_sgd
from jdist.methods._chains import mp2 as mp2
from jdist.methods._chains import msdpu as msdpu
from jdist.methods._chains import post_local_sgd as post_local_sgd
from jdist.methods._chains import ssgd as ssgd
from jdist.methods._compressed_methods import demo as demo
from jdist.methods._compressed_methods import dgc as dgc
from jdist.methods._compressed_methods import ef_signsgd as ef_signsgd
from jdist.methods._compressed_methods import one_bit_adam as one_bit_adam
from jdist.methods._compressed_methods import powersgd as powersgd
from jdist.methods._compressed_methods import qsgd as qsgd
from jdist.methods._compressed_methods import signsgd as signsgd
from jdist.methods._compressed_methods import terngrad as terngrad
from jdist.methods._compressed_methods import topk_sgd as topk_sgd
from jdist.methods._federated import easgd as easgd
from jdist.methods._federated import fed_prox as fed_prox
from jdist.methods._federated import scaffold as scaffold
from jdist.methods._federated import slow_mo as slow_mo
from jdist.methods._loco import muloco as muloco
from jdist.methods._loco import sparse_loco as sparse_loco
from jdist.methods._overlapped import cocod as cocod
from jdist.methods._overlapped import od_sgd as od_sgd
from jdist.methods._overlapped import overlap_local_sgd as overlap_local_sgd
from jdist.methods._overlapped import streaming_diloco as streaming_diloco
