"""Products with a weight, by the kernels in `cuda_src/linear`."""
