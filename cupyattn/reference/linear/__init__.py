"""Products with a weight in NumPy, and bounds of the kernels' errors."""
