"""A run's identity, and connections between processes that share its secret."""

from jdist.channel._connection import call as call
from jdist.channel._connection import Connection as Connection
from jdist.channel._connection import listen as listen
from jdist.channel._connection import Listener as Listener
from jdist.channel._connection import lost_process as lost_process
from jdist.channel._identity import adopt as adopt
from jdist.channel._identity import disagreement as disagreement
from jdist.channel._identity import draw as draw
from jdist.channel._identity import Identity as Identity
from jdist.channel._identity import identity as identity
from jdist.channel._identity import package_versions as package_versions
from jdist.channel._identity import private_directory as private_directory
from jdist.channel._identity import RUN_DIRECTORY as RUN_DIRECTORY
from jdist.channel._identity import run_id as run_id
