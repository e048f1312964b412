"""``python -m cupyattn.benchmark plot``."""
