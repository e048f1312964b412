// The loaders of int8 keys for a CTA of query rows: tiles of codes, of their scales and of V, from global memory to
// registers while the present tile is in use, and from there to the half of the buffers in shared memory that is not.
// Dense and packed keys lie row after row, those of a cache in blocks.
#pragma once

#include "../params.cuh"
#include "../tensor_core/key_loader.cuh"
#include "../tensor_core/tile_loader.cuh"
#if defined(PAGED_PARAMS_BYTES)
#include "../paged_keys.cuh"
#endif

// Field for field the structured dtype QUANTIZED_KEYS_PARAMS of cupyattn/ops/attention/structs.
struct QuantizedKeysParams {
  Strides scales;
  int64 centre_batch, centre_head;  // in items; the columns of a head are neighbours
};
static_assert(sizeof(QuantizedKeysParams) == QUANTIZED_KEYS_PARAMS_BYTES,
              "its dtype in Python describes another struct");

// A scale of a key that keeps 22 bits: -kSumBias * scale is then exact, and so is the sum that is left of
// sum_bits * scale - kSumBias * scale, before its one rounding.
__device__ __forceinline__ float short_scale(float scale) { return __uint_as_float(__float_as_uint(scale) & ~3u); }

// What the loaders of keys have in common: both halves of the buffers in shared memory, and the way from registers to
// them.
template <typename KTileLoader, typename VTileLoader>
struct TileBuffers {
  using KTile = typename KTileLoader::Tile;
  using VTile = typename VTileLoader::Tile;
  static constexpr int kTileK = KTile::kRows;
  // On the way, of K, then of V.
  using Quads = uint4[KTileLoader::kQuads > VTileLoader::kQuads ? KTileLoader::kQuads : VTileLoader::kQuads];

  uint32 k_both_s, v_both_s, scales_both_s;
  KTileLoader k_loader;
  VTileLoader v_loader;

  template <typename Tiles>
  __device__ __forceinline__ TileBuffers(const Tiles& tiles, const KTileLoader& k, const VTileLoader& v)
      : k_both_s(shared_address(tiles.keys.k)),
        v_both_s(shared_address(tiles.keys.v)),
        scales_both_s(shared_address(tiles.scales)),
        k_loader(k),
        v_loader(v) {}

  __device__ __forceinline__ uint32 k_s(int half) const { return k_both_s + half * KTile::kBytes; }
  __device__ __forceinline__ uint32 v_s(int half) const { return v_both_s + half * VTile::kBytes; }
  __device__ __forceinline__ uint32 scales_s(int half) const {
    return scales_both_s + half * kTileK * static_cast<int>(sizeof(float));
  }

  __device__ __forceinline__ void store_k(const Quads& quads, float scale, uint32 to_s, uint32 scales_to_s) const {
    k_loader.store(to_s, quads);
    if (threadIdx.x < kTileK) {
      st_shared_u32(scales_to_s + threadIdx.x * sizeof(float), __float_as_uint(short_scale(scale)));
    }
  }
  __device__ __forceinline__ void store_v(const Quads& quads, uint32 to_s) const { v_loader.store(to_s, quads); }

  // See Softmax::renew.
  __device__ __forceinline__ void renew() {
    k_loader.renew();
    v_loader.renew();
  }
};

// The loader of keys for a CTA of query rows: as KeyLoader (tensor_core/key_loader.cuh), of codes, their scales and V.
template <typename KTileLoader, typename VTileLoader>
struct QuantizedKeyLoader : TileBuffers<KTileLoader, VTileLoader> {
  using Base = TileBuffers<KTileLoader, VTileLoader>;
  using Base::kTileK, Base::k_loader, Base::v_loader;
  using typename Base::Quads;

  struct Rows {
    const char *k_g, *v_g;
    const float* scales_g;
  };

  int64 k_stride, v_stride, scale_stride;  // in items of 16 bits, and in floats
  Rows head_rows;                          // of the head's first tile

  template <typename Tiles>
  __device__ __forceinline__ QuantizedKeyLoader(const AttentionParams& params, const QuantizedKeysParams& quantized,
                                                const TileCoordinates& coords, const signed char* k_g,
                                                const float* scales_g, const float16* v_g, const Tiles& tiles)
      : Base(tiles, KTileLoader(params.k.seq / 2), VTileLoader(params.v.seq)),
        k_stride(params.k.seq / 2),
        v_stride(params.v.seq),
        scale_stride(quantized.scales.seq) {
    const signed char* k_head_g = ::head_rows(k_g, params.k, coords.batch, coords.kv_head, 0);
    head_rows.k_g = KTileLoader::lowest(reinterpret_cast<const uint16*>(k_head_g), k_stride);
    head_rows.v_g = VTileLoader::lowest(::head_rows(v_g, params.v, coords.batch, coords.kv_head, 0), v_stride);
    head_rows.scales_g = ::head_rows(scales_g, quantized.scales, coords.batch, coords.kv_head, 0);
  }

  __device__ __forceinline__ Rows rows(int tile) const {
    return {head_rows.k_g + tile * (k_stride * kTileK * 2), head_rows.v_g + tile * (v_stride * kTileK * 2),
            head_rows.scales_g + tile * (scale_stride * kTileK)};
  }
  // The loop moves on to the tile that is loaded next, before a tile; nothing is looked up ahead.
  __device__ __forceinline__ void move_to(Rows& next, int tile) const { next = rows(tile); }
  __device__ __forceinline__ void look_ahead(Rows&, int) const {}
  __device__ __forceinline__ void move_on(Rows& next) const {
    next.k_g += k_stride * kTileK * 2;
    next.v_g += v_stride * kTileK * 2;
    next.scales_g += scale_stride * kTileK;
  }

