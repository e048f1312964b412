"""What block_mask and calls with one refuse, and how they say so."""

from __future__ import annotations

import numpy as np
import pytest
from support.block_masks import arrays, blocks_of
from support.devices import KERNELS

import cupyattn
from cupyattn import MaskMod, attention, block_mask

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


SQUARE = (1, 2, 40, 70)


MISFITS = {
    "B": ((3, 2, 40, 70), {}, "B = 3, and the call has B = 1"),
    "H": ((1, 3, 40, 70), {}, "H = 3, and the call has H = 2.*broadcasts"),
    "Sq": ((1, 2, 41, 70), {}, "Sq = 41, and the call has Sq = 40"),
    "Sk": ((1, 1, 40, 1), {}, "Sk = 1, and the call has Sk = 70"),
    "q_offset": (SQUARE, {"q_offset": 3}, "q_offset = 3, and the call's is 30"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_calls_that_it_was_not_made_for(name):
    shape, options, message = MISFITS[name]
    _, q, k, v = map(KERNELS.put, arrays("float16", 40, 70))
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, mask_mod=blocks_of(np.ones(shape, bool), **options))
    _, q, k, v = arrays("float16", 40, 70)
    with cupyattn.backend("reference"):
        blocks = block_mask(CAUSAL, *shape[2:], B=shape[0], H=shape[1], **options)
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, mask_mod=blocks)


CAUSAL = MaskMod("q_idx >= k_idx", python=lambda b, h, i, j: i >= j)


WRONG = {
    "none": ((None, 8, 8), {}, TypeError, "mask_mod is None"),
    "number": ((3, 8, 8), {}, TypeError, "mask_mod is a int"),
    "score_mod": ((cupyattn.ScoreMod("score"), 8, 8), {}, TypeError, "mask_mod is a ScoreMod"),
    "twice": ((block_mask(CAUSAL, 8, 8), 8, 8), {}, TypeError, "BlockMask already"),
    "float": ((CAUSAL, 8.0, 8), {}, TypeError, "Sq is 8.0"),
    "negative": ((CAUSAL, 8, -1), {}, ValueError, "Sk = -1.*it is 0 to"),
    "heads": ((CAUSAL, 8, 8), {"H": "2"}, TypeError, "H is '2'"),
    "q_offset": ((CAUSAL, 8, 8), {"q_offset": 1.5}, TypeError, "q_offset is 1.5"),
    "dtype": ((MaskMod("t[h]", t=np.zeros(2, complex)), 8, 8), {}, TypeError, "mask_mod's t has"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_it_refuses(name):
    given_arguments, options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        block_mask(*given_arguments, **options)


def test_functions_and_expressions_where_they_do_not_run():
    with cupyattn.backend("reference"), pytest.raises(NotImplementedError, match="python="):
        block_mask(MaskMod("seen[q_idx]", seen=np.ones(8, bool)), 8, 8)
    with cupyattn.backend("emulator"):
        with pytest.raises(NotImplementedError, match="pass a MaskMod"):
            block_mask(lambda b, h, i, j: i >= j, 8, 8)
        with pytest.raises(ValueError, match="mask_mod does not compile: line 1, column 10"):
            block_mask(MaskMod("q_idx >= kidx"), 8, 8)


def test_out_may_not_overlap_its_tiles():
    _, q, k, v = arrays("float16", 16, 16, head_dim=8)
    with cupyattn.backend("emulator"):
        blocks = block_mask(CAUSAL, 16, 16)
        blocks.tiles = q.view(np.uint8).reshape(-1)[:1].reshape(1, 1, 1, 1)
        with pytest.raises(ValueError, match="out overlaps mask_mod's tiles"):
            attention(q.copy(), k, v, mask_mod=blocks, out=q)


def test_it_says_what_it_is():
    text = repr(block_mask(CAUSAL, 8, 9, H=2))
    assert text == "BlockMask(MaskMod('q_idx >= k_idx'), B=1, H=2, Sq=8, Sk=9)"
