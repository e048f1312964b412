"""``python -m cupyattn.benchmark``: measured figures of the library, one module per row."""
