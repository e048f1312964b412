"""``python -m cupyattn report``: what a card does, beside what the model of Turing says of it."""
