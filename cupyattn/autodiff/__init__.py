"""Gradients of functions that call the library's functions: `vjp`."""
