"""Methods with rounds between workers that join, leave and return."""

from jdist.elastic._rounds import OwnLoop as OwnLoop
from jdist.elastic._rounds import Rounds as Rounds
