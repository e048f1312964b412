// Attention backward in float32 arithmetic throughout, of every dtype: the gradients of keys and values, and with
// ONE_PASS of queries as well.
//
//   dv_j = sum_i p_ij dout_i,   dk_j = softmax_scale * sum_i ds_ij q_i,   dq_i = softmax_scale * sum_j ds_ij k_j
//
// (score_gradient.cuh). dQ sums over all keys, which other CTAs own: ONE_PASS adds each tile's part to dq itself by
// float32 atomics, in an order that differs from run to run, and spends five products; with attention_backward_f32_dq
// they are seven.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); delta
//           float32, (B, H, Sq), contiguous, or (H, rows) for one packed sequence after the other.
//           ONE_PASS: dq is float32, and zero or what is added to; of other dtypes it is scratch memory.
// Tiles     TILE_K keys, which the CTA owns, by TILE_Q queries. All products, S and dP over the head dims, dV and dK
//           over the queries, dQ over the keys, are outer products from shared memory (backward_products.cuh), a step
//           at a time (backward_loader.cuh); a thread keeps its blocks of dK and dV in registers through the loop.
//           Where these do not fit, the CTA loops over the queries COLUMN_PARTS times, each time for a part of the
//           columns of dK, dV and dQ; S and dP are then computed as often.
// Grid      B * G * ceil(Sk / TILE_K) CTAs of 128 threads; each loops over the queries of all heads of its group that
//           see one of its keys.
// Budget    shared memory: two buffers, and P or dS, or a part of it; registers: dK and dV, and S and dP or, for 128
//           columns at a time, dQ: a 128th each.
// Barriers  one a step, one for each part of P or dS, and one before P.
// Edges     rows beyond the arrays are zeros and not stored; keys that no query sees give zeros. dbias, if given, has
//           every score's place: it is written here, where the score is seen.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILE_Q) || !defined(TILE_K) ||        \
    !defined(THREAD_ROWS) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES) || !defined(ONE_PASS) || \
    !defined(DBIAS) || !defined(COLUMN_PARTS)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, TILE_Q, TILE_K, THREAD_ROWS, VEC, MIN_CTAS, SHARED_BYTES, ONE_PASS, DBIAS, COLUMN_PARTS come from a launch-configuration table"
#endif
#include "../backward_sequences.cuh"
#include "score_gradient.cuh"

struct Traits : BackwardTraits {
  // Columns of dK, dQ and dV at a time, with what is added to the last part.
  static constexpr int kParts = COLUMN_PARTS;
  static constexpr int kPartDim = kParts == 1 ? kPaddedDim : padded(div_up(kHeadDim, kParts));
  static constexpr int kPartDimV = kParts == 1 ? kPaddedDimV : padded(div_up(kHeadDimV, kParts));
  static constexpr int kMostCols = kParts == 1 ? kHeadDim : kPartDim;  // of D, in a part
  // dQ in addition to dK and dV: as many of its columns at a time as there are registers for.
  static constexpr int kDqColumns = kPartDim < 128 ? kPartDim : 128;
  using QPanels = RowPanels<Scalar, kTileQ, kPartDim, kVec>;
  using DoutPanels = RowPanels<Scalar, kTileQ, kPartDimV, kVec>;
  using KPanels = RowPanels<Scalar, kTileK, kDqColumns, kVec>;
};

struct Smem {
  alignas(128) float buffers[2][kBufferFloats];
  union {
    TileSums sums;
    alignas(128) float weights[Traits::kWeightFloats];  // P by query, dS by query, dS by key
  };
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// The CTA's buffers.
__device__ __forceinline__ Smem& shared_memory() {
  __shared__ Smem smem;
  return smem;
}

// A tile of queries of one head; no rows after the last tile.
struct QueryTile {
  int head, first_row, rows;
};

// The tiles that see some of a CTA's keys, head by head of its group.
struct GroupLoop {
  int first_head, heads, begin, end;  // heads of the group, and the rows of each

