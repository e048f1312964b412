"""Operations on a device: validate, allocate, configure, launch.

A call is first described by the layouts of its arrays and its options, all hashable: what follows
from that description alone (the checks, the strides a kernel is passed, its configuration) is
worked out once and cached, so that a repeated call costs little more than its launch.
"""
