// Which tiles of a call's block mask some score of is seen, and which are seen in full: two bits a tile.
//
// block_bits.cu writes them for the tiles of one kernel, which owns rows (or keys) and walks tiles of keys (or rows):
// for each matrix of scores and each tile that a CTA owns, words of 32 tiles that it may walk, `seen`, and as many
// behind them, `full`. Here they meet the window's range of tiles.
#pragma once

#include "../common/reduce.cuh"

// Of a call without a block mask.
struct NoBlocks {};

struct BlockBits {
  const uint32* items_g;
  // In matrices, from batch element to batch element and from head to head; and the queries and keys of a matrix, in
  // whole tiles of the block mask. A packed sequence may have fewer.
  const int64* strides;

  __device__ __forceinline__ int queries() const { return strides[2]; }
  __device__ __forceinline__ int keys() const { return strides[3]; }

  // The words of the tile `own` of `own_tiles`, which walks `words` * 32 tiles.
  __device__ __forceinline__ const uint32* of(int batch, int head, int own, int own_tiles, int words) const {
    const int64 matrix = batch * strides[0] + head * strides[1];
    return items_g + (matrix * own_tiles + own) * (2 * words);
  }
};

// The first `count` bits of a word; none below 0, all above 32.
__device__ __forceinline__ uint32 first_bits(int count) {
  return count <= 0 ? 0u : count >= 32 ? 0xffffffffu : (1u << count) - 1u;
}

// The tiles that a CTA walks: those that need a mask first (key_walk.cuh says why), then those that are seen in full. A
// warp asks together. Its lanes hold a word each of the first 1,024 tiles: words that are read anew for every tile come
// from far, because K and V drive them out of the cache (one document of 16,384 tokens, all tiles full, took 1.46 times
// the plain call's time so and takes 1.25 now, head dim 64, 16 heads, CUDA graphs of a call on an H200 as compute_75
// code, 2026-11-22).
struct BlockTiles {
  const uint32* seen_g;
  int words;
  int begin, end;            // tiles that the window leaves
  int full_begin, full_end;  // those that it leaves whole
  int held;                  // the first word that the lanes hold
  uint32 masked_r, full_r;   // the lane's, of either kind

  BlockTiles() = default;
  __device__ __forceinline__ BlockTiles(const uint32* seen_g_, int words_, int begin_, int end_, int full_begin_,
                                        int full_end_)
      : seen_g(seen_g_),
        words(words_),
        begin(begin_),
        end(end_),
        full_begin(full_begin_),
        full_end(full_end_),
        held(begin_ / 32),
        masked_r(read(held + lane_index(), false)),
        full_r(read(held + lane_index(), true)) {}

  // Behind the last one comes `end`.
  __device__ __forceinline__ int first() const { return first_of_either(next(begin, /*full=*/false)); }
  __device__ __forceinline__ int after(int tile) const {
    return is_full(tile) ? next(tile + 1, true) : first_of_either(next(tile + 1, false));
  }
  __device__ __forceinline__ bool is_full(int tile) const {
    const int lane = tile / 32 - held;
    const uint32 word = lane < kWarpSize ? __shfl_sync(kFullWarp, full_r, lane) : read(tile / 32, true);
    return word >> (tile % 32) & 1u;
  }
  __device__ __forceinline__ int count(bool full) const {
    int tiles = 0;
    for (int first = held; first * 32 < end; first += kWarpSize) tiles += __popc(own_word(first, full));
    return warp_reduce<Sum>(tiles);
  }

 private:
  __device__ __forceinline__ int first_of_either(int masked) const { return masked < end ? masked : next(begin, true); }
  // The tiles 32 at, 32 at + 1, ... of one kind.
  __device__ __forceinline__ uint32 read(int at, bool full) const {
    if (at * 32 >= end) return 0;
    const uint32 walked = first_bits(end - 32 * at) & ~first_bits(begin - 32 * at) & seen_g[at];
    const uint32 whole = first_bits(full_end - 32 * at) & ~first_bits(full_begin - 32 * at) & seen_g[words + at];
    return walked & (full ? whole : ~whole);
  }
  // The lane's of the words from `first` on.
  __device__ __forceinline__ uint32 own_word(int first, bool full) const {
    if (first == held) return full ? full_r : masked_r;
    return read(first + lane_index(), full);
  }
  __device__ __forceinline__ int next(int from, bool full) const {
    for (int first = held; first * 32 < end; first += kWarpSize) {
      const uint32 found = own_word(first, full) & ~first_bits(from - 32 * (first + lane_index()));
      const uint32 lanes = __ballot_sync(kFullWarp, found != 0);
      if (lanes != 0) {
        const int lane = __ffs(lanes) - 1;
        return (first + lane) * 32 + __ffs(__shfl_sync(kFullWarp, found, lane)) - 1;
      }
    }
    return end;
  }
};
