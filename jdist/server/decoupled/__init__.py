"""Decoupled DiLoCo: learners on their own clocks, fragments, a quorum."""
