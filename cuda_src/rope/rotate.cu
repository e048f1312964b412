// Rotary position embedding of one array or two (q and k) in one launch; its inverse and its backward too.
//
//   (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)   (+ the previous contents, with ACCUMULATE)
//
// for each pair (a, b) of the first R features, with the cosine and sine of the token's position and the pair. With
// `sign` = -1, a factor of sin, the rotation is the inverse one. Pair m is (m, m + R/2) as in GPT-NeoX, or with
// INTERLEAVED (2 m, 2 m + 1) as in Su et al., arXiv:2104.09864, equation 34. Features from R on are copied.
//
// Shapes    x (B, S, heads, D) of any outer strides, out alike; cos and sin (positions, R/2) of TABLE; positions (B, S)
//           or (S,) by its strides, or null: token s has position s.
// Work      a head is cut into slots: PAIRS pairs of features, or as many features that are copied. A thread owns one
//           slot of HEADS neighbouring heads of a token, and reads cosines and sines once for them; neighbouring
//           threads have neighbouring slots, then groups of heads, then tokens. Grid ceil(threads / THREADS).
// Budget    registers: 4 * HEADS * VEC storage items and 2 * PAIRS floats, below 128 in all; no shared memory.
// Edges     a position outside of the tables gives NaN in the R features, and nothing is read there. out may be x.
#if !defined(THREADS) || !defined(POSITION)
#error "THREADS and POSITION come from a launch-configuration table, and what rotated_slots.cuh names"
#endif
#include "rotated_slots.cuh"

constexpr int kRopeArrays = 2;

// Field for field the structured dtype ROPE_PARAMS of cupyattn/ops/rope/kernels. Strides are in items.
struct RopeStrides {
  int64 batch, seq, head;
};
struct RopeParams {
  RopeStrides x[kRopeArrays], out[kRopeArrays];
  int64 cos_stride, sin_stride;          // of a position
  int64 positions_batch, positions_seq;  // strides
  int64 table_length;
  uint32 tokens, seq;  // of all batch elements, and of one
  uint32 heads[kRopeArrays], groups[kRopeArrays];
  uint32 slots, rotated_slots, half, dim;  // of a head: half is R/2, dim D
  float sign;
};
static_assert(sizeof(RopeParams) == ROPE_PARAMS_BYTES, "its dtype in Python describes another struct");

// Selected, not indexed: parameters have no index, so the struct would go through local memory.
__device__ __forceinline__ RopeStrides either(bool other, const RopeStrides (&strides)[kRopeArrays]) {
  return {other ? strides[1].batch : strides[0].batch, other ? strides[1].seq : strides[0].seq,
          other ? strides[1].head : strides[0].head};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rope(const DTYPE* x0_g, const DTYPE* x1_g, const TABLE* cos_g, const TABLE* sin_g, const POSITION* positions_g,
         DTYPE* out0_g, DTYPE* out1_g, const RopeParams params) {
  // Phase 1: find this thread's slot, heads and token.
  const uint32 thread = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  const uint32 of_group = thread / params.slots, slot = thread - of_group * params.slots;
  const uint32 groups = params.groups[0] + params.groups[1];
  const uint32 token = of_group / groups, group = of_group - token * groups;
  if (token >= params.tokens) return;
  const uint32 batch = token / params.seq, s = token - batch * params.seq;
  const bool other = group >= params.groups[0];
  const uint32 head = (other ? group - params.groups[0] : group) * HEADS;
  const uint32 heads = other ? params.heads[1] : params.heads[0];
  const RopeStrides x_strides = either(other, params.x), out_strides = either(other, params.out);
  const DTYPE* x_g = (other ? x1_g : x0_g) + batch * x_strides.batch + s * x_strides.seq + head * x_strides.head;
  DTYPE* out_g = (other ? out1_g : out0_g) + batch * out_strides.batch + s * out_strides.seq + head * out_strides.head;

  // Phase 2: rotate it.
  rotate_slot(params, slot, head, heads, x_g, x_strides.head, out_g, out_strides.head, cos_g, sin_g,
              /*token_rotates=*/true, [&]() -> int64 {
                return positions_g == nullptr ? s
                                              : positions_g[batch * params.positions_batch + s * params.positions_seq];
              });
}
