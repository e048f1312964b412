// Positions of a tile's keys in a paged cache. Blocks are whole groups of 16 tokens (PagedAttention, Kwon et al.,
// arXiv:2309.06180): lane i of every warp looks up group i of the tile, a tile ahead, and the threads that load a row
// ask that lane for the place of its group.
#pragma once

#include "../common/memory.cuh"
#include "paged_params.cuh"

constexpr int kGroupKeys = 16;

// A lane's entry of the table: the block of a group, and how far into a block the group begins. Where scales have
// places too, it is groups that this counts: one register for both.
template <bool kScaled>
struct GroupEntry {
  int block, within;

  __device__ __forceinline__ int coords(const CacheUnits& units) const {
    return block * units.block + (kScaled ? within * units.group : within);
  }
};

// The entries of one sequence that hold keys which some row of the CTA sees, and none after them.
template <int kTileK, bool kScaled>
struct GroupTable {
  static constexpr int kGroups = kTileK / kGroupKeys;  // of a tile
  static_assert(kTileK % kGroupKeys == 0 && kGroups <= kWarpSize, "whole groups, a lane each");

  const int* table_g;
  const PagedParams& params;
  int last;       // group; -1 without keys
  int seen_keys;  // from the first that some row sees to the sequence's end

  __device__ __forceinline__ GroupTable(const PagedParams& all, const int* block_table_g, const TileCoordinates& coords,
                                        const KeyWindow& window, int rows)
      : table_g(block_table_g + coords.batch * all.table_batch), params(all) {
    last = div_up(window.of_row(coords.first_row + rows - 1).end, kGroupKeys) - 1;
    seen_keys = window.keys - window.of_row(coords.first_row).begin;
  }

  // The groups of a tile; those after the last one repeat it.
  __device__ __forceinline__ GroupEntry<kScaled> look_up(int tile) const {
    const int group = min(tile * kGroups + (kGroups > 1 ? lane_index() : 0), last);
    const int column = __umulhi(2 * group, params.block_reciprocal) >> params.block_shift;
    const int64 entry_g = mad_wide(column, params.table_block, reinterpret_cast<int64>(table_g));
    return {static_cast<int>(ld_global_u32(reinterpret_cast<const void*>(entry_g))),
            kScaled ? group - column * params.scales.block_groups
                    : group * params.units.group - column * params.block_span};
  }

  // Lane `group`'s entry, for all lanes.
  __device__ __forceinline__ static int of_group(int coords, int group) {
    return kGroups > 1 ? __shfl_sync(kFullWarp, coords, group) : coords;
  }

  // Whether a key of a tile, of whose first one on `keys` are in use, is read at all.
  __device__ __forceinline__ bool exists(int key, int keys) const {
    return static_cast<uint32>(keys - 1 - key) < static_cast<uint32>(seen_keys);
  }
};
