// Attention forward with shared-memory tiles and the online softmax: the second step of the tour naive -> tiled ->
// flash.
//
//   s_ij = softmax_scale * q_i . k_j,   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// A tile of keys and values is brought to shared memory once for kTileQ query rows, and each row keeps the running
// maximum m and sum l of the online softmax (arXiv:1805.02867), so that one walk over the keys suffices:
// FlashAttention's algorithm (Dao et al., arXiv:2205.14135, algorithm 1) on ordinary float32 arithmetic.
//
// Shapes    AttentionParams (params.cuh). float16, bfloat16 or float32 in, float32 inside, one rounding at the store.
// Tiles     kTileQ = WARPS * ROWS query rows by 32 keys. A warp owns ROWS rows, alone: their m and l, and their part of
//           P, need no barrier of the CTA. In Q K^T a lane owns one key and ROWS scores; in P V it owns the columns
//           lane, lane + 32, ... of ROWS output rows. So each K or V word read from shared memory serves ROWS rows.
// Grid      B * H * ceil(Sq / kTileQ) CTAs of WARPS warps.
// Budget    shared memory: Q (kTileQ x D), one tile of K or V (32 x D, used in turn), P (kTileQ x 32), as float32;
//           registers: ROWS * (ceil(Dv / 32) accumulators + score + m + l).
// Edges     rows beyond Sq are zeros and not stored; keys beyond the sequence are zeros and masked;
//           tiles that no row of the CTA sees are not visited; a row without keys gives out = 0 and lse = -inf.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(WARPS) || !defined(ROWS) || \
    !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, WARPS, ROWS, VEC, MIN_CTAS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../../common/online_softmax.cuh"
#include "../../common/reduce.cuh"
#include "../../common/tile.cuh"
#include "../params.cuh"

struct Traits {
  using Scalar = DTYPE;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kRows = ROWS;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kTileQ = WARPS * kRows;
  static constexpr int kTileK = kWarpSize;  // one key per lane

  static constexpr int kPaddedDim = round_up(kHeadDim, kVec > 4 ? kVec : 4);  // Q K^T reads four columns at a time
  static constexpr int kOutColumns = div_up(kHeadDimV, kWarpSize);            // output columns per lane
  static constexpr int kPaddedDimV = kOutColumns * kWarpSize;

  using QTile = Tile<kTileQ, kHeadDim, kPaddedDim, kPaddedDim>;  // read by broadcast: no padding
  using KTile = Tile<kTileK, kHeadDim, kPaddedDim, conflict_free_stride(kPaddedDim)>;
  using VTile = Tile<kTileK, kHeadDimV, kPaddedDimV, kPaddedDimV>;
  static constexpr int kKeyValueItems = KTile::kItems > VTile::kItems ? KTile::kItems : VTile::kItems;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kVec == 1 || kVec * sizeof(Scalar) == kVectorBytes, "single items or 16 bytes");
  static_assert(kThreads <= 1024, "a CTA has at most 1,024 threads");
};

struct Smem {
  alignas(16) float q[Traits::QTile::kItems];
  alignas(16) float key_value[Traits::kKeyValueItems];  // K, then V, of the present key tile
  alignas(16) float p[Traits::kTileQ][Traits::kTileK];  // each warp writes and reads its own rows only
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

struct Row {
  KeyRange visible;
  OnlineSoftmax<Unit::kLog2> softmax;
  float acc[Traits::kOutColumns] = {};
};

// s[r] = q_r . k_lane, in units of log2, for the warp's rows.
__device__ __forceinline__ void score_tile(float (&s_log2)[Traits::kRows], const Smem& smem, float scale_log2) {
  const float* k_row_s = smem.key_value + lane_index() * Traits::KTile::kRowStride;
  const float* q_rows_s = smem.q + warp_index() * Traits::kRows * Traits::QTile::kRowStride;
#pragma unroll
  for (int r = 0; r < Traits::kRows; r++) s_log2[r] = 0.f;
#pragma unroll 4
  for (int d = 0; d < Traits::kPaddedDim; d += 4) {
    const float4 k = *reinterpret_cast<const float4*>(k_row_s + d);
#pragma unroll
    for (int r = 0; r < Traits::kRows; r++) {
      const float4 q = *reinterpret_cast<const float4*>(q_rows_s + r * Traits::QTile::kRowStride + d);
      s_log2[r] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
    }
  }
#pragma unroll
  for (int r = 0; r < Traits::kRows; r++) s_log2[r] *= scale_log2;
}

// Mask the scores of key `key`, fold them into each row's running softmax, and leave P in shared memory.
__device__ __forceinline__ void softmax_tile(Row (&rows)[Traits::kRows], const float (&s_log2)[Traits::kRows], int key,
                                             Smem& smem) {
#pragma unroll
  for (int r = 0; r < Traits::kRows; r++) {
    Row& row = rows[r];
    const float s = row.visible.contains(key) ? s_log2[r] : -kInfinity;
    const float shrink = row.softmax.raise(warp_reduce<Max>(s));
    const float p = row.softmax.weight(s);
    row.softmax.l += warp_reduce<Sum>(p);
#pragma unroll
    for (int c = 0; c < Traits::kOutColumns; c++) row.acc[c] *= shrink;
    smem.p[warp_index() * Traits::kRows + r][lane_index()] = p;
  }
}

// acc[r] += p_r V, four keys at a time.
__device__ __forceinline__ void accumulate_tile(Row (&rows)[Traits::kRows], const Smem& smem) {
#pragma unroll 2
  for (int j = 0; j < Traits::kTileK; j += 4) {
    float v[4][Traits::kOutColumns];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int c = 0; c < Traits::kOutColumns; c++) {
        v[i][c] = smem.key_value[(j + i) * Traits::VTile::kRowStride + c * kWarpSize + lane_index()];
      }
    }
#pragma unroll
    for (int r = 0; r < Traits::kRows; r++) {
      const float4 p = *reinterpret_cast<const float4*>(&smem.p[warp_index() * Traits::kRows + r][j]);
#pragma unroll
      for (int c = 0; c < Traits::kOutColumns; c++) {
        rows[r].acc[c] += p.x * v[0][c] + p.y * v[1][c] + p.z * v[2][c] + p.w * v[3][c];
      }
    }
  }
}