  // See KeyLoader. Scales, which are few, come with their tile.
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const Rows& next, int left) const {
    if constexpr (kAhead > 0) {
      if (left <= kAhead + 1) return;
      ::bring_to_l2<KTileLoader, VTileLoader>(next.k_g + kAhead * (k_stride * kTileK * 2), k_stride,
                                              next.v_g + kAhead * (v_stride * kTileK * 2), v_stride);
    }
  }

  // kRagged: only `keys` keys of the tile exist; the others have scale 0.
  template <bool kRagged>
  __device__ __forceinline__ void fetch_k(Quads& quads, float& scale, const Rows& from, int keys) const {
    k_loader.template load<kRagged>(quads, from.k_g, k_stride, keys);
    const int key = threadIdx.x;
    scale = 0.f;
    if (key < kTileK && (!kRagged || key < keys)) {
      scale = __uint_as_float(ld_global_u32(from.scales_g + key * scale_stride));
    }
  }
  template <bool kRagged>
  __device__ __forceinline__ void fetch_v(Quads& quads, const Rows& from, int keys) const {
    v_loader.template load<kRagged>(quads, from.v_g, v_stride, keys);
  }
};

#if defined(PAGED_PARAMS_BYTES)
// The loader of keys that lie in the blocks of a pool (paged_keys.cuh): a thread's rows are found by the entries of
// their groups of 16 keys, which the lanes of its warp have looked up.
template <typename KTileLoader, typename VTileLoader>
struct QuantizedBlockLoader : TileBuffers<KTileLoader, VTileLoader> {
  using Base = TileBuffers<KTileLoader, VTileLoader>;
  using Base::kTileK, Base::k_loader, Base::v_loader;
  using typename Base::Quads;
  using Groups = GroupTable<kTileK, true>;
  using Rows = GroupEntry<true>;

  Groups groups;
  const Strides &k, &v, &scales;  // "batch" is from block to block; in bytes these and "seq" have 32 bits
  const signed char* k_g;         // of the head
  const float16* v_g;
  const float* scales_g;

  template <typename Tiles>
  __device__ __forceinline__ QuantizedBlockLoader(const AttentionParams& params, const QuantizedKeysParams& quantized,
                                                  const Groups& of_sequence, const TileCoordinates& coords,
                                                  const signed char* k_cache_g, const float* k_scales_g,
                                                  const float16* v_cache_g, const Tiles& tiles)
      : Base(tiles, KTileLoader(), VTileLoader()),
        groups(of_sequence),
        k(params.k),
        v(params.v),
        scales(quantized.scales),
        k_g(k_cache_g + coords.kv_head * params.k.head),
        v_g(v_cache_g + coords.kv_head * params.v.head),
        scales_g(k_scales_g + coords.kv_head * quantized.scales.head) {}

  // Only where there are keys: a sequence without any has no entries either.
  __device__ __forceinline__ Rows rows(int tile) const { return groups.last < 0 ? Rows{} : groups.look_up(tile); }
  // Entries are looked up during the tile before, when those of its own loads have been used.
  __device__ __forceinline__ void move_to(Rows&, int) const {}
  __device__ __forceinline__ void move_on(Rows&) const {}
  __device__ __forceinline__ void look_ahead(Rows& next, int tile) const { next = rows(tile); }
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const Rows&, int) const {
    static_assert(kAhead == 0, "positions are looked up one tile ahead");
  }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_k(Quads& quads, float& scale, const Rows& from, int keys) const {
    fetch<kRagged>(quads, k_loader, k_g, k, from, keys);
    const int key = threadIdx.x;
    const char* own_g = row_of(scales_g, from, key, scales);  // in all lanes
    scale = 0.f;
    if (key < kTileK && (!kRagged || groups.exists(key, keys))) scale = __uint_as_float(ld_global_u32(own_g));
  }
  template <bool kRagged>
  __device__ __forceinline__ void fetch_v(Quads& quads, const Rows& from, int keys) const {
    fetch<kRagged>(quads, v_loader, v_g, v, from, keys);
  }

 private:
  // The address of a row of the tile.
  template <typename Item>
  __device__ __forceinline__ static const char* row_of(const Item* head_g, const Rows& from, int row,
                                                       const Strides& strides) {
    constexpr int kItem = sizeof(Item);
    const int group = min(row / kGroupKeys, Groups::kGroups - 1);
    const int token = Groups::of_group(from.within, group) * kGroupKeys + row % kGroupKeys;
    const int64 in_block_g = mad_wide(token, static_cast<int>(strides.seq) * kItem, reinterpret_cast<int64>(head_g));
    const int64 row_g =
        mad_wide(Groups::of_group(from.block, group), static_cast<int>(strides.batch) * kItem, in_block_g);
    return reinterpret_cast<const char*>(row_g);
  }

  template <bool kRagged, typename Loader, typename Item>
  __device__ __forceinline__ void fetch(Quads& quads, const Loader& loader, const Item* head_g, const Strides& strides,
                                        const Rows& from, int keys) const {
    const char* rows_g[Loader::kPasses];  // in all lanes: some threads may have no row
#pragma unroll
    for (int pass = 0; pass < Loader::kPasses; pass++) {
      rows_g[pass] = row_of(head_g, from, loader.row + pass * Loader::kPassRows, strides);
    }
    loader.template load_rows<kRagged>(
        quads, [&](int key) { return groups.exists(key, keys); },
        [&](int pass) { return rows_g[pass] + loader.chunk * kChunkBytes; });
  }
};
#endif
