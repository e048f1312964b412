"""The way from arrays to a launched kernel. No module here names an operation."""
