"""Bad input of the public functions: valid calls, and what can be wrong with each.

call            a valid call of each function, a change that makes it invalid, and the error
values          bad arrays, results and options
every_function  a valid call of every public function, with results and scratch memory given
"""
