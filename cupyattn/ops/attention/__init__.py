"""Attention on a device."""
