"""Bad input of the public functions: valid calls, and what can be wrong with each.

call      a valid call of each function, what makes it invalid, and how it has to fail
row       a row of the tables: a change to a valid call and the exception that it brings
arrays    what no array of floats may be, and q, k and v that do not fit together
options   the options that forward and backward share
outputs   out, grads and dx, and the options that one function has
"""
