"""``python -m cupyattn memory``: memory-bound kernels on Turing cards, modelled without a GPU."""
