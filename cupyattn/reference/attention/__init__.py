"""Attention in NumPy float64, its gradients, and the bounds of its kernels."""
