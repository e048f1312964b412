"""The emulator's exceptions: one class per kind of fault, all of them `EmulatorError`."""


class EmulatorError(RuntimeError):
    """Base class of everything that `cupyattn.emulator` raises on purpose."""


class PTXSyntaxError(EmulatorError):
    """The text is not the PTX that this parser reads."""


class UnsupportedPTXError(EmulatorError):
    """The PTX is valid, but uses an instruction or a form that the emulator does not run."""


class LaunchError(EmulatorError):
    """The launch is wrong (grid, block, arguments, shared memory); nothing has run."""


class KernelFault(EmulatorError):  # noqa: N818 (a fault, as in page fault)
    """A thread did something wrong; the message names block, thread and source line.

    Attributes
    ----------
    block, thread : tuple of int or None
        Indices (x, y, z) of the first faulting thread and of its block.
    line : int
        Line of the ``.cu`` file, 0 if the PTX has no line information.
    """

    def __init__(
        self,
        message: str,
        *,
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        line: int = 0,
    ) -> None:
        super().__init__(message)
        self.block = block
        self.thread = thread
        self.line = line


class OutOfBoundsError(KernelFault):
    """An access outside every argument, or outside of shared or local memory."""


class MisalignedAccessError(KernelFault):
    """An address that is not a multiple of the access size."""


class UninitializedReadError(KernelFault):
    """A read of shared memory that no thread of the block has written."""


class SharedMemoryRaceError(KernelFault):
    """Two threads touch the same shared memory, one writes, and no barrier orders them."""


class BarrierError(KernelFault):
    """A barrier that some threads never reach, or reach at different instructions."""


class WarpSyncError(KernelFault):
    """A shuffle, vote, match, mma or ldmatrix without lanes it needs, or with a wrong mask."""


class ConstWriteError(KernelFault):
    """A store to an argument that was passed as const."""


class KernelTrap(KernelFault):
    """The kernel executed ``trap`` (a failed device-side assertion)."""
