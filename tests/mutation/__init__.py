"""How many small bugs in a CUDA source does the suite notice?

`python -m mutation`, with PYTHONPATH=.:tests, plants bugs in a copy of cuda_src, one at a time, and
runs the tests that load a kernel with the changed file in it, to the first failure.

    bugs        what is changed, and where a source could have it
    coverage    which tests load which kernels, and which tests to run for a file
    planted     a copy of the sources with a bug in it; whether it makes any difference to the code
    trial       the tests against one bug
    plugin      pytest's: points the library at the copy, notes what is loaded
"""
