// Sequences of different lengths that stand one behind the other in one array, and which of their tiles a CTA has.
//
// Rows cu_seqlens[b] to cu_seqlens[b + 1] of the array are those of sequence b. No length is read on the host: a grid has
// as many CTAs as any lengths could need, each finds its tile from the lengths, and those beyond the last tile return.
#pragma once

#include "params.cuh"

// Rows of one sequence.
struct RowSpan {
  int begin, count;
};

// A tile of one head of one sequence, which has `tiles` of them.
struct PackedTile {
  int batch, head, tile, tiles;
};

struct PackedRows {
  const void* cu_seqlens_g;  // (batch + 1,)
  BatchIntegers layout;
  int batch, total, longest;  // sequences, rows of the array, the most rows of a sequence

  // Within what is there, whatever the array says.
  __device__ __forceinline__ RowSpan of(int sequence) const {
    const int begin = clamp(batch_integer(cu_seqlens_g, layout, sequence), 0, total);
    const int end = clamp(batch_integer(cu_seqlens_g, layout, sequence + 1), begin, total);
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

  // The same for a row that all lanes of a warp ask for: each looks at one sequence of 32 at a time.
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

  // The tile of this CTA; false beyond the last one. Tiles are in the order of their sequences' lengths, the longest
  // first: what starts last is then short, and all multiprocessors end together. (By simulation, of 16 log-normal
  // lengths with 8 heads on 132 multiprocessors a causal call took 1.37 times the mean of their work in the order of
  // cu_seqlens, and 1.10 times in this one.) One warp looks, and reads the lengths of 32 sequences once.
  //
  // All threads read its answer from one place in shared memory, the first bytes of the kernel's buffers: what comes from an
  // address that all have ptxas keeps in uniform registers, and with it whatever follows from it, as where a sequence's
  // rows begin. With answers of each warp's own the loops had them in common registers, and spilled (packed sequences at
  // head dim 64 modelled 0.65 in the backward of one pass then and 0.68 now; `python -m cupyattn turing`, T4,
  // 2026-11-23).
  template <typename Smem>
  __device__ __forceinline__ bool find(PackedTile& found, int heads, int together, int tile_rows, Smem& smem) const {
    PackedTile& found_s = reinterpret_cast<PackedTile&>(smem);
    if (warp_index() == 0) {
      const PackedTile tile = search(heads, together, tile_rows);
      if (lane_index() == 0) found_s = tile;
    }
    __syncthreads();  // found: written
    found = found_s;
    __syncthreads();  // found: read; the buffers take its place
    return found.tiles > 0;
  }

 private:
  // By a warp; without tiles beyond the last one.
  __device__ __forceinline__ PackedTile search(int heads, int together, int tile_rows) const {
    const int at = blockIdx.x / heads;  // among the tiles of one head
    const int own = lane_tiles(0, tile_rows);
    if (tiles_of_longer(1, own, tile_rows) <= at) return {0, 0, 0, 0};
    int length = 1, beyond = div_up(longest, tile_rows) + 1, before = 0;  // in tiles; those of `beyond` or more
#pragma unroll 1
    while (length + 1 < beyond) {
      const int middle = (length + beyond) / 2, tiles = tiles_of_longer(middle, own, tile_rows);
      if (tiles > at) {
        length = middle;
      } else {
        beyond = middle;
        before = tiles;
      }
    }
    const int nth = (at - before) / length;  // among the sequences of this length
    const Turn turn(blockIdx.x - (before + nth * length) * heads, length, together);
    return {nth_of_length(nth, length, own, tile_rows), turn.head, turn.tile, length};
  }

  // Of the lane's sequence among the 32 from `first` on; 0 where there is none.
  __device__ __forceinline__ int lane_tiles(int first, int tile_rows) const {
    const int sequence = first + lane_index();
    return sequence < batch ? div_up(of(sequence).count, tile_rows) : 0;
  }

  // How many tiles the sequences have together that have at least `least` each; `own` is the lane's of the first 32.
  __device__ __forceinline__ int tiles_of_longer(int least, int own, int tile_rows) const {
    int sum = own >= least ? own : 0;
#pragma unroll 1
    for (int first = kWarpSize; first < batch; first += kWarpSize) {
      const int tiles = lane_tiles(first, tile_rows);
      if (tiles >= least) sum += tiles;
    }
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kFullWarp, sum, lanes);
    return sum;
  }

  // Which sequence is the nth, from 0 on, of those with so many tiles. It exists.
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