  __device__ __forceinline__ QueryTile first() const { return at(first_head, begin); }
  __device__ __forceinline__ QueryTile after(const QueryTile& tile) const {
    const int row = tile.first_row + Traits::kTileQ;
    const bool last = tile.head + 1 == first_head + heads;
    return row < end || last ? at(tile.head, row) : at(tile.head + 1, begin);
  }
  __device__ __forceinline__ static bool partial(const QueryTile&) { return true; }

 private:
  __device__ __forceinline__ QueryTile at(int head, int first_row) const {
    return {head, first_row, min(Traits::kTileQ, end - first_row)};
  }
};

// The tiles that a block mask leaves.
struct BlockGroupLoop {
  struct Tile : QueryTile {
    uint32 states;
  };

  BlockQueryLoop<Traits::kTileQ> blocks;
  int sq;

  __device__ __forceinline__ Tile first() { return take(); }
  __device__ __forceinline__ Tile after(const Tile&) { return take(); }
  __device__ __forceinline__ static bool partial(const Tile& tile) { return tile.states != kFull; }

 private:
  __device__ __forceinline__ Tile take() {
    blocks.next_run();
    const auto tile = blocks.take();
    const int first_row = tile.tile * Traits::kTileQ;
    const int rows = tile.head < blocks.end_head ? min(Traits::kTileQ, sq - first_row) : 0;
    return {{tile.head, first_row, rows}, tile.states};
  }
};

__device__ __forceinline__ GroupLoop group_loop(const AttentionParams& params, const KeyWindow& window,
                                                const KeyTileCoordinates& coords, NoBlocks) {
  // Both ends of the range of queries that see a key grow with the key.
  const int keys = min(Traits::kTileK, window.keys - coords.first_key);
  const int begin = window.rows_of(coords.first_key, params.sq).begin;
  const int end = window.rows_of(coords.first_key + max(keys, 1) - 1, params.sq).end;
  return {coords.kv_head * params.group, params.group, begin, end};
}
__device__ __forceinline__ BlockGroupLoop group_loop(const AttentionParams& params, const KeyWindow& window,
                                                     const KeyTileCoordinates& coords, const BlockLists& lists) {
  return {loop_over_queries<Traits::kTileQ>(params, window, coords, Traits::kTileK, lists), params.sq};
}

template <typename Dbias>
__device__ __forceinline__ void write_dbias(void* dbias_g, float ds, int batch, int head, int row, int key,
                                            const BackwardParams& params) {
  if constexpr (kGiven<Dbias>) {
    const ScoreStrides& to = params.dbias;
    Dbias* items_g = static_cast<Dbias*>(dbias_g);
    store_gradient(items_g + batch * to.batch + head * to.head + row * to.row + key * to.key, ds, params);
  }
}

// Rows from column `first` on.
__device__ __forceinline__ Rows<Traits::Scalar> from_column(const Rows<Traits::Scalar>& rows, int first) {
  return {rows.first_g + first, rows.stride, rows.rows};
}

// Columns from kFirst on, as many as dQ takes at a time. `k` begins at the first column of the part.
template <int kFirst>
__device__ __forceinline__ Traits::KPanels k_panels(const Rows<Traits::Scalar>& k, int cols) {
  return {from_column(k, kFirst), cols - kFirst};
}

// dQ += softmax_scale * dS K for the tile, from column kFirst of the part on, which has `cols`; the present buffer has
// the first of these columns of K. Other CTAs add their keys' parts.
template <int kFirst = 0, typename Next>
__device__ __forceinline__ void add_dq(Buffers& buffers, uint32 weights_s, const ScoreTile& ds, float* dq_rows_g,
                                       const Rows<Traits::Scalar>& k, int cols, int rows, const BackwardParams& params,
                                       const Next& next) {
  constexpr int kNextFirst = kFirst + Traits::kDqColumns;
  const Traits::KPanels panels = k_panels<kFirst>(k, cols);
  const auto write_ds = [&](int part) { ds.store_by_column<Traits::kPartK>(weights_s, part); };
  Product<Traits::kTileQ, Traits::kDqColumns> dq;
  dq.clear();
  if constexpr (kNextFirst < Traits::kMostCols) {
    multiply_rows<Traits::kPartK>(dq, buffers, weights_s, panels, k_panels<kNextFirst>(k, cols), write_ds);
  } else {
    multiply_rows<Traits::kPartK>(dq, buffers, weights_s, panels, next, write_ds);
  }
  dq.for_each(rows, cols - kFirst, [&](float x, int row, int col) {
    red_global_add(dq_rows_g + row * params.dq.seq + kFirst + col, params.scale * x);
  });
  if constexpr (kNextFirst < Traits::kMostCols) {
    add_dq<kNextFirst>(buffers, weights_s, ds, dq_rows_g, k, cols, rows, params, next);
  }
}

// The CTA's arrays. Rows of delta follow one another from head to head.
struct Arrays {
  const Traits::Scalar *dout_g, *q_g, *k_g, *v_g;
  const float *lse_g, *delta_g;
  const void *bias_g, *mask_g, *slopes_g;
  float* dq_g;
  Traits::Scalar *dk_g, *dv_g;
  void* dbias_g;
  Modifiers modifiers;
};

// The keys of one CTA, and part `part` of the columns.
__device__ __forceinline__ void add_up_gradients(const BackwardParams& params, const Arrays& arrays,
                                                 const KeyTileCoordinates& coords, const KeyWindow& window,
                                                 int64 q_offset, int part) {
  Smem& smem = shared_memory();
  const AttentionParams& forward = params.attention;

  // Phase 1: the keys, the queries that see any of them, and the columns.
  const int col = part * Traits::kPartDim, col_v = part * Traits::kPartDimV;
  const int cols = min(Traits::kHeadDim - col, Traits::kMostCols);
  const int cols_v = Traits::kHeadDimV - col_v;
  const int batch = coords.batch, kv_head = coords.kv_head, first_key = coords.first_key;
  const int keys = min(Traits::kTileK, window.keys - first_key);
  auto loop = group_loop(forward, window, coords, arrays.modifiers.blocks);
  const Rows<Traits::Scalar> k = {head_rows(arrays.k_g, forward.k, batch, kv_head, first_key), forward.k.seq, keys};
  const Rows<Traits::Scalar> v = {head_rows(arrays.v_g, forward.v, batch, kv_head, first_key), forward.v.seq, keys};
  const auto q_of = [&](const QueryTile& at) -> Rows<Traits::Scalar> {
    return {head_rows(arrays.q_g, forward.q, batch, at.head, at.first_row), forward.q.seq, at.rows};
  };

  // Phase 2: one tile of queries after the other.
  Product<Traits::kTileK, Traits::kPartDim> dk;
  Product<Traits::kTileK, Traits::kPartDimV> dv;
  dk.clear();
  dv.clear();
  Buffers buffers(smem.buffers);
  const uint32 weights_s = shared_address(smem.weights);
  auto tile = loop.first();
  if (tile.rows > 0) buffers.begin(Traits::QKSlices{{q_of(tile)}, {k}});
#pragma unroll 1
  while (tile.rows > 0) {
    const int head = tile.head, first_row = tile.first_row;
    const auto next_tile = loop.after(tile);
    const Rows<Traits::Scalar> q = q_of(tile);
    const Rows<Traits::Scalar> dout = {head_rows(arrays.dout_g, params.dout, batch, head, first_row), params.dout.seq,
                                       tile.rows};
    const Traits::DoutVSlices dout_v = {{dout}, {v}};
    const Traits::DoutPanels dout_panels = {from_column(dout, col_v), cols_v};
    const Traits::QPanels q_panels = {from_column(q, col), cols};
    const Traits::QKSlices next = {{q_of(next_tile)}, {k}};
    const Traits::Pass pass(forward, arrays.bias_g, arrays.mask_g, arrays.slopes_g,
                            TileCoordinates{batch, head, kv_head, 0, forward.sq, forward.sk}, q_offset,
                            arrays.modifiers);
    const HeadScores head_scores = {
        params, window, pass, head_rows(arrays.lse_g, forward.lse, batch, head, 0),
        arrays.delta_g + (static_cast<int64>(coords.scratch_batch) * forward.heads + head) * forward.sq};

    ScoreTile s, dp;
    const float2 sums = head_scores.fetch_sums(first_row);
    multiply_columns<Traits::kHeadDim>(s, buffers, Traits::QKSlices{{q}, {k}}, dout_v);
    HeadScores::store_sums(smem.sums, sums);
    multiply_columns<Traits::kHeadDimV>(dp, buffers, dout_v, dout_panels);
    head_scores.turn_to_gradients(s, dp, smem.sums, first_row, first_key, loop.partial(tile),
                                  [&](float ds, int row, int key) {
                                    if (part == 0)
                                      write_dbias<DBIAS>(arrays.dbias_g, ds, batch, head, row, key, params);
                                  });

    __syncthreads();  // weights: the sums have been read
    multiply_rows<Traits::kPartQ>(dv, buffers, weights_s, dout_panels, q_panels,
                                  [&](int part) { s.store_by_row<Traits::kPartQ>(weights_s, part); });
    const auto write_ds = [&](int part) { dp.store_by_row<Traits::kPartQ>(weights_s, part); };
    if constexpr (ONE_PASS) {
      multiply_rows<Traits::kPartQ>(dk, buffers, weights_s, q_panels, k_panels<0>(from_column(k, col), cols), write_ds);
      float* dq_rows_g = head_rows(arrays.dq_g, params.dq, batch, head, first_row) + col;
      add_dq(buffers, weights_s, dp, dq_rows_g, from_column(k, col), cols, tile.rows, params, next);
    } else {
      multiply_rows<Traits::kPartQ>(dk, buffers, weights_s, q_panels, next, write_ds);
    }
    tile = next_tile;
  }

  // Phase 3: scale and store.
  const int stored = forward.sk - first_key;
  store_product(dk, head_rows(arrays.dk_g, params.dk, batch, kv_head, first_key) + col, params.dk.seq, stored, cols,
                params.scale, params);
  store_product(dv, head_rows(arrays.dv_g, params.dv, batch, kv_head, first_key) + col_v, params.dv.seq, stored, cols_v,
                1.f, params);
}

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS) ENTRY(attention_backward_f32_dkdv)(
    const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g, const Traits::Scalar* v_g,
    const float* lse_g, const float* delta_g PACKED_ARRAYS, const void* q_offsets_g, const void* seqused_k_g,
    const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, float* dq_g, Traits::Scalar* dk_g,
    Traits::Scalar* dv_g, void* dbias_g, const GradientParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaKeys<Traits::kTileK, Traits::kTileQ> own(sequences, modifiers.blocks, shared_memory());
  if (!own.exist()) return;
  const AttentionParams& longest = sequences.attention;
  const auto& backward = params_of(params, own.queries(), own.keys());
  const RowSpan queries = own.queries(), keys = own.keys();
  const Arrays arrays = {rows_from(dout_g, backward.dout, queries),
                         rows_from(q_g, longest.q, queries),
                         rows_from(k_g, longest.k, keys),
                         rows_from(v_g, longest.v, keys),
                         rows_from(lse_g, longest.lse, queries),
                         delta_g + static_cast<int64>(queries.begin) * longest.heads,
                         bias_g,
                         mask_g,
                         slopes_g,
                         rows_from(dq_g, backward.dq, queries),
                         rows_from(dk_g, backward.dk, keys),
                         rows_from(dv_g, backward.dv, keys),
                         dbias_g,
                         modifiers};
  if constexpr (Traits::kParts == 1) {
    add_up_gradients(backward, arrays, own.coords(), own.window(), own.q_offset(), 0);
  } else {
#pragma unroll 1
    for (int part = 0; part < Traits::kParts; part++) {
      add_up_gradients(backward, arrays, own.coords(), own.window(), own.q_offset(), part);
    }
  }
}
