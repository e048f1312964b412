// Attention forward with shared-memory tiles and the online softmax: step two of the tour naive -> tiled -> flash.
//
//   s_ij = softmax_scale * q_i . k_j,   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// FlashAttention's algorithm (Dao et al., arXiv:2205.14135, algorithm 1) in ordinary float32 arithmetic. A tile of keys
// and values is loaded into shared memory once for kTileQ query rows. Each row keeps the running maximum m and sum l
// of the online softmax (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3), so each score is computed once.
//
// Shapes    q (B, Sq, H, D), k (B, Sk, G, D), v (B, Sk, G, Dv), out (B, Sq, H, Dv), lse (B, H, Sq). The last axis of q,
//           k, v and out is contiguous; other axes have any stride. Query head h reads key-value head h / (H / G).
//           float16, bfloat16 or float32 items, float32 arithmetic; the result is rounded once, at the store.
// Tiles     kTileQ = WARPS * ROWS query rows by 32 keys. A warp owns ROWS rows alone: their m, l and part of P need no
//           barrier of the CTA. For Q K^T a lane owns one key and ROWS scores. For P V it owns the columns lane,
//           lane + 32, ... of ROWS output rows. Each word of K or V that is read from shared memory serves ROWS rows.
// Grid      B * H * ceil(Sq / kTileQ) CTAs of WARPS warps.
// Budget    shared memory: Q (kTileQ x D), P (kTileQ x 32), a tile of K or V (32 x D), as float32; 121 to 153 registers
// Barriers  before and after each tile of K, and of V, is written.
// Edges     rows beyond Sq are zeros and are not stored; keys beyond Sk are zeros and masked. Tiles that no row of the
//           CTA sees are not visited. A row without keys has out = 0 and lse = -inf. lse_g may be null.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(WARPS) || !defined(ROWS) || \
    !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, WARPS, ROWS, MIN_CTAS and SHARED_BYTES come from a launch-configuration table"
#endif
#include <cuda_fp16.h>
#ifdef BFLOAT16  // only where DTYPE is bfloat16: the header takes as long to compile as this file
#include <cuda_bf16.h>
using bfloat16 = __nv_bfloat16;
#endif
using float16 = __half;
using float32 = float;
using Item = DTYPE;

constexpr int kThreads = WARPS * 32, kTileQ = WARPS * ROWS, kTileK = 32;
constexpr int kDim = (HEAD_DIM + 3) / 4 * 4;           // of Q, padded by zeros: Q K^T reads four columns at a time
constexpr int kKDim = kDim / 4 % 2 ? kDim : kDim + 4;  // of K: 8 lanes, each in its own row, meet 32 different banks
constexpr int kColumns = (HEAD_DIM_V + 31) / 32, kDimV = kColumns * 32;  // output columns of a lane; of V, padded
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u), kLowest = -3.402823466e38f;
static_assert(HEAD_DIM >= 1 && HEAD_DIM <= 256 && HEAD_DIM_V >= 1 && HEAD_DIM_V <= 256, "head dims are 1 to 256");

struct Strides {
  long long batch, seq, head;  // in items
};

struct TeachingParams {
  Strides q, k, v, out, lse;
  int heads, group, sq, sk;  // H, H / G, Sq, Sk
  int causal;
  float softmax_scale;
};
static_assert(sizeof(TeachingParams) == TEACHING_PARAMS_BYTES, "its dtype in Python describes another struct");

