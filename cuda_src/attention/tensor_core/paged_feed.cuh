// The feed of a paged cache: a tile's rows lie in groups of 16, each wherever the block table says.
#pragma once

#include "../paged_keys.cuh"
#include "key_feed.cuh"
#include "../stored_items.cuh"
#include "tile_feed.cuh"

// A thread's share of a tile of a paged cache between global and shared memory: chunks of rows as the cache keeps them.
// Of integers each row has a scale too, and items become float16 before they are stored.

template <typename Item, typename TileFeed>
struct ScaledRows {
  StoredItems<Item, kChunkItems> chunks[TileFeed::kQuads];
  float scales[TileFeed::kPasses];
};

template <typename Item, typename TileFeed>
struct StoredRows {
  using Type = ScaledRows<Item, TileFeed>;
};
template <typename TileFeed>
struct StoredRows<float16, TileFeed> {
  using Type = uint4[TileFeed::kQuads];
};

template <typename TileFeed, int kQuads>
__device__ __forceinline__ void store_rows(const TileFeed& feed, uint32 tile_s, const uint4 (&quads)[kQuads]) {
  feed.store(tile_s, quads);
}
template <typename TileFeed, typename Item>
__device__ __forceinline__ void store_rows(const TileFeed& feed, uint32 tile_s,
                                           const ScaledRows<Item, TileFeed>& rows) {
  feed.store_made(tile_s, [&](int pass, int group) {
    return as_halves(rows.chunks[pass * TileFeed::kColumnGroups + group], rows.scales[pass]);
  });
}

// As of float16: kVec is 8 where rows are aligned to a chunk, otherwise 1.
template <int kCols, int kVec, typename Item>
__device__ __forceinline__ void load_chunk(StoredItems<Item, kChunkItems>& items, const void* chunk_g, int chunk) {
  if constexpr (kVec == kChunkItems) {
    items.load(chunk_g);
  } else {
    items.load_bytes(chunk_g, (kCols - chunk * kChunkItems) * StoredFormat<Item>::kBits / 8);
  }
}

// Where a thread's rows of a tile lie: of each pass the place of its group; or of group i in lane i.
template <int kPlaces, bool kScaled>
struct GroupPlaces {
  int places[kPlaces];
};
template <int kPlaces>
struct GroupPlaces<kPlaces, true> {
  int places[kPlaces];
  int scale_places[kPlaces];
};

// As KeyFeed; its rows are what was looked up of them. K and V have the same strides, so one place serves both, and
// another their scales.
template <typename Item, typename KTileFeed, typename VTileFeed, int kMTiles>
struct PagedKeyFeed {
  using KTile = typename KTileFeed::Tile;
  using VTile = typename VTileFeed::Tile;
  static constexpr int kPassRows = KTileFeed::kPassRows, kPasses = KTileFeed::kPasses;
  static constexpr bool kScaled = StoredFormat<Item>::kScaled;
  using Groups = GroupTable<KTile::kRows, kScaled>;
  // Of a thread's rows either all stand at one place in their groups, or their addresses go on from row to row; then
  // each lane counts its group's place from where the tile would begin.
  static constexpr bool kEven = kPassRows % kGroupKeys == 0;

  // Chosen by the model of sm_75 (python -m cupyattn turing), because of where ptxas then puts the loads: utilisation
  // 0.86, 0.85 and 0.84 at head dims 64, 96 and 128, where other choices had 0.78, 0.77 and 0.80 (2026-11-22).
  // With scales, a look-up ahead of the products spilled 68 bytes at head dim 256 (8 bits, sm_75, NVRTC 12.9.86,
  // 2026-11-26).
  static constexpr bool kAskOnce = (kMTiles == 1 && !kScaled) || kPasses == 1;
  static constexpr LookUp kLookUp = kMTiles == 1 ? (kScaled ? LookUp::kBehindV : LookUp::kFirst)
                                    : kEven      ? LookUp::kBehindV
                                                 : LookUp::kWithV;

