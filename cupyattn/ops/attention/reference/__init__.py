"""Attention in NumPy float64."""
