"""Times of the fused layers, beside PyTorch's."""
