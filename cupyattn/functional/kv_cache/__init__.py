"""Paged KV caches: the public functions."""
