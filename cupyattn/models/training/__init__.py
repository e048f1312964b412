"""Fine-tuning: samples of a text file, an optimiser, and steps that can be interrupted."""
