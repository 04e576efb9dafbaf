"""The product of all options, against one reference in NumPy.

A seed draws a combination.  Every step of its run, on any substrate and in
any loop, is compared with the equations of its method: parameters of every
worker, anchor, batch statistics and loss, then what an `Evaluator` measures.
A run that is resumed must have the bits of one that was not.
"""

import pytest

from tests.oracle import _check

DEFAULT, NIGHTLY = range(20), range(20, 200)


@pytest.mark.parametrize("seed", DEFAULT)
def test_combination_matches_the_equations(seed):
  _check.check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", NIGHTLY)
def test_further_combination_matches_the_equations(seed):
  _check.check_seed(seed)
