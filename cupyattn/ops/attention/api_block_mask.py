"""block_mask: which tiles of the scores a mask_mod leaves, asked once for many calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from cupyattn.ops.attention import reference
from cupyattn.ops.attention.api_modifiers import MaskMod, arrays_of, python_function, user_function
from cupyattn.ops.attention.block_mask import require_block_mask, run_block_mask
from cupyattn.ops.attention.kernels.block_mask import TILE
from cupyattn.ops.attention.modifiers import Blocks, UserFunction, shown_names
from cupyattn.ops.attention.options import checked_q_offset
from cupyattn.ops.attention.problem import MAX_LENGTH
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import Operands, adopt
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.errors import error
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.value_checks import on_host


class BlockMask:
    """A mask_mod and the tiles that it leaves: what `block_mask` returns.

    Attributes
    ----------
    mask_mod : MaskMod
    shape : (B, H, Sq, Sk)
        Of the scores that it was made for; B and H of 1 stand for any.
    q_offset : int or None
        Of the calls that it was made for; None for any.
    tile : (int, int)
        Queries and keys of a tile, (16, 16).
    tiles : uint8 array (B, H, ceil(Sq / 16), ceil(Sk / 16))
        0 where no score of a tile is seen, 1 where some are, 2 where all are. On the device of the
        expression's arrays; calls read it.
    sparsity : float
        The share of tiles in which nothing is seen; a GPU is waited for, once.
    """

    tile = (TILE, TILE)

    def __init__(self, mask_mod: Any, blocks: Blocks, tiles: Array) -> None:
        self.mask_mod = mask_mod
        self.shape, self.q_offset = blocks
        self.tiles = tiles

    @property
    def blocks(self) -> Blocks:
        """What it was made for."""
        return Blocks(self.shape, self.q_offset)

    @cached_property
    def sparsity(self) -> float:
        """The share of tiles in which nothing is seen."""
        tiles = on_host(self.tiles)
        return float((tiles == 0).mean()) if tiles.size else 0.0

    def tiles_beside(self, q: Any) -> Array | None:
        """Return what a call on q reads: all but what lies on a GPU, with NumPy arrays.

        An expression without arrays may have been asked there; the call does without its tiles.
        """
        elsewhere = isinstance(q, np.ndarray) and not isinstance(self.tiles, np.ndarray)
        return None if elsewhere and not getattr(self.mask_mod, "arrays", None) else self.tiles

    def __repr__(self) -> str:
        sizes = zip(("B", "H", "Sq", "Sk"), self.shape, strict=True)
        return f"BlockMask({self.mask_mod!r}, {', '.join(f'{n}={size}' for n, size in sizes)})"


def block_mask(
    mask_mod: MaskMod | Callable[..., Any],
    Sq: int,  # noqa: N803
    Sk: int,  # noqa: N803
    /,
    *,
    B: int = 1,  # noqa: N803
    H: int = 1,  # noqa: N803
    q_offset: int | None = None,
) -> BlockMask:
    r"""Ask a mask_mod for every score once: `attention` then skips the tiles that it leaves empty.

    What it returns is passed as ``mask_mod=`` to any number of calls of `attention`,
    `attention_varlen`, their backwards and `vjp`. Kernels neither read nor multiply tiles in which
    nothing is seen, and do not ask the expression in those that are seen in full.

    Parameters
    ----------
    mask_mod : MaskMod
        Without `backend` ("emulator"), on NumPy arrays, also a function as `attention` takes it.
        What its arrays hold must not change afterwards.
    Sq, Sk : int
        Query and key length of the calls; of packed sequences max_seqlen_q and max_seqlen_k. The
        expression is asked for all these scores, also where a sequence is shorter.
    B, H : int
        Batch elements (or packed sequences) and query heads of the calls; 1 where the mask is the
        same for all of them, which is asked for the first.
    q_offset : int, optional
        q_offset of the calls; others are refused then. The expression is told the number of a
        query, whatever its position, so None is right for calls with any.

    Returns
    -------
    BlockMask
        With ``tiles``, an array to look at, and ``sparsity``, the share of them that is skipped.
        They are computed on the device of the expression's arrays; without arrays on the current
        GPU, and where there is none, by ``python=``.

    Raises
    ------
    TypeError
        For a mask_mod that is none, or lengths that are no integers.
    ValueError
        For lengths out of range, and an expression that does not compile.
    NotImplementedError
        On NumPy arrays for an expression without ``python=``; on the emulator for a function.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    `attention` needs scratch memory for it: 8 bytes for each tile of its kernel, of 16 to 64 keys
    of some 128 queries. causal, window_size, seqused_k and mask hide further scores, as they do
    beside any mask_mod. The idea is FlexAttention's (Dong et al., arXiv:2412.05496, section 3.2). A
    call runs on the current stream and does not synchronise.

    Examples
    --------
    Three documents of 16 tokens each in one sequence:

    >>> import numpy as np, cupyattn
    >>> same = cupyattn.MaskMod(
    ...     "document[q_idx] == document[k_idx]",
    ...     python=lambda b, h, q_idx, k_idx, document: document[q_idx] == document[k_idx],
    ...     document=np.repeat(np.arange(3), 16),
    ... )
    >>> blocks = cupyattn.block_mask(same, 48, 48)
    >>> blocks.tiles[0, 0]
    array([[2, 0, 0],
           [0, 2, 0],
           [0, 0, 2]], dtype=uint8)
    >>> round(blocks.sparsity, 2)
    0.67
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 48, 2, 8), dtype=np.float32)
    >>> out = cupyattn.attention(q, k, v, mask_mod=blocks)
    >>> np.array_equal(out, cupyattn.attention(q, k, v, mask_mod=same))
    True
    """
    if isinstance(mask_mod, BlockMask):
        raise error(
            TypeError,
            "mask_mod is a BlockMask already",
            "block_mask takes the MaskMod that it is of",
            "pass its mask_mod",
        )
    function = user_function("mask_mod", mask_mod)
    if function is None:
        raise error(
            TypeError,
            "mask_mod is None",
            "block_mask takes a MaskMod",
            "write one, or leave mask_mod= of attention out",
        )
    shape = (_size("B", B), _size("H", H), _size("Sq", Sq), _size("Sk", Sk))
    blocks = Blocks(shape, checked_q_offset(q_offset, array=False))
    operands = adopt(arrays_of("mask_mod", mask_mod), shown_as=shown_names({"mask_mod": function}))
    device = _device_of(operands, mask_mod)
    require_block_mask(function, operands, on_cpu=device is None)
    if device is None:
        python = python_function("mask_mod", mask_mod, operands.arrays)
        return BlockMask(mask_mod, blocks, reference.block_mask(python, shape, TILE))
    _require_expression(function)
    return BlockMask(mask_mod, blocks, run_block_mask(device, function, shape, operands))


def _device_of(operands: Operands, mask_mod: Any) -> Device | None:
    device = device_of(operands)
    if device is None and not operands.arrays and isinstance(mask_mod, MaskMod) and device_count():
        return cuda_device(load_cupy().cuda.runtime.getDevice())
    return device


def _size(name: str, given: Any) -> int:
    size = integer(name, given)
    if not 0 <= size <= MAX_LENGTH:
        raise error(
            ValueError,
            f"{name} = {size}",
            f"it is 0 to {MAX_LENGTH}",
            f"pass the {name} of the calls",
        )
    return size


def _require_expression(function: UserFunction) -> None:
    if function.expression is None:
        raise error(
            NotImplementedError,
            "mask_mod in block_mask on the emulator, a Python function",
            "kernels are compiled of a MaskMod",
            "pass a MaskMod, or leave backend('emulator')",
        )
