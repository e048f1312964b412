// The gradient of an embedding's table, second step: tokens in the order of their rows, equal ones in their own order.
//
//   rows_p is the p-th smallest of ids, order_p the token it came from: a stable counting sort
//
// A CTA (cooperative thread array, a block of threads) reads all ids and places those of its own rows. Their first
// position is the number of smaller ids, which the CTA counts as it reads. So no CTA waits for another, and the result
// does not depend on their order. T ids and R rows take T R / THREADS reads, from the level-2 cache.
//
// Shapes    ids (count,) int32, a multiple of THREADS * 4, padded with numbers above any row; order and rows
//           (T,).
// Work      THREADS rows a CTA, one a thread; grid ceil(rows / THREADS).
// Budget    shared memory: 2 * THREADS + THREADS / 32 words of counts and 2 * 4 * THREADS of found ids; 30 registers.
// Edges     a CTA without ids of its rows returns after the first pass.
#if !defined(THREADS) || !defined(READS) || !defined(SHARED_BYTES)
#error "THREADS, READS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../common/config.cuh"

constexpr int kRead = READS;  // ids that a thread reads at a time
constexpr int kWarps = THREADS / kWarpSize;
static_assert(kRead * sizeof(int) == kVectorBytes, "one load");
static_assert(THREADS % kWarpSize == 0 && kWarps <= kWarpSize, "whole warps, at most 32 of them");

struct Smem {
  int count[THREADS];  // ids of each row
  int below;           // ids of smaller rows
  int warp_sum[kWarps];
  int found_row[THREADS * kRead], found_token[THREADS * kRead];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

struct Scanned {
  int before, total;  // over the threads before this one, and over all
};

// All threads of the CTA take part. warp_sum_s belongs to the scan until the caller's next barrier.
__device__ __forceinline__ Scanned cta_scan(int x, int (&warp_sum_s)[kWarps]) {
  int sum = x;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_up_sync(kFullWarp, sum, distance);
    if (lane_index() >= distance) sum += other;
  }
  if (lane_index() == kWarpSize - 1) warp_sum_s[warp_index()] = sum;
  __syncthreads();  // warp_sum_s: written by every warp
  Scanned scanned = {sum - x, 0};
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) {
    if (warp < warp_index()) scanned.before += warp_sum_s[warp];
    scanned.total += warp_sum_s[warp];
  }
  return scanned;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_sort(const int* ids_g, int* order_g, int* rows_g, int count) {
  __shared__ Smem smem_s;
  const int first = blockIdx.x * THREADS;

  // Phase 1: how many ids each of the rows has, and how many are smaller.
  smem_s.count[threadIdx.x] = 0;
  if (threadIdx.x == 0) smem_s.below = 0;
  __syncthreads();  // smem_s.count, smem_s.below: zero
  int below = 0;
  for (int start = threadIdx.x * kRead; start < count; start += THREADS * kRead) {
    const int4 read = *reinterpret_cast<const int4*>(ids_g + start);
    const int ids[kRead] = {read.x, read.y, read.z, read.w};
#pragma unroll
    for (int i = 0; i < kRead; i++) {
      below += ids[i] < first;
      if (ids[i] >= first && ids[i] - first < THREADS) atomicAdd(&smem_s.count[ids[i] - first], 1);
    }
  }
  if (below > 0) atomicAdd(&smem_s.below, below);
  __syncthreads();  // smem_s.count, smem_s.below: every thread has added
  const Scanned of_rows = cta_scan(smem_s.count[threadIdx.x], smem_s.warp_sum);
  if (of_rows.total == 0) return;
  int next = smem_s.below + of_rows.before;  // where this thread's row goes on

  // Phase 2: the same ids again, THREADS * kRead at a time; those found, in their order, to each row's thread.
  for (int start = 0; start < count; start += THREADS * kRead) {
    const int token = start + threadIdx.x * kRead;
    const int4 read = *reinterpret_cast<const int4*>(ids_g + token);
    const int ids[kRead] = {read.x, read.y, read.z, read.w};
    int own = 0;
#pragma unroll
    for (int i = 0; i < kRead; i++) own += ids[i] >= first && ids[i] - first < THREADS;
    __syncthreads();  // smem_s.warp_sum, smem_s.found_*: the previous ones have been read
    const Scanned scanned = cta_scan(own, smem_s.warp_sum);
    int place = scanned.before;
#pragma unroll
    for (int i = 0; i < kRead; i++) {
      if (ids[i] >= first && ids[i] - first < THREADS) {
        smem_s.found_row[place] = ids[i] - first;
        smem_s.found_token[place++] = token + i;
      }
    }
    __syncthreads();  // smem_s.found_*: written
    for (int f = 0; f < scanned.total; f++) {
      if (smem_s.found_row[f] == threadIdx.x) {
        order_g[next] = smem_s.found_token[f];
        rows_g[next++] = first + threadIdx.x;
      }
    }
  }
}
