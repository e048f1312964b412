"""``python -m cupyattn.benchmark attention`` and ``attention_backward``."""