  static constexpr int kPlaces = kAskOnce ? kPasses : 1;
  using Rows = GroupPlaces<kPlaces, kScaled>;
  using Entry = GroupEntry<kScaled>;
  using Quads = typename StoredRows<Item, KTileFeed>::Type;
  static_assert(KTile::kChunks == VTile::kChunks, "K and V have the same head dim");

  uint32 k_both_s, v_both_s;  // both halves
  KTileFeed k_feed;
  VTileFeed v_feed;
  Groups groups;
  const PagedParams& params;
  const char *k_g, *v_g;  // of the head
  uint32 lane_bytes;      // to this thread's chunk of its row in a group or tile
  const float *k_scales_g, *v_scales_g;
  int64 scale_bytes;  // to the scale of that row, of the head

  template <typename Tiles>
  __device__ __forceinline__ PagedKeyFeed(const PagedParams& all, const Groups& groups_, const Place& place,
                                          const Item* k_cache_g, const Item* v_cache_g, const float* k_scales_g_,
                                          const float* v_scales_g_, const Tiles& tiles)
      : k_both_s(shared_address(tiles.k)),
        v_both_s(shared_address(tiles.v)),
        groups(groups_),
        params(all),
        k_g(reinterpret_cast<const char*>(k_cache_g + place.kv_head * all.attention.k.head)),
        v_g(reinterpret_cast<const char*>(v_cache_g + place.kv_head * all.attention.v.head)),
        lane_bytes(kept_in_register(k_feed.chunk * kStoredBytes + first_row() * row_bytes())),
        k_scales_g(k_scales_g_),
        v_scales_g(v_scales_g_),
        scale_bytes(place.kv_head * all.scales.head + first_row() * all.scales.token) {}

