// Two results of attention over different keys in one, as if it had been one attention over all of them.
//
//   lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
//
// (Rabe and Staats, arXiv:2112.05682, section 3; FlashInfer, Ye et al., arXiv:2501.01005, section 2.2.)
//
// Shapes    out_a, out_b, out (B, S, H, D) and lse_a, lse_b, lse (B, H, S) of any strides, the last axis of out
//           contiguous. Each of the first three has its own dtype: a sum of parts stays in float32 while parts come
//           in 16 bits.
// Work      a warp a row (batch, token, head); a lane has the VEC columns from lane * VEC on, the next 32 * VEC after
//           these. Grid ceil(rows / warps).
// Budget    registers for what is on the way; no shared memory.
// Edges     a part whose lse is -inf is not read; of two such out is 0 and lse -inf. An lse of +inf or NaN gives NaN in
//           both results. out may be out_a itself, and lse lse_a: a lane reads what it writes, and no lane writes lse
//           before all have read it.
#if !defined(DTYPE_A) || !defined(DTYPE_B) || !defined(DTYPE) || !defined(VEC)
#error "DTYPE_A, DTYPE_B, DTYPE and VEC come from a launch-configuration table"
#endif
#include "../common/vec.cuh"
#include "params.cuh"

// Field for field the structured dtype MERGE_PARAMS of cupyattn/ops/attention/structs.
struct MergeParams {
  Strides out_a, lse_a, out_b, lse_b, out, lse;
  int64 rows;
  int heads, seq, dim;
};
static_assert(sizeof(MergeParams) == MERGE_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_merge(const DTYPE_A* out_a_g, const float* lse_a_g, const DTYPE_B* __restrict__ out_b_g,
                    const float* __restrict__ lse_b_g, DTYPE* out_g, float* lse_g, const MergeParams params) {
  const int64 row = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  if (row >= params.rows) return;
  const int head = static_cast<int>(row % params.heads);
  const int token = static_cast<int>(row / params.heads % params.seq);
  const int batch = static_cast<int>(row / params.heads / params.seq);

  const float a = *head_rows(lse_a_g, params.lse_a, batch, head, token);
  const float b = *head_rows(lse_b_g, params.lse_b, batch, head, token);
  const float top = a > b ? a : b;  // a NaN of either is one of a weight
  const bool has_a = a != -kInfinity, has_b = b != -kInfinity;
  const float p_a = has_a ? ex2_approx((a - top) * kLog2E) : 0.f;
  const float p_b = has_b ? ex2_approx((b - top) * kLog2E) : 0.f;
  const float total = p_a + p_b;
  const float normaliser = total == 0.f ? 0.f : 1.f / total;
  const float weight_a = p_a * normaliser, weight_b = p_b * normaliser;

  const DTYPE_A* row_a_g = head_rows(out_a_g, params.out_a, batch, head, token);
  const DTYPE_B* row_b_g = head_rows(out_b_g, params.out_b, batch, head, token);
  DTYPE* row_g = head_rows(out_g, params.out, batch, head, token);
  for (int column = lane_index() * VEC; column < params.dim; column += kWarpSize * VEC) {
    float items_a[VEC] = {}, items_b[VEC] = {}, sum[VEC];
    if (has_a) load_vec(items_a, row_a_g + column);
    if (has_b) load_vec(items_b, row_b_g + column);
#pragma unroll
    for (int i = 0; i < VEC; i++) sum[i] = __fmaf_rn(weight_b, items_b[i], weight_a * items_a[i]);
    store_vec(row_g + column, sum);
  }
  __syncwarp();  // lse_a: read by all lanes
  if (lane_index() == 0) {
    *head_rows(lse_g, params.lse, batch, head, token) = total == 0.f ? -kInfinity : top + lg2_approx(total) * kLn2;
  }
}
