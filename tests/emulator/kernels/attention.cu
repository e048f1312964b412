// Attention forward and backward on tensor cores, head dim 64, in their plainest form: tiles of 64 queries by 64 keys,
// every operand in shared memory, four warps of 16 rows. They exercise the emulator; they are not meant to be fast.
#include <cuda_fp16.h>
typedef unsigned int u32;
constexpr int D = 64, TILE = 64, LD = D + 8, CTA_THREADS = 128;  // rows padded by 16 bytes: no bank conflicts

struct Params {
  const __half *q, *k, *v, *out, *dout;  // (heads, length, D)
  float *lse, *delta, *dq;               // (heads, length), (heads, length), (heads, length, D)
  __half *o, *dk, *dv;
  int queries, keys;
  float scale;
  int causal;  // query i sees keys up to i + keys - queries
};
typedef __half Tile[TILE][LD];

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void ldmatrix(u32& a, u32& b, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(a), "=r"(b)
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(u32& a, u32& b, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(a), "=r"(b)
               : "r"(shared_address(row))
               : "memory");
}

// c (16 x 64) += a b over 64 steps of k. kATrans: a is stored as (k, m), else (m, k). kBTrans: b as (n, k), else (k,
// n).
template <bool kATrans, bool kBTrans>
__device__ void product(float (&c)[8][4], const Tile& a, int row, const Tile& b) {
  const int lane = threadIdx.x & 31, r = lane & 7, second = lane >> 3 & 1;
#pragma unroll
  for (int k = 0; k < TILE; k += 8) {
    u32 a0, a1;
    if (kATrans)
      ldmatrix_trans(a0, a1, &a[k + r][row + 8 * second]);
    else
      ldmatrix(a0, a1, &a[row + r + 8 * second][k]);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 b0, b1;
      if (kBTrans)
        ldmatrix(b0, b1, &b[8 * (n + second) + r][k]);
      else
        ldmatrix_trans(b0, b1, &b[k + r][8 * (n + second)]);
#pragma unroll
      for (int i = 0; i < 2; i++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(c[n + i][0]), "+f"(c[n + i][1]), "+f"(c[n + i][2]), "+f"(c[n + i][3])
                     : "r"(a0), "r"(a1), "r"(i ? b1 : b0));
    }
  }
}
__device__ __forceinline__ void clear(float (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
}
// rows of a tile from global memory, zero behind `length`
__device__ __forceinline__ void load_tile(Tile& tile, const __half* source, int first, int length) {
  for (int i = threadIdx.x; i < TILE * D / 8; i += CTA_THREADS) {
    const int row = i / (D / 8), column = i % (D / 8) * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (first + row < length) value = *(const uint4*)(source + (size_t)(first + row) * D + column);
    *(uint4*)&tile[row][column] = value;
  }
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

extern "C" __global__ void __launch_bounds__(CTA_THREADS) attention_forward(const Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Tile &q = ((Tile*)bytes)[0], &k = ((Tile*)bytes)[1], &v = ((Tile*)bytes)[2], &s = ((Tile*)bytes)[3];
  const int head = blockIdx.y, row0 = blockIdx.x * TILE, row = threadIdx.x / 32 * 16, lane = threadIdx.x & 31;
  load_tile(q, p.q + (size_t)head * p.queries * D, row0, p.queries);
  float acc[8][4], m[2] = {-1e30f, -1e30f}, l[2] = {0.f, 0.f};
  clear(acc);
  const int shift = p.keys - p.queries, end = p.causal ? min(p.keys, row0 + TILE + shift) : p.keys;
  for (int key0 = 0; key0 < end; key0 += TILE) {
    __syncthreads();
    load_tile(k, p.k + (size_t)head * p.keys * D, key0, p.keys);
    load_tile(v, p.v + (size_t)head * p.keys * D, key0, p.keys);
    __syncthreads();
    float score[8][4];
    clear(score);
    product<false, true>(score, q, row, k);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = row0 + row + lane / 4 + 8 * h;
      float top = m[h];
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
          const int j = key0 + 8 * n + lane % 4 * 2 + (e & 1);
          score[n][e] = j < p.keys && (!p.causal || j <= i + shift) ? score[n][e] * p.scale : -1e30f;
          top = fmaxf(top, score[n][e]);
        }
      top = quad_max(top);
      const float old = __expf(m[h] - top);
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float a = score[n][2 * h] > -1e29f ? __expf(score[n][2 * h] - top) : 0.f,
                    b = score[n][2 * h + 1] > -1e29f ? __expf(score[n][2 * h + 1] - top) : 0.f;
        sum += a + b;
        *(__half2*)&s[row + lane / 4 + 8 * h][8 * n + lane % 4 * 2] = __floats2half2_rn(a, b);
        acc[n][2 * h] *= old;
        acc[n][2 * h + 1] *= old;
      }
      l[h] = l[h] * old + quad_sum(sum);
      m[h] = top;
    }
    __syncwarp();
    product<false, false>(acc, s, row, v);
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int i = row0 + row + lane / 4 + 8 * h;
    if (i >= p.queries) continue;
    const float inverse = l[h] > 0.f ? 1.f / l[h] : 0.f;
#pragma unroll
    for (int n = 0; n < 8; n++)
      *(__half2*)(p.o + ((size_t)head * p.queries + i) * D + 8 * n + lane % 4 * 2) =
          __floats2half2_rn(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
    if (lane % 4 == 0)
      p.lse[(size_t)head * p.queries + i] = l[h] > 0.f ? m[h] + logf(l[h]) : __int_as_float(0xff800000);
  }
}

