"""Attention: dense, packed and paged, forward and backward."""
