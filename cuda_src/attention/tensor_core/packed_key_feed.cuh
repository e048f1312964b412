// The feed of packed sequences: as the dense one, but where a sequence's keys begin is read from memory, and what is read
// from memory ptxas keeps in no uniform register. So each thread counts its items from the first one of the whole array,
// in 32 bits. On a T4 the loops model 0.88 and 0.81 at head dims 64 and 128 (python -m cupyattn turing, 2026-11-22); with
// the dense feed, whose addresses then take twice the registers, 0.71 and 0.72.
#pragma once

#include "key_feed.cuh"

// Where this thread's chunk of a tile's first row lies, in items of the arrays.
struct PackedKeyRows {
  int k, v;
};

template <typename KTileFeed, typename VTileFeed>
struct PackedKeyFeed {
  using KTile = typename KTileFeed::Tile;
  using VTile = typename VTileFeed::Tile;
  using Tiles = KeyTiles<KTile, VTile>;
  using Rows = PackedKeyRows;
  struct Entry {};  // nothing has to be looked up ahead
  static constexpr LookUp kLookUp = LookUp::kFirst;
  static constexpr bool kHoldsLoads = true;
  using Quads = uint4[KTileFeed::kQuads > VTileFeed::kQuads ? KTileFeed::kQuads : VTileFeed::kQuads];

  uint32 k_both_s, v_both_s;  // both halves
  KTileFeed k_feed;
  VTileFeed v_feed;
  int k_stride, v_stride;  // from row to row
  const float16 *k_g, *v_g;
  Rows first;  // of the sequence's first tile

  __device__ __forceinline__ PackedKeyFeed(const AttentionParams& params, const Place& place, int first_key,
                                           const float16* k_all_g, const float16* v_all_g, const Tiles& tiles)
      : k_both_s(shared_address(tiles.k)),
        v_both_s(shared_address(tiles.v)),
        k_stride(params.k.seq),
        v_stride(params.v.seq),
        k_g(k_all_g),
        v_g(v_all_g) {
    first.k = own_item(k_feed, first_key, k_stride) + place.kv_head * static_cast<int>(params.k.head);
    first.v = own_item(v_feed, first_key, v_stride) + place.kv_head * static_cast<int>(params.v.head);
  }

  __device__ __forceinline__ Rows rows(int tile) const {
    return {first.k + tile * KTile::kRows * k_stride, first.v + tile * KTile::kRows * v_stride};
  }
  __device__ __forceinline__ void turn_to(Rows& next, int tile) const { next = rows(tile); }
  __device__ __forceinline__ void turn_on(Rows& next) const {
    next.k += KTile::kRows * k_stride;
    next.v += KTile::kRows * v_stride;
  }
  __device__ __forceinline__ Entry look_up(int) const { return {}; }
  __device__ __forceinline__ void keep(Rows&, Entry) const {}
  __device__ __forceinline__ uint32 k_s(int half) const { return k_both_s + half * KTile::kBytes; }
  __device__ __forceinline__ uint32 v_s(int half) const { return v_both_s + half * VTile::kBytes; }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_k(Quads& quads, const Rows& from, int keys) const {
    fetch<kRagged>(quads, k_feed, k_g, from.k, k_stride, keys);
  }
  template <bool kRagged>
  __device__ __forceinline__ void fetch_v(Quads& quads, const Rows& from, int keys) const {
    fetch<kRagged>(quads, v_feed, v_g, from.v, v_stride, keys);
  }
  __device__ __forceinline__ void store_k(const Quads& quads, uint32 to_s) const { k_feed.store(to_s, quads); }
  __device__ __forceinline__ void store_v(const Quads& quads, uint32 to_s) const { v_feed.store(to_s, quads); }

  // The first tile, all the way.
  __device__ __forceinline__ void bring(const Rows& from, int keys, int half, int) const {
    Quads k_quads, v_quads;
    fetch_k<true>(k_quads, from, keys);
    store_k(k_quads, k_s(half));
    fetch_v<true>(v_quads, from, keys);
    store_v(v_quads, v_s(half));
  }

  __device__ __forceinline__ void renew() {}

 private:
  template <typename TileFeed>
  __device__ __forceinline__ static int own_item(const TileFeed& feed, int first_key, int stride) {
    return (first_key + (TileFeed::kEvenPasses ? feed.key_of_pass(0) : 0)) * stride + feed.chunk * kChunkItems;
  }

  template <bool kRagged, typename TileFeed>
  __device__ __forceinline__ static void fetch(Quads& quads, const TileFeed& feed, const float16* array_g, int first,
                                               int stride, int keys) {
    feed.template load_rows<kRagged>(
        quads, [&](int key) { return key < keys; },
        [&](int pass) {
          const int item =
              first + (TileFeed::kEvenPasses ? pass * TileFeed::kPassRows : feed.key_of_pass(pass)) * stride;
          return reinterpret_cast<const char*>(
              mad_wide(item, static_cast<int>(sizeof(float16)), reinterpret_cast<int64>(array_g)));
        });
  }
};

// Of a call with packed sequences: K and V of all of them.
struct PackedKeys {
  const AttentionParams& params;
  const float16 *k_g, *v_g;
  int first_key;  // of this one

  template <typename Traits, typename Tiles>
  __device__ __forceinline__ auto feed(const Place& place, const KeyWindow&, int, const Tiles& tiles) const
      -> PackedKeyFeed<typename Traits::KTileFeed, typename Traits::VTileFeed> {
    return {params, place, first_key, k_g, v_g, tiles};
  }
};
