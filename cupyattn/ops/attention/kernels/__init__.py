"""Specs and configurations of the attention kernels, a module per kind."""
