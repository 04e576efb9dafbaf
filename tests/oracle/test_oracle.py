"""The product of all options, against one reference in NumPy.

A seed draws a combination.  Every step of its run, on any substrate and in
any loop, is compared with the equations of its method: parameters of every
worker, anchor, batch statistics and loss, then what an `Evaluator` measures.
A run that is resumed must have the bits of one that was not.
"""

import pytest

from tests import _thinned
from tests.oracle import __main__ as oracle
from tests.oracle import _check

# They hold every value of every option, and compile in a few seconds each.
DEFAULT = (1, 2, 4, 5, 10, 13, 16, 17, 19, 20)
DEFAULT += (21, 25, 28, 31, 32, 34, 37, 40, 44, 49)


@pytest.mark.parametrize("seed", _thinned.some([*range(200)], DEFAULT))
def test_combination_matches_the_equations(seed):
  _check.check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [9, 22])
def test_combination_matches_the_equations_in_two_processes(seed):
  assert not oracle.main([str(seed), "--processes"])
