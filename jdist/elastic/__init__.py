"""Methods with rounds between workers that join, leave and return."""

from jdist.elastic._own_loop import OwnLoop as OwnLoop
from jdist.elastic._rounds import Rounds as Rounds
