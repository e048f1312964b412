// A token's heads in slots: what the kernels that rotate whole arrays share. A thread has one slot of HEADS neighbouring
// heads: PAIRS pairs of features, or a copied stretch as long, and so reads cosines and sines once for them.
#pragma once

#if !defined(DTYPE) || !defined(HEADS) || !defined(VEC) || !defined(TABLE) || !defined(INTERLEAVED) || \
    !defined(ACCUMULATE)
#error "DTYPE, HEADS, VEC, TABLE, INTERLEAVED and ACCUMULATE come from a launch-configuration table"
#endif
#include "rotation.cuh"

// A slot is two pieces: the first and second features of its pairs, or one stretch that holds both side by side.
constexpr int kPairs = !INTERLEAVED ? VEC : VEC > 1 ? VEC / 2 : 1;
constexpr int kPiece = INTERLEAVED && VEC == 1 ? 1 : VEC;
constexpr int kPieces = 2 * kPairs / kPiece;
static_assert(kPieces == 1 || kPieces == 2, "a pair is in one vector or in two");

// What a thread computes of a slot.
struct Features {
  float piece[kPieces][kPiece];

  __device__ __forceinline__ float& first(int pair) {
    return INTERLEAVED ? piece[2 * pair / kPiece][2 * pair % kPiece] : piece[0][pair];
  }
  __device__ __forceinline__ float& second(int pair) {
    return INTERLEAVED ? piece[(2 * pair + 1) / kPiece][(2 * pair + 1) % kPiece] : piece[kPieces - 1][pair];
  }
};

// A slot as the words that lie in memory, zeros where nothing was loaded. As items it was taken apart behind each load,
// which waited for it before the next head's began: 64 byte permutations of 501 instructions (two heads, float16 in
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

// Where the pieces of this thread's slot begin in a head.
struct SlotPlace {
  uint32 column[kPieces];
  bool exists[kPieces];  // what is copied may end within a slot

  template <typename Params>
  __device__ __forceinline__ SlotPlace(const Params& params, uint32 slot) {
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

// The slot of the heads from `head` on of one token, whose rows begin at x_g and out_g; position_of() says where the token
// stands. Where `turns` is false the token is copied, wherever it stands. Params has slots, rotated_slots, half, dim,
// table_length, the strides of the tables and sign.
template <typename Params, typename Position>
__device__ __forceinline__ void turn_slot(const Params& params, uint32 slot, uint32 head, uint32 heads,
                                          const DTYPE* x_g, int64 x_head, DTYPE* out_g, int64 out_head,
                                          const TABLE* cos_g, const TABLE* sin_g, bool turns, Position position_of) {
  const SlotPlace place(params, slot);

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
  const bool rotates = turns && slot < params.rotated_slots;
  const int64 position = position_of();
  if (rotates && position >= 0 && position < params.table_length) {
    load_table<(VEC > 1)>(cos, cos_g + position * params.cos_stride + slot * kPairs);
    load_table<(VEC > 1)>(sin, sin_g + position * params.sin_stride + slot * kPairs);
  } else {
    const float identity = rotates ? __int_as_float(0x7fc00000) : 1.f;  // NaN where there is no such position
#pragma unroll
    for (int i = 0; i < kPairs; i++) cos[i] = identity, sin[i] = 0.f;
  }

  // Rotate, and store. What is only copied is no product: 0 times infinity is none.
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    Features turned = x[h].features(), added;
    if constexpr (ACCUMULATE) added = present[h].features();
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      float &first = turned.first(i), &second = turned.second(i);
      const float a = first, b = second, turn = params.sign * sin[i];
      first = rotates ? rotated(a, b, cos[i], -turn) : a;
      second = rotates ? rotated(b, a, cos[i], turn) : b;
      if constexpr (ACCUMULATE) first += added.first(i), second += added.second(i);
    }
    if (head + h < heads) place.store(out_g + h * out_head, turned);
  }
}
