// The order of the key tiles in a CTA's loop: those that need a mask first.
//
// Causal order, a window and the end of the keys cut off the first and last tiles that a CTA sees; between them lie
// tiles that every row sees in full. A cyclic loop from the first tile after the full ones puts the masked tiles
// first. They give every row a maximum, so that the loop over the full tiles needs no mask, no maximum and no
// predicates.
#pragma once

#include "params.cuh"

// The query tiles that see a run of keys, and those of them that need no mask.

template <int kTileQ>
struct QueryLoop {
  int begin, end;            // tiles with a query that sees some key of the run
  int full_begin, full_end;  // tiles whose every query sees every key of the run

  // Row i sees key j if i + begin_shift <= j < i + end_shift: rows j - end_shift + 1 to j - begin_shift.
  __device__ __forceinline__ QueryLoop(const KeyWindow& window, int first_key, int keys_per_cta, int sq) {
    const int64 first = first_key, end_key = min(first_key + keys_per_cta, window.keys);
    const int first_row = clamp(first - window.end_shift + 1, 0, sq);
    const int end_row = clamp(end_key - window.begin_shift, 0, sq);
    const bool seen = first < end_key && first_row < end_row;
    begin = first_row / kTileQ;
    end = seen ? div_up(end_row, kTileQ) : begin;
    const bool ragged = first_key + keys_per_cta > window.keys;
    full_begin = ragged ? end : div_up(clamp(first + keys_per_cta - window.end_shift, 0, kFar), kTileQ);
    full_end = clamp(first - window.begin_shift + 1, 0, kFar) / kTileQ;
  }

  __device__ __forceinline__ int tiles() const { return end - begin; }
  __device__ __forceinline__ bool masked(int tile) const { return tile < full_begin || tile >= full_end; }
};

template <int kTileK>
struct KeyLoop {
  int begin, end;            // tiles with a key that some row of the CTA sees
  int first;                 // where the loop starts
  int masked;                // how many tiles from there on need the mask (at least one, if there is any)
  int full_begin, full_end;  // tiles that every row sees in full; none where they do not rise

  __device__ __forceinline__ KeyLoop(const KeyWindow& window, int first_row, int rows) {
    const KeyRange top = window.of_row(first_row), bottom = window.of_row(first_row + rows - 1);
    begin = top.begin / kTileK;
    end = top.begin < bottom.end ? div_up(bottom.end, kTileK) : begin;
    // Seen in full: from where the last row's range begins to where the first row's ends.
    full_begin = div_up(bottom.begin, kTileK);
    full_end = top.end / kTileK;
    put_masked_first();
  }

  // The loop over those of its tiles alone that are in [from, to); perhaps none.
  __device__ __forceinline__ KeyLoop within(int from, int to) const {
    KeyLoop part = *this;
    part.begin = max(begin, from);
    part.end = max(min(end, to), part.begin);
    part.full_begin = max(full_begin, part.begin);
    part.full_end = min(full_end, part.end);
    part.put_masked_first();
    return part;
  }

  __device__ __forceinline__ bool cuts(int tile) const { return tile < full_begin || tile >= full_end; }
  __device__ __forceinline__ int tiles() const { return end - begin; }
  __device__ __forceinline__ int after(int tile) const { return tile + 1 == end ? begin : tile + 1; }
  // The next tile after the masked ones.
  __device__ __forceinline__ int whole_after(int tile) const { return tile + 1; }

 private:
  __device__ __forceinline__ void put_masked_first() {
    first = begin;
    masked = end - begin;
    if (full_begin < full_end) {
      masked = max(1, (end - full_end) + (full_begin - begin));
      if (full_end < end) first = full_end;
    }
  }
};

// The split of a CTA that loops over all keys of its rows, and writes results.
struct AllKeys {
  static constexpr bool kAll = true;

  template <typename Loop>
  __device__ __forceinline__ const Loop& of(const Loop& loop) const {
    return loop;
  }
};
