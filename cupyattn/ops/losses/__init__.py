"""Cross entropy of logits and of a product with a weight."""
