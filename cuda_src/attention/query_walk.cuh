// Which query tiles a run of keys is seen by, and which of them need no mask.
#pragma once

#include "params.cuh"

template <int kTileQ>
struct QueryWalk {
  int begin, end;            // tiles with a query that sees some key of the run
  int full_begin, full_end;  // tiles whose every query sees every key of the run

  // Row i sees key j if i + begin_shift <= j < i + end_shift: rows j - end_shift + 1 to j - begin_shift.
  __device__ __forceinline__ QueryWalk(const KeyWindow& window, int first_key, int keys_per_cta, int sq) {
    const int64 first = first_key, behind = min(first_key + keys_per_cta, window.keys);
    const int first_row = clamp(first - window.end_shift + 1, 0, sq);
    const int behind_row = clamp(behind - window.begin_shift, 0, sq);
    const bool seen = first < behind && first_row < behind_row;
    begin = first_row / kTileQ;
    end = seen ? div_up(behind_row, kTileQ) : begin;
    const bool ragged = first_key + keys_per_cta > window.keys;
    full_begin = ragged ? end : div_up(clamp(first + keys_per_cta - window.end_shift, 0, kFar), kTileQ);
    full_end = clamp(first - window.begin_shift + 1, 0, kFar) / kTileQ;
  }

  __device__ __forceinline__ int tiles() const { return end - begin; }
  __device__ __forceinline__ bool masked(int tile) const { return tile < full_begin || tile >= full_end; }
};
