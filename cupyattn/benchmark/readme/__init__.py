"""``python -m cupyattn.benchmark readme``."""
