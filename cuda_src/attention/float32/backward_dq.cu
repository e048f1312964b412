// Attention backward in float32 arithmetic throughout, of every dtype: the gradient of the queries.
//
//   dq_i = softmax_scale * sum_j ds_ij k_j      (score_gradient.cuh)
//
// The same bits from run to run, where attention_backward_f32_dkdv with ONE_PASS adds atomically.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); delta
//           float32, (B, H, Sq), contiguous, or (H, rows) for one packed sequence after the other.
// Tiles     TILE_Q queries, which the CTA owns, by TILE_K keys; products as in backward_dkdv.cu.
// Grid      B * H * ceil(Sq / TILE_Q) CTAs of 128 threads; under causal order the longest rows start first.
// Budget    shared memory: two buffers, and dS, or a part of it; registers: dQ, S and dP, a 128th each.
// Edges     rows beyond the arrays are zeros and not stored; a row without keys gives dq = 0.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILE_Q) || !defined(TILE_K) || \
    !defined(THREAD_ROWS) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, TILE_Q, TILE_K, THREAD_ROWS, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#include "../backward_sequences.cuh"
#include "score_gradient.cuh"

struct Traits : BackwardTraits {
  // A step of 4 keys above head dim 256: whole passes are 128 columns.
  static constexpr int kColumns = kPaddedDim > 256 ? round_up(kPaddedDim, 128) : kPaddedDim;
  using KPanels = RowPanels<Scalar, kTileK, kColumns, kVec>;
};

struct Smem {
  alignas(128) float buffers[2][kBufferFloats];
  union {
    TileSums sums;
    alignas(128) float ds[Traits::kWeightFloats];  // by key
  };
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// The CTA's buffers.
__device__ __forceinline__ Smem& shared_memory() {
  __shared__ Smem smem;
  return smem;
}

// The tiles of keys that a CTA's rows see, by their first keys from `begin` to `end`: each that it has to look at,
struct KeySteps {
  int begin;

  __device__ __forceinline__ int first() const { return begin; }
  __device__ __forceinline__ int after(int key) const { return key + Traits::kTileK; }
  __device__ __forceinline__ static int key_of(int key) { return key; }
  __device__ __forceinline__ static bool partial(int) { return true; }
};
// or what a block mask leaves of them.
struct BlockKeySteps {
  BlockKeyLoop<Traits::kTileQ, Traits::kTileK> loop;

