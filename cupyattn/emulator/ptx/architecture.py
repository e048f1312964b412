"""The meaning of ``.target``: the targets that exist, and the instructions that need a newer one.

A GPU's assembler refuses PTX that its ``.target`` does not have, so the emulator does too: a kernel
for Turing that uses ``mma.m16n8k16`` must not pass its tests here. The numbers are those of the
"Target ISA Notes" of the PTX ISA; `tests/emulator/test_architecture.py` holds them against the
assembler inside NVRTC.
"""

import re
from functools import lru_cache

# Shared memory that a block may opt in to, in bytes, by target (CUDA C++ Programming Guide,
# "Technical specifications per compute capability"). Before Volta, the lanes of a warp could not
# wait for each other in divergent code, which is how the emulator runs them.
SHARED_BYTES = {
    target: 1024 * kibibytes
    for target, kibibytes in {
        70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 101: 227,
        103: 227, 110: 227, 120: 99, 121: 99,
    }.items()
}  # fmt: skip


def shared_start(target: int) -> int:
    """Return the address at which a block's variables in shared memory begin.

    From sm_80 on they come after 1 KiB that the system reserves in each block's shared memory
    (the guide's section "Compute Capability 8.x"). `SHARED_BYTES` does not contain this KiB.
    """
    return 1024 if target >= 80 else 0


def shared_unit(target: int) -> int:
    """Return the unit, in bytes, of a block's shared memory (PTX ISA, %total_smem_size)."""
    return 128 if target >= 80 else 256


# Forms that the emulator runs and sm_70 does not have, newest first; the first match counts.
_NEEDED = [
    (90, r"fence\..*(async|mbarrier_init|tensormap|sync_restrict)"),
    (90, r".*\.cluster(\.|$)"),  # the scope
    (90, r"(add|sub|mul|ex2|tanh|set|setp)\..*bf16"),
    (90, r"cvt\.(?!.*(bf16(x2)?\.f32|f32\.bf16)$).*bf16"),
    (90, r"cp\.async\.(bulk|mbarrier.*\.cluster)"),
    (80, r"cp\.async"),
    (80, r".*bf16"),
    (80, r"cvt\..*f16x2"),
    (80, r".*\.relu\."),
    (80, r"(min|max)\..*(NaN|f16(x2)?$)"),
    (80, r"mma\..*m16n8k(16|32|64)"),
    (80, r"discard|prefetch\..*evict"),
    (80, r".*L2::(256B|cache_hint)"),
    (75, r".*L2::(64B|128B)"),
    (75, r"mma|ldmatrix|movmatrix|tanh|ex2\..*f16"),
]
_COMPILED = [(target, re.compile(pattern)) for target, pattern in _NEEDED]


@lru_cache(maxsize=4096)
def needed_target(opcode: str) -> int:
    """Return the first target (75 for sm_75) that has the form of an opcode, at least 70."""
    matching = (target for target, pattern in _COMPILED if pattern.match(opcode))
    return next(matching, min(SHARED_BYTES))
