"""Fused layers in NumPy float64."""
