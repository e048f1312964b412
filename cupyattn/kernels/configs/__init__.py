"""Launch-configuration tables: the one place where tile sizes live.

A folder a family. A module holds some kernels, and of each what it is (a `KernelSpec`), the rows of
its table with a reason each, the way from a row to a `Specialisation`, and in `catalogue` what of
it is compiled ahead and gated by the tests. `cupyattn.registry` collects them.
"""
