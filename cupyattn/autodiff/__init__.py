"""vjp: gradients of functions made of the library's functions."""
