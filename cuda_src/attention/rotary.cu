// Rotary embedding of q and k in one launch before the kernels of attention, and of dq and dk behind them.
//
//   (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)   (+ what is there, with ACCUMULATE)
//
// for each pair (a, b) of the first R features, as in ../rope/rotate.cu (Su et al., arXiv:2104.09864, equation 34), with
// query i at position i + q_offset and key j at j. sin times `sign` -1 is the inverse: with s = (R_i q) . (R_j k), dq is
// R_i^T times the gradient of the rotated q, likewise dk.
//
// Shapes    as in params.cuh; cos and sin (positions, R/2) of TABLE.
// Work      a thread owns a slot of HEADS neighbouring heads of a token (../rope/rotated_slots.cuh), first of all
//           queries, then of all keys. Grid ceil(threads / THREADS).
// Budget    registers: 4 * HEADS * VEC storage items and 2 * PAIRS floats, below 128 in all; no shared memory.
// Edges     keys that are not in use are left as they are; queries that see no key are copied. A position outside of the
//           tables gives NaN in the R features, and nothing is read there. out may be x.
#include "rotary.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_rotary(const DTYPE* x0_g, const DTYPE* x1_g, const TABLE* cos_g, const TABLE* sin_g,
                     const void* q_offsets_g, const void* seqused_k_g, DTYPE* out0_g, DTYPE* out1_g,
                     const AttentionParams attention, const RotaryParams params) {
  rotate(params, {x0_g, x1_g, cos_g, sin_g, out0_g, out1_g}, [&](Token& token, bool keys, uint32 number) {
    const uint32 length = keys ? attention.sk : attention.sq;
    token.batch = number / length;
    token.row = number - token.batch * length;
    token.position = token.row + (keys ? 0 : query_offset(attention, q_offsets_g, token.batch));
    const KeyWindow window = sequence_window(attention, q_offsets_g, seqused_k_g, token.batch);
    token.turns = keys || !window.of_row(token.row).empty();
    return !keys || token.row < window.keys;
  });
}
