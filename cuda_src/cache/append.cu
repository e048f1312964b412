// Write the keys and values of new tokens to their slots of a paged cache. The same pass normalises the heads of keys
// (and of queries, in place), applies the rotary embedding to them, and quantises keys and values for a quantised
// cache.
//
//   n_i = x_i (mean_j x_j^2 + eps)^(-1/2) (offset + weight_i)   (RMS norm of a head: Zhang, Sennrich, arXiv:1910.07467)
//   stored = round(rotated(n)),   with no rounding in between
//
// CENTRED keys are stored as codes of rotated(n) - c, whose scales and codes are those of attention/quantize_keys.cu,
// with one centre c (G, D) of the whole cache; values then stay floats.
//
// Shapes    k and v (B, S, G, D), q (B, S, H, D) or null, of any outer strides; slot_mapping and positions (B, S); the
//           caches (num_blocks, block_size, G, D) of CACHE, their scales (num_blocks, block_size, G); cos and sin
//           (table length, R/2) of TABLE, which is void without a rotation; with NORMED the weights of norms (D,),
//           null for heads that have none.
// Work      LANES lanes of a warp own HEADS neighbouring heads of one token's q, k or v: a lane has CHUNKS chunks of
//           each head's columns, and reads cosines and sines once for all its heads. It also reads the other features
//           of its pairs, which other lanes hold: they are in L1. The lanes add up a head's squares by shuffles.
//           Neighbouring rows of lanes have neighbouring heads, then q, k and v, then tokens. Grid ceil(rows of lanes /
//           rows of a CTA).
// Budget    registers: 2 * HEADS * CHUNKS vectors and their cosines and sines, below 128 in all, and 2 * CHUNKS vectors
//           of weights; no shared memory.
// Edges     a slot that is not in the caches, such as -1, is skipped; a position outside of the tables gives NaN in the
//           R features, and nothing is read there. Two tokens with one slot may leave parts of both. A head with a NaN
//           is NaN after its norm; one with an infinity is zeros, and NaN at the infinity.
#if !defined(DTYPE) || !defined(CACHE) || !defined(THREADS) || !defined(LANES) || !defined(CHUNKS) || \
    !defined(HEADS) || !defined(VEC) || !defined(SLOT) || !defined(TABLE) || !defined(POSITION) ||    \
    !defined(INTERLEAVED) || !defined(NORMED) || !defined(CENTRED)
#error \
    "DTYPE, CACHE, THREADS, LANES, CHUNKS, HEADS, VEC, SLOT, TABLE, POSITION, INTERLEAVED, NORMED and CENTRED come from a launch-configuration table"
#endif
#include "../common/reduce.cuh"
#include "../common/row_codes.cuh"
#include "../rope/rotation.cuh"
#include "formats.cuh"

// The fields are those of APPEND_PARAMS in cupyattn/ops/cache/kernels.py. Strides are in items.
struct RowStrides {
  int64 outer, inner, head;  // of a batch element and a token of it, or of a block and a token in it
};
struct AppendParams {
  RowStrides q, k, v, k_cache, v_cache, k_scales, v_scales;
  int64 slots_batch, slots_seq, positions_batch, positions_seq;  // strides
  int64 cos_stride, sin_stride;                                  // of a position
  int64 table_length;
  int64 slots;           // of the caches
  uint32 tokens, seq;    // of all batch elements, and of one
  uint32 heads, groups;  // of q: HEADS heads are a group
  uint32 kv_heads, kv_groups;
  uint32 half, dim;  // R/2 and D
  uint32 block_size;
  float q_eps, k_eps, q_offset, k_offset;  // of the norms
};
static_assert(sizeof(AppendParams) == APPEND_PARAMS_BYTES, "its dtype in Python describes another struct");

template <typename Table>
struct Rotation {
  static constexpr bool kThere = true;
  using Item = Table;
};
template <>
struct Rotation<void> {
  static constexpr bool kThere = false;
  using Item = float;
};

struct Traits {
  using Stored = Format<CACHE>;
  static constexpr bool kRotates = Rotation<TABLE>::kThere;
  // A lane stores whole bytes: where it loads single items of four bits, it has two.
  static constexpr int kChunk = VEC < Stored::kPerByte ? Stored::kPerByte : VEC;
  static constexpr int kLoads = CHUNKS * (kChunk / VEC);                 // of a head
  static constexpr int kTable = INTERLEAVED && VEC > 1 ? VEC / 2 : VEC;  // pairs that a load has features of
  static constexpr bool kPairInLoad = INTERLEAVED && VEC > 1;
  static_assert(LANES >= 1 && LANES <= kWarpSize && (LANES & (LANES - 1)) == 0, "a row of lanes is in one warp");
  static_assert(THREADS % kWarpSize == 0, "whole warps");
};

