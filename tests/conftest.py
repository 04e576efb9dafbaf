"""Every test runs on 8 virtual CPU devices, with strict promotion."""

import os

# Before the backend starts; a GPU, where there is one, has its own tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from jdist import collectives

collectives.make_cpu_devices(8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
