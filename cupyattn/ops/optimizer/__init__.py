"""AdamW, also with 8-bit states, and the global norm of gradients."""
