"""The processes of a run, which start and end together."""

from jdist.collectives.processes._process_group import (
  await_verdict as await_verdict,
)
from jdist.collectives.processes._process_group import (
  leave_processes as leave_processes,
)
from jdist.collectives.processes._process_group import (
  processes_stop as processes_stop,
)
from jdist.collectives.processes._process_group import (
  start_processes as start_processes,
)
from jdist.collectives.processes._process_group import (
  watches_processes as watches_processes,
)
