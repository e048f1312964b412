"""Attention, by the folders of its kernels in `cuda_src/attention`."""
