"""Target-free kernels: the portable fallback and the test oracle."""