  // Only where there are keys: a sequence without any has no entries either.
  __device__ __forceinline__ Rows rows(int tile) const { return groups.last < 0 ? Rows{} : find(groups.look_up(tile)); }
  __device__ __forceinline__ void turn_to(Rows&, int) const {}
  __device__ __forceinline__ void turn_on(Rows&) const {}
  // Where tiles stand is looked up one ahead, and no more.
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const Rows&, int) const {}
  __device__ __forceinline__ Entry look_up(int tile) const { return groups.look_up(tile); }
  __device__ __forceinline__ void keep(Rows& next, const Entry& ahead) const { next = find(ahead); }
  __device__ __forceinline__ uint32 k_s(int half) const { return k_both_s + half * KTile::kBytes; }
  __device__ __forceinline__ uint32 v_s(int half) const { return v_both_s + half * VTile::kBytes; }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_k(Quads& quads, const Rows& from, int keys) const {
    fetch<kRagged>(quads, k_feed, k_g, k_scales_g, from, keys);
  }
  template <bool kRagged>
  __device__ __forceinline__ void fetch_v(Quads& quads, const Rows& from, int keys) const {
    fetch<kRagged>(quads, v_feed, v_g, v_scales_g, from, keys);
  }
  __device__ __forceinline__ void store_k(const Quads& quads, uint32 to_s) const { store_rows(k_feed, to_s, quads); }
  __device__ __forceinline__ void store_v(const Quads& quads, uint32 to_s) const { store_rows(v_feed, to_s, quads); }

  // The first tile, all the way; and the next one is looked up.
  __device__ __forceinline__ void bring(Rows& from, int keys, int half, int next_tile) const {
    Quads k_quads, v_quads;
    const Entry ahead = look_up(next_tile);
    fetch_k<true>(k_quads, from, keys);
    store_k(k_quads, k_s(half));
    fetch_v<true>(v_quads, from, keys);
    store_v(v_quads, v_s(half));
    keep(from, ahead);
  }

  // See Softmax::renew.
  __device__ __forceinline__ void renew() { lane_bytes = kept_in_register(lane_bytes); }

 private:
  static constexpr int kStoredBytes = kChunkItems * StoredFormat<Item>::kBits / 8;  // of a chunk

  __device__ __forceinline__ uint32 row_bytes() const {
    return static_cast<uint32>(params.attention.k.seq * sizeof(Item));
  }
  __device__ __forceinline__ int first_row() const { return kEven ? k_feed.row % kGroupKeys : k_feed.row; }

  __device__ __forceinline__ Rows find(const Entry& entry) const {
    Rows rows{{own_place(entry, params.units)}};
    if (kAskOnce) ask(rows.places, rows.places[0]);
    if constexpr (kScaled) {
      rows.scale_places[0] = own_place(entry, params.scales.units);
      if (kAskOnce) ask(rows.scale_places, rows.scale_places[0]);
    }
    return rows;
  }
  __device__ __forceinline__ static int own_place(const Entry& entry, const CacheUnits& units) {
    int own = entry.place(units);
    if (!kEven && Groups::kGroups > 1) own -= lane_index() * units.group;
    return own;
  }

  // In all lanes: some threads may have no row.
  template <int kCount>
  __device__ __forceinline__ void ask(int (&places)[kCount], int own) const {
#pragma unroll
    for (int pass = 0; pass < kCount; pass++) places[pass] = Groups::of_group(own, group_of(k_feed.row, pass));
  }

  __device__ __forceinline__ static int group_of(int row, int pass) {
    if (kPassRows == kGroupKeys) return pass;
    return (row + pass * kPassRows) / kGroupKeys;
  }

  __device__ __forceinline__ void of_passes(int (&places)[kPasses], const int (&known)[kPlaces]) const {
    if (kAskOnce) {
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) places[pass] = known[kAskOnce ? pass : 0];
    } else {
      ask(places, known[0]);
    }
  }

  template <bool kRagged, typename TileFeed>
  __device__ __forceinline__ void fetch(Quads& quads, const TileFeed& feed, const char* head_g, const float* scales_g,
                                        const Rows& from, int keys) const {
    const auto exists = [&](int key) { return groups.exists(key, keys); };
    int places[kPasses];
    of_passes(places, from.places);
    const auto pass_g = [&](int pass) {
      const uint32 lane = kEven ? lane_bytes : lane_bytes + pass * kPassRows * row_bytes();
      return head_g + mad_wide(lane, 1u, mad_wide(places[pass], params.units.bytes, 0));
    };
    if constexpr (!kScaled) {
      feed.template load_rows<kRagged>(quads, exists, pass_g);
    } else {
      feed.template load_rows<kRagged>(quads.chunks, exists, pass_g);
      of_passes(places, from.scale_places);
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) {
        if (kRagged) quads.scales[pass] = 0.f;
        if (!feed.owns(pass) || (kRagged && !exists(feed.key_of_pass(pass)))) continue;
        const int64 row = kEven ? scale_bytes : scale_bytes + pass * kPassRows * params.scales.token;
        const int64 bytes = mad_wide(places[pass], params.scales.units.bytes, row);
        quads.scales[pass] = __uint_as_float(ld_global_u32(reinterpret_cast<const char*>(scales_g) + bytes));
      }
    }
  }
};

// Of a call with a paged cache.
template <typename Item>
struct PagedKeys {
  const PagedParams& params;
  const Item *k_g, *v_g;
  const float *k_scales_g, *v_scales_g;
  const int* table_g;

  template <typename Traits, typename Tiles>
  __device__ __forceinline__ auto feed(const Place& place, const KeyWindow& window, int rows, const Tiles& tiles) const
      -> PagedKeyFeed<Item, typename Traits::KTileFeed, typename Traits::VTileFeed, Traits::kMTiles> {
    return {params, {params, table_g, place, window, rows}, place, k_g, v_g, k_scales_g, v_scales_g, tiles};
  }
};
