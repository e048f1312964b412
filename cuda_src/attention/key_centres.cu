// The centres of keys that are to be quantised: for each sequence and head, the mean of evenly spaced keys.
//
//   c = (1 / n) sum over i < n of k[i step],   step = max(1, ceil(S / kSamples)),   n = ceil(S / step)
//
// Keys are rotated first if there is a TABLE, as in rope/rotate.cu (Su et al., arXiv:2104.09864, equation 34).
// Softmax is the same for k and k - c (Zhang et al., "SageAttention", arXiv:2410.02367, section 4.2). Items that are
// not finite count as 0, so that one of them spares the keys of other tokens, and a mean that overflows is 0.
//
// S counts the keys in use: those from seqused_k on are not read.
//
// Shapes    k (B, S, G, D) with any outer strides, or packed (total, G, D) with cu_seqlens; seqused_k (sequences,), or
//           null; centre (sequences, G, D) float32, with any outer strides; cos and sin (positions, R/2) of TABLE,
//           which is void without a rotation.
// Work      a CTA owns kColumns columns of one sequence and head. kLanes neighbouring threads have a part of the
//           samples: part p has samples p, p + kParts, ... Grid sequences * G * ceil(D / kColumns).
// Order     fixed, so that NumPy repeats it bit by bit: the samples of a part in their order, then parts 4 w to 4 w + 3
//           of warp w as (p0 + p1) + (p2 + p3), then the warps in their order. Subnormal numbers are 0.
// Budget    registers: the loads of kPerPart samples, or of 2 that are rotated, 16 bytes each (32 for float32); 2 KiB
//           of shared memory.
// Barriers  one, between the warps' sums and the threads that add them.
// Edges     a sequence without keys in use has a centre of zeros. seqused_k is clamped to the keys that exist. Columns
//           beyond D are neither read nor written.
#if !defined(DTYPE) || !defined(THREADS) || !defined(VEC) || !defined(PACKED) || !defined(SHARED_BYTES) || \
    !defined(TABLE) || !defined(INTERLEAVED)
#error "DTYPE, THREADS, VEC, PACKED, SHARED_BYTES, TABLE and INTERLEAVED come from a launch-configuration table"
#endif
#include "packed_rows.cuh"
#include "../rope/rotation.cuh"

constexpr int kSamples = 256;
constexpr int kParts = 32;
constexpr int kPerPart = kSamples / kParts;
constexpr int kItems = 8;  // columns of a thread
constexpr int kLanes = THREADS / kParts;
constexpr int kColumns = kLanes * kItems;
constexpr int kWarps = THREADS / kWarpSize;
static_assert(kLanes == 8, "a warp has 4 parts, whose sums two shuffles add");
static_assert(VEC == 1 || VEC == kItems, "single items or all of them");

struct Smem {
  float sums[kWarps][kColumns];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// Field for field the structured dtype CENTRES_PARAMS of cupyattn/ops/attention/structs. Strides are in items.
struct CentresParams {
  Strides k;
  int64 centre_batch, centre_head;
  BatchIntegers bounds, seqused_k;
  HeadRotationParams rotation;
  int32 seq, heads, dim;  // seq is S, or the total of packed keys
  int32 sequences;
};
static_assert(sizeof(CentresParams) == CENTRES_PARAMS_BYTES, "its dtype in Python describes another struct");

using Rotation = HeadRotation<TABLE, INTERLEAVED, (VEC > 1)>;

__device__ __forceinline__ float finite(float x) { return fabsf(x) < kInfinity ? x : 0.f; }

extern "C" __global__ void __launch_bounds__(THREADS)
    key_centres(const DTYPE* k_g, const void* cu_seqlens_g, const void* seqused_k_g, const TABLE* cos_g,
                const TABLE* sin_g, const void* positions_g, float* centre_g, const CentresParams params) {
  __shared__ Smem smem_s;

  // Phase 1: the columns of this CTA, and the sampled keys of its sequence.
  const int chunks = div_up(params.dim, kColumns);
  const int chunk = blockIdx.x % chunks, number = blockIdx.x / chunks;  // of sequences and their heads
  const int sequence = number / params.heads, head = number - sequence * params.heads;
  RowSpan keys = {0, params.seq};
  if constexpr (PACKED) {
    const PackedRows rows = {cu_seqlens_g, params.bounds, params.sequences, params.seq, params.seq};
    keys = rows.of(sequence);
  }
  if (seqused_k_g != nullptr) {
    keys.count = static_cast<int>(clamp(batch_integer(seqused_k_g, params.seqused_k, sequence), 0, keys.count));
  }
  const int step = max(1, div_up(keys.count, kSamples)), samples = div_up(keys.count, step);
  const int part = threadIdx.x / kLanes, column = chunk * kColumns + threadIdx.x % kLanes * kItems;
  k_g += (PACKED ? 0 : sequence) * params.k.batch + keys.begin * params.k.seq + head * params.k.head;

  const Rotation rotation = {cos_g, sin_g, positions_g, params.rotation};

  // Phase 2: the sum of this thread's part. Samples that do not exist read the last one instead, and count as 0.
  float sum[kItems] = {};
  if (samples > 0 && column < params.dim) {
    constexpr int kTogether = Rotation::kThere ? 2 : kPerPart;  // whose loads are in flight
#pragma unroll kTogether
    for (int i = 0; i < kPerPart; i++) {
      const int sample = min(part + i * kParts, samples - 1);
      const int64 token = static_cast<int64>(sample) * step;
      const DTYPE* key_g = k_g + token * params.k.seq;
      float k[kItems];
      if constexpr (VEC > 1) {
        load_vec(k, key_g + column);
      } else {
#pragma unroll
        for (int item = 0; item < kItems; item++) k[item] = to_float(key_g[min(column + item, params.dim - 1)]);
      }
      rotation.rotate(k, key_g, column, rotation.position(PACKED ? 0 : sequence, keys.begin + token, token));
#pragma unroll
      for (int item = 0; item < kItems; item++) sum[item] += part + i * kParts < samples ? finite(k[item]) : 0.f;
    }
  }

  // Phase 3: the sums of all parts, in their order.
#pragma unroll
  for (int item = 0; item < kItems; item++) {
#pragma unroll
    for (int distance = kLanes; distance < kWarpSize; distance *= 2) {
      sum[item] += __shfl_xor_sync(kFullWarp, sum[item], distance);
    }
  }
  if (lane_index() < kLanes) {
#pragma unroll
    for (int item = 0; item < kItems; item++) smem_s.sums[warp_index()][lane_index() * kItems + item] = sum[item];
  }
  __syncthreads();  // smem_s.sums: written by every warp
  const int own = chunk * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns || own >= params.dim) return;
  float total = smem_s.sums[0][threadIdx.x];
#pragma unroll
  for (int warp = 1; warp < kWarps; warp++) total += smem_s.sums[warp][threadIdx.x];
  const float mean = __fdiv_rn(total, static_cast<float>(max(samples, 1)));
  centre_g[sequence * params.centre_batch + head * params.centre_head + own] = finite(mean);
}
