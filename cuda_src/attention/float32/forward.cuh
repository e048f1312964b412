// The loop of the float32 forward, for any loader of keys. forward.cu documents what is computed and how.
#pragma once

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(WARPS) || !defined(COLUMN_LANES) || \
    !defined(THREAD_ROWS) || !defined(PAIRS) || !defined(PANEL_KEYS) || !defined(VEC) || !defined(MIN_CTAS) ||    \
    !defined(SHARED_BYTES)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, WARPS, COLUMN_LANES, THREAD_ROWS, PAIRS, PANEL_KEYS, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(BIAS_VEC) || !defined(MASK) || !defined(MASK_VEC) || !defined(SLOPES) || \
    !defined(SOFTCAP) || !defined(SINKS) || !defined(DROPOUT) || !defined(MODIFIED)
#error \
    "BIAS, BIAS_VEC, MASK, MASK_VEC, SLOPES, SOFTCAP, SINKS, DROPOUT, MODIFIED come from a launch-configuration table"
#endif
#include "forward_products.cuh"
#include "../block_key_loop.cuh"
#include "../modifiers.cuh"
#include "epilogue.cuh"
#include "../scores.cuh"
#include "../sinks.cuh"
#include "../../common/philox.cuh"
#include "../params.cuh"
#include "score_tile.cuh"

// Dropout of a warp's probabilities in plain registers (score_tile.cuh).

// The words of one Philox call serve a thread's pairs of one row, word n % 4 that of pair n.
template <typename Scores>
__device__ __forceinline__ void drop(Scores& scores, const ScoreParams& params, const TileCoordinates& coords,
                                     int first_row, int first_key) {
  const int key = first_key + Scores::key_of(0);
  const bool upper = Scores::kPairs == 2 && key % 32 >= 16;
#pragma unroll
  for (int i = 0; i < Scores::kRows; i++) {
    const Philox4 words = dropout_words(params, coords.batch, coords.head, first_row + Scores::row_of(i), key);
#pragma unroll
    for (int n = 0; n < Scores::kPairs; n++) {
      const uint32 word = upper ? words.word[(n + 2) % 4] : words.word[n];
      if ((word & 0xffffu) < params.keep_from) scores.s[i][2 * n] = 0.f;
      if ((word >> 16) < params.keep_from) scores.s[i][2 * n + 1] = 0.f;
    }
  }
}

struct Traits {
  using Scalar = DTYPE;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr bool kSinks = kGiven<SINKS>, kDropout = DROPOUT;

  using Grid = LaneGrid<COLUMN_LANES>;
  using Scores = ScoreTile<Grid, THREAD_ROWS, PAIRS>;
  static constexpr int kRows = Scores::kRows;  // per thread
  using Probabilities = ProbabilityPanel<Scores, PANEL_KEYS>;
  static constexpr int kWarpRows = Scores::kWarpRows;
  static constexpr int kTileQ = WARPS * kWarpRows;
  // Of a tile of a block mask: at least 16 rows, which warps of 8 share.
  __device__ __forceinline__ static int part_of_warp() {
    constexpr int kWarpsOfPart = kWarpRows < 16 ? 16 / kWarpRows : 1;
    return kWarpsOfPart == 1 ? warp_index() : warp_index() / kWarpsOfPart;
  }
  static constexpr int kTileK = Scores::kTileK;

  using Slice = SliceShape<kTileQ, kTileK>;
  static constexpr int kChunks = div_up(kHeadDim, kQuadItems);
  static constexpr int kSlices = div_up(kChunks, Slice::kChunks);

  using Columns = OutputColumns<kHeadDimV, COLUMN_LANES>;
  static constexpr int kColumns = Columns::kItems;
  using Panel = PanelShape<PANEL_KEYS, kColumns, COLUMN_LANES>;
  static constexpr int kPanels = 2 * COLUMN_LANES / PANEL_KEYS;  // to a pair of each column lane

  using DenseLoader = ForwardLoader<Scalar, Scores, Slice, Panel, kHeadDim, kHeadDimV, kVec, kThreads>;
  using Softmax = ::Softmax<Scores, kColumns>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Pass = ScorePass<Options, BIAS_VEC, MASK_VEC>;
  // Outer products in one copy of the code: 8, and 4 wherever that spills less. 4 throughout was slower at D 64 and 128
  // (H200, 2026-11-20).
  static constexpr int kUnrolled = kColumns > 8 || Pass::kNeeded ? 4 : 8;

