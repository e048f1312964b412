"""Operations: a folder per family, the same file names in each.

``api`` has the public functions, ``kernels`` the specs and configurations, ``reference`` NumPy in
float64, ``bounds`` the derived error bounds. The folders of cuda_src and tests have the same names.
"""
