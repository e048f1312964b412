"""Files of weights: what they are called there, and the way into a model's arrays."""
