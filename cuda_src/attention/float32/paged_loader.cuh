// The loader of a paged cache: Q is loaded as in the dense one, keys in groups of 16, which the block table locates.
#pragma once

#include "../paged_keys.cuh"
#include "../stored_items.cuh"
#include "forward_loader.cuh"

// Four neighbouring items of a row of a paged cache on their way to shared memory, as the cache keeps them. Floats are
// a RawQuad; integers come with their row's scale, and are multiplied by it in float32.

template <typename Item>
struct ScaledQuad {
  StoredItems<Item, kQuadItems> items;
  float scale;
};

template <typename Item>
struct StoredQuad {
  using Type = RawQuad<Item>;
};
template <>
struct StoredQuad<int8> {
  using Type = ScaledQuad<int8>;
};
template <>
struct StoredQuad<uint8> {
  using Type = ScaledQuad<uint8>;
};

template <typename Item>
__device__ __forceinline__ Vec<float, kQuadItems> as_floats(const ScaledQuad<Item>& quad) {
  return {quad.items.item(0) * quad.scale, quad.items.item(1) * quad.scale, quad.items.item(2) * quad.scale,
          quad.items.item(3) * quad.scale};
}

// As load_quad. kVec is 4 for rows that are aligned to the bytes of four items, otherwise 1.
template <int kVec, typename Item>
__device__ __forceinline__ typename StoredQuad<Item>::Type load_stored_quad(const Item* from_g, int columns,
                                                                            float scale) {
  if constexpr (StoredFormat<Item>::kScaled) {
    ScaledQuad<Item> quad = {{}, scale};
    if constexpr (kVec == kQuadItems) {
      if (columns > 0) quad.items.load(from_g);
    } else {
      quad.items.load_bytes(from_g, columns * StoredFormat<Item>::kBits / 8);
    }
    return quad;
  } else {
    return load_quad<kVec>(from_g, columns);
  }
}

template <typename Dense, typename Item>
struct PagedLoader : Dense {
  using Scalar = typename Dense::Scalar;
  using Slice = typename Dense::Slice;
  using Quad = typename StoredQuad<Item>::Type;
  static constexpr bool kScaled = StoredFormat<Item>::kScaled;
  using Groups = GroupTable<Slice::kTileK, kScaled>;
  static constexpr int kKeyQuads = Dense::kKPasses > Dense::kVPasses ? Dense::kKPasses : Dense::kVPasses;
  using Dense::keys;

  const PagedParams& paged;
  Groups groups;
  GroupEntry<kScaled> next;             // of the tile after the present one
  int offsets, scale_offsets;           // of lane i: group i of the present tile
  const Item *k_row_g, *v_row_g;        // where this thread begins in a group of K, and of V
  const char *k_scales_g, *v_scales_g;  // of the head
  Quad key_quads[kKeyQuads];            // of K or V, on the way

  __device__ __forceinline__ PagedLoader(const PagedParams& all, const Groups& groups_, const Scalar* q_rows_g,
                                         const Item* k_head_g, const Item* v_head_g, const char* k_scales_g_,
                                         const char* v_scales_g_, int rows, int keys_)
      : Dense(all.attention, q_rows_g, nullptr, nullptr, rows, keys_),
        paged(all),
        groups(groups_),
        k_row_g(on(k_head_g + slice_key() % kGroupKeys * all.attention.k.seq, Dense::slice_col())),
        v_row_g(on(v_head_g + panel_key() % kGroupKeys * all.attention.k.seq, Dense::panel_lane() * kQuadItems)),
        k_scales_g(k_scales_g_),
        v_scales_g(v_scales_g_) {}

  __device__ __forceinline__ void begin(int first_key, int next_key) {
    next = groups.look_up(first_key / Slice::kTileK);
    advance(next_key);
  }
  // On to the tile that was looked up.
  __device__ __forceinline__ void advance(int key_after) {
    offsets = next.coords(paged.units);
    if (kScaled) scale_offsets = next.coords(paged.scales.units);
    next = groups.look_up(key_after / Slice::kTileK);
  }

