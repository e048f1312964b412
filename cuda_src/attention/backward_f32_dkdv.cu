// Attention backward for float32 and bfloat16: the gradients of keys and values, in float32 arithmetic throughout.
//
//   dv_j = sum_i p_ij dout_i,   dk_j = softmax_scale * sum_i ds_ij q_i      (float_gradient.cuh)
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous.
// Tiles     TILE_K keys, which the CTA owns, by TILE_Q queries. All four products, S and dP over the head dims, dV and
//           dK over the queries, are outer products from shared memory (register_products.cuh), staged kDepth at a
//           time; a thread keeps its blocks of dK and dV in registers through the walk.
// Grid      B * G * ceil(Sk / TILE_K) CTAs of 128 threads; each walks the queries of all heads of its group that see
//           one of its keys. No atomics: the same result from run to run.
// Budget    shared memory: one stage, and P or dS (TILE_Q x TILE_K floats); registers: dK, dV, S and dP, a 128th each.
// Edges     rows beyond the arrays are zeros and not stored; keys that no query sees give zeros. dbias, if given, has
//           every score's place: it is written here, where the score is seen.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILE_Q) || !defined(TILE_K) || \
    !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES) || !defined(ONE_PASS) || !defined(DBIAS)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, TILE_Q, TILE_K, VEC, MIN_CTAS, SHARED_BYTES, ONE_PASS, DBIAS come from a launch-configuration table"
#endif
#include "float_gradient.cuh"

struct Traits : FloatTraits {
  using QRows = RowStage<Scalar, kPaddedDim, kVec>;
  using DoutRows = RowStage<Scalar, kPaddedDimV, kVec>;
  // dQ beside dK and dV: as many of its columns at a time as there are registers for.
  static constexpr int kDqColumns = kPaddedDim < 128 ? kPaddedDim : 128;
  using KRows = RowStage<Scalar, kDqColumns, kVec>;
  static constexpr int kRowFloats = QRows::kFloats > DoutRows::kFloats ? QRows::kFloats : DoutRows::kFloats;
  static constexpr int kStageFloats = kSliceFloats > kRowFloats ? kSliceFloats : kRowFloats;
};

