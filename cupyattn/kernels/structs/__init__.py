"""The C structs that kernels take by value, as NumPy dtypes: a module a family, and `walks`.

A struct here and its C twin are held together by the size, which every source asserts, and by a
test that reads each field back from a kernel.
"""