  __device__ __forceinline__ void fetch_slice(int slice, int first_key) {
    if (this->rows < Slice::kTileQ || !whole(first_key)) {
      this->template fetch_q_rows<true>(slice);
      fetch_k_rows<true>(slice, first_key);
    } else {
      this->template fetch_q_rows<false>(slice);
      fetch_k_rows<false>(slice, first_key);
    }
  }
  __device__ __forceinline__ void fetch_panel(int pair, int panel, int first_key) {
    if (whole(first_key)) {
      fetch_v_rows<false>(pair, panel, first_key);
    } else {
      fetch_v_rows<true>(pair, panel, first_key);
    }
  }
  __device__ __forceinline__ void store_slice(uint32 buffer_s) const { Dense::store_slice(buffer_s, key_quads); }
  __device__ __forceinline__ void store_panel(uint32 buffer_s) const { Dense::store_panel(buffer_s, key_quads); }

 private:
  // So many items on.
  __device__ __forceinline__ static const Item* on(const Item* row_g, int items) {
    return kScaled ? row_g + items * StoredFormat<Item>::kBits / 8 : row_g + items;
  }

  // This thread's key of the first rows of a slice and of a panel: others are at a constant distance.
  __device__ __forceinline__ static int slice_key() { return Dense::slice_key(Dense::slice_row()); }
  __device__ __forceinline__ static int panel_key() { return Dense::panel_key(0, 0, Dense::panel_row()); }

  // Whether all keys of the tile are read.
  __device__ __forceinline__ bool whole(int first_key) const {
    return first_key + Slice::kTileK <= keys && groups.exists(0, keys - first_key);
  }

  // A key's row, this thread's own key the given constant further.
  __device__ __forceinline__ const Item* row(const Item* row_g, int own, int further) const {
    const int coords = Groups::of_group(offsets, (own + further) / kGroupKeys);
    const int64 group_g = mad_wide(coords, paged.units.bytes, reinterpret_cast<int64>(row_g));
    return reinterpret_cast<const Item*>(group_g) + further % kGroupKeys * paged.attention.k.seq;
  }
  // Its scale, if it exists and has one.
  __device__ __forceinline__ float scale(const char* scales_g, int own, int further, bool exists) const {
    if constexpr (!kScaled) return 1.f;
    const int coords = Groups::of_group(scale_offsets, (own + further) / kGroupKeys);
    const int64 group_g = mad_wide(coords, paged.scales.units.bytes, reinterpret_cast<int64>(scales_g));
    const int64 at_g = mad_wide((own + further) % kGroupKeys, paged.scales.token, group_g);
    return exists ? __ldg(reinterpret_cast<const float*>(at_g)) : 0.f;
  }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_k_rows(int slice, int first_key) {
    const int columns = Dense::columns_of(slice);
#pragma unroll
    for (int pass = 0; pass < Dense::kKPasses; pass++) {
      const int further = Dense::slice_key(pass * Dense::kPassRows);
      const Item* from_g = row(k_row_g, slice_key(), further);
      const bool exists = !kRagged || groups.exists(slice_key() + further, keys - first_key);
      const float key_scale = scale(k_scales_g, slice_key(), further, exists);
      key_quads[pass] =
          exists ? load_stored_quad<Dense::kVec>(on(from_g, slice * Slice::kCols), columns, key_scale) : Quad{};
    }
  }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_v_rows(int pair, int panel, int first_key) {
    const int further = Dense::panel_key(pair, panel, 0);
    const Item* from_g = row(v_row_g, panel_key(), further);
    const bool exists = !kRagged || groups.exists(panel_key() + further, keys - first_key);
    const float key_scale = scale(v_scales_g, panel_key(), further, exists);
#pragma unroll
    for (int pass = 0; pass < Dense::kVPasses; pass++) {
      key_quads[pass] = exists ? load_stored_quad<Dense::kVec>(on(from_g, pass * Dense::kPanelLanes * kQuadItems),
                                                               Dense::panel_columns_of(pass), key_scale)
                               : Quad{};
    }
  }
};
