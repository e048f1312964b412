// Packed codes for tensor cores: float16 pairs, exact for integers, and the pairs of x that they are multiplied with.
//
// A word of codes is 8 neighbouring k in four bits, 4 in eight bits; a pair is two of them. Each class has the pairs of
// a word (pair), the pair of x for each (input, from 8 neighbouring items), kChains sums to which they are added in
// rotation, and the value of these sums together (merge, times kFactor).
//
//   NibblePairs    a masked nibble is a subnormal float16: q 2^-24 or, four bits higher, q 2^-20. Tensor cores multiply
//                  subnormals exactly, so that one instruction makes a pair, if the two kinds have separate chains, or
//                  two instructions in one chain. Nibbles 0 and 4 of a word are a pair.
//   CodebookPairs  a byte's two entries from a table in shared memory, rounded to float16. There are 32 copies, so
//                  that every lane reads its own bank.
//   BytePairs      1024 + 128 + q is a float16 whose low byte is 128 + q.
#pragma once

#include <cuda_fp16.h>

#include "../../common/memory.cuh"
#include "../../common/mma.cuh"
#include "../../common/numeric.cuh"
#include "formats.cuh"

struct CodebookTable {
  static constexpr int kEntries = 256;
  alignas(kVectorBytes) uint32 pairs[kEntries][kWarpSize];

  // An entry of the codebook, as float16.
  __device__ __forceinline__ static uint32 half_bits(int code) {
    uint32 bits = 0;
#pragma unroll
    for (int i = 0; i < kCodes; i++) {
      const uint32 entry = __half_as_ushort(__float2half_rn(kNf4Codebook[i]));
      bits = code == i ? entry : bits;
    }
    return bits;
  }

  // Called by all threads: eight of them fill the copies of one entry. A lane has one entry of the codebook, and gets
  // the others by shuffles.
  template <int kThreads>
  __device__ __forceinline__ void fill() {
    const uint32 own = half_bits(lane_index() % kCodes);
    constexpr int kWide = kVectorBytes / sizeof(uint32), kTogether = kWarpSize / kWide;
#pragma unroll
    for (int first = 0; first < kEntries; first += kThreads / kTogether) {
      const int entry = first + threadIdx.x / kTogether;
      if (kEntries % (kThreads / kTogether) != 0 && entry >= kEntries) break;
      const uint32 even = __shfl_sync(kFullWarp, own, entry / kCodes);  // its nibble is the high one
      const uint32 pair = even | __shfl_sync(kFullWarp, own, entry % kCodes) << 16;
      const uint32 copies = shared_address(&pairs[entry][threadIdx.x % kTogether * kWide]);
      st_shared_v4(copies, make_uint4(pair, pair, pair, pair));
    }
  }
};

// A lane's lookup of pairs. One instruction computes the address of a pair from the shifted byte and the lane's bits,
// as long as the compiler does not know these.
struct CodebookLookup {
  const char* pairs;
  uint32 lane;

  __device__ __forceinline__ explicit CodebookLookup(const CodebookTable& table)
      : pairs(reinterpret_cast<const char*>(table.pairs)),
        lane(kept_in_register<uint32>(lane_index() * sizeof(uint32))) {}

  __device__ __forceinline__ uint32 operator()(uint32 word, int byte) const {
    constexpr int kRowLog2 = 7;
    const uint32 shifted = byte == 0 ? word << kRowLog2 : word >> (8 * byte - kRowLog2);
    return *reinterpret_cast<const uint32*>(pairs + ((shifted & 0xff << kRowLog2) | lane));
  }
};

struct NoTable {
  static constexpr int kEntries = 0;
  template <int kThreads>
  __device__ __forceinline__ void fill() {}
};
struct NoLookup {
  __device__ __forceinline__ explicit NoLookup(const NoTable&) {}
};

__device__ __forceinline__ uint32 permuted(const uint4& x, int pair) {  // items pair and pair + 4 of eight
  const uint32 low = pair < 2 ? x.x : x.y, high = pair < 2 ? x.z : x.w;
  return __byte_perm(low, high, pair % 2 ? 0x7632 : 0x5410);
}

template <int kChains_>
struct NibblePairs {
  static constexpr int kPairs = 4;  // of a word
  static constexpr int kChains = kChains_;
  static constexpr float kFactor = kChains == 2 ? 0x1p20f : 0x1p24f;
  using Table = NoTable;
  using Lookup = NoLookup;
  __device__ __forceinline__ static uint32 pair(uint32 word, int i, const Lookup&) {
    if (kChains == 1) return word >> 4 * i & 0x000f000fu;
    return (i < 2 ? word : word >> 8) & (i % 2 ? 0x00f000f0u : 0x000f000fu);
  }
  __device__ __forceinline__ static uint32 input(const uint4& x, int i) { return permuted(x, i); }
  __device__ __forceinline__ static float merge(float low, float high) {
    return kChains == 2 ? fmaf(16.f, low, high) : low;
  }
};

struct CodebookPairs {
  static constexpr int kPairs = 4;
  static constexpr int kChains = 1;
  static constexpr float kFactor = 1.f;
  using Table = CodebookTable;
  using Lookup = CodebookLookup;
  __device__ __forceinline__ static uint32 pair(uint32 word, int i, const Lookup& lookup) { return lookup(word, i); }
  __device__ __forceinline__ static uint32 input(const uint4& x, int i) { return word_of(x, i); }
  __device__ __forceinline__ static float merge(float sum, float) { return sum; }
};

struct BytePairs {
  static constexpr int kPairs = 2;
  static constexpr int kChains = 1;
  static constexpr float kFactor = 1.f;
  using Table = NoTable;
  using Lookup = NoLookup;
  __device__ __forceinline__ static uint32 pair(uint32 word, int i, const Lookup&) {
    const uint32 beyond = __byte_perm(word ^ 0x80808080u, 0x64646464u, i ? 0x4342 : 0x4140);
    const __half2 pair = __hsub2(reinterpret_cast<const __half2&>(beyond), __half2half2(__ushort_as_half(0x6480)));
    return reinterpret_cast<const uint32&>(pair);
  }
  __device__ __forceinline__ static uint32 input(const uint4& x, int i) { return word_of(x, i); }
  __device__ __forceinline__ static float merge(float sum, float) { return sum; }
};

template <typename Format, int kChains>
struct PairsOf {
  using Type = NibblePairs<kChains>;
};
template <int kChains>
struct PairsOf<Nf4, kChains> {
  using Type = CodebookPairs;
};
template <int kChains>
struct PairsOf<Int8, kChains> {
  using Type = BytePairs;
};
