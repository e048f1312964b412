"""What all benchmarks share: a case and who computes it, the clock, a row, the command around them.

A benchmark is a `Benchmark`: it yields a `Subject` for each case, or rows of times that it took
itself. The rest is here: which peers, warm-up, times, ceilings, memory, JSON, table, comparison.
"""
