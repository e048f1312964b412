// Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
//
// A counter-based generator: the random word of a score is a function of the seed and the score's indices (batch, head,
// query, key) only. So forward, backward, every tile shape and the NumPy reference compute the same dropout mask. The
// random word of an array's item is a function of the seed and the item's index in C order.
#pragma once

#include "config.cuh"

struct Philox4 {
  uint32 word[4];
};

__device__ __forceinline__ Philox4 philox4x32_10(Philox4 counter, uint32 key_lo, uint32 key_hi) {
  constexpr uint32 kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32 kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint32 hi0 = __umulhi(kMultiplier0, counter.word[0]), lo0 = kMultiplier0 * counter.word[0];
    const uint32 hi1 = __umulhi(kMultiplier1, counter.word[2]), lo1 = kMultiplier1 * counter.word[2];
    counter = {{hi1 ^ counter.word[1] ^ key_lo, lo1, hi0 ^ counter.word[3] ^ key_hi, lo0}};
    key_lo += kWeyl0;
    key_hi += kWeyl1;
  }
  return counter;
}

// The eight 16-bit fields for the eight scores of one thread in 32 keys: key j of query i uses field
// 2 * ((j % 32) / 8) + j % 2 of the call whose counter starts with 4 * (j / 32) + (j % 8) / 2.
// `key` may be relative to a first key that is a multiple of 32; first_counter is an eighth of this first key.
__device__ __forceinline__ Philox4 dropout_words(uint64 seed, int batch, int head, int query, int key,
                                                 uint32 first_counter) {
  const uint32 of_key = static_cast<uint32>(4 * (key / 32) + key % 8 / 2);
  const Philox4 counter = {
      {first_counter + of_key, static_cast<uint32>(query), static_cast<uint32>(head), static_cast<uint32>(batch)}};
  return philox4x32_10(counter, static_cast<uint32>(seed), static_cast<uint32>(seed >> 32));
}

__device__ __forceinline__ uint32 dropout_field(const Philox4& words, int key) {
  const int word = key % 32 / 8;
  // Selected, not indexed: an index would put the words into local memory.
  const uint32 low = word % 2 == 0 ? words.word[0] : words.word[1];
  const uint32 high = word % 2 == 0 ? words.word[2] : words.word[3];
  return (word < 2 ? low : high) >> (16 * (key % 2)) & 0xffffu;
}

// Dropout of an array: the eight 16-bit fields of one call are for items 8 g to 8 g + 7 in C order, low half first. No
// batch element of attention has this word 3 of the counter.
__device__ __forceinline__ Philox4 element_words(uint64 seed, uint64 group) {
  constexpr uint32 kElements = 0x80000000u;
  const Philox4 counter = {{static_cast<uint32>(group), static_cast<uint32>(group >> 32), 0u, kElements}};
  return philox4x32_10(counter, static_cast<uint32>(seed), static_cast<uint32>(seed >> 32));
}

// The field of item `place` of the eight. If it is known at compile time, this is one shift.
__device__ __forceinline__ uint32 element_field(const Philox4& words, int place) {
  const uint32 low = place < 2 ? words.word[0] : words.word[1];
  const uint32 high = place < 6 ? words.word[2] : words.word[3];
  return (place < 4 ? low : high) >> (16 * (place % 2)) & 0xffffu;
}
