"""Fused layers, on a device."""
