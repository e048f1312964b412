// The feed of a paged cache: Q comes as in the dense one, keys from groups of 16, each wherever the block table says.
#pragma once

#include "../paged_keys.cuh"
#include "forward_feed.cuh"

template <typename Dense>
struct PagedFeed : Dense {
  using Scalar = typename Dense::Scalar;
  using Slice = typename Dense::Slice;
  using Groups = GroupTable<Slice::kTileK>;
  using Quad = RawQuad<Scalar>;
  using Dense::keys;
  using Dense::quads;

  const PagedParams& paged;
  Groups groups;
  GroupEntry next;                  // of the tile behind the present one
  int places;                       // of lane i: group i of the present tile
  const Scalar *k_row_g, *v_row_g;  // where this thread begins in a group of K, and of V

  __device__ __forceinline__ PagedFeed(const PagedParams& all, const Groups& groups_, const Scalar* q_rows_g,
                                       const Scalar* k_head_g, const Scalar* v_head_g, int rows, int keys_)
      : Dense(all.attention, q_rows_g, k_head_g, v_head_g, rows, keys_),
        paged(all),
        groups(groups_),
        k_row_g(k_head_g + slice_key() % kGroupKeys * all.attention.k.seq + Dense::slice_col()),
        v_row_g(v_head_g + panel_key() % kGroupKeys * all.attention.k.seq + Dense::panel_lane() * kQuadItems) {}

  __device__ __forceinline__ void begin(int first_key, int next_key) {
    next = groups.look_up(first_key / Slice::kTileK);
    turn(next_key);
  }
  // On to the tile that was looked up.
  __device__ __forceinline__ void turn(int key_behind) {
    places = next.place(paged.units);
    next = groups.look_up(key_behind / Slice::kTileK);
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

 private:
  // This thread's key of the first rows of a slice and of a panel: others lie a constant behind it.
  __device__ __forceinline__ static int slice_key() { return Dense::slice_key(Dense::slice_row()); }
  __device__ __forceinline__ static int panel_key() { return Dense::panel_key(0, 0, Dense::panel_row()); }

  // Whether all keys of the tile are read.
  __device__ __forceinline__ bool whole(int first_key) const {
    return first_key + Slice::kTileK <= keys && groups.exists(0, keys - first_key);
  }

  // A key's row, this thread's own key the given constant further.
  __device__ __forceinline__ const Scalar* row(const Scalar* row_g, int own, int further) const {
    const int place = Groups::of_group(places, (own + further) / kGroupKeys);
    const int64 group_g = mad_wide(place, paged.units.bytes, reinterpret_cast<int64>(row_g));
    return reinterpret_cast<const Scalar*>(group_g) + further % kGroupKeys * paged.attention.k.seq;
  }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_k_rows(int slice, int first_key) {
    const int columns = Dense::columns_of(slice);
#pragma unroll
    for (int pass = 0; pass < Dense::kKPasses; pass++) {
      const int further = Dense::slice_key(pass * Dense::kPassRows);
      const Scalar* from_g = row(k_row_g, slice_key(), further);
      const bool exists = !kRagged || groups.exists(slice_key() + further, keys - first_key);
      quads[Dense::kQPasses + pass] =
          exists ? load_quad<Dense::kVec>(from_g + slice * Slice::kCols, columns) : Quad::zero();
    }
  }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_v_rows(int pair, int panel, int first_key) {
    const int further = Dense::panel_key(pair, panel, 0);
    const Scalar* from_g = row(v_row_g, panel_key(), further);
    const bool exists = !kRagged || groups.exists(panel_key() + further, keys - first_key);
#pragma unroll
    for (int pass = 0; pass < Dense::kVPasses; pass++) {
      quads[pass] = exists ? load_quad<Dense::kVec>(from_g + pass * Dense::kPanelLanes * kQuadItems,
                                                    Dense::panel_columns_of(pass))
                           : Quad::zero();
    }
  }
};
