"""The benchmark of whole models: tokens a second, and what a step of decoding consists of."""
