// Sequences of different lengths, one after the other in one array, and the search for a CTA's tile.
//
// Rows cu_seqlens[b] to cu_seqlens[b + 1] of the array are those of sequence b. No length is read on the host: a grid
// has as many CTAs as any lengths could need, each finds its tile from the lengths, and those beyond the last tile
// return.
#pragma once

#include "params.cuh"

// A tile of one head of one sequence, which has `tiles` of them.
struct PackedTile {
  int batch, head, tile, tiles;
};

struct PackedRows {
  const void* cu_seqlens_g;  // (batch + 1,)
  BatchIntegers layout;
  int batch, total, longest;  // sequences, rows of the array, the most rows of a sequence

  // The beginning of a sequence by the array; what lies beyond 32 bits becomes the nearest int. Read by words,
  // without a branch: the loads of several are then in flight at once.
  __device__ __forceinline__ int bound(int sequence) const {
    const int* words_g = static_cast<const int*>(cu_seqlens_g) + (sequence * layout.stride << layout.is_int64);
    const int low = words_g[0], high = words_g[layout.is_int64];
    return !layout.is_int64 || high == low >> 31 ? low : high >> 31 ^ 0x7fffffff;
  }

  // Clamped to the rows that exist, for any values of the array.
  __device__ __forceinline__ RowSpan of(int sequence) const {
    const int begin = clamp(bound(sequence), 0, total);
    const int end = clamp(bound(sequence + 1), begin, total);
    return {begin, min(end - begin, longest)};
  }

  // The last sequence for which begin_of(sequence) <= row. Beginnings do not fall, and that of the first is 0.
  template <typename Begin>
  __device__ __forceinline__ int last_from(int row, Begin begin_of) const {
    int sequence = 0, beyond = batch;
    while (sequence + 1 < beyond) {
      const int middle = (sequence + beyond) / 2;
      (begin_of(middle) <= row ? sequence : beyond) = middle;
    }
    return sequence;
  }

  // Find the sequence of a row that is the same for all lanes of a warp: each looks at one sequence of 32 at a time.
  template <typename Begin>
  __device__ __forceinline__ int last_from_of_warp(int row, Begin begin_of) const {
    int sequence = 0, step = 1;
    while (step * kWarpSize < batch) step *= kWarpSize;
#pragma unroll 1
    for (; step > 0; step /= kWarpSize) {
      const int asked = sequence + lane_index() * step;
      const uint32 begun = __ballot_sync(kFullWarp, asked < batch && begin_of(asked) <= row);
      sequence += (31 - __clz(begun | 1u)) * step;
    }
    return sequence;
  }

  // The tiles of the lane's sequence among the 32 from `first` on; 0 where there is none.
  __device__ __forceinline__ int lane_tiles(int first, int tile_rows) const {
    const int sequence = first + lane_index();
    return sequence < batch ? div_up(of(sequence).count, tile_rows) : 0;
  }

  // The tile of this CTA, by a warp; without tiles beyond the last one. Tiles are in the order of their sequences'
  // lengths, the longest first: what starts last is then short, and all multiprocessors end together. Sequences with
  // equally many tiles are interleaved as those of a batch are. `own`: how many tiles the lane's sequence has, of the
  // first 32.
  __device__ __forceinline__ PackedTile of_cta(int heads, int together, int tile_rows, int own) const {
    Alike alike;
    if (!alike_at(alike, blockIdx.x / heads, own, tile_rows)) return {0, 0, 0, 0};
    const uint32 index = blockIdx.x - alike.before * heads, group_tiles = alike.tiles * together;
    const int first = index / group_tiles * together;  // of the interleaved heads; the last of them may be fewer
    const int interleaved = min(together, alike.all / alike.tiles * heads - first);
    const InterleavedTile at(index - first * alike.tiles, alike.tiles, interleaved);
    const int head = first + at.head;  // of all sequences with so many tiles
    return {nth_of_length(head / heads, alike.tiles, own, tile_rows), head % heads, at.tile, alike.tiles};
  }