struct Smem {
  alignas(16) float stage[Traits::kStageFloats];
  alignas(16) float weights[Traits::kTileQ * Traits::kTileK];  // P by query, dS by query, dS by key
  TileSums sums;
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

template <typename Dbias>
__device__ __forceinline__ void write_dbias(void* dbias_g, float ds, int batch, int head, int row, int key,
                                            const BackwardParams& params) {
  if constexpr (kGiven<Dbias>) {
    const ScoreStrides& to = params.dbias;
    Dbias* items_g = static_cast<Dbias*>(dbias_g);
    store_gradient(items_g + batch * to.batch + head * to.head + row * to.row + key * to.key, ds, params);
  }
}

// dQ += softmax_scale * dS K for the tile, whose dS lies by key in shared memory: other CTAs add their keys' parts.
__device__ __forceinline__ void add_dq(Smem& smem, float* dq_rows_g, int rows, const Traits::Scalar* k_rows_g, int keys,
                                       const BackwardParams& params) {
#pragma unroll 1
  for (int first_col = 0; first_col < Traits::kHeadDim; first_col += Traits::kDqColumns) {
    Product<Traits::kTileQ, Traits::kDqColumns> dq;
    dq.clear();
    multiply_rows<Traits::kTileK, Traits::kTileQ, Traits::KRows>(
        dq, smem.stage, smem.weights, k_rows_g + first_col, params.attention.k.seq, keys, Traits::kHeadDim - first_col);
    dq.for_each(rows, Traits::kHeadDim - first_col, [&](float x, int row, int col) {
      red_global_add(dq_rows_g + row * params.dq.seq + first_col + col, params.scale * x);
    });
  }
}

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS)
    attention_backward_f32_dkdv(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                                const Traits::Scalar* v_g, const float* lse_g, const float* delta_g,
                                const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                const void* mask_g, const void* slopes_g, float* dq_g, Traits::Scalar* dk_g,
                                Traits::Scalar* dv_g, void* dbias_g, const BackwardParams params) {
  __shared__ Smem smem;
  const AttentionParams& forward = params.attention;

  // Phase 1: the keys, and the queries that see any of them: both ends of their range grow with the key.
  const KeyPlace place(forward, Traits::kTileK);
  const int batch = place.batch, kv_head = place.kv_head, first_key = place.first_key;
  const int64 q_offset = query_offset(forward, q_offsets_g, batch);
  const KeyWindow window = sequence_window(forward, q_offsets_g, seqused_k_g, batch);
  const int keys = min(Traits::kTileK, window.keys - first_key);
  const int begin = window.rows_of(first_key, forward.sq).begin;
  const int end = window.rows_of(first_key + max(keys, 1) - 1, forward.sq).end;
  const Traits::Scalar* k_rows_g = head_rows(k_g, forward.k, batch, kv_head, first_key);
  const Traits::Scalar* v_rows_g = head_rows(v_g, forward.v, batch, kv_head, first_key);

  // Phase 2: head by head, one tile of queries after the other.
  Product<Traits::kTileK, Traits::kPaddedDim> dk;
  Product<Traits::kTileK, Traits::kPaddedDimV> dv;
  dk.clear();
  dv.clear();
#pragma unroll 1
  for (int head = kv_head * forward.group; head < (kv_head + 1) * forward.group; head++) {
    const Traits::Options options(forward, bias_g, mask_g, slopes_g, Place{batch, head, kv_head, 0}, q_offset);
    const HeadScores head_scores = {params, window, options, head_rows(lse_g, forward.lse, batch, head, 0),
                                    delta_g + (static_cast<int64>(batch) * forward.heads + head) * forward.sq};
#pragma unroll 1
    for (int first_row = begin; first_row < end; first_row += Traits::kTileQ) {
      const int rows = min(Traits::kTileQ, end - first_row);
      const Traits::Scalar* q_rows_g = head_rows(q_g, forward.q, batch, head, first_row);
      const Traits::Scalar* dout_rows_g = head_rows(dout_g, params.dout, batch, head, first_row);
      FloatScores s, dp;
      const float sum = head_scores.fetch_sum(first_row);
      multiply_columns<Traits::kHeadDim, Traits::QStage, Traits::KStage>(s, smem.stage, q_rows_g, forward.q.seq, rows,
                                                                         k_rows_g, forward.k.seq, keys);
      HeadScores::store_sum(smem.sums, sum);
      multiply_columns<Traits::kHeadDimV, Traits::DoutStage, Traits::VStage>(
          dp, smem.stage, dout_rows_g, params.dout.seq, rows, v_rows_g, forward.v.seq, keys);
      head_scores.turn_to_gradients(s, dp, smem.sums, first_row, first_key, [&](float ds, int row, int key) {
        write_dbias<DBIAS>(dbias_g, ds, batch, head, row, key, params);
      });

      s.store_by_row(smem.weights);
      multiply_rows<Traits::kTileQ, Traits::kTileK, Traits::DoutRows>(dv, smem.stage, smem.weights, dout_rows_g,
                                                                      params.dout.seq, rows, Traits::kHeadDimV);
      __syncthreads();  // weights: P has been read
      dp.store_by_row(smem.weights);
      multiply_rows<Traits::kTileQ, Traits::kTileK, Traits::QRows>(dk, smem.stage, smem.weights, q_rows_g,
                                                                   forward.q.seq, rows, Traits::kHeadDim);
      if (ONE_PASS) {
        __syncthreads();  // weights: dS has been read
        dp.store_by_key(smem.weights);
        add_dq(smem, head_rows(dq_g, params.dq, batch, head, first_row), rows, k_rows_g, keys, params);
      }
    }
  }

  // Phase 3: scale and store.
  const int stored = forward.sk - first_key;
  store_product<Traits::kHeadDim>(dk, head_rows(dk_g, params.dk, batch, kv_head, first_key), params.dk.seq, stored,
                                  params.scale, params);
  store_product<Traits::kHeadDimV>(dv, head_rows(dv_g, params.dv, batch, kv_head, first_key), params.dv.seq, stored,
                                   1.f, params);
}
