"""``python -m cupyattn finetune``: adapters of a model, or all of it, learn from a file of text."""
