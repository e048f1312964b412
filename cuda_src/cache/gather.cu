// Gather the tokens of sequences from the blocks of a paged cache into arrays that dense attention takes.
//
//   k[b, t] = k_cache[block_table[b, t / block_size], t % block_size] for t < seqlens_k[b], otherwise 0; v alike
//
// Shapes    caches (num_blocks, block_size, G, D) of CACHE, their scales (num_blocks, block_size, G); block_table (B,
//           max_blocks), seqlens_k (B,); k and v (B, length, G, D) of DTYPE. Outer strides are any.
// Work      a thread owns VEC neighbouring items of a head, of k and of v: two loads and two stores. Neighbouring
//           threads have neighbouring items, then heads, then tokens. Grid ceil(threads / THREADS).
// Budget    registers for the items in flight; no shared memory.
// Edges     a block that does not exist gives zeros, and nothing is read there; lengths beyond the table or the results
//           are cut.
#if !defined(DTYPE) || !defined(CACHE) || !defined(THREADS) || !defined(VEC) || !defined(LENGTH)
#error "DTYPE, CACHE, THREADS, VEC and LENGTH come from a launch-configuration table"
#endif
#include "formats.cuh"

// The fields are those of GATHER_PARAMS in cupyattn/ops/cache/kernels.py. Strides are in items.
struct GatherStrides {
  int64 outer, inner, head;  // of a block and a token in it, or of a sequence and a token of it
};
struct GatherParams {
  GatherStrides k_cache, v_cache, k_scales, v_scales, k, v;
  int64 table_batch, table_block, seqlens_stride;
  uint32 tokens, length;  // of all results, and of one sequence's
  uint32 heads, units;    // units are a head's vectors
  uint32 block_size;
  int num_blocks, max_blocks;
};
static_assert(sizeof(GatherParams) == GATHER_PARAMS_BYTES, "its dtype in Python describes another struct");

using Items = Vec<DTYPE, VEC>;
using CacheItem = Format<CACHE>::Item;

__device__ __forceinline__ int64 place_of(const GatherStrides& strides, uint32 outer, uint32 inner, uint32 head) {
  return outer * strides.outer + inner * strides.inner + head * strides.head;
}

// The items from `column` on of a cache's head.
template <typename Cache>
__device__ __forceinline__ Items load_items(const typename Format<Cache>::Item* head_g, const float* scale_g,
                                            uint32 column) {
  if constexpr (Format<Cache>::kQuantised) {
    const Unpacked<Cache, VEC> stored(head_g, column);
    const float scale = *scale_g;
    Items items;
#pragma unroll
    for (int i = 0; i < VEC; i++) items.item[i] = from_float<DTYPE>(static_cast<float>(stored.integer(i)) * scale);
    return items;
  } else {
    return *reinterpret_cast<const Items*>(head_g + column);
  }
}

__device__ __forceinline__ void store_items(DTYPE* target, const Items& items) {
  if constexpr (sizeof(Items) == kVectorBytes) {
    st_global_v4(target, *reinterpret_cast<const uint4*>(&items));
  } else {
    *reinterpret_cast<Items*>(target) = items;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    kv_gather(const CacheItem* __restrict__ k_cache_g, const CacheItem* __restrict__ v_cache_g,
              const float* __restrict__ k_scales_g, const float* __restrict__ v_scales_g,
              const int* __restrict__ block_table_g, const LENGTH* __restrict__ seqlens_k_g, DTYPE* __restrict__ k_g,
              DTYPE* __restrict__ v_g, const GatherParams params) {
  // Phase 1: which items are this thread's.
  const uint32 thread = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  const uint32 row = thread / params.units, column = (thread - row * params.units) * VEC;
  const uint32 token = row / params.heads, head = row - token * params.heads;
  if (token >= params.tokens) return;
  const uint32 batch = token / params.length, t = token - batch * params.length;

  // Phase 2: from the token's block, if there is one.
  Items k = {}, v = {};
  const uint32 table_column = t / params.block_size, place = t - table_column * params.block_size;
  const int64 length = seqlens_k_g[batch * params.seqlens_stride];  // a negative one is none
  if (t < length && table_column < static_cast<uint32>(params.max_blocks)) {
    const int block = block_table_g[batch * params.table_batch + table_column * params.table_block];
    if (block >= 0 && block < params.num_blocks) {
      k = load_items<CACHE>(k_cache_g + place_of(params.k_cache, block, place, head),
                            k_scales_g + place_of(params.k_scales, block, place, head), column);
      v = load_items<CACHE>(v_cache_g + place_of(params.v_cache, block, place, head),
                            v_scales_g + place_of(params.v_scales, block, place, head), column);
    }
  }

  // Phase 3: to the results.
  store_items(k_g + place_of(params.k, batch, t, head) + column, k);
  store_items(v_g + place_of(params.v, batch, t, head) + column, v);
}
