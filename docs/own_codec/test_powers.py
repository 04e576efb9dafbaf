"""The laws of all codecs, kept by one outside of jdist."""

import powers_of_two

from jdist import conformance


def test_powers_keep_the_laws():
  """Checks the codec as jdist checks its own."""
  conformance.check(powers_of_two.Powers())
