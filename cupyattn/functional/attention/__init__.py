"""Attention: the public functions, forward and backward."""