enum class Role { kQuery, kKey, kValue };

// The columns of load `load` of this lane.
__device__ __forceinline__ uint32 column_of(int load) {
  constexpr int kPerChunk = Traits::kChunk / VEC;
  const uint32 lane = threadIdx.x % LANES;
  return (lane + load / kPerChunk * LANES) * Traits::kChunk + load % kPerChunk * VEC;
}

// Position of the pairs of a load's features: the first of the other features, and the first pair.
struct Pairing {
  uint32 other, pair;
  bool second;  // these are the second features of their pairs

  __device__ __forceinline__ Pairing(uint32 column, uint32 half) {
    if constexpr (INTERLEAVED) {
      other = column ^ 1, pair = column / 2, second = column % 2;
    } else {
      second = column >= half;
      other = second ? column - half : column + half;
      pair = second ? other : column;
    }
  }
};

// The cosines and sines of a lane's features: 1 and 0 where nothing is rotated.
struct Angles {
  float cos[Traits::kLoads][Traits::kTable], sin[Traits::kLoads][Traits::kTable];

  __device__ __forceinline__ void load(const AppendParams& params, const Rotation<TABLE>::Item* cos_g,
                                       const Rotation<TABLE>::Item* sin_g, int64 position) {
    const bool known = position >= 0 && position < params.table_length;
#pragma unroll
    for (int i = 0; i < Traits::kLoads; i++) {
      const uint32 column = column_of(i);
      const Pairing pairing(column, params.half);
      if (column < 2 * params.half && known) {
        load_table<(VEC > 1)>(cos[i], cos_g + position * params.cos_stride + pairing.pair);
        load_table<(VEC > 1)>(sin[i], sin_g + position * params.sin_stride + pairing.pair);
      } else {
#pragma unroll
        for (int t = 0; t < Traits::kTable; t++) cos[i][t] = kNaN, sin[i][t] = 0.f;  // there is no such position
      }
    }
  }
};

using Loaded = Vec<DTYPE, VEC>;
using Loads = Loaded[Traits::kLoads];

// The norm of a row's heads: its weights of the lane's features, and of the other features of their pairs.
struct HeadNorm {
  Loads own = {}, others = {};
  float eps, offset;
  bool there;

  // 1 / sqrt(mean square + eps) of a head, which LANES lanes hold, with zeros after it; every lane of the warp calls
  // this.
  __device__ __forceinline__ float rstd(const Loads& x, uint32 dim) const {
    float squares = 0.f;
#pragma unroll
    for (int load = 0; load < Traits::kLoads; load++) {
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        const float item = to_float(x[load].item[i]);
        squares += item * item;
      }
    }
    return rsqrtf(warp_reduce<Sum, LANES>(squares) * rcp_approx(static_cast<float>(dim)) + eps);
  }

  // Of a feature, whose weight is item i of `weights`.
  __device__ __forceinline__ float of(float x, float rstd, const Loaded& weights, int i) const {
    return there ? x * rstd * (offset + to_float(weights.item[i])) : x;
  }
};

// A lane's part of one head, in float32, normalised and rotated if `rotates`. Features that are only copied are not
// multiplied: 0 times infinity is NaN.
struct Head {
  float x[Traits::kLoads][VEC];

