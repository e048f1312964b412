"""Golden vectors of the emulator: kernels, inputs, and how they compare.

``capture.py`` runs the `case.Case`s on a GPU and writes ``recorded.npz``, which holds their output;
``tests/emulator/test_golden.py`` runs the same cases on the emulator.

    values          operands: the special numbers of each type, and random bits
    case            a kernel with its inputs, and running it
    elementwise     tables of instructions that work on the registers of one thread
    floating_tables, integer_tables
                    those tables; conversions are with floating-point arithmetic
    warp_level      shuffles, votes, matches, ldmatrix, mma
    atomics         atom and red
    catalogue       all of them
    vectors         the file of outputs, and what the PTX ISA promises of .approx instructions
"""
