// The loader of a paged cache: a tile's rows lie in groups of 16, which the block table locates.
#pragma once

#include "../paged_keys.cuh"
#include "key_loader.cuh"
#include "../stored_items.cuh"
#include "tile_loader.cuh"

// A thread's share of a tile of a paged cache between global and shared memory: chunks of rows as the cache keeps them.
// Each row of integers has a scale too, and items become the kernel's dtype before they are stored.

template <typename Item, typename TileLoader>
struct ScaledRows {
  StoredItems<Item, kChunkItems> chunks[TileLoader::kQuads];
  float scales[TileLoader::kPasses];
};

template <typename Item, typename TileLoader, bool kScaled>
struct StoredRows {
  using Type = ScaledRows<Item, TileLoader>;
};
template <typename Item, typename TileLoader>
struct StoredRows<Item, TileLoader, false> {
  using Type = uint4[TileLoader::kQuads];
};

template <typename Scalar, typename TileLoader, int kQuads>
__device__ __forceinline__ void store_rows(const TileLoader& loader, uint32 tile_s, const uint4 (&quads)[kQuads]) {
  loader.store(tile_s, quads);
}
template <typename Scalar, typename TileLoader, typename Item>
__device__ __forceinline__ void store_rows(const TileLoader& loader, uint32 tile_s,
                                           const ScaledRows<Item, TileLoader>& rows) {
  loader.store_made(tile_s, [&](int pass, int group) {
    return ScaledItems<Scalar>::chunk(rows.chunks[pass * TileLoader::kColumnGroups + group], rows.scales[pass]);
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

// Offsets of a thread's rows of a tile: the group of each pass, or group i in lane i.
template <int kOffsets, bool kScaled>
struct GroupOffsets {
  int offsets[kOffsets];
};
template <int kOffsets>
struct GroupOffsets<kOffsets, true> {
  int offsets[kOffsets];
  int scale_offsets[kOffsets];
};

// As KeyLoader; its rows are what was looked up of them. K and V have the same strides, so one place serves both, and
// another their scales.
template <typename Scalar, typename Item, typename KTileLoader, typename VTileLoader, typename Tiles, int kMTiles>
struct PagedKeyLoader {
  using KTile = typename KTileLoader::Tile;
  using VTile = typename VTileLoader::Tile;
  static constexpr int kPassRows = KTileLoader::kPassRows, kPasses = KTileLoader::kPasses;
  static constexpr bool kScaled = StoredFormat<Item>::kScaled;
  using Groups = GroupTable<KTile::kRows, kScaled>;
  // A thread's rows either all have one position in their groups, or their addresses go on from row to row; then
  // each lane counts its group's place from where the tile would begin.
  static constexpr bool kEven = kPassRows % kGroupKeys == 0;

  // Chosen by the model of sm_75 (python -m cupyattn turing), because of where ptxas then puts the loads: utilisation
  // 0.86, 0.85 and 0.84 at head dims 64, 96 and 128, where other choices had 0.78, 0.77 and 0.80 (2026-11-22).
  // With scales, a look-up ahead of the products spilled 68 bytes at head dim 256 (8 bits, sm_75, NVRTC 12.9.86,
  // 2026-11-26).
  static constexpr bool kAskOnce = (kMTiles == 1 && !kScaled) || kPasses == 1;
  static constexpr LookUp kLookUp = kMTiles == 1 ? (kScaled ? LookUp::kAfterV : LookUp::kFirst)
                                    : kEven      ? LookUp::kAfterV
                                                 : LookUp::kWithV;

  static constexpr int kParts = 1;  // the offsets of all rows are known at once
  static constexpr int kOffsets = kAskOnce ? kPasses : 1;
  using Rows = GroupOffsets<kOffsets, kScaled>;
  using Entry = GroupEntry<kScaled>;
  using Quads = typename StoredRows<Item, KTileLoader, kScaled>::Type;
  static_assert(KTile::kChunks == VTile::kChunks, "K and V have the same head dim");

  uint32 k_both_s, v_both_s;  // both halves
  KTileLoader k_loader;
  VTileLoader v_loader;
  Groups groups;
  const PagedParams& params;
  const char *k_g, *v_g;  // of the head
  uint32 lane_bytes;      // to this thread's chunk of its row in a group or tile
  const float *k_scales_g, *v_scales_g;
  int64 scale_bytes;  // to the scale of that row, of the head

  __device__ __forceinline__ PagedKeyLoader(const PagedParams& all, const Groups& groups_,
                                            const TileCoordinates& coords, const Item* k_cache_g, const Item* v_cache_g,
                                            const float* k_scales_g_, const float* v_scales_g_, const Tiles& tiles)
      : k_both_s(shared_address(tiles.k)),
        v_both_s(shared_address(tiles.v)),
        groups(groups_),
        params(all),
        k_g(reinterpret_cast<const char*>(k_cache_g + coords.kv_head * all.attention.k.head)),
        v_g(reinterpret_cast<const char*>(v_cache_g + coords.kv_head * all.attention.v.head)),
        lane_bytes(kept_in_register(k_loader.chunk * kStoredBytes + first_row() * row_bytes())),
        k_scales_g(k_scales_g_),
        v_scales_g(v_scales_g_),
        scale_bytes(coords.kv_head * all.scales.head + first_row() * all.scales.token) {}

  // Only where there are keys: a sequence without any has no entries either.
  __device__ __forceinline__ Rows rows(int tile) const { return groups.last < 0 ? Rows{} : find(groups.look_up(tile)); }
  __device__ __forceinline__ void move_to(Rows&, int) const {}
  __device__ __forceinline__ void move_on(Rows&) const {}
  // Positions of tiles are looked up one tile ahead, and no more.
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const Rows&, int) const {}
  __device__ __forceinline__ Entry look_up(int tile) const { return groups.look_up(tile); }
  __device__ __forceinline__ void keep(Rows& next, const Entry& ahead) const { next = find(ahead); }
  __device__ __forceinline__ uint32 k_s(int half) const { return k_both_s + Tiles::k_bytes(half); }
  __device__ __forceinline__ uint32 v_s(int half) const { return v_both_s + half * VTile::kBytes; }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_k(Quads& quads, const Rows& from, int keys, TilePart = {}) const {
    fetch<kRagged>(quads, k_loader, k_g, k_scales_g, from, keys);
  }
  template <bool kRagged>
  __device__ __forceinline__ void fetch_v(Quads& quads, const Rows& from, int keys, TilePart = {}) const {
    fetch<kRagged>(quads, v_loader, v_g, v_scales_g, from, keys);
  }
  __device__ __forceinline__ void store_k(const Quads& quads, uint32 to_s, TilePart = {}) const {
    store_rows<Scalar>(k_loader, to_s, quads);
  }
  __device__ __forceinline__ void store_v(const Quads& quads, uint32 to_s, TilePart = {}) const {
    store_rows<Scalar>(v_loader, to_s, quads);
  }

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
  __device__ __forceinline__ int first_row() const { return kEven ? k_loader.row % kGroupKeys : k_loader.row; }

  __device__ __forceinline__ Rows find(const Entry& entry) const {
    Rows rows{{own_offset(entry, params.units)}};
    if (kAskOnce) ask(rows.offsets, rows.offsets[0]);
    if constexpr (kScaled) {
      rows.scale_offsets[0] = own_offset(entry, params.scales.units);
      if (kAskOnce) ask(rows.scale_offsets, rows.scale_offsets[0]);
    }
    return rows;
  }
  __device__ __forceinline__ static int own_offset(const Entry& entry, const CacheUnits& units) {
    int own = entry.coords(units);
    if (!kEven && Groups::kGroups > 1) own -= lane_index() * units.group;
    return own;
  }

  // In all lanes: some threads may have no row.
  template <int kCount>
  __device__ __forceinline__ void ask(int (&offsets)[kCount], int own) const {
#pragma unroll
    for (int pass = 0; pass < kCount; pass++) offsets[pass] = Groups::of_group(own, group_of(k_loader.row, pass));
  }

  __device__ __forceinline__ static int group_of(int row, int pass) {
    if (kPassRows == kGroupKeys) return pass;
    return (row + pass * kPassRows) / kGroupKeys;
  }

  __device__ __forceinline__ void of_passes(int (&offsets)[kPasses], const int (&known)[kOffsets]) const {
    if (kAskOnce) {
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) offsets[pass] = known[kAskOnce ? pass : 0];
    } else {
      ask(offsets, known[0]);
    }
  }

  template <bool kRagged, typename TileLoader>
  __device__ __forceinline__ void fetch(Quads& quads, const TileLoader& loader, const char* head_g,
                                        const float* scales_g, const Rows& from, int keys) const {
    const auto exists = [&](int key) { return groups.exists(key, keys); };
    int offsets[kPasses];
    of_passes(offsets, from.offsets);
    const auto pass_g = [&](int pass) {
      const uint32 lane = kEven ? lane_bytes : lane_bytes + pass * kPassRows * row_bytes();
      return head_g + mad_wide(lane, 1u, mad_wide(offsets[pass], params.units.bytes, 0));
    };
    if constexpr (!kScaled) {
      loader.template load_rows<kRagged>(quads, exists, pass_g);
    } else {
      loader.template load_rows<kRagged>(quads.chunks, exists, pass_g);
      of_passes(offsets, from.scale_offsets);
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) {
        if (kRagged) quads.scales[pass] = 0.f;
        if (!loader.owns(pass) || (kRagged && !exists(loader.key_of_pass(pass)))) continue;
        const int64 row = kEven ? scale_bytes : scale_bytes + pass * kPassRows * params.scales.token;
        const int64 bytes = mad_wide(offsets[pass], params.scales.units.bytes, row);
        quads.scales[pass] = __uint_as_float(ld_global_u32(reinterpret_cast<const char*>(scales_g) + bytes));
      }
    }
  }
};

// For a call with a paged cache.
template <typename Item>
struct PagedKeys {
  const PagedParams& params;
  const Item *k_g, *v_g;
  const float *k_scales_g, *v_scales_g;
  const int* table_g;

  template <typename Traits, typename Tiles>
  __device__ __forceinline__ auto loader(const TileCoordinates& coords, const KeyWindow& window, int rows,
                                         const Tiles& tiles) const
      -> PagedKeyLoader<typename Traits::Scalar, Item, typename Traits::KTileLoader, typename Traits::VTileLoader,
                        Tiles, Traits::kMTiles> {
    return {params, {params, table_g, coords, window, rows}, coords, k_g, v_g, k_scales_g, v_scales_g, tiles};
  }
};
