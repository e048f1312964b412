// A token's heads in slots, for the kernels that rotate whole arrays. A thread has one slot of HEADS neighbouring
// heads: PAIRS pairs of features, or as many features that are copied. It reads cosines and sines once for all of its
// heads.
#pragma once

#if !defined(DTYPE) || !defined(HEADS) || !defined(VEC) || !defined(TABLE) || !defined(INTERLEAVED) || \
    !defined(ACCUMULATE)
#error "DTYPE, HEADS, VEC, TABLE, INTERLEAVED and ACCUMULATE come from a launch-configuration table"
#endif
#include "rotation.cuh"

// A slot has two pieces: the first and the second features of its pairs; or one piece with both, interleaved.
constexpr int kPairs = !INTERLEAVED ? VEC : VEC > 1 ? VEC / 2 : 1;
constexpr int kPiece = INTERLEAVED && VEC == 1 ? 1 : VEC;
constexpr int kPieces = 2 * kPairs / kPiece;
static_assert(kPieces == 1 || kPieces == 2, "a pair is in one vector or in two");

// A thread's pairs of a slot in float32.
struct Features {
  float piece[kPieces][kPiece];

  __device__ __forceinline__ float& first(int pair) {
    return INTERLEAVED ? piece[2 * pair / kPiece][2 * pair % kPiece] : piece[0][pair];
  }
  __device__ __forceinline__ float& second(int pair) {
    return INTERLEAVED ? piece[(2 * pair + 1) / kPiece][(2 * pair + 1) % kPiece] : piece[kPieces - 1][pair];
  }
};

// A slot as words, zeros where nothing was loaded. As items it was unpacked directly after each load, so each head
// waited for its load before the next one began: 64 byte permutations of 501 instructions (two heads, float16 in
// halves, sm_75, NVRTC 12.9, 2026-11-24).
struct Slot {
  WordsOf<Vec<DTYPE, kPiece>> piece[kPieces];

  __device__ __forceinline__ Features features() const {
    Features x;
#pragma unroll
    for (int p = 0; p < kPieces; p++) unpack<DTYPE>(x.piece[p], piece[p]);
    return x;
  }
};

// The first features of the pieces of this thread's slot in a head.
struct SlotCoordinates {
  uint32 column[kPieces];
  bool exists[kPieces];  // copied features may end within a slot

  template <typename Params>
  __device__ __forceinline__ SlotCoordinates(const Params& params, uint32 slot) {
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
      if (exists[p]) slot.piece[p] = *reinterpret_cast<const WordsOf<Vec<DTYPE, kPiece>>*>(head_g + column[p]);
    }
    return slot;
  }

  __device__ __forceinline__ void store(DTYPE* head_g, const Features& x) const {
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
      if (exists[p]) store_vec(head_g + column[p], x.piece[p]);
    }
  }
};

// Rotate this thread's slot of the heads from `head` on of one token, whose rows begin at x_g and out_g; position_of()
// returns the token's position. If `token_rotates` is false, the token is copied. Params has slots, rotated_slots,
// half, dim, table_length, the strides of the tables and sign.
template <typename Params, typename Position>
__device__ __forceinline__ void rotate_slot(const Params& params, uint32 slot, uint32 head, uint32 heads,
                                            const DTYPE* x_g, int64 x_head, DTYPE* out_g, int64 out_head,
                                            const TABLE* cos_g, const TABLE* sin_g, bool token_rotates,
                                            Position position_of) {
  const SlotCoordinates place(params, slot);

  // All loads.
  Slot x[HEADS] = {}, present[ACCUMULATE ? HEADS : 1];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (head + h < heads) x[h] = place.load(x_g + h * x_head);
    if constexpr (ACCUMULATE) {
      if (head + h < heads) present[h] = place.load(out_g + h * out_head);
    }
  }
  float cos[kPairs], sin[kPairs];
  const bool rotates = token_rotates && slot < params.rotated_slots;
  const int64 position = position_of();
  if (rotates && position >= 0 && position < params.table_length) {
    load_table<(VEC > 1)>(cos, cos_g + position * params.cos_stride + slot * kPairs);
    load_table<(VEC > 1)>(sin, sin_g + position * params.sin_stride + slot * kPairs);
  } else {
    const float identity = rotates ? __int_as_float(0x7fc00000) : 1.f;  // NaN if the tables have no such position
#pragma unroll
    for (int i = 0; i < kPairs; i++) cos[i] = identity, sin[i] = 0.f;
  }

  // Rotate, and store. Copied features are not multiplied, so that infinities are kept.
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    Features rotated_items = x[h].features(), added;
    if constexpr (ACCUMULATE) added = present[h].features();
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      float &first = rotated_items.first(i), &second = rotated_items.second(i);
      const float a = first, b = second, signed_sin = params.sign * sin[i];
      first = rotates ? rotated(a, b, cos[i], -signed_sin) : a;
      second = rotates ? rotated(b, a, cos[i], signed_sin) : b;
      if constexpr (ACCUMULATE) first += added.first(i), second += added.second(i);
    }
    if (head + h < heads) place.store(out_g + h * out_head, rotated_items);
  }
}
