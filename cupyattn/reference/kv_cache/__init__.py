"""Paged KV caches: their storage formats, and what is done to them."""
