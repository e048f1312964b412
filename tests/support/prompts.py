"""Prompts over a paged cache for tests: many query tokens, as a batch or packed."""

from __future__ import annotations

from hypothesis import strategies as st
from support.packed import PackedProblem
from support.paged import PagedProblem

BLOCK_SIZES = (16, 32, 48, 64, 80, 128, 256)
# Tokens of a sequence: none, around a group's and a tile's ends, and several tiles.
LENGTHS = (0, 1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 127, 130, 200)
WINDOWS = (None, (0, 0), (15, 0), (16, 2), (40, 0), (100, None))

CHUNK = PagedProblem(
    lengths=(150, 64), Sq=40, G=1, group=2, D=64, dtype="float16", options=(("causal", True),)
)
EVERY_OPTION = (
    *(("causal", True), ("alibi_slopes", True), ("softcap", 5.0), ("sinks", True)),
    ("window_size", (37, None)),
)


@st.composite
def prompts(
    draw: st.DrawFn, kernels: tuple[tuple[str, int], ...], bits: int | None = None
) -> PagedProblem:
    """Draw calls of these kernels: (dtype, D)."""
    dtype, head_dim = draw(st.sampled_from(kernels))
    options = [("causal", draw(st.booleans()))]
    if (window := draw(st.sampled_from(WINDOWS))) is not None:
        options.append(("window_size", window))
    return PagedProblem(
        lengths=tuple(draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3))),
        Sq=draw(st.sampled_from((17, 33, 130))),
        G=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 2)),
        D=head_dim,
        dtype=dtype,
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        options=tuple(options),
        seed=draw(st.integers(0, 2**16)),
        bits=bits,
    )


@st.composite
def packed_prompts(
    draw: st.DrawFn, kernels: tuple[tuple[str, int], ...], bits: int | None = None
) -> PackedProblem:
    """Draw the same with any number of queries a sequence."""
    plain = draw(prompts(kernels, bits))
    most = draw(st.sampled_from((1, 16, 40, 130)))
    queries = tuple(draw(st.integers(0, min(most, length))) for length in plain.lengths)
    fields = {**vars(plain), "Sq": most, "queries": queries}
    return PackedProblem(**fields, spare=draw(st.sampled_from((0, 3))))
