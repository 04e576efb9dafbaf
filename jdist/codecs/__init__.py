"""Arrays, packed: an array -> a payload of few bits -> an array.

A codec speaks to nobody; `jdist.collectives` carries its payloads.
"""

from jdist.codecs._codec import Codec as Codec