 private:
  // Sequences with `tiles` tiles each, `all` in total, after the `before` tiles of longer ones.
  struct Alike {
    int tiles, all, before;
  };

  // Those among whose tiles the one of that number is; false beyond the last. Each lane asks of one length of 32 at a
  // time.
  __device__ __forceinline__ bool alike_at(Alike& alike, int at, int own, int tile_rows) const {
    // If all are alike, one ballot shows it: packed sequences of 512 tokens take 1.03 times what a dense call does,
    // and 1.05 without it (python -m cupyattn.benchmark varlen, H100, 2026-11-27).
    alike = {__shfl_sync(kFullWarp, own, 0), 0, 0};
    if (__all_sync(kFullWarp, own == (lane_index() < batch ? alike.tiles : 0)) && batch <= kWarpSize) {
      alike.all = alike.tiles * batch;
      return at < alike.all;
    }
    int length = 1, before = 0, step = 1;
    while (step * kWarpSize < div_up(longest, tile_rows)) step *= kWarpSize;
#pragma unroll 1
    for (; step > 0; step /= kWarpSize) {
      const int tiles = tiles_of_longer(length + lane_index() * step, own, tile_rows);
      const uint32 reached = __ballot_sync(kFullWarp, tiles > at);
      if (reached == 0) return false;  // by the shortest of all
      const int lane = 31 - __clz(reached), longer = __shfl_sync(kFullWarp, tiles, (lane + 1) % kWarpSize);
      if (lane + 1 < kWarpSize) before = longer;
      length += lane * step;
      alike = {length, __shfl_sync(kFullWarp, tiles, lane) - before, before};
    }
    return true;
  }

  // The sum of the tiles of all sequences that have at least `least` tiles each. `least` differs from lane to lane;
  // `own` is the lane's of the first 32. A ballot has one bit of 32 counts of tiles, so that few steps compare and add
  // them all.
  __device__ __forceinline__ int tiles_of_longer(int least, int own, int tile_rows) const {
    constexpr int kBits = 6;  // in one round: few sequences have 64 tiles or more
    const int bits = kWarpSize - __clz(div_up(longest, tile_rows));
    int sum = 0;
#pragma unroll 1
    for (int first = 0; first < batch; first += kWarpSize) {
      const int of_lane = first == 0 ? own : lane_tiles(first, tile_rows);
      uint32 longer = kFullWarp;  // lanes whose tiles, by the bits so far, are at least `least`
#pragma unroll 1
      for (int from = 0; from < bits; from += kBits) {
#pragma unroll
        for (int bit = 0; bit < kBits; bit++) {
          const uint32 set = __ballot_sync(kFullWarp, of_lane >> from & 1 << bit);
          longer = least >> from & 1 << bit ? longer & set : longer | set;
        }
      }
      if (least >> bits) longer = 0;
#pragma unroll 1
      for (int from = 0; from < bits; from += kBits) {
        int tiles = 0;
#pragma unroll
        for (int bit = 0; bit < kBits; bit++) {
          tiles += __popc(__ballot_sync(kFullWarp, of_lane >> from & 1 << bit) & longer) << bit;
        }
        sum += tiles << from;
      }
    }
    return sum;
  }

  // The nth sequence, from 0 on, of those with so many tiles. It exists.
  __device__ __forceinline__ int nth_of_length(int nth, int length, int own, int tile_rows) const {
    int first = 0;
    uint32 alike = __ballot_sync(kFullWarp, own == length);
    while (__popc(alike) <= nth && first + kWarpSize < batch) {
      nth -= __popc(alike);
      first += kWarpSize;
      alike = __ballot_sync(kFullWarp, lane_tiles(first, tile_rows) == length);
    }
    const uint32 up_to_lane = alike << (31 - lane_index());
    const bool is_nth = up_to_lane >> 31 && __popc(up_to_lane) == nth + 1;
    return first + __ffs(__ballot_sync(kFullWarp, is_nth)) - 1;
  }
};