  __device__ __forceinline__ Head(const Loads& own, const Loads& others, const HeadNorm& norm, const Angles& angles,
                                  bool rotates, uint32 half, uint32 dim) {
    const float rstd = NORMED ? norm.rstd(own, dim) : 1.f;
#pragma unroll
    for (int load = 0; load < Traits::kLoads; load++) {
      const uint32 column = column_of(load);
      const Pairing pairing(column, half);
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        x[load][i] = to_float(own[load].item[i]);
        if constexpr (NORMED) x[load][i] = norm.of(x[load][i], rstd, norm.own[load], i);
        if constexpr (Traits::kRotates) {
          const int at = Traits::kPairInLoad ? i ^ 1 : i;
          float other = to_float((Traits::kPairInLoad ? own : others)[load].item[at]);
          if constexpr (NORMED) {
            other = norm.of(other, rstd, (Traits::kPairInLoad ? norm.own : norm.others)[load], at);
          }
          const int pair = Traits::kPairInLoad ? i / 2 : i;
          const bool second = Traits::kPairInLoad ? i % 2 : pairing.second;
          const float sin = angles.sin[load][pair];
          if (rotates && column < 2 * half) {
            x[load][i] = rotated(x[load][i], other, angles.cos[load][pair], second ? sin : -sin);
          }
        }
      }
    }
  }

  template <typename Scalar>
  __device__ __forceinline__ void store(Scalar* head_g, uint32 dim) const {
#pragma unroll
    for (int load = 0; load < Traits::kLoads; load++) {
      if (column_of(load) < dim) store_vec(head_g + column_of(load), x[load]);
    }
  }

  // To a cache, where `wanted`; every lane of the warp calls this.
  template <typename Cache>
  __device__ __forceinline__ void store_as(typename Format<Cache>::Item* head_g, float* scale_g, uint32 dim,
                                           bool wanted) const {
    if constexpr (Format<Cache>::kQuantised) {
      const float scale = scale_of<Cache>(largest_bits());
      if (wanted && threadIdx.x % LANES == 0) *scale_g = scale;
      const Divisor divisor(scale);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        constexpr int kPerChunk = Traits::kChunk / VEC;
        float items[Traits::kChunk];
#pragma unroll
        for (int i = 0; i < Traits::kChunk; i++) items[i] = x[chunk * kPerChunk + i / VEC][i % VEC];
        const uint32 column = column_of(chunk * kPerChunk);
        const Packed<Cache, Traits::kChunk> packed(items, divisor);
        if (wanted && column < dim) packed.store(head_g + stored_column<Cache>(column));
      }
    } else {
      if (wanted) store(head_g, dim);
    }
  }

  // Subtract the centre, and store codes to a cache, where `wanted`; every lane of the warp calls this.
  __device__ __forceinline__ void store_codes(signed char* head_g, float* scale_g, const float* centre_g, uint32 dim,
                                              bool wanted) {
    uint32 largest = 0;
#pragma unroll
    for (int load = 0; load < Traits::kLoads; load++) {
      float centre[VEC] = {};
      if (wanted && column_of(load) < dim) load_vec(centre, centre_g + column_of(load));
#pragma unroll
      for (int i = 0; i < VEC; i++) x[load][i] -= centre[i];
      largest = max_bits(largest, x[load]);
    }
    const RowCodes codes = RowCodes::of_key(warp_reduce<MaxBits, LANES>(largest));
    if (!wanted) return;
    if (threadIdx.x % LANES == 0) *scale_g = codes.scale;
#pragma unroll
    for (int load = 0; load < Traits::kLoads; load++) {
      const uint32 column = column_of(load);
      if (column >= dim) continue;
      if constexpr (VEC > 1) {
        codes.store(head_g + column, x[load]);
      } else {
        head_g[column] = static_cast<signed char>(codes.code(x[load][0]));
      }
    }
  }

 private:
  // Of the head's items, which LANES lanes hold, with zeros after them: a NaN is above infinity.
  __device__ __forceinline__ uint32 largest_bits() const {
    uint32 largest = 0;
#pragma unroll
    for (int load = 0; load < Traits::kLoads; load++) {
#pragma unroll
      for (int i = 0; i < VEC; i++) largest = max(largest, __float_as_uint(fabsf(x[load][i])));
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
      largest = max(largest, __shfl_xor_sync(kFullWarp, largest, distance));
    }
    return largest;
  }
};

// The item at which a head begins.
__device__ __forceinline__ int64 place_of(const RowStrides& strides, uint32 outer, uint32 inner, uint32 head) {
  return outer * strides.outer + inner * strides.inner + head * strides.head;
}