struct Smem {
  alignas(16) float q[kTileQ][kDim];
  alignas(16) float key_value[kTileK * (kKDim > kDimV ? kKDim : kDimV)];  // a tile of K, then one of V
  alignas(16) float p[kTileQ][kTileK];  // each warp writes and reads only its own rows
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

template <typename T>
__device__ T* row_of(T* array_g, const Strides& strides, int batch, int head, int token) {
  return array_g + batch * strides.batch + head * strides.head + token * strides.seq;
}

// Load kRows rows of kCols items from row `first` on, as kWidth floats each, kStride floats apart; zeros from `end` on.
template <int kRows, int kCols, int kWidth, int kStride>
__device__ void load_tile(float* tile_s, const Item* rows_g, long long row_stride, int first, int end) {
  for (int i = threadIdx.x; i < kRows * kWidth; i += kThreads) {
    const int row = i / kWidth, col = i % kWidth;
    const bool exists = first + row < end && col < kCols;
    tile_s[row * kStride + col] = exists ? static_cast<float>(rows_g[(first + row) * row_stride + col]) : 0.f;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_CTAS)
    attention_tiled(const Item* q_g, const Item* k_g, const Item* v_g, Item* out_g, float* lse_g,
                    const TeachingParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * ROWS;  // the warp's first row of the tile

  // Phase 1: the query rows, and the number of keys that the last one sees; under causal order the others see fewer.
  const int tiles = (params.sq + kTileQ - 1) / kTileQ;
  const int first_row = blockIdx.x % tiles * kTileQ;
  const int head = blockIdx.x / tiles % params.heads, batch = blockIdx.x / tiles / params.heads;
  const int end_row = min(params.sq, first_row + kTileQ);
  const int shift = params.causal ? params.sk - params.sq + 1 : params.sk;  // row i sees the keys before i + shift
  const int keys = min(params.sk, end_row - 1 + shift);
  const Item* q_rows_g = row_of(q_g, params.q, batch, head, 0);
  const Item* k_rows_g = row_of(k_g, params.k, batch, head / params.group, 0);
  const Item* v_rows_g = row_of(v_g, params.v, batch, head / params.group, 0);
  load_tile<kTileQ, HEAD_DIM, kDim, kDim>(smem.q[0], q_rows_g, params.q.seq, first_row, end_row);

  float m[ROWS], l[ROWS], acc[ROWS][kColumns] = {};
  for (int r = 0; r < ROWS; r++) m[r] = kLowest, l[r] = 0.f;
  for (int first = 0; first < keys; first += kTileK) {
    // Phase 2: scores of the warp's rows with the lane's key.
    __syncthreads();  // key_value: the previous tile of V has been read
    load_tile<kTileK, HEAD_DIM, kDim, kKDim>(smem.key_value, k_rows_g, params.k.seq, first, keys);
    __syncthreads();  // key_value: K (and, the first time, q) has been written
    float s[ROWS] = {};
#pragma unroll 4
    for (int d = 0; d < kDim; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(smem.key_value + lane * kKDim + d);
      for (int r = 0; r < ROWS; r++) {
        const float4 q = *reinterpret_cast<const float4*>(&smem.q[warp_row + r][d]);
        s[r] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
      }
    }

    // Phase 3: the online softmax. What was summed under the old maximum shrinks by exp(old - new).
    for (int r = 0; r < ROWS; r++) {
      const bool visible = first + lane < min(params.sk, first_row + warp_row + r + shift);
      s[r] = visible ? s[r] * params.softmax_scale : -kInfinity;
      float new_m = fmaxf(m[r], s[r]);
      for (int d = 16; d > 0; d /= 2) new_m = fmaxf(new_m, __shfl_xor_sync(0xffffffff, new_m, d));
      const float shrink = expf(m[r] - new_m), p = expf(s[r] - new_m);
      m[r] = new_m;
      l[r] = l[r] * shrink + p;  // each lane sums its own keys until the end
      for (int c = 0; c < kColumns; c++) acc[r][c] *= shrink;
      smem.p[warp_row + r][lane] = p;
    }

    // Phase 4: acc += P V, four keys at a time.
    __syncthreads();  // key_value: K has been read; p: written by each warp for itself
    load_tile<kTileK, HEAD_DIM_V, kDimV, kDimV>(smem.key_value, v_rows_g, params.v.seq, first, keys);
    __syncthreads();  // key_value: V has been written
#pragma unroll 2
    for (int j = 0; j < kTileK; j += 4) {
      for (int c = 0; c < kColumns; c++) {
        const float* v_s = smem.key_value + j * kDimV + c * 32 + lane;
        for (int r = 0; r < ROWS; r++) {
          const float4 p = *reinterpret_cast<const float4*>(&smem.p[warp_row + r][j]);
          acc[r][c] += p.x * v_s[0] + p.y * v_s[kDimV] + p.z * v_s[2 * kDimV] + p.w * v_s[3 * kDimV];
        }
      }
    }
  }

  // Phase 5: normalise and store. Without keys l is 0, and log(0) is -inf.
  for (int r = 0; r < ROWS && first_row + warp_row + r < end_row; r++) {
    for (int d = 16; d > 0; d /= 2) l[r] += __shfl_xor_sync(0xffffffff, l[r], d);
    const float normaliser = l[r] == 0.f ? 0.f : 1.f / l[r];
    const int row = first_row + warp_row + r;
    Item* out_row_g = row_of(out_g, params.out, batch, head, row);
    for (int c = 0; c < kColumns; c++) {
      if (c * 32 + lane < HEAD_DIM_V) out_row_g[c * 32 + lane] = Item(acc[r][c] * normaliser);
    }
    if (lse_g != nullptr && lane == 0) *row_of(lse_g, params.lse, batch, head, row) = m[r] + logf(l[r]);
  }
}
