// Language and machine features that the emulator must run: what NVRTC makes of ordinary CUDA C++.
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void
typedef unsigned int u32;
typedef unsigned long long u64;

struct Point {
  float x, y, z;
};
__constant__ float weights[4] = {1.f, 2.f, 3.f, 4.f};
__device__ int counter;
__device__ float offsets[3] = {0.5f, -1.f, 3.e10f};

__device__ __noinline__ Point move(Point p, float by, int k) {
  Point r = {p.x * by, p.y + weights[k & 3], k > 3 ? p.z : offsets[k % 3]};
  if (k == 7) return p;
  return r;
}
__device__ __noinline__ float apply_twice(float x, int k) {
  Point p = {x, x, x};
  p = move(p, 2.f, k);
  return move(p, 0.5f, k + 1).y;
}
KERNEL calls(float* out, const int* k) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  Point p = {(float)i, 2.f, 3.f};
  p = move(p, 2.f, k[i]);
  if (k[i] & 1) p = move(p, 3.f, k[i] + 1);
  out[2 * i] = p.x + p.y + p.z;
  out[2 * i + 1] = apply_twice(i, k[i]);
}
KERNEL count_votes(int* out, const float* x) {  // bar.red
  int i = threadIdx.x;
  int n = __syncthreads_count(x[i] > 0.f), any = __syncthreads_or(x[i] > 2.f), all = __syncthreads_and(x[i] > -9.f);
  if (i < 40) n += 1000 * __popc(__ballot_sync(__activemask(), x[i] > 0.f));
  out[i] = n + 100000 * any + 1000000 * all;
  if (i == 0) atomicAdd(&counter, n);
}
KERNEL choose(int* out, const int* in) {  // a dense switch
  int i = threadIdx.x, x = in[i], r;
  switch (x) {
    case 0:
      r = in[i + 1] * 7;
      break;
    case 1:
      r = atomicAdd(out + 32, 3);
      break;
    case 2:
      r = __popc(i);
      in += 3;
      break;
    case 3:
      r = __clz(i);
      atomicMax(out + 33, i);
      break;
    case 4:
      r = __brev(i);
      __threadfence();
      break;
    case 5:
      r = __ffs(i);
      in++;
      break;
    case 6:
      r = i / (x - 3);
      break;
    default:
      r = -1;
  }
  out[i] = r + in[0];
}
KERNEL generic_pointers(float* a, const int* where) {  // one load instruction, three state spaces
  __shared__ float s[32];
  float l[8];
  int i = threadIdx.x;
  for (int j = 0; j < 8; j++) l[j] = 100 * i + j;
  s[i] = -i;
  __syncthreads();
  float* p = where[i] == 0 ? a : where[i] == 1 ? s : l;
  float v = p[i & 7];
  p[i & 7] = v + 0.5f;
  a[32 + i] = v + l[i & 7];
  if (where[i] == 1) atomicAdd(p + 31, 1.f);
  __syncthreads();
  a[64 + i] = s[31];
}
KERNEL collatz(int* steps, const int* start) {  // loops of different length, then a shuffle of all
  int n = start[blockIdx.x * blockDim.x + threadIdx.x], count = 0;
  while (n != 1) {
    if (n & 1)
      n = 3 * n + 1;
    else
      n /= 2;
    count++;
    if (count > 500) break;
  }
  steps[blockIdx.x * blockDim.x + threadIdx.x] = count + 1000 * __shfl_sync(~0u, count, 0);
}
KERNEL indices(int* out) {  // blocks of any shape
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  __shared__ int sum;
  if (thread == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z);
  __syncthreads();
  int threads = blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] = sum * 1000 + thread;
}
KERNEL atomics(int* i, u32* u, u64* l, float* f, __half2* h, double* d, int* old) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(i, t);
  atomicMin(i + 1, t - 50);
  atomicMax(i + 2, t - 50);
  atomicExch(i + 3, t);
  atomicMin(u, t + 7u);
  atomicMax(u + 1, t);
  atomicAnd(u + 2, ~(1u << (t & 31)));
  atomicOr(u + 3, 1u << (t & 15));
  atomicXor(u + 4, t);
  atomicInc(u + 5, 9u);
  atomicDec(u + 6, 9u);
  atomicAdd(l, (u64)t << 30);
  atomicMax(l + 1, (u64)t << 40);
  atomicAdd(f, 0.5f * t);
  atomicAdd(d, 0.25 * t);
  atomicAdd(h, __floats2half2_rn(1.f, -1.f));
  old[t] = atomicAdd(i + 4, 1);
  int seen = i[5], want;  // a lock-free maximum of t * 37 % 101
  do {
    want = seen;
    seen = atomicCAS(i + 5, want, max(want, t * 37 % 101));
  } while (seen != want);
}
// Blocks take turns: each waits for the one before (in the order of a ticket, so none waits in vain).
KERNEL take_turns(volatile int* turn, int* order, int* ticket) {
  __shared__ int mine;
  if (threadIdx.x == 0) mine = atomicAdd(ticket, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    while (*turn != gridDim.x - 1 - mine) {
    }
    order[mine] = *turn;
    __threadfence();
    *turn = *turn + 1;
  }
  __syncthreads();
}
KERNEL vectors(const uint4* a, uint2* b, unsigned char* c, short* s, u64* w) {
  int i = threadIdx.x;
  uint4 x = a[i];
  b[i] = make_uint2(x.x + x.w, x.y ^ x.z);
  c[i] = (unsigned char)(x.x >> 24) + c[i];
  s[i] = (short)(-s[i]);
  w[i] = __umul64hi(w[i], w[i ^ 1]);
}
KERNEL matches(u32* out, const u32* x) {
  int i = threadIdx.x, all;
  out[i] = __match_any_sync(~0u, x[i]);
  out[32 + i] = __match_all_sync(~0u, x[i], &all) + all;
  out[64 + i] = __funnelshift_l(x[i], i, 5) + __byte_perm(x[i], i, 0x3175) + __dp4a(x[i], (u32)i, 3u);
}
KERNEL shuffles(int* out) {
  int i = threadIdx.x;
  out[i] = __shfl_sync(~0u, i, 5);
  out[32 + i] = __shfl_up_sync(~0u, i, 3);
  out[64 + i] = __shfl_down_sync(~0u, i, 4, 8);
  out[96 + i] = __shfl_xor_sync(~0u, i, 9);
  out[128 + i] = __shfl_sync(~0u, i, i * 5 + 1, 16);
  out[160 + i] = __any_sync(~0u, i == 3) + 2 * __all_sync(~0u, i < 31);
}
KERNEL math(const float* x, float* y, int n) {  // the accurate library functions: long paths, tables
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = expf(x[i]);
  y[n + i] = logf(fabsf(x[i]) + 1e-3f);
  y[2 * n + i] = tanhf(x[i]);
  y[3 * n + i] = erff(x[i]);
  y[4 * n + i] = sinf(x[i] * 1000.f);
  y[5 * n + i] = powf(fabsf(x[i]), 1.7f);
  y[6 * n + i] = x[i] / 3.1f;
  y[7 * n + i] = fmodf(x[i], 0.7f);
}
KERNEL half_math(const __half* x, __half* y, int n) {
  int i = threadIdx.x;
  y[i] = hexp2(x[i]);
  y[n + i] = x[i] > __half(0.f) ? hsqrt(x[i]) : __hneg(x[i]);
  y[2 * n + i] = __hfma(x[i], x[i], __float2half(0.5f));
  y[3 * n + i] = __hmax(x[i], __float2half(0.25f));
  __half2 p = __hmul2(__halves2half2(x[i], x[i]), __floats2half2_rn(2.f, 3.f));
  y[4 * n + i] = __hadd(__low2half(p), __high2half(p));
}