  static_assert(kHeadDim >= 1 && kHeadDim <= 512 && kHeadDimV >= 1 && kHeadDimV <= 512, "head dims are 1 to 512");
  static_assert(kThreads <= 1024, "a CTA has at most 1,024 threads");
};

struct Smem {
  union Buffer {
    unsigned char slice[Traits::Slice::kBytes];
    unsigned char panel[Traits::Panel::kBytes];
  };
  alignas(128) Buffer buffers[2];
  // For each warp, one pair of every lane.
  alignas(128) unsigned char p[WARPS][Traits::kPanels][Traits::Probabilities::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

static_assert(sizeof(Smem::Buffer) % 128 == 0, "both buffers begin at bank 0");

// A thread's registers in the loop.
template <typename Loader_>
struct Thread {
  using Loader = Loader_;

  Traits::Softmax softmax;
  Loader loader;
  int first_row;      // of the warp, in the sequence
  uint32 buffer_s;    // the buffer to compute
  uint32 q_at, k_at;  // where in a slice this thread's rows and keys begin
  uint32 p_s;         // its warp's P

  __device__ __forceinline__ uint32 other_buffer_s(const Smem& smem) const {
    return shared_address(&smem.buffers[0]) + shared_address(&smem.buffers[1]) - buffer_s;
  }
};

struct Cta {
  const Smem& smem;
  const AttentionParams& params;
  const KeyWindow& window;
  const Traits::Pass& pass;
  TileCoordinates coords;
};

// Scores to probabilities; m and l are kept right.
template <typename Thread>
__device__ __forceinline__ void softmax_tile(Traits::Scores& scores, Thread& thread, const Cta& cta, int first_key,
                                             bool masked, bool partial) {
  float scale_log2 = cta.params.scale_log2;
  const int first_row = not_hoisted(thread.first_row);
  if (masked) {
    cta.pass.template apply<true>(scores, first_row, first_key, partial);
    scores.mask([&](int row) { return cta.window.of_row(first_row + row); }, first_key);
    scale_log2 = kLog2E;
  } else if (Traits::Pass::kNeededInFull || scale_log2 <= 0.f) {  // the largest score is that of the largest product
    cta.pass.template apply<false>(scores, first_row, first_key, false);
    scale_log2 = kLog2E;
  }
  thread.softmax.exponentiate(scores, scale_log2);
  if (Traits::kDropout) drop(scores, cta.params.scores, cta.coords, thread.first_row, first_key);
}

// The other buffer has been filled: compute that one next.
template <typename Thread>
__device__ __forceinline__ void swap_buffers(Thread& thread, const Cta& cta) {
  __syncthreads();  // buffer: this one has been read, the other one written
  thread.buffer_s = thread.other_buffer_s(cta.smem);
}

// One key tile, whose first slice is in the present buffer. At the end it holds the first slice of the tile at
// next_key, if there is one. The loader looks up the tile after that one.
template <typename Thread>
__device__ __forceinline__ void key_tile(Thread& thread, const Cta& cta, int first_key, bool masked, uint32 state,
                                         bool more, int next_key, int key_after_next) {
  typename Thread::Loader& loader = thread.loader;
  bool active = thread.first_row < cta.coords.sq && state != kEmpty;
  if (masked) {  // a warp may see nothing
    const KeyRange top = cta.window.of_row(thread.first_row);
    const KeyRange bottom = cta.window.of_row(thread.first_row + Traits::kWarpRows - 1);
    active = active && first_key < bottom.end && first_key + Traits::kTileK > top.begin;
  }

  Traits::Scores scores;
  scores.clear();
#pragma unroll 1
  for (int slice = 0; slice < Traits::kSlices; slice++) {
    const bool last = slice + 1 == Traits::kSlices;
    if (last) {
      loader.fetch_panel(0, 0, first_key);
    } else {
      loader.fetch_slice(slice + 1, first_key);
    }
    if (active) {
      multiply_q_k<Traits::kUnrolled, Traits::Slice>(scores, thread.buffer_s + thread.q_at,
                                                     thread.buffer_s + thread.k_at,
                                                     Traits::kChunks - slice * Traits::Slice::kChunks);
    }
    if (last) {
      loader.store_panel(thread.other_buffer_s(cta.smem));
    } else {
      loader.store_slice(thread.other_buffer_s(cta.smem));
    }
    swap_buffers(thread, cta);
  }

  if (active) softmax_tile(scores, thread, cta, first_key, masked, masked && state != kFull);

  // Rolled into one copy of the code, it was slower at D 64 and at 256 (H200, 2026-11-20), and spilled.
#pragma unroll
  for (int pair = 0; pair < PAIRS; pair++) {
    if (active) Traits::Probabilities::store(scores, thread.p_s, pair);
    __syncwarp();  // p: written
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; panel++) {
      const bool next_panel = panel + 1 < Traits::kPanels, last = !next_panel && pair + 1 == PAIRS;
      if (!last) {
        loader.fetch_panel(next_panel ? pair : pair + 1, next_panel ? panel + 1 : 0, first_key);
      } else if (more) {
        loader.advance(key_after_next);
        loader.fetch_slice(0, next_key);
      }
      if (active) {
        multiply_p_v<Traits::kUnrolled, Traits::Scores, Traits::Panel, Traits::Columns>(
            thread.softmax.acc, thread.p_s + panel * Traits::Probabilities::kBytes, thread.buffer_s);
      }
      if (!last) {
        loader.store_panel(thread.other_buffer_s(cta.smem));
      } else if (more) {
        loader.store_slice(thread.other_buffer_s(cta.smem));
      }
      swap_buffers(thread, cta);  // p: read
    }
  }
}

using Arrays = ForwardArrays<Traits::Scalar>;

// The query rows of one CTA; `keys` makes the loader of a head from the rows of Q, `split` selects which of them are
// this CTA's.
template <typename Keys, typename Split = AllKeys>
__device__ __forceinline__ void attend(const AttentionParams& params, const Arrays& arrays,
                                       const TileCoordinates& coords, const KeyWindow& window, int64 q_offset,
                                       const Keys& keys, const Split& split = {}) {
  Smem& smem = dynamic_shared<Smem>();

  // Phase 1: the keys of the loop, and each thread's rows and keys.
  const int rows = min(Traits::kTileQ, coords.sq - coords.first_row);
  const auto loop =
      split.of(loop_over_keys<Traits::kTileQ, Traits::kTileK>(window, coords, rows, arrays.modifiers.blocks));
  if (!Split::kAll && loop.tiles() == 0) return;
  const Traits::Pass pass(params, arrays.bias_g, arrays.mask_g, arrays.slopes_g, coords, q_offset, arrays.modifiers);
  const Cta cta = {smem, params, window, pass, coords};

  const int row_lane = Traits::Grid::row_lane(), column_lane = Traits::Grid::column_lane();
  const int warp_row = warp_index() * Traits::kWarpRows;
  Thread<typename Keys::Loader> thread = {
      {},
      keys.loader(coords, window, query_row(arrays.q_g, params.q, coords, coords.first_row), rows),
      coords.first_row + warp_row,
      shared_address(&smem.buffers[0]),
      static_cast<uint32>(warp_row * sizeof(float) + row_lane * kQuadBytes),
      static_cast<uint32>(Traits::Slice::kKeysAt + column_lane * kQuadBytes),
      shared_address(&smem.p[warp_index()])};
  thread.softmax.clear();

  // Phase 2: the loop over the keys, masked tiles first.
  auto tile = loop.first, next = loop.after(tile);
  if (loop.tiles() > 0) {
    thread.loader.begin(tile * Traits::kTileK, next * Traits::kTileK);
    thread.loader.fetch_slice(0, tile * Traits::kTileK);
    thread.loader.store_slice(thread.buffer_s);
  }
  __syncthreads();  // buffer: the first slice has been written
#pragma unroll 1
  for (int done = 0; done < loop.tiles(); done++) {
    if (!Modifiers::kBlocks) next = loop.after(tile);  // carried along, it would take a register
    const auto after_next = loop.after(next);
    key_tile(thread, cta, tile * Traits::kTileK, done < loop.masked, state_of(tile, Traits::part_of_warp()),
             done + 1 < loop.tiles(), next * Traits::kTileK, after_next * Traits::kTileK);
    tile = next;
    next = after_next;
  }

  // Phase 3: normalise and store, or store sums.
  const OutputRows<Traits> result = {params, coords, thread.first_row};
  if constexpr (Split::kAll) {
    result.store(thread.softmax, sink_log2<SINKS>(arrays.sinks_g, params, coords.head), arrays.out_g, arrays.lse_g);
  } else {
    result.store_sums(thread.softmax, split);
  }
}
