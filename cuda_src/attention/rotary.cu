// Rotary embedding of q and k in one launch before the kernels of attention, and of dq and dk after them.
//
//   (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)   (+ what is there, with ACCUMULATE)
//
// for each pair (a, b) of the first R features, as in ../rope/rotate.cu (Su et al., arXiv:2104.09864, equation 34),
// with query i at position i + q_offset and key j at j. sin times `sign` -1 is the inverse: with s = (R_i q) . (R_j k),
// dq is R_i^T times the gradient of the rotated q, likewise dk.
//
// Shapes    as in params.cuh, or in varlen_params.cuh: packed sequences, whose positions begin at 0 in each. cos and
//           sin (positions, R/2) of TABLE.
// Work      a thread owns a slot of HEADS neighbouring heads of a token (../rope/rotated_slots.cuh), first of all
//           queries, then of all keys. Grid ceil(threads / THREADS).
// Budget    registers: 4 * HEADS * VEC storage items and 2 * PAIRS floats, below 128 in all; no shared memory.
// Edges     keys that are not in use are left as they are; queries that see no key are copied. A position outside of
//           the tables gives NaN in the R features, and nothing is read there. Rows of no packed sequence are left as
//           they are. out may be x.
#if !defined(THREADS)
#error "THREADS comes from a launch-configuration table, and what rotated_slots.cuh names"
#endif
#include "sequences.cuh"
#include "../rope/rotated_slots.cuh"

constexpr int kRotaryArrays = 2;  // queries (q or dq) and keys (k or dk)

// Field for field the structured dtype ROTARY_PARAMS of cupyattn/ops/attention/structs. Strides are in items.
struct RotaryParams {
  Strides x[kRotaryArrays], out[kRotaryArrays];
  int64 cos_stride, sin_stride;  // of a position
  int64 table_length;
  uint32 query_threads;          // the first threads, which have the queries
  uint32 tokens[kRotaryArrays];  // of all sequences
  uint32 heads[kRotaryArrays], groups[kRotaryArrays];
  uint32 slots, rotated_slots, half, dim;  // of a head: half is R/2, dim D
  float sign;
};
static_assert(sizeof(RotaryParams) == ROTARY_PARAMS_BYTES, "its dtype in Python describes another struct");

struct RotaryArrays {
  const DTYPE *q_g, *k_g;
  const TABLE *cos_g, *sin_g;
  DTYPE *q_out_g, *k_out_g;
};

// A token's row in its array, and its position in its sequence.
struct Token {
  uint32 batch, row;
  int64 position;
  bool rotates;  // false of a query that sees no key: it is copied, at any position
};

// Selected, not indexed: parameters have no index, so the struct would go through local memory.
__device__ __forceinline__ Strides either(bool keys, const Strides (&strides)[kRotaryArrays]) {
  return {keys ? strides[1].batch : strides[0].batch, keys ? strides[1].seq : strides[0].seq,
          keys ? strides[1].head : strides[0].head};
}

// Find token `number` of the queries or keys. False if it belongs to no sequence, or is a key that is not in use.
#if PACKED
__device__ __forceinline__ bool find(Token& token, const Sequences& sequences, bool keys, uint32 number) {
  const PackedBatch& packed = sequences.packed;
  const AttentionParams& longest = sequences.attention;
  const PackedRows rows =
      keys ? packed_keys(packed, longest, sequences.pointers) : packed_queries(packed, longest, sequences.pointers);
  const int row = static_cast<int>(number);
  const int batch = rows.last_from(row, [&](int b) { return rows.of(b).begin; });
  const PackedSequence sequence(packed, longest, sequences.pointers, batch);
  const int within = row - (keys ? sequence.keys : sequence.queries).begin;
  token = {0, number, within + (keys ? 0 : sequence.q_offset),
           keys || !sequence.window(longest).of_row(within).empty()};
  return within >= 0 && within < (keys ? sequence.keys_in_use : sequence.queries.count);
}
#else
__device__ __forceinline__ bool find(Token& token, const Sequences& sequences, bool keys, uint32 number) {
  const uint32 length = keys ? sequences.attention.sk : sequences.attention.sq;
  token.batch = number / length;
  token.row = number - token.batch * length;
  token.position = token.row + (keys ? 0 : sequences.q_offset(token.batch));
  const KeyWindow window = sequences.window(token.batch);
  token.rotates = keys || !window.of_row(token.row).empty();
  return !keys || token.row < window.keys;
}
#endif

// One slot of a thread. Tokens that are not found are left as they are.
__device__ __forceinline__ void rotate(const RotaryParams& params, const RotaryArrays& arrays,
                                       const Sequences& sequences) {
  // Phase 1: which slot, heads and token are this thread's.
  const uint32 thread = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  const bool keys = thread >= params.query_threads;
  const uint32 own = keys ? thread - params.query_threads : thread;
  const uint32 groups = keys ? params.groups[1] : params.groups[0];
  const uint32 of_group = own / params.slots, slot = own - of_group * params.slots;
  const uint32 number = of_group / groups, head = (of_group - number * groups) * HEADS;
  Token token;
  if (number >= (keys ? params.tokens[1] : params.tokens[0]) || !find(token, sequences, keys, number)) return;
  const uint32 heads = keys ? params.heads[1] : params.heads[0];
  const Strides x_strides = either(keys, params.x), out_strides = either(keys, params.out);
  const DTYPE* x_g = (keys ? arrays.k_g : arrays.q_g) + token.batch * x_strides.batch + token.row * x_strides.seq +
                     head * x_strides.head;
  DTYPE* out_g = (keys ? arrays.k_out_g : arrays.q_out_g) + token.batch * out_strides.batch +
                 token.row * out_strides.seq + head * out_strides.head;

  // Phase 2: rotate it.
  rotate_slot(params, slot, head, heads, x_g, x_strides.head, out_g, out_strides.head, arrays.cos_g, arrays.sin_g,
              token.rotates, [&] { return token.position; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(attention_rotary)(const DTYPE* x0_g, const DTYPE* x1_g, const TABLE* cos_g, const TABLE* sin_g PACKED_ARRAYS,
                            const void* q_offsets_g, const void* seqused_k_g, DTYPE* out0_g, DTYPE* out1_g,
                            const ForwardParams attention, const RotaryParams params) {
  const Sequences sequences(attention, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  rotate(params, {x0_g, x1_g, cos_g, sin_g, out0_g, out1_g}, sequences);
}
