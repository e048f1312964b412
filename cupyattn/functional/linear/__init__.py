"""Products with a weight: the public functions."""
