// The loader of keys for a CTA of query rows: the tiles of K and V in its loop, fetched from global memory to
// registers while the present tile is in use, and from there to the half of two buffers in shared memory that is not.
#pragma once

#include "../params.cuh"
#include "tile_loader.cuh"

// Two tiles of keys in shared memory: one half is computed, the other filled. Or one tile, where two do not fit; or one
// of K, where the loop has a barrier between the products that read K and the stores of the next tile.
template <typename KTile_, typename VTile_, int kKHalves = 2, int kVHalves = kKHalves>
struct KeyTiles {
  using KTile = KTile_;
  using VTile = VTile_;

  alignas(128) unsigned char k[kKHalves][KTile::kBytes];
  alignas(128) unsigned char v[kVHalves][VTile::kBytes];

  __device__ __forceinline__ static constexpr int k_bytes(int half) { return half % kKHalves * KTile::kBytes; }
};

// Addresses of the rows of a tile's keys in global memory.
struct KeyRows {
  const char *k_g, *v_g;
};

// When in a tile the entries of the tile after the next are looked up: before the products, with the loads of V, or
// after them.
enum class LookUp { kFirst, kWithV, kAfterV };

// How the K and V of a head lie in memory, tile after tile. (The kernel passes the loop's position by value:
// as a member of the loader the compiler kept it in memory for too long to place the loads well.)
template <typename KTileLoader, typename VTileLoader,
          typename Tiles_ = KeyTiles<typename KTileLoader::Tile, typename VTileLoader::Tile>>
struct KeyLoader {
  using KTile = typename KTileLoader::Tile;
  using VTile = typename VTileLoader::Tile;
  using Tiles = Tiles_;
  using Rows = KeyRows;
  struct Entry {};  // nothing has to be looked up ahead
  static constexpr LookUp kLookUp = LookUp::kFirst;
  static constexpr int kParts = 4;  // in which a tile may be fetched and stored
  static constexpr int kTileK = KTile::kRows;
  // On the way, of K, then of V: with registers for each, ptxas spilled.
  using Quads = uint4[KTileLoader::kQuads > VTileLoader::kQuads ? KTileLoader::kQuads : VTileLoader::kQuads];

  uint32 k_both_s, v_both_s;  // both halves
  KTileLoader k_loader;
  VTileLoader v_loader;
  const Strides &k, &v;
  KeyRows head_rows;                 // of the head's first tile
  int64 k_tile_bytes, v_tile_bytes;  // from tile to tile

  template <typename Scalar>
  __device__ __forceinline__ KeyLoader(const AttentionParams& params, const TileCoordinates& coords, const Scalar* k_g,
                                       const Scalar* v_g, const Tiles& tiles)
      : k_both_s(shared_address(tiles.k)),
        v_both_s(shared_address(tiles.v)),
        k_loader(params.k.seq),
        v_loader(params.v.seq),
        k(params.k),
        v(params.v),
        head_rows{KTileLoader::lowest(::head_rows(k_g, k, coords.batch, coords.kv_head, 0), k.seq),
                  VTileLoader::lowest(::head_rows(v_g, v, coords.batch, coords.kv_head, 0), v.seq)},
        k_tile_bytes(k.seq * kTileK * sizeof(Scalar)),
        v_tile_bytes(v.seq * kTileK * sizeof(Scalar)) {}

  __device__ __forceinline__ Rows rows(int tile) const {
    return {head_rows.k_g + tile * k_tile_bytes, head_rows.v_g + tile * v_tile_bytes};
  }
  __device__ __forceinline__ Rows rows_after(const Rows& tile) const {
    return {tile.k_g + k_tile_bytes, tile.v_g + v_tile_bytes};
  }
  // The forward's loop: move on to a tile, and to the one after it.
  __device__ __forceinline__ void move_to(Rows& next, int tile) const { next = rows(tile); }
  // Move to a tile that follows in no order. ptxas would otherwise add up each thread's addresses again, in
  // registers, where the tile's begins in uniform ones.
  __device__ __forceinline__ void move_to_listed(Rows& next, int tile) const {
    next = rows(tile);
    asm volatile("" : "+l"(next.k_g), "+l"(next.v_g));
  }
  __device__ __forceinline__ void move_on(Rows& next) const { next = rows_after(next); }
  __device__ __forceinline__ Entry look_up(int) const { return {}; }
  __device__ __forceinline__ void keep(Rows&, Entry) const {}
  __device__ __forceinline__ uint32 k_s(int half) const { return k_both_s + Tiles::k_bytes(half); }
  __device__ __forceinline__ uint32 v_s(int half) const { return v_both_s + half * VTile::kBytes; }

  // kRagged: only `keys` keys of the tile exist.
  template <bool kRagged>
  __device__ __forceinline__ void fetch_k(Quads& quads, const Rows& from, int keys, TilePart part = {}) const {
    k_loader.template load<kRagged>(quads, from.k_g, k.seq, keys, part);
  }
  template <bool kRagged>
  __device__ __forceinline__ void fetch_v(Quads& quads, const Rows& from, int keys, TilePart part = {}) const {
    v_loader.template load<kRagged>(quads, from.v_g, v.seq, keys, part);
  }
  __device__ __forceinline__ void store_k(const Quads& quads, uint32 to_s, TilePart part = {}) const {
    k_loader.store(to_s, quads, part);
  }
  __device__ __forceinline__ void store_v(const Quads& quads, uint32 to_s, TilePart part = {}) const {
    v_loader.store(to_s, quads, part);
  }

  // The first tile, all the way.
  __device__ __forceinline__ void bring(const Rows& from, int keys, int half, int = 0) const {
    Quads k_quads, v_quads;
    fetch_k<true>(k_quads, from, keys);
    store_k(k_quads, k_s(half));
    fetch_v<true>(v_quads, from, keys);
    store_v(v_quads, v_s(half));
  }

  // The tile that many after `next`, if it is among the `left` from the present one on, whose keys all exist.
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const Rows& next, int left) const {
    if constexpr (kAhead > 0) {
      if (left <= kAhead + 1) return;
      ::bring_to_l2<KTileLoader, VTileLoader>(next.k_g + kAhead * k_tile_bytes, k.seq, next.v_g + kAhead * v_tile_bytes,
                                              v.seq);
    }
  }

  // See Softmax::renew.
  __device__ __forceinline__ void renew() {
    k_loader.renew();
    v_loader.renew();
  }
};

// For a call with dense keys.
struct DenseKeys {
  const AttentionParams& params;
  const float16 *k_g, *v_g;

  template <typename Traits, typename Tiles>
  __device__ __forceinline__ auto loader(const TileCoordinates& coords, const KeyWindow&, int, const Tiles& tiles) const
      -> KeyLoader<typename Traits::KTileLoader, typename Traits::VTileLoader, Tiles> {
    return {params, coords, k_g, v_g, tiles};
  }
};
