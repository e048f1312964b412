// Equal shares of all work, worked out on the device: each CTA takes as many units as every other, whatever the
// sequences' lengths.
//
// The work is a flat list of units of kWarps tiles of keys, those of a segment side by side: a segment is one sequence,
// one key-value head and one tile of its rows. Every warp adds up the units of all sequences, 32 at a time. A sequence
// without keys has one unit, in which zeros are written.
#pragma once

#include "../../common/reduce.cuh"
#include "params.cuh"

// The tiles that hold what some row of the sequence sees.
struct TileSpan {
  int first, count;

  __device__ __forceinline__ TileSpan(const KeyWindow& window, int rows) {
    const int begin = window.of_row(0).begin, end = window.of_row(rows - 1).end;
    first = begin / kTileKeys;
    count = begin < end ? div_up(end, kTileKeys) - first : 0;
  }
};

__device__ __forceinline__ KeyWindow window_of(const DecodeParams& params, const Lengths& lengths, int batch) {
  return sequence_window(params.attention, lengths.q_offset_g, lengths.used_g, batch);
}

// Units of a segment of the sequence; none beyond the last sequence.
template <int kWarps>
__device__ __forceinline__ int units_of(const DecodeParams& params, const Lengths& lengths, int batch) {
  if (batch >= params.batch) return 0;
  return max(1, div_up(TileSpan(window_of(params, lengths, batch), params.attention.sq).count, kWarps));
}

// Who takes which units: of CTAs with a unit more than others come the first ones.
struct Splits {
  int each, longer;

  __device__ __forceinline__ Splits(int units, int ctas) : each(units / ctas), longer(units % ctas) {}

  __device__ __forceinline__ int begin(int cta) const { return cta * each + min(cta, longer); }
  __device__ __forceinline__ int cta_of(int unit) const {
    const int in_longer = longer * (each + 1);
    return unit < in_longer ? unit / (each + 1) : longer + (unit - in_longer) / max(each, 1);
  }
};

// One sequence, one key-value head, one tile of rows; its units are first to first + units - 1.
struct Segment {
  int batch, index;  // index of the sequence's segments: rows of one head are neighbours
  int first, units;

  // The place in scratch memory of what one of its CTAs has: a CTA cuts at most a segment at the beginning of its
  // share, and one at the end.
  __device__ __forceinline__ static int slot(int cta, int first_cta) { return 2 * cta + (cta == first_cta); }
};

__device__ __forceinline__ int segments_of_sequence(const DecodeParams& params) {
  return params.kv_heads * params.row_tiles;
}

template <int kWarps>
__device__ __forceinline__ Splits splits_of(const DecodeParams& params, const Lengths& lengths) {
  int units = 0;
  for (int b = lane_index(); b < params.batch; b += kWarpSize) units += units_of<kWarps>(params, lengths, b);
  return Splits(warp_reduce<Sum>(units) * segments_of_sequence(params), params.ctas);
}

// The segment of a CTA that has one for itself, as a list of its own.
template <int kWarps>
__device__ __forceinline__ Segment segment_of_cta(const DecodeParams& params, const Lengths& lengths, int cta) {
  const int batch = cta / segments_of_sequence(params);
  return {batch, cta % segments_of_sequence(params), 0, units_of<kWarps>(params, lengths, batch)};
}

// The segment that holds a unit of the list.
template <int kWarps>
__device__ __forceinline__ Segment segment_at(const DecodeParams& params, const Lengths& lengths, int unit) {
  const int segments = segments_of_sequence(params);
  int before = 0;  // units of one segment each of the sequences before
  for (int first = 0;; first += kWarpSize) {
    const int units = units_of<kWarps>(params, lengths, first + lane_index());
    int up_to = units;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = __shfl_up_sync(kFullWarp, up_to, distance);
      if (lane_index() >= distance) up_to += other;
    }
    const uint32 beyond = __ballot_sync(kFullWarp, (before + up_to) * segments > unit);
    if (beyond != 0) {
      const int lane = __ffs(beyond) - 1;
      Segment segment;
      segment.batch = first + lane;
      segment.units = __shfl_sync(kFullWarp, units, lane);
      const int start = (before + __shfl_sync(kFullWarp, up_to, lane) - segment.units) * segments;
      segment.index = (unit - start) / segment.units;
      segment.first = start + segment.index * segment.units;
      return segment;
    }
    before += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  }
}

// The same, and the units of a segment whose sequence and index are given.
template <int kWarps>
__device__ __forceinline__ Splits splits_around(const DecodeParams& params, const Lengths& lengths, Segment& segment) {
  int units = 0, before = 0, own = 0;  // of one segment each: of all sequences, of those before, of its own
  for (int first = 0; first < params.batch; first += kWarpSize) {
    const int b = first + lane_index(), of_b = units_of<kWarps>(params, lengths, b);
    units += of_b;
    before += b < segment.batch ? of_b : 0;
    own += b == segment.batch ? of_b : 0;
  }
  segment.units = warp_reduce<Sum>(own);
  segment.first = warp_reduce<Sum>(before) * segments_of_sequence(params) + segment.index * segment.units;
  return Splits(warp_reduce<Sum>(units) * segments_of_sequence(params), params.ctas);
}

template <int kWarps>
__device__ __forceinline__ Segment next_segment(const DecodeParams& params, const Lengths& lengths,
                                                const Segment& segment) {
  Segment next{segment.batch, segment.index + 1, segment.first + segment.units, segment.units};
  if (next.index == segments_of_sequence(params)) {
    next.index = 0;
    next.batch++;
    next.units = units_of<kWarps>(params, lengths, next.batch);
  }
  return next;
}
