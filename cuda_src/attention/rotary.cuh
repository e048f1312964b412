// Rotary embedding of a call's q and k before the kernels of attention, or of dq and dk behind them: rotary.cu says what
// is computed and how.
#pragma once

#if !defined(THREADS)
#error "THREADS comes from a launch-configuration table, and what rotated_slots.cuh names"
#endif
#include "params.cuh"
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

// Where a token lies, and where it stands.
struct Token {
  uint32 batch, row;
  int64 position;
  bool turns;  // false of a query that sees no key: it is copied, wherever it stands
};

// Selected, not indexed: parameters have no index, so the struct would go through local memory.
__device__ __forceinline__ Strides either(bool keys, const Strides (&strides)[kRotaryArrays]) {
  return {keys ? strides[1].batch : strides[0].batch, keys ? strides[1].seq : strides[0].seq,
          keys ? strides[1].head : strides[0].head};
}

// One slot of a thread. `find(token, of_keys, number)` says where the token of that number lies; false for one that no
// sequence has, which is left as it is.
template <typename Find>
__device__ __forceinline__ void rotate(const RotaryParams& params, const RotaryArrays& arrays, Find find) {
  // Phase 1: which slot, heads and token are this thread's.
  const uint32 thread = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  const bool keys = thread >= params.query_threads;
  const uint32 own = keys ? thread - params.query_threads : thread;
  const uint32 groups = keys ? params.groups[1] : params.groups[0];
  const uint32 of_group = own / params.slots, slot = own - of_group * params.slots;
  const uint32 number = of_group / groups, head = (of_group - number * groups) * HEADS;
  Token token;
  if (number >= (keys ? params.tokens[1] : params.tokens[0]) || !find(token, keys, number)) return;
  const uint32 heads = keys ? params.heads[1] : params.heads[0];
  const Strides x_strides = either(keys, params.x), out_strides = either(keys, params.out);
  const DTYPE* x_g = (keys ? arrays.k_g : arrays.q_g) + token.batch * x_strides.batch + token.row * x_strides.seq +
                     head * x_strides.head;
  DTYPE* out_g = (keys ? arrays.k_out_g : arrays.q_out_g) + token.batch * out_strides.batch +
                 token.row * out_strides.seq + head * out_strides.head;

  // Phase 2: rotate it.
  turn_slot(params, slot, head, heads, x_g, x_strides.head, out_g, out_strides.head, arrays.cos_g, arrays.sin_g,
            token.turns, [&] { return token.position; });
}
