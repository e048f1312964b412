"""GELU, SiLU, their gated forms, dropout, and sums into an array."""