  __device__ __forceinline__ BlockTile first() const { return loop.first; }
  __device__ __forceinline__ BlockTile after(const BlockTile& tile) const { return loop.after(tile); }
  __device__ __forceinline__ int key_of(const BlockTile& tile) const {
    return tile.number < loop.tiles() ? tile * Traits::kTileK : kFar;
  }
  __device__ __forceinline__ static bool partial(const BlockTile& tile) { return tile.state(0) != kFull; }
};
__device__ __forceinline__ KeySteps key_steps(const KeyWindow&, const TileCoordinates&, int, int begin, NoBlocks) {
  return {begin};
}
__device__ __forceinline__ BlockKeySteps key_steps(const KeyWindow& window, const TileCoordinates& coords, int rows,
                                                   int, const BlockLists& lists) {
  return {loop_over_keys<Traits::kTileQ, Traits::kTileK>(window, coords, rows, lists)};
}

// The CTA's arrays. Rows of delta follow one another from head to head.
struct Arrays {
  const Traits::Scalar *dout_g, *q_g, *k_g, *v_g;
  const float *lse_g, *delta_g;
  const void *bias_g, *mask_g, *slopes_g;
  Traits::Scalar* dq_g;
  Modifiers modifiers;
};

// dQ of the query rows of one CTA. `q_offset()` is the key position of query 0, `scratch_batch` is the sequence's
// number in scratch memory.
template <typename Offset>
__device__ __forceinline__ void add_up_dq(const BackwardParams& params, const Arrays& arrays,
                                          const TileCoordinates& coords, const KeyWindow& window, Offset q_offset,
                                          int scratch_batch) {
  Smem& smem = shared_memory();
  const AttentionParams& forward = params.attention;

  // Phase 1: the rows, and the keys that any of them sees.
  const int batch = coords.batch, head = coords.head, first_row = coords.first_row;
  const int rows = min(Traits::kTileQ, forward.sq - first_row);
  const int begin = window.of_row(first_row).begin / Traits::kTileK * Traits::kTileK;
  const int end = window.of_row(first_row + rows - 1).end;
  const Rows<Traits::Scalar> q = {head_rows(arrays.q_g, forward.q, batch, head, first_row), forward.q.seq, rows};
  const Rows<Traits::Scalar> dout = {head_rows(arrays.dout_g, params.dout, batch, head, first_row), params.dout.seq,
                                     rows};
  const Traits::Pass pass(forward, arrays.bias_g, arrays.mask_g, arrays.slopes_g, coords, q_offset(), arrays.modifiers);
  const HeadScores head_scores = {
      params, window, pass, head_rows(arrays.lse_g, forward.lse, batch, head, 0),
      arrays.delta_g + (static_cast<int64>(scratch_batch) * forward.heads + head) * forward.sq};

  const auto k_of = [&](int key) -> Rows<Traits::Scalar> {
    return {head_rows(arrays.k_g, forward.k, batch, coords.kv_head, key), forward.k.seq,
            min(Traits::kTileK, end - key)};
  };

  // Phase 2: one tile of keys after the other.
  Product<Traits::kTileQ, Traits::kColumns> dq;
  dq.clear();
  Buffers buffers(smem.buffers);
  const uint32 ds_s = shared_address(smem.ds);
  const auto steps =
      key_steps(window, TileCoordinates{batch, head, 0, first_row}, rows, begin, arrays.modifiers.blocks);
  auto tile = steps.first();
  int first_key = steps.key_of(tile);
  if (first_key < end) buffers.begin(Traits::QKSlices{{q}, {k_of(first_key)}});
#pragma unroll 1
  while (first_key < end) {
    const auto next_tile = steps.after(tile);
    const int next_key = steps.key_of(next_tile);
    const Rows<Traits::Scalar> k = k_of(first_key);
    const Rows<Traits::Scalar> v = {head_rows(arrays.v_g, forward.v, batch, coords.kv_head, first_key), forward.v.seq,
                                    k.rows};
    const Traits::DoutVSlices dout_v = {{dout}, {v}};
    const Traits::KPanels k_panels = {k, Traits::kHeadDim};
    const Traits::QKSlices next = {{q}, {k_of(next_key)}};

    ScoreTile s, dp;
    const float2 sums = head_scores.fetch_sums(not_hoisted(first_row));
    multiply_columns<Traits::kHeadDim>(s, buffers, Traits::QKSlices{{q}, {k}}, dout_v);
    HeadScores::store_sums(smem.sums, sums);
    multiply_columns<Traits::kHeadDimV>(dp, buffers, dout_v, k_panels);
    head_scores.turn_to_gradients(s, dp, smem.sums, first_row, first_key, steps.partial(tile), [](float, int, int) {});

    __syncthreads();  // ds: the sums have been read
    multiply_rows<Traits::kPartK>(dq, buffers, ds_s, k_panels, next,
                                  [&](int part) { dp.store_by_column<Traits::kPartK>(ds_s, part); });
    tile = next_tile;
    first_key = next_key;
  }

  // Phase 3: scale and store.
  store_product(dq, head_rows(arrays.dq_g, params.dq, batch, head, first_row), params.dq.seq, rows, Traits::kHeadDim,
                params.scale, params);
}

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS)
    ENTRY(attention_backward_f32_dq)(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                                     const Traits::Scalar* v_g, const float* lse_g, const float* delta_g PACKED_ARRAYS,
                                     const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                     const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, Traits::Scalar* dq_g,
                                     const GradientParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaQueries<Traits::kTileQ, Traits::kTileK> own(sequences, modifiers.blocks, shared_memory());
  if (!own.exist()) return;
  const AttentionParams& longest = sequences.attention;
  const TileCoordinates coords = own.coords();
  const auto& backward = params_of(params, own.queries(), own.keys());
  const RowSpan queries = own.queries(), keys = own.keys();
  add_up_dq(
      backward,
      {rows_from(dout_g, backward.dout, queries), rows_from(q_g, longest.q, queries), rows_from(k_g, longest.k, keys),
       rows_from(v_g, longest.v, keys), rows_from(lse_g, longest.lse, queries),
       delta_g + static_cast<int64>(queries.begin) * longest.heads, bias_g, mask_g, slopes_g,
       rows_from(dq_g, backward.dq, queries), modifiers},
      coords, own.window(), [&] { return own.q_offset(); }, ScratchBatch(queries, coords.batch).batch);
}
