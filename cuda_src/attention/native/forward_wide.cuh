// The loop of the forward of sm_80 and later for head dims of 257 to 512: that of ../tensor_core/forward_wide.cuh, in
// which four warps share 32 rows, with tiles of keys that pass no register on their way to shared memory (cp.async).
//
// Budget    shared memory: K and V twice, and what warps exchange; or Q or the output tile: at most 79 KiB.
// Barriers  as there. The copies of a tile's V and of the next one's K begin with its products and end with its
//           softmax.
// Edges     as forward.cu.
#pragma once

#define ASYNC_KEYS 1
#include "../tensor_core/forward_wide.cuh"

// As KeyLoader, but tiles are copied.
template <typename KTileLoader, typename VTileLoader, typename Tiles>
struct CopiedKeyLoader : KeyLoader<KTileLoader, VTileLoader, Tiles> {
  using KeyLoader<KTileLoader, VTileLoader, Tiles>::KeyLoader;

  template <bool kRagged>
  __device__ __forceinline__ void copy_k(uint32 to_s, const KeyRows& from, int keys, TilePart part) const {
    this->k_loader.template copy<kRagged>(to_s, from.k_g, this->k.seq, keys, part);
  }
  template <bool kRagged>
  __device__ __forceinline__ void copy_v(uint32 to_s, const KeyRows& from, int keys, TilePart part) const {
    this->v_loader.template copy<kRagged>(to_s, from.v_g, this->v.seq, keys, part);
  }
};

// For a call with dense keys.
template <typename Scalar>
struct DenseTiles {
  const Scalar *k_g, *v_g;

  template <typename T, typename Tiles>
  __device__ __forceinline__ auto loader(const AttentionParams& params, const TileCoordinates& coords, const KeyWindow&,
                                         int, const Tiles& tiles) const
      -> CopiedKeyLoader<typename T::KTileLoader, typename T::VTileLoader, Tiles> {
    return {params, coords, k_g, v_g, tiles};
  }
};

// Keys with the parameters of their call.
template <typename Keys>
struct KeysOfCall {
  const AttentionParams& params;
  const Keys& keys;

  template <typename T, typename Tiles>
  __device__ __forceinline__ auto loader(const TileCoordinates& coords, const KeyWindow& window, int rows,
                                         const Tiles& tiles) const {
    return keys.template loader<T>(params, coords, window, rows, tiles);
  }
};

template <typename Keys, typename Split = AllKeys>
__device__ __forceinline__ void attend(const AttentionParams& params, const Arrays& arrays, const Keys& keys,
                                       const TileCoordinates& coords, const KeyWindow& window, int64 q_offset,
                                       const Split& split = {}) {
  attend(params, arrays, coords, window, q_offset, KeysOfCall<Keys>{params, keys},
         StoredChunks<Traits::kHeadDim, Traits::kVec>(), split);
}
