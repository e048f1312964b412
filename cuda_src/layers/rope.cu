// Rotary position embedding of one array or two (q and k) in one launch, its inverse, and so its backward.
//
//   (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)   (+ what is there, with ACCUMULATE)
//
// for each pair (a, b) of the first R features, with the cosine and sine of the token's position and the pair; sin
// times `sign` -1 is the inverse rotation. Pair m is (m, m + R/2), or (2 m, 2 m + 1) where INTERLEAVED (Su et al.,
// arXiv:2104.09864, equation 34, has the latter; GPT-NeoX brought the former). Features from R on are copied.
//
// Shapes    x (B, S, heads, D) of any outer strides, out alike; cos and sin (positions, R/2) of TABLE; positions (B, S)
//           or (S,) by its strides, or null: token s stands at s.
// Work      a head is cut into slots: PAIRS pairs of features, or a copied stretch as long. A thread owns one slot of
//           HEADS neighbouring heads of a token, and so reads cosines and sines once for them; neighbouring threads
//           have neighbouring slots, then groups of heads, then tokens. Grid ceil(threads / THREADS).
// Budget    registers: 4 * HEADS * VEC storage items and 2 * PAIRS floats, below 128 in all; no shared memory.
// Edges     a position outside of the tables gives NaN in the R features, and nothing is read there. out may be x.
#if !defined(DTYPE) || !defined(THREADS) || !defined(HEADS) || !defined(VEC) || !defined(TABLE) || \
    !defined(POSITION) || !defined(INTERLEAVED) || !defined(ACCUMULATE)
#error "DTYPE, THREADS, HEADS, VEC, TABLE, POSITION, INTERLEAVED and ACCUMULATE come from a launch-configuration table"
#endif
#include "rotation.cuh"

constexpr int kRopeArrays = 2;

// Field for field the structured dtype ROPE_PARAMS of cupyattn/kernels/structs.py. Strides are in items.
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
static_assert(sizeof(RopeParams) == ROPE_PARAMS_BYTES, "cupyattn/kernels/structs.py describes another struct");

// Selected, not indexed: parameters have no index, so the struct would go through local memory.
__device__ __forceinline__ RopeStrides either(bool other, const RopeStrides (&strides)[kRopeArrays]) {
  return {other ? strides[1].batch : strides[0].batch, other ? strides[1].seq : strides[0].seq,
          other ? strides[1].head : strides[0].head};
}

// A slot is two pieces: the first and second features of its pairs, or one stretch that holds both side by side.
constexpr int kPairs = !INTERLEAVED ? VEC : VEC > 1 ? VEC / 2 : 1;
constexpr int kPiece = INTERLEAVED && VEC == 1 ? 1 : VEC;
constexpr int kPieces = 2 * kPairs / kPiece;
static_assert(kPieces == 1 || kPieces == 2, "a pair is in one vector or in two");

struct Slot {
  Vec<DTYPE, kPiece> piece[kPieces];

  __device__ __forceinline__ float first(int pair) const {
    return to_float(INTERLEAVED ? piece[2 * pair / kPiece].item[2 * pair % kPiece] : piece[0].item[pair]);
  }
  __device__ __forceinline__ float second(int pair) const {
    return to_float(INTERLEAVED ? piece[(2 * pair + 1) / kPiece].item[(2 * pair + 1) % kPiece]
                                : piece[kPieces - 1].item[pair]);
  }
  __device__ __forceinline__ void set(int pair, float first, float second) {
    if constexpr (INTERLEAVED) {
      piece[2 * pair / kPiece].item[2 * pair % kPiece] = from_float<DTYPE>(first);
      piece[(2 * pair + 1) / kPiece].item[(2 * pair + 1) % kPiece] = from_float<DTYPE>(second);
    } else {
      piece[0].item[pair] = from_float<DTYPE>(first);
      piece[kPieces - 1].item[pair] = from_float<DTYPE>(second);
    }
  }
};

// Where the pieces of this thread's slot begin in a head.
struct Place {
  uint32 column[kPieces];
  bool exists[kPieces];  // what is copied may end within a slot

  __device__ __forceinline__ Place(const RopeParams& params, uint32 slot) {
    const bool rotates = slot < params.rotated_slots;
    column[0] = !rotates || INTERLEAVED ? slot * (2 * kPairs) : slot * kPairs;
    if constexpr (kPieces == 2) column[1] = column[0] + (rotates && !INTERLEAVED ? params.half : kPiece);
#pragma unroll
    for (int p = 0; p < kPieces; p++) exists[p] = column[p] < params.dim;
  }

  __device__ __forceinline__ Slot load(const DTYPE* head_g) const {
    Slot slot = {};
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
      if (exists[p]) slot.piece[p] = *reinterpret_cast<const Vec<DTYPE, kPiece>*>(head_g + column[p]);
    }
    return slot;
  }

  __device__ __forceinline__ void store(DTYPE* head_g, const Slot& slot) const {
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
      if (!exists[p]) continue;
      if constexpr (sizeof(slot.piece[p]) == kVectorBytes) {
        st_global_v4(head_g + column[p], *reinterpret_cast<const uint4*>(&slot.piece[p]));
      } else {
        *reinterpret_cast<Vec<DTYPE, kPiece>*>(head_g + column[p]) = slot.piece[p];
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    rope(const DTYPE* x0_g, const DTYPE* x1_g, const TABLE* cos_g, const TABLE* sin_g, const POSITION* positions_g,
         DTYPE* out0_g, DTYPE* out1_g, const RopeParams params) {
  // Phase 1: which slot, heads and token are this thread's.
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
  const Place place(params, slot);

  // Phase 2: all loads.
  Slot x[HEADS] = {}, present[ACCUMULATE ? HEADS : 1];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (head + h < heads) x[h] = place.load(x_g + h * x_strides.head);
    if constexpr (ACCUMULATE) {
      if (head + h < heads) present[h] = place.load(out_g + h * out_strides.head);
    }
  }
  float cos[kPairs], sin[kPairs];
  const bool rotates = slot < params.rotated_slots;
  const int64 position =
      positions_g == nullptr ? s : positions_g[batch * params.positions_batch + s * params.positions_seq];
  if (rotates && position >= 0 && position < params.table_length) {
    load_table<(VEC > 1)>(cos, cos_g + position * params.cos_stride + slot * kPairs);
    load_table<(VEC > 1)>(sin, sin_g + position * params.sin_stride + slot * kPairs);
  } else {
    const float identity = rotates ? __int_as_float(0x7fc00000) : 1.f;  // NaN where there is no such position
#pragma unroll
    for (int i = 0; i < kPairs; i++) cos[i] = identity, sin[i] = 0.f;
  }

  // Phase 3: rotate, and store. What is only copied is no product: 0 times infinity is none.
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    Slot out = x[h];
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const float a = x[h].first(i), b = x[h].second(i), turn = params.sign * sin[i];
      float first = rotates ? rotated(a, b, cos[i], -turn) : a;
      float second = rotates ? rotated(b, a, cos[i], turn) : b;
      if constexpr (ACCUMULATE) first += present[h].first(i), second += present[h].second(i);
      out.set(i, first, second);
    }
    if (head + h < heads) place.store(out_g + h * out_strides.head, out);
  }
}