// delta = rowsum(dO * O), one warp a row
extern "C" __global__ void __launch_bounds__(CTA_THREADS) attention_delta(const Params p) {
  const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (row >= p.queries) return;
  const size_t at = ((size_t)blockIdx.y * p.queries + row) * D + 2 * lane;
  const float2 a = __half22float2(*(const __half2*)(p.out + at)), b = __half22float2(*(const __half2*)(p.dout + at));
  float sum = a.x * b.x + a.y * b.y;
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 0) p.delta[(size_t)blockIdx.y * p.queries + row] = sum;
}

// A block owns 64 keys and walks the queries; dQ is added up in global memory by atomics.
extern "C" __global__ void __launch_bounds__(CTA_THREADS) attention_backward(const Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Tile *tiles = (Tile*)bytes, &k = tiles[0], &v = tiles[1], &q = tiles[2], &dout = tiles[3], &prob = tiles[4],
       &ds = tiles[5];
  const int head = blockIdx.y, key0 = blockIdx.x * TILE, row = threadIdx.x / 32 * 16, lane = threadIdx.x & 31,
            shift = p.keys - p.queries;
  load_tile(k, p.k + (size_t)head * p.keys * D, key0, p.keys);
  load_tile(v, p.v + (size_t)head * p.keys * D, key0, p.keys);
  float dk[8][4], dv[8][4];
  clear(dk);
  clear(dv);
  for (int row0 = p.causal ? max(0, key0 - shift) / TILE * TILE : 0; row0 < p.queries; row0 += TILE) {
    __syncthreads();
    load_tile(q, p.q + (size_t)head * p.queries * D, row0, p.queries);
    load_tile(dout, p.dout + (size_t)head * p.queries * D, row0, p.queries);
    __syncthreads();
    float score[8][4], dp[8][4];
    clear(score);
    clear(dp);
    product<false, true>(score, q, row, k);
    product<false, true>(dp, dout, row, v);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + lane / 4 + 8 * h, i = row0 + r;
      const float lse = i < p.queries ? p.lse[(size_t)head * p.queries + i] : 0.f,
                  delta = i < p.queries ? p.delta[(size_t)head * p.queries + i] : 0.f;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        float w[2], g[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int j = key0 + 8 * n + lane % 4 * 2 + e;
          const bool seen = i < p.queries && j < p.keys && (!p.causal || j <= i + shift);
          w[e] = seen ? __expf(score[n][2 * h + e] * p.scale - lse) : 0.f;
          g[e] = w[e] * (dp[n][2 * h + e] - delta);
        }
        *(__half2*)&prob[r][8 * n + lane % 4 * 2] = __floats2half2_rn(w[0], w[1]);
        *(__half2*)&ds[r][8 * n + lane % 4 * 2] = __floats2half2_rn(g[0], g[1]);
      }
    }
    __syncthreads();
    product<true, false>(dv, prob, row, dout);
    product<true, false>(dk, ds, row, q);
    float dq[8][4];
    clear(dq);
    product<false, false>(dq, ds, row, k);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = row0 + row + lane / 4 + 8 * h;
      if (i < p.queries)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            atomicAdd(p.dq + ((size_t)head * p.queries + i) * D + 8 * n + lane % 4 * 2 + e, dq[n][2 * h + e] * p.scale);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int j = key0 + row + lane / 4 + 8 * h;
    if (j >= p.keys) continue;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const size_t at = ((size_t)head * p.keys + j) * D + 8 * n + lane % 4 * 2;
      *(__half2*)(p.dk + at) = __floats2half2_rn(dk[n][2 * h] * p.scale, dk[n][2 * h + 1] * p.scale);
      *(__half2*)(p.dv + at) = __floats2half2_rn(dv[n][2 * h], dv[n][2 * h + 1]);
    }
  }
}
