"""Embedding lookup and its gradient."""
