// A quantised weight as a factor of a product in float32 arithmetic: a source of float32/operands.cuh.
//
// A contiguous line is a row of codes. A load has as many neighbouring weights, all of one block, as x has in 16 bytes.
// It fetches codes and their block's numbers as they are in memory; they are decoded before they are stored to shared
// memory. Nf4's codebook is in shared memory, an entry a bank.
#pragma once

#include "../float32/product.cuh"
#include "formats.cuh"

// Field for field QUANTISED_FLOAT of cupyattn/ops/linear/kernels_quantised_tile.py. b_stride of the product
// is the weights of a row.
struct QuantisedFloatParams {
  FloatProductParams product;
  int blocks;      // in a row
  int block_log2;  // weights of a block; 31 if a row is one block
};
static_assert(sizeof(QuantisedFloatParams) == QUANTISED_FLOAT_PARAMS_BYTES,
              "QuantisedFloatParams and its NumPy twin are one layout");

// The shared memory of a product, with Nf4's codebook.
template <typename Format, typename A, typename B, bool kCodebook = Format::kCodebook>
struct QuantisedSmem : ProductSmem<A, B> {
  __device__ __forceinline__ const float* filled_codebook() { return nullptr; }
};
template <typename Format, typename A, typename B>
struct QuantisedSmem<Format, A, B, true> : ProductSmem<A, B> {
  float codebook[kCodes];

  __device__ __forceinline__ const float* filled_codebook() {
#pragma unroll
    for (int q = 0; q < kCodes; q++) {
      if (threadIdx.x == q) codebook[q] = kNf4Codebook[q];
    }
    __syncthreads();  // codebook: filled
    return codebook;
  }
};

// An integer of 0 to 255, by placing it in a mantissa: a conversion would use Turing's slowest pipe.
__device__ __forceinline__ float small_integer(uint32 q) {
  constexpr uint32 kMagic = 0x4b000000u;  // 2^23
  return __uint_as_float(kMagic | q) - 8388608.f;
}

template <typename Format, typename Scalar_>
struct QuantisedNumbers {
  using Scalar = Scalar_;  // of x
  static constexpr int kItems = kLoadItems<Scalar>;
  static constexpr int kBytes = kItems * Format::kBits / 8;
  using Codes = typename Word<kBytes>::Type;
  static constexpr int kSuperBlock = Format::kSuperBlock > 0 ? Format::kSuperBlock : 1;

  struct Fetched {
    Codes codes;
    typename Format::Scale scales[Format::kNumbers];
    float16 above[Format::kNumbers];
  };

  const unsigned char* codes_g;
  const typename Format::Scale* scales_g;
  const float16* super_scales_g;
  const float* codebook_s;
  int64 row_items;
  int blocks, block_log2;

  __device__ __forceinline__ void fetch(Fetched& fetched, int64 row, int64 place, int64 count) const {
    fetched = {};
    if (count <= 0) return;
    fetched.codes = *reinterpret_cast<const Codes*>(codes_g + (row * row_items + place) * Format::kBits / 8);
    const int64 block = row * blocks + (place >> block_log2);
#pragma unroll
    for (int i = 0; i < Format::kNumbers; i++) fetched.scales[i] = scales_g[block * Format::kNumbers + i];
    if constexpr (Format::kSuperBlock > 0) {
      const int64 above = (row * row_items + place) / kSuperBlock;
#pragma unroll
      for (int i = 0; i < Format::kNumbers; i++) fetched.above[i] = super_scales_g[above * Format::kNumbers + i];
    }
  }

  __device__ __forceinline__ void finish(float (&values)[kItems], const Fetched& fetched, int64) const {
    const BlockNumbers numbers = block_numbers<Format>(fetched.scales, fetched.above, 0, 0);
    const Codes codes = fetched.codes;
    uint32 words[(kBytes + 3) / 4] = {};
    memcpy(words, &codes, kBytes);
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const int bit = (Format::kEvenHigh ? i ^ 1 : i) * Format::kBits;
      const uint32 lowest = words[bit / 32] >> bit % 32;
      float q;
      if constexpr (Format::kBits == 8) {
        q = small_integer((lowest ^ 0x80u) & 0xffu) - 128.f;
      } else if constexpr (Format::kCodebook) {
        q = codebook_s[lowest & 15u];
      } else {
        q = small_integer(lowest & 15u);
      }
      values[i] = weight_of<Format>(q, numbers);
    }
  }
};
