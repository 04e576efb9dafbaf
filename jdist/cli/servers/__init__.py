"""Commands of parameter servers: `simulate`, and `train --protocol`."""
