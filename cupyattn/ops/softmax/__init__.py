"""Softmax, log-softmax and log-sum-exp of attention scores and rows."""
