"""Fused layers: the public functions."""
