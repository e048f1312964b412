// How the caches keep their items: the only place that knows the storage.
//
// Floats are themselves. int8 is an integer, uint8 two of 4 bits: item 2 i in the low nibble of byte i, item 2 i + 1 in
// the high one, each with 8 added. Of a token and head all integers have one float32 scale, and none of this concerns
// it.
#pragma once

#include "../common/pack.cuh"
#include "../common/vec.cuh"

using int8 = signed char;
using uint8 = unsigned char;

// Bits of an item, and whether there are scales.
template <typename Item>
struct StoredFormat {
  static constexpr int kBits = 8 * static_cast<int>(sizeof(Item));
  static constexpr bool kScaled = false;
};
template <>
struct StoredFormat<int8> {
  static constexpr int kBits = 8;
  static constexpr bool kScaled = true;
};
template <>
struct StoredFormat<uint8> {
  static constexpr int kBits = 4;
  static constexpr bool kScaled = true;
};

// kItems neighbours of a row in registers.
template <typename Item, int kItems>
struct StoredItems {
  Vec<Item, kItems> items;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int x = 0; x < kItems; x++) items.item[x] = from_float<Item>(0.f);
  }
  __device__ __forceinline__ void load(const Item* source) {
    if constexpr (sizeof(items) == kVectorBytes) {
      const uint4 words = ld_global_stream_v4(source);
      items = *reinterpret_cast<const Vec<Item, kItems>*>(&words);
    } else {
      items = *reinterpret_cast<const Vec<Item, kItems>*>(source);
    }
  }
  __device__ __forceinline__ float item(int x) const { return to_float(items.item[x]); }
};

// Words of bytes, or one or two bytes.
template <int kBytes>
struct StoredBytes {
  static constexpr int kWords = div_up(kBytes, 4);
  static_assert(kBytes <= 2 || kBytes % 4 == 0, "one or two bytes, or words");

  uint32 word[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; i++) word[i] = 0;
  }
  __device__ __forceinline__ void load(const void* source) {
    if constexpr (kBytes == 1) {
      word[0] = *static_cast<const uint8*>(source);
    } else if constexpr (kBytes == 2) {
      word[0] = *static_cast<const uint16*>(source);
    } else {
      ld_global_stream(word, source);
    }
  }
  // Byte by byte from any address, of which `count` are there; the others become 0.
  __device__ __forceinline__ void load_bytes(const void* source, int count) {
    clear();
#pragma unroll
    for (int i = 0; i < kBytes; i++) {
      if (i < count) word[i / 4] |= static_cast<uint32>(static_cast<const uint8*>(source)[i]) << 8 * (i % 4);
    }
  }
};

constexpr uint32 kTwoTo23 = 0x4b000000u;  // a float32 of which the low bits count units

template <int kItems>
struct StoredItems<int8, kItems> : StoredBytes<kItems> {
  __device__ __forceinline__ float item(int x) const {
    const uint32 unsigned_word = this->word[x / 4] ^ 0x80808080u;
    return __uint_as_float(__byte_perm(unsigned_word, kTwoTo23, 0x7650 + x % 4)) - (8388608.f + 128.f);
  }
};

template <int kItems>
struct StoredItems<uint8, kItems> : StoredBytes<kItems / 2> {
  __device__ __forceinline__ float item(int x) const {
    const uint32 nibble = this->word[x / 8] >> 4 * (x % 8) & 0xfu;
    return __uint_as_float(nibble | kTwoTo23) - (8388608.f + 8.f);
  }
};

// 8 integers times their scale as float16, two a word; the scale is rounded to float16, and so is each product.
//
// Bits of an integer in the low bits of a float16 are a number: one operation makes two of them, where a conversion
// would take Turing's slowest pipe one by one. kBase is the float16 in whose units they are 1 / kUnit each, which keeps
// scales of float16 items within its range; what they are too large by is subtracted exactly.
template <typename Item>
struct HalfPairs;

__device__ __forceinline__ uint32 multiply_halves(uint32 x, __half2 factor) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&x), factor);
  return *reinterpret_cast<const uint32*>(&product);
}
// x * factor + term in both halves, for constants of float16.
__device__ __forceinline__ uint32 add_halves(uint32 x, float factor, float term) {
  const __half2 sum = __hfma2(*reinterpret_cast<const __half2*>(&x), __float2half2_rn(factor), __float2half2_rn(term));
  return *reinterpret_cast<const uint32*>(&sum);
}

template <>
struct HalfPairs<int8> {
  static constexpr float kUnit = 64.f;
  static constexpr uint32 kBase = 0x4c4c4c4cu;  // 16: high bytes

  __device__ __forceinline__ static void integers(uint32 (&halves)[4], const StoredItems<int8, 8>& items) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32 unsigned_word = items.word[i / 2] ^ 0x80808080u;
      halves[i] = add_halves(__byte_perm(unsigned_word, kBase, i % 2 == 0 ? 0x4140 : 0x4342), 1.f, -18.f);
    }
  }
};

template <>
struct HalfPairs<uint8> {
  static constexpr float kUnit = 4.f;
  static constexpr uint32 kBase = 0x5c005c00u;  // 256

  // Nibbles 0 and 4 of the word, 1 and 5, 2 and 6, 3 and 7; those of odd numbers are one nibble too high.
  __device__ __forceinline__ static void integers(uint32 (&halves)[4], const StoredItems<uint8, 8>& items) {
    uint32 apart[4];
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const uint32 shifted = items.word[0] >> 8 * (x / 2);
      apart[x] = x % 2 == 0 ? add_halves((shifted & 0x000f000fu) | kBase, 1.f, -258.f)
                            : add_halves((shifted & 0x00f000f0u) | kBase, 1.f / 16.f, -18.f);
    }
#pragma unroll
    for (int x = 0; x < 2; x++) {
      halves[x] = __byte_perm(apart[2 * x], apart[2 * x + 1], 0x5410);
      halves[2 + x] = __byte_perm(apart[2 * x], apart[2 * x + 1], 0x7632);
    }
  }
};

// The same for any dtype of 16 bits. bfloat16 has too few bits to round scales as well: items are scaled in float32.
template <typename Scalar>
struct ScaledItems {
  template <typename Item>
  __device__ __forceinline__ static uint4 chunk(const StoredItems<Item, 8>& items, float scale) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      pairs[i] = pack_pair<Scalar>(items.item(2 * i) * scale, items.item(2 * i + 1) * scale);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

template <>
struct ScaledItems<float16> {
  template <typename Item>
  __device__ __forceinline__ static uint4 chunk(const StoredItems<Item, 8>& items, float scale) {
    uint32 halves[4];
    HalfPairs<Item>::integers(halves, items);
    const __half2 unit = __float2half2_rn(scale * HalfPairs<Item>::kUnit);
#pragma unroll
    for (int i = 0; i < 4; i++) halves[i] = multiply_halves(halves[i], unit);
    return make_uint4(halves[0], halves[1], halves[2], halves[3]);
  }
};
