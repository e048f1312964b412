"""Paged KV caches, on a device."""
