// Attention backward: sums of dS in float32 scratch to dbias, over the axes along which the bias broadcasts.
//
// Shapes    scratch and dbias as (B, H, Sq, Sk), any strides; dbias has extent 1 along axes that it sums over, of which
//           the scratch has what attention_backward_summed_dbias leaves (all scores from the float32 kernels).
// Work      a thread owns an item of dbias, neighbours along the keys; where keys are summed over, a warp does, whose
//           lanes take every 32nd key. Grid: one thread, or one warp, per item. The order of the additions is fixed.
// Budget    no shared memory; about 40 registers.
#if !defined(DTYPE) || !defined(THREADS) || !defined(DBIAS_PARAMS_BYTES)
#error "DTYPE, THREADS and DBIAS_PARAMS_BYTES come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../params.cuh"

// Field for field the structured dtype DBIAS_PARAMS of cupyattn/ops/attention/structs.
struct DbiasParams {
  int64 shape[4];    // of dbias
  int64 repeats[4];  // items of the scratch that are summed, along each axis
  ScoreStrides source, target;
  int64 accumulate;  // dbias is added to
};
static_assert(sizeof(DbiasParams) == DBIAS_PARAMS_BYTES, "its dtype in Python describes another struct");

__device__ __forceinline__ int64 item_offset(const ScoreStrides& strides, const int64 (&at)[4]) {
  return at[0] * strides.batch + at[1] * strides.head + at[2] * strides.row + at[3] * strides.key;
}

// The sum over everything that repeats, keys by steps of `key_step` from `first_key` on.
__device__ __forceinline__ float sum_repeats(const float* item_g, const DbiasParams& params, int first_key,
                                             int key_step) {
  float sum = 0.f;
  for (int64 b = 0; b < params.repeats[0]; b++) {
    for (int64 h = 0; h < params.repeats[1]; h++) {
      for (int64 i = 0; i < params.repeats[2]; i++) {
        for (int64 j = first_key; j < params.repeats[3]; j += key_step) {
          const int64 at[4] = {b, h, i, j};
          sum += item_g[item_offset(params.source, at)];
        }
      }
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_dbias(const float* scratch_g, DTYPE* dbias_g, const DbiasParams params) {
  const bool sums_keys = params.repeats[3] > 1;
  const int64 thread = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
  int64 item = sums_keys ? thread / kWarpSize : thread, at[4];
#pragma unroll
  for (int axis = 3; axis >= 0; axis--) {
    at[axis] = item % params.shape[axis];
    item /= params.shape[axis];
  }
  if (item > 0) return;  // beyond the last

  const float* item_g = scratch_g + item_offset(params.source, at);
  float sum = sum_repeats(item_g, params, sums_keys ? lane_index() : 0, sums_keys ? kWarpSize : 1);
  if (sums_keys) sum = warp_reduce<Sum>(sum);
  if (sums_keys && lane_index() != 0) return;
  DTYPE* target_g = dbias_g + item_offset(params.target, at);
  *target_g = from_float<DTYPE>((params.accumulate ? to_float(*target_g) : 0.f) + sum);
}