__device__ __forceinline__ void store_rows(const Row (&rows)[Traits::kRows], const Place& place, Traits::Scalar* out_g,
                                           float* lse_g, const AttentionParams& params) {
#pragma unroll
  for (int r = 0; r < Traits::kRows; r++) {
    const int i = place.first_row + warp_index() * Traits::kRows + r;
    if (i >= params.sq) return;
    const float normaliser = rows[r].softmax.normaliser();
    Traits::Scalar* out_row_g = head_rows(out_g, params.out, place.batch, place.head, i);
#pragma unroll
    for (int c = 0; c < Traits::kOutColumns; c++) {
      const int col = c * kWarpSize + lane_index();
      if (col < Traits::kHeadDimV) out_row_g[col] = from_float<Traits::Scalar>(rows[r].acc[c] * normaliser);
    }
    if (lse_g != nullptr && lane_index() == 0) {
      *head_rows(lse_g, params.lse, place.batch, place.head, i) = rows[r].softmax.lse();
    }
  }
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_tiled(const Traits::Scalar* q_g, const Traits::Scalar* k_g, const Traits::Scalar* v_g,
                    Traits::Scalar* out_g, float* lse_g, const void* q_offsets_g, const void* seqused_k_g,
                    const AttentionParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);

  // Phase 1: place, the keys that each row sees, and the keys that any row of the CTA sees. Both ends of a row's
  // range grow with its index, so the CTA's first and last row span them all.
  const Place place = place_of_cta(params, Traits::kTileQ);
  const KeyWindow window = sequence_window(params, q_offsets_g, seqused_k_g, place.batch);
  const int cta_rows = min(Traits::kTileQ, params.sq - place.first_row);
  const int begin = window.of_row(place.first_row).begin / Traits::kTileK * Traits::kTileK;
  const int end = window.of_row(place.first_row + cta_rows - 1).end;
  Row rows[Traits::kRows];
#pragma unroll
  for (int r = 0; r < Traits::kRows; r++) {
    rows[r].visible = window.of_row(place.first_row + warp_index() * Traits::kRows + r);
  }

  // Phase 2: the query rows.
  load_tile<Traits::QTile, Traits::kThreads, Traits::kVec>(
      smem.q, head_rows(q_g, params.q, place.batch, place.head, place.first_row), params.q.seq, cta_rows);

  // Phase 3: walk the key tiles.
  for (int first = begin; first < end; first += Traits::kTileK) {
    const int valid = window.keys - first;
    __syncthreads();  // key_value: the previous tile's V has been read
    load_tile<Traits::KTile, Traits::kThreads, Traits::kVec>(
        smem.key_value, head_rows(k_g, params.k, place.batch, place.kv_head, first), params.k.seq, valid);
    __syncthreads();  // key_value: K (and, the first time, q) has been written

    float s_log2[Traits::kRows];
    score_tile(s_log2, smem, params.scale_log2);
    softmax_tile(rows, s_log2, first + lane_index(), smem);

    __syncthreads();  // key_value: K has been read; p: written by each warp for itself
    load_tile<Traits::VTile, Traits::kThreads, Traits::kVec>(
        smem.key_value, head_rows(v_g, params.v, place.batch, place.kv_head, first), params.v.seq, valid);
    __syncthreads();  // key_value: V has been written
    accumulate_tile(rows, smem);
  }

  // Phase 4: normalise and store.
  store_rows(rows, place, out_g, lse_g, params);
}
