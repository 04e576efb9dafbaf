"""Codecs: an array -> a payload of few bits -> an array.

A codec does not communicate; `jdist.collectives` carries its payloads.
"""

from jdist.codecs._bits import pack as pack
from jdist.codecs._bits import unpack as unpack
from jdist.codecs._cast import Cast as Cast
from jdist.codecs._codec import Codec as Codec
from jdist.codecs._codec import Dense as Dense
from jdist.codecs._dct import DCTTopK as DCTTopK
from jdist.codecs._quantize import Quantize as Quantize
from jdist.codecs._random_k import RandomK as RandomK
from jdist.codecs._sign import Sign as Sign
from jdist.codecs._sign import Ternary as Ternary
from jdist.codecs._sparse import SampledTopK as SampledTopK
from jdist.codecs._sparse import TopK as TopK
