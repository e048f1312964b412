"""Which faults a launch looks for.

A fault names the block, the thread, the line of the source (compile with ``-lineinfo``) and, if
that line is of an inlined function, the lines that call it:

===================================  =============================================================
fault                                found
===================================  =============================================================
`OutOfBoundsError`                   an address outside of every array, with the nearest array and
                                     the distance
`MisalignedAccessError`              an address that is no multiple of the size of the access
`UninitializedReadError`             shared memory read before it is written
`SharedMemoryRaceError`              two threads, of two warps or of one, touch shared memory, one
                                     writes, and no barrier orders them; any access to bytes to
                                     which a copy (``cp.async``) is on its way
`BarrierError`                       a barrier that some threads miss, or at which threads arrive
                                     and nobody waits
`WarpSyncError`                      a shuffle, vote or ``mma`` that needs absent lanes, a member
                                     mask without its caller, unequal masks
`ConstWriteError`, `KernelTrap`      a store to an argument that is const; a failed device-side
                                     assertion
`LaunchError`, `PTXSyntaxError`,     a wrong argument, size or grid, and PTX that the emulator
`UnsupportedPTXError`                cannot run: before anything has run
===================================  =============================================================

What it does not see: races in global memory, and two threads that store the same value to one
shared word (a store of an equal value after another thread's read is a race). Order by flags in
shared memory it takes for a race.

A register that is read before it is written is no fault: compilers copy such registers where
nothing comes of it. It begins as a NaN, or a large odd integer, so that a result that needs it is
wrong.

The tests show that each check can fail: ``tests/emulator/kernels/faults.cu`` has a small faulty
kernel for every kind of fault. Without a GPU the tests of the library's own kernels run on the
emulator with all checks. ``tests/mutation`` changes single lines of those kernels (a barrier
dropped, one row too many, a wrong index) and reports which changes no test finds.
"""

from dataclasses import dataclass

from cupyattn.emulator.errors import LaunchError


@dataclass(frozen=True)
class Checks:
    """Switches for the checks of one launch; all are on unless turned off.

    Attributes
    ----------
    bounds : bool
        Global, shared and local accesses stay inside their memory. Turned off, global accesses
        still cannot leave the memory of the arguments: they fail, with less to say.
    alignment : bool
        Addresses are multiples of the access size; on sm_75 this includes the addresses of the
        lanes that ``ldmatrix.x1`` and ``.x2`` do not use.
    const_writes : bool
        No store to an argument marked const.
    uninitialized : bool
        Shared memory is written before it is read; a copy (``cp.async``) writes at its wait.
    races : bool
        Shared-memory accesses of different threads are ordered by barriers if one is a write,
        between warps and inside a warp. Two writes of the same value are let pass; flags in memory
        and votes order nothing. A copy to shared memory (``cp.async``) is a write from its start to
        the wait of its thread, to which nothing may come in between; then it is ordered as a
        store at the wait would be. Adds a tenth to a half to the time of a launch, and more in
        kernels whose warps write what they read before the block's next barrier, or with a
        ``__syncwarp`` of some lanes.
    barriers : bool
        Every thread of a block reaches the same ``bar.sync``, and every barrier at which threads
        arrive (``bar.arrive``) is completed before the block ends.
    warp_sync : bool
        The mask of a shuffle, vote, match or ``bar.warp.sync`` names the lane that passes it;
        shuffles read from lanes that are there and named; no lane that a shuffle, vote or match
        waits for ends without coming.
    max_steps : int
        Basic blocks executed per batch of thread blocks before the kernel counts as hung.

    Examples
    --------
    >>> from cupyattn.emulator import Checks
    >>> Checks.none().races, Checks.fast().bounds
    (False, True)
    """

    bounds: bool = True
    alignment: bool = True
    const_writes: bool = True
    uninitialized: bool = True
    races: bool = True
    barriers: bool = True
    warp_sync: bool = True
    max_steps: int = 10_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "max_steps":
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise LaunchError(f"max_steps is {value!r:.60}; allowed: a positive int")
            elif not isinstance(value, bool):
                raise LaunchError(f"Checks.{name} is {value!r:.60}; allowed: True or False")

    @classmethod
    def all(cls) -> "Checks":
        """Return every check turned on."""
        return cls()

    @classmethod
    def fast(cls) -> "Checks":
        """Return the checks that cost little: all but races and uninitialised reads."""
        return cls(uninitialized=False, races=False)

    @classmethod
    def none(cls) -> "Checks":
        """Return every check turned off.

        What has no meaning at all stays an error: an address outside of the arguments, lanes that
        wait for others which never come, ``mma`` and ``ldmatrix`` in only a part of a warp (all of
        it must execute them), and a kernel that runs too many steps.
        """
        return cls(False, False, False, False, False, False, False)
