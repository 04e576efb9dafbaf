"""Arrays, packed: an array -> a payload of few bits -> an array.

A codec speaks to nobody; `jdist.collectives` carries its payloads.
"""

from jdist.codecs._casting import Cast as Cast
from jdist.codecs._casting import Dense as Dense
from jdist.codecs._codec import Codec as Codec
from jdist.codecs._drawing import RandomK as RandomK
from jdist.codecs._quantizing import Quantize as Quantize
from jdist.codecs._signing import Sign as Sign
from jdist.codecs._signing import Ternary as Ternary
from jdist.codecs._sparsifying import SampledTopK as SampledTopK
from jdist.codecs._sparsifying import Threshold as Threshold
from jdist.codecs._sparsifying import TopK as TopK
from jdist.codecs._transforming import DCTTopK as DCTTopK
