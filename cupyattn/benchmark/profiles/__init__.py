"""Profiles of every kernel, taken by Nsight Compute on a GPU, and a table of them."""
