// The loader of keys for a CTA of query rows from sm_80 on: the tiles of K and V in its loop go from global to shared
// memory by copies that pass no register, one tile ahead of the one in use.
#pragma once

#include "../params.cuh"
#include "../tensor_core/key_loader.cuh"

// One of two stages in shared memory: one is computed, the other filled.
template <typename KTile, typename VTile>
struct KeyStage {
  alignas(128) unsigned char k[KTile::kBytes];
  alignas(128) unsigned char v[VTile::kBytes];
};

template <typename KTileLoader, typename VTileLoader>
struct AsyncKeyLoader {
  using KTile = typename KTileLoader::Tile;
  using VTile = typename VTileLoader::Tile;
  using Stage = KeyStage<KTile, VTile>;
  static constexpr int kTileK = KTile::kRows;

  KTileLoader k_loader;
  VTileLoader v_loader;
  const Strides &k, &v;
  KeyRows head_rows;                 // of the head's first tile
  int64 k_tile_bytes, v_tile_bytes;  // from tile to tile

  template <typename Scalar>
  __device__ __forceinline__ AsyncKeyLoader(const AttentionParams& params, const TileCoordinates& coords,
                                            const Scalar* k_g, const Scalar* v_g)
      : k_loader(params.k.seq),
        v_loader(params.v.seq),
        k(params.k),
        v(params.v),
        head_rows{KTileLoader::lowest(::head_rows(k_g, k, coords.batch, coords.kv_head, 0), k.seq),
                  VTileLoader::lowest(::head_rows(v_g, v, coords.batch, coords.kv_head, 0), v.seq)},
        k_tile_bytes(k.seq * kTileK * sizeof(Scalar)),
        v_tile_bytes(v.seq * kTileK * sizeof(Scalar)) {}

  __device__ __forceinline__ KeyRows rows(int tile) const {
    return {head_rows.k_g + tile * k_tile_bytes, head_rows.v_g + tile * v_tile_bytes};
  }
  __device__ __forceinline__ KeyRows rows_after(const KeyRows& tile) const {
    return {tile.k_g + k_tile_bytes, tile.v_g + v_tile_bytes};
  }

  __device__ __forceinline__ static uint32 v_s(uint32 stage_s) {
    static_assert(KTile::kBytes % 128 == 0, "V follows K in a stage");
    return stage_s + KTile::kBytes;
  }

  // kRagged: only `keys` keys of the tile exist; the others become zero.
  template <bool kRagged>
  __device__ __forceinline__ void copy(uint32 stage_s, const KeyRows& from, int keys) const {
    k_loader.template copy<kRagged>(stage_s, from.k_g, k.seq, keys);
    v_loader.template copy<kRagged>(v_s(stage_s), from.v_g, v.seq, keys);
  }
};

// For a call with dense keys.
template <typename Scalar>
struct DenseTiles {
  static constexpr bool kLooksUp = false;  // where tiles are, one tile ahead of their copies

  const Scalar *k_g, *v_g;

  template <typename Traits>
  __device__ __forceinline__ auto loader(const AttentionParams& params, const TileCoordinates& coords, const KeyWindow&,
                                         int) const
      -> AsyncKeyLoader<typename Traits::KTileLoader, typename Traits::VTileLoader> {
    return {params, coords, k_g, v_g};
  }
};
