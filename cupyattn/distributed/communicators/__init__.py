"""Communicators that carry the bytes: NCCL, MPI, memory that threads share, or the user's own."""
