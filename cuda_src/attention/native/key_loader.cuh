// The loaders for a CTA of query rows from sm_80 on: what its loop reads goes from global to shared memory by copies that
// pass no register, tiles of K and V one tile ahead of the one in use, items of a bias or mask before the scores.
#pragma once

#include "../params.cuh"
#include "../tensor_core/key_loader.cuh"
#include "../tensor_core/score_items.cuh"

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

// A warp's items of a bias or mask for one step of keys. Lanes of a row read runs of neighbouring keys, four of which are
// a segment; segments of a row are swizzled, so that reads of several rows have no bank conflicts.
template <typename Item, typename Tile>
struct StagedRuns {
  static constexpr int kRunBytes = Tile::kRun * sizeof(Item), kSegmentBytes = 4 * kRunBytes;
  static constexpr int kRows = 16 * Tile::kMTiles, kSegments = Tile::kNTiles / 2, kRowRuns = 4 * kSegments;
  static constexpr int kRowBytes = kSegments * kSegmentBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kLineRows = kRowBytes < 128 ? 128 / kRowBytes : 1;  // that share all banks
  static_assert((kSegments & (kSegments - 1)) == 0 && kRowRuns <= kWarpSize, "16, 32, 64 or 128 keys");

  __device__ __forceinline__ static uint32 offset(uint32 row, uint32 run) {
    const uint32 segment = run / 4 ^ row / kLineRows % kSegments;
    return row * kRowBytes + segment * kSegmentBytes + run % 4 * kRunBytes;
  }

  // Start the copies of this lane; zeros for rows and keys that do not exist.
  template <bool kRagged>
  __device__ __forceinline__ static void copy(uint32 items_s, const ScoreMatrix<Item>& matrix, int cta_row,
                                              int first_row, int first_key) {
    if (kRagged || first_row + kRows - 1 > matrix.last_row) {
      copy_rows<true>(items_s, matrix, cta_row, first_row, first_key);
    } else {
      copy_rows<false>(items_s, matrix, cta_row, first_row, first_key);
    }
  }

  // body(score, item) for each score, by the lane that copied any of the items, after the copies' end.
  template <typename Body>
  __device__ __forceinline__ static void for_each(uint32 items_s, Scores<Tile>& scores, Body body) {
    const uint32 lane_s = items_s + offset(lane_index() / 4, lane_index() % 4);
#pragma unroll
    for (int i = 0; i < Tile::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < Tile::kNTiles; n += 2) {
          float words[kRunBytes / 4];
          ld_shared(words, (lane_s ^ n / 2 * kSegmentBytes) + (16 * i + 8 * half) * kRowBytes);
          Vec<Item, Tile::kRun> run;
          memcpy(&run, words, sizeof(run));
          body(scores.s[n][i][2 * half], run.item[0]);
          body(scores.s[n][i][2 * half + 1], run.item[1]);
          body(scores.s[n + 1][i][2 * half], run.item[2]);
          body(scores.s[n + 1][i][2 * half + 1], run.item[3]);
        }
      }
    }
  }

 private:
  template <bool kMayLack>
  __device__ __forceinline__ static void copy_rows(uint32 items_s, const ScoreMatrix<Item>& matrix, int cta_row,
                                                   int first_row, int first_key) {
    constexpr int kPassRows = kWarpSize / kRowRuns;
    const int lane_row = lane_index() / kRowRuns, run = lane_index() % kRowRuns;
    const int row = not_hoisted(first_row) + lane_row;  // addresses would otherwise wait in registers, and spill
    const bool seen = !kMayLack || first_key + (run + 1) * Tile::kRun <= matrix.keys;
    const Item* run_g = matrix.items_g + row * matrix.row_stride + (first_key + run * Tile::kRun);
#pragma unroll
    for (int pass = 0; pass < kRows / kPassRows; pass++) {
      const bool exists = seen && (!kMayLack || row + pass * kPassRows <= matrix.last_row);
      cp_async<kRunBytes>(items_s + offset(lane_row + pass * kPassRows, run), exists ? run_g : matrix.items_g, exists);
      run_g += kPassRows * matrix.row_stride;
    }
  }
};
template <typename Tile>
struct StagedRuns<void, Tile> {
  static constexpr int kBytes = 0;
};

// Those of a pass that are read four keys at a time; others are read when they are used.
template <typename Pass, typename Tile>
struct StagedItems {
  using Bias = StagedRuns<typename Pass::Bias, Tile>;
  using Mask = StagedRuns<unsigned char, Tile>;
  static constexpr bool kBias = Pass::kBiasVec == 4, kMask = Pass::kMaskVec == 4;
  static constexpr int kBiasBytes = kBias ? Bias::kBytes : 0, kMaskBytes = kMask ? Mask::kBytes : 0;
  static constexpr int kBytes = kBiasBytes + kMaskBytes;  // of a warp

  uint32 items_s;

  __device__ __forceinline__ explicit StagedItems(uint32 of_warp_s) : items_s(of_warp_s) {}

  template <bool kRagged>
  __device__ __forceinline__ void load(const Pass& pass, int first_row, int first_key) const {
    __syncwarp();  // items: read by all lanes
    if constexpr (kBias) Bias::template copy<kRagged>(items_s, pass.bias(), pass.cta_row, first_row, first_key);
    if constexpr (kMask) {
      Mask::template copy<kRagged>(items_s + kBiasBytes, pass.mask(), pass.cta_row, first_row, first_key);
    }
    cp_async_commit_group();
  }
  // They are there still. After this ptxas reads them again, instead of keeping them in registers.
  template <bool kRagged>
  __device__ __forceinline__ void load_again(const Pass&, int, int) const {
    __syncwarp();
  }
  __device__ __forceinline__ void wait() const {
    cp_async_wait_group<0>();
    __syncwarp();  // items: written by all lanes
  }

  template <bool kRagged, typename Body>
  __device__ __forceinline__ void for_each_bias(const Pass& pass, Scores<Tile>& scores, int first_row, int first_key,
                                                Body body) const {
    if constexpr (kBias) {
      Bias::for_each(items_s, scores, body);
    } else {
      ItemsInPlace().for_each_bias<kRagged>(pass, scores, first_row, first_key, body);
    }
  }
  template <bool kRagged, typename Body>
  __device__ __forceinline__ void for_each_mask(const Pass& pass, Scores<Tile>& scores, int first_row, int first_key,
                                                Body body) const {
    if constexpr (kMask) {
      Mask::for_each(items_s + kBiasBytes, scores, body);
    } else {
      ItemsInPlace().for_each_mask<kRagged>(pass, scores, first_row, first_key, body);
    }
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
