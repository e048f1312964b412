// The two products of the float32 flash kernel, S = Q K^T and O += P V, as outer products of what a warp reads from
// shared memory (products.cuh; the buffers: forward_loader.cuh, the lanes: score_tile.cuh).
//
// P passes from the layout of S to that of O through shared memory of the warp's own, in panels of as many keys as V:
// key by key, the warp's rows side by side. A group of four rows is XORed with the number of its pair of keys, so that
// the lanes that store four pairs at a time meet in no bank (or in pairs, where the warp has 8 rows).
#pragma once

#include "forward_loader.cuh"
#include "../../common/outer_products.cuh"
#include "score_tile.cuh"

// A thread's columns of the output: quads, and 0, 1 or 2 single ones.
template <int kHeadDimV, int kColumnLanes_>
struct OutputColumns {
  static constexpr int kColumnLanes = kColumnLanes_;
  static constexpr int kLaneColumns = div_up(kHeadDimV, kColumnLanes);
  static constexpr int kTail = kLaneColumns % kQuadItems == 3 ? 0 : kLaneColumns % kQuadItems;
  static constexpr int kQuads = div_up(kLaneColumns - kTail, kQuadItems);
  static constexpr int kItems = kQuads * kQuadItems + kTail;
  static constexpr int kTailAt = kColumnLanes * kQuads * kQuadItems;
  static constexpr bool kWhole = kColumnLanes * kItems == kHeadDimV;
};

// S += Q K^T over at most `chunks` chunks of four columns of a slice, kUnrolled columns at a time: those beyond the
// last are zeros. q_s and k_s: the thread's first group of rows and of keys in column 0 of the buffer.
template <int kUnrolled, typename Slice, typename Scores>
__device__ __forceinline__ void multiply_q_k(Scores& scores, uint32 q_s, uint32 k_s, int chunks) {
  using Grid = typename Scores::Grid;
  constexpr int kGroups = Slice::kCols / kUnrolled;
  add_products<kUnrolled>(scores.s, min(div_up(chunks, kUnrolled / kQuadItems), kGroups),
                          [&](float (&q)[Scores::kRows], float (&k)[Scores::kKeys], int group, int step) {
                            const int first = group % kGroups * kUnrolled;
                            const uint32 flip = Slice::flip(first / kQuadItems) ^ Slice::flip(step / kQuadItems);
#pragma unroll
                            for (int i = 0; i < Scores::kRows; i += kQuadItems) {
                              const uint32 at_s = (q_s + i * Grid::kRowLanes * sizeof(float)) ^ flip;
                              ld_shared_group(q, i, at_s + first * Slice::kQColumnBytes + step * Slice::kQColumnBytes);
                            }
#pragma unroll
                            for (int j = 0; j < Scores::kKeys; j += kQuadItems) {
                              const uint32 at_s = (k_s ^ flip) + j * Grid::kColumnLanes * sizeof(float);
                              ld_shared_group(k, j, at_s + first * Slice::kKColumnBytes + step * Slice::kKColumnBytes);
                            }
                          });
}

// A panel of P of a warp: two keys of each of 8 column lanes, or of 4.
template <typename Scores, int kKeys_>
struct ProbabilityPanel {
  using Grid = typename Scores::Grid;
  static constexpr int kKeys = kKeys_;
  static constexpr uint32 kPairBytes = 2 * Scores::kWarpRows * sizeof(float);
  static constexpr uint32 kBytes = kKeys / 2 * kPairBytes;

  // The position of the thread's rows i to i + 3 of key e within its pair of keys.
  __device__ __forceinline__ static uint32 offset(int i, int e, int pair) {
    constexpr uint32 kLaneBits = Grid::kRowLanes * kQuadBytes - 1;
    constexpr int kFlips = kPairBytes / (2 * kQuadBytes) < 4 ? kPairBytes / (2 * kQuadBytes) : 4;
    const uint32 flip = pair % kFlips * (2 * kQuadBytes);
    const uint32 group = e * (kPairBytes / 2) + i * Grid::kRowLanes * sizeof(float);
    return (group ^ (flip & ~kLaneBits)) + (Grid::row_lane() * kQuadBytes ^ (flip & kLaneBits));
  }

  // Pair `pair` of all lanes to the panels at p_s.
  __device__ __forceinline__ static void store(const Scores& scores, uint32 p_s, int pair) {
    const int lane = Grid::column_lane();
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int i = 0; i < Scores::kRows; i += kQuadItems) {
        uint32 p[kQuadItems];
#pragma unroll
        for (int row = 0; row < kQuadItems; row++) p[row] = __float_as_uint(scores.s[i + row][2 * pair + e]);
        st_shared_v4(p_s + lane * kPairBytes + offset(i, e, lane), make_uint4(p[0], p[1], p[2], p[3]));
      }
    }
  }
};

// The thread's columns of one key of V, from quad kQuad on.
template <typename Columns, int kQuad = 0>
__device__ __forceinline__ void load_v(float (&v)[Columns::kItems], uint32 v_s, int lane) {
  if constexpr (kQuad < Columns::kQuads) {
    ld_shared_group(v, kQuad * kQuadItems, v_s + (lane + kQuad * Columns::kColumnLanes) * kQuadBytes);
    load_v<Columns, kQuad + 1>(v, v_s, lane);
  } else if constexpr (Columns::kTail > 0) {
    ld_shared_group<Columns::kTail>(v, kQuad * kQuadItems,
                                    v_s + (Columns::kTailAt + lane * Columns::kTail) * sizeof(float));
  }
}

// O += P V over one panel of P at p_s and of V at v_s, kUnrolled keys at a time.
template <int kUnrolled, typename Scores, typename Panel, typename Columns>
__device__ __forceinline__ void multiply_p_v(float (&acc)[Scores::kRows][Columns::kItems], uint32 p_s, uint32 v_s) {
  using Probabilities = ProbabilityPanel<Scores, Panel::kKeys>;
  constexpr int kGroups = Panel::kKeys / kUnrolled;
  add_products<kUnrolled>(
      acc, kGroups, [&](float (&p)[Scores::kRows], float (&v)[Columns::kItems], int group, int step) {
        const int first = group % kGroups * kUnrolled, pair = (first + step) / 2;
        const uint32 first_s = p_s + first / 2 * Probabilities::kPairBytes;
#pragma unroll
        for (int i = 0; i < Scores::kRows; i += kQuadItems) {
          ld_shared_group(p, i,
                          first_s + step / 2 * Probabilities::kPairBytes + Probabilities::offset(i, step % 2, pair));
        }
        load_v<Columns>(v, v_s + (first + step) * Panel::kRowBytes, Scores::Grid::column_lane());
      });
}
