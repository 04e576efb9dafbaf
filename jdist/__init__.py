"""Training deep networks where communication is dear and machines unequal."""

from jdist import collectives as collectives
from jdist._version import __version__ as __version__
