"""Products with a weight, on a device: the checked problem, the table of kernels, the plans."""