#if CENTRED
#define ENTRY append_kv_centred
#define CENTRE_ARRAY , const float* k_centre_g
#define CENTRE_STRIDE , int64 centre_stride
using KeyItem = signed char;
#else
#define ENTRY append_kv
#define CENTRE_ARRAY
#define CENTRE_STRIDE
using KeyItem = Traits::Stored::Item;
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(KeyItem* k_cache_g, Traits::Stored::Item* v_cache_g, float* k_scales_g, float* v_scales_g, DTYPE* q_g,
          const DTYPE* k_g, const DTYPE* v_g, const SLOT* slot_mapping_g, const Rotation<TABLE>::Item* cos_g,
          const Rotation<TABLE>::Item* sin_g, const POSITION* positions_g, const DTYPE* q_weight_g,
          const DTYPE* k_weight_g CENTRE_ARRAY, const AppendParams params CENTRE_STRIDE) {
  // Phase 1: which token and heads are this row's, and where they go.
  const uint32 row = blockIdx.x * static_cast<uint32>(THREADS / LANES) + threadIdx.x / LANES;
  const uint32 all_groups = params.groups + 2 * params.kv_groups;
  const uint32 token = row / all_groups, group = row - token * all_groups;
  const uint32 batch = token / params.seq, s = token - batch * params.seq;
  const Role role = group < params.groups                      ? Role::kQuery
                    : group < params.groups + params.kv_groups ? Role::kKey
                                                               : Role::kValue;
  const uint32 first_group = role == Role::kQuery ? 0
                             : role == Role::kKey ? params.groups
                                                  : params.groups + params.kv_groups;
  const uint32 head = (group - first_group) * HEADS;
  const uint32 heads = role == Role::kQuery ? params.heads : params.kv_heads;
  int64 slot = 0;
  bool exists = token < params.tokens;
  if (exists && role != Role::kQuery) {
    slot = slot_mapping_g[batch * params.slots_batch + s * params.slots_seq];
    exists = slot >= 0 && slot < params.slots;
  }
  const bool rotates = Traits::kRotates && role != Role::kValue;
  const DTYPE* weight_g = nullptr;
  HeadNorm norm;
  if constexpr (NORMED) {
    if (role != Role::kValue) weight_g = role == Role::kQuery ? q_weight_g : k_weight_g;
    norm.eps = role == Role::kQuery ? params.q_eps : params.k_eps;
    norm.offset = role == Role::kQuery ? params.q_offset : params.k_offset;
  }
  norm.there = weight_g != nullptr;
  // Features of q that are neither normalised nor rotated stay as they are.
  const uint32 dim = role == Role::kQuery && !norm.there ? 2 * params.half : params.dim;

  // Phase 2: all loads.
  Loads own[HEADS] = {}, others[HEADS] = {};
  Angles angles;
  const RowStrides strides = role == Role::kQuery ? params.q : role == Role::kKey ? params.k : params.v;
  const DTYPE* rows_g = role == Role::kQuery ? q_g : role == Role::kKey ? k_g : v_g;
  if (exists) {
    rows_g += place_of(strides, batch, s, head);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      const DTYPE* head_g = rows_g + h * strides.head;
#pragma unroll
      for (int load = 0; load < Traits::kLoads; load++) {
        const uint32 column = column_of(load);
        if (head + h < heads && column < dim) {
          own[h][load] = *reinterpret_cast<const Loaded*>(head_g + column);
        }
        if (Traits::kRotates && !Traits::kPairInLoad && rotates && head + h < heads && column < 2 * params.half) {
          const Pairing pairing(column, params.half);
          others[h][load] = *reinterpret_cast<const Loaded*>(head_g + pairing.other);
        }
      }
    }
    if (NORMED && norm.there) {
#pragma unroll
      for (int load = 0; load < Traits::kLoads; load++) {
        const uint32 column = column_of(load);
        if (column < params.dim) norm.own[load] = *reinterpret_cast<const Loaded*>(weight_g + column);
        if (Traits::kRotates && !Traits::kPairInLoad && column < 2 * params.half) {
          const Pairing pairing(column, params.half);
          norm.others[load] = *reinterpret_cast<const Loaded*>(weight_g + pairing.other);
        }
      }
    }
    if constexpr (Traits::kRotates) {
      if (rotates) {
        const int64 position = positions_g[batch * params.positions_batch + s * params.positions_seq];
        angles.load(params, cos_g, sin_g, position);
      }
    }
  }
  if constexpr (Traits::kRotates) __syncwarp();  // q: its other features are read by every lane before one is written

  // Phase 3: normalise, rotate and store, head by head.
  const uint32 block = static_cast<uint32>(slot) / params.block_size;
  const uint32 place = static_cast<uint32>(slot) - block * params.block_size;
  const RowStrides cache_strides = role == Role::kKey ? params.k_cache : params.v_cache;
  const RowStrides scale_strides = role == Role::kKey ? params.k_scales : params.v_scales;
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    Head values(own[h], others[h], norm, angles, rotates, params.half, params.dim);
    const bool there = exists && head + h < heads;
    if ((Traits::kRotates || NORMED) && role == Role::kQuery) {
      if (there) values.store(q_g + place_of(params.q, batch, s, head + h), dim);
    }
    const bool cached = there && role != Role::kQuery;
#if CENTRED
    const bool key = cached && role == Role::kKey;
    if (cached && !key) values.store(v_cache_g + place_of(params.v_cache, block, place, head + h), params.dim);
    values.store_codes(k_cache_g + place_of(params.k_cache, block, place, head + h),
                       k_scales_g + place_of(params.k_scales, block, place, head + h),
                       k_centre_g + (head + h) * centre_stride, params.dim, key);
#else
    auto* cache_g = (role == Role::kKey ? k_cache_g : v_cache_g) + place_of(cache_strides, block, place, head + h);
    float* scale_g = (role == Role::kKey ? k_scales_g : v_scales_g) + place_of(scale_strides, block, place, head + h);
    values.store_as<CACHE>(cache_g, scale_g, params.dim, cached);
#endif
  }
}
