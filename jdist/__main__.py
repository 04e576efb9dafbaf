"""`python -m jdist` is the command line."""

import sys

from jdist import cli

if __name__ == "__main__":
  sys.exit(cli.main())
