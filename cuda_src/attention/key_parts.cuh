// Split-KV: the keys of a tile of query rows, distributed over several CTAs if tiles alone do not fill the GPU
// (FlashDecoding: Dao et al., 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html).
//
// A tile's key tiles, in the order of the sequence, are cut into runs of `each`; the last run has the rest. `each` is
// the same for all tiles of a sequence: the longest loop that any of them could have, divided by `splits`. So a row
// under causal order that sees fewer keys has fewer parts, all CTAs take as long as each other, and a shorter sequence
// in use still fills the GPU. CTAs beyond a tile's last part return.
#pragma once

#include "key_loop.cuh"

// Field for field the structured dtype SPLIT_PARAMS of cupyattn/ops/attention/structs.
struct SplitParams {
  AttentionParams attention;
  int splits;      // CTAs for each tile of query rows: the most parts
  int least_keys;  // of a part, if it is not the last one
  int batch;
};
static_assert(sizeof(SplitParams) == SPLIT_PARAMS_BYTES, "its dtype in Python describes another struct");

// How the key tiles of each tile of kTileQ query rows of a sequence are cut.
template <int kTileQ, int kTileK>
struct KeyCut {
  int each;  // key tiles of a part

  __device__ __forceinline__ KeyCut(const SplitParams& params, const KeyWindow& window) {
    // The rows of a tile see neighbouring keys: no more than all rows do, nor than the window has and the rows after
    // the first one add. These may lie in one tile more than they fill.
    const int reach = window.of_row(params.attention.sq - 1).end - window.of_row(0).begin;
    const int64 width = static_cast<int64>(window.end_shift) - window.begin_shift + kTileQ - 1;
    const int keys = clamp(min(static_cast<int64>(reach), width), 0, window.keys);
    const int most = min(div_up(window.keys, kTileK), div_up(keys, kTileK) + 1);
    each = max(div_up(most, params.splits), div_up(params.least_keys, kTileK));
  }

  __device__ __forceinline__ int parts(const KeyLoop<kTileK>& loop) const { return div_up(loop.tiles(), each); }
};

// The split of a CTA that loops over one part of the keys of its rows, and writes sums: the rows of scratch memory of a
// query lie side by side.
struct PartOfKeys {
  static constexpr bool kAll = false;

  const SplitParams& params;
  int part, each;
  float* out_g;    // (rows, splits, Dv): sum_j exp(s_j - m) v_j
  float2* sums_g;  // (rows, splits): m in log2, and sum_j exp(s_j - m)

  template <typename Loop>
  __device__ __forceinline__ Loop of(const Loop& loop) const {
    return loop.within(loop.begin + part * each, loop.begin + (part + 1) * each);
  }

  __device__ __forceinline__ int64 row(const TileCoordinates& coords, int query) const {
    const AttentionParams& attention = params.attention;
    const int64 sequence = static_cast<int64>(coords.batch) * attention.heads + coords.head;
    return (sequence * attention.sq + query) * params.splits + part;
  }
};
