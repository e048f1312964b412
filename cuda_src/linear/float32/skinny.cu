// out = activation(x w + b) + residual for at most ROWS rows of x, in float32 arithmetic: the weight is read once.
//
// Shapes    as forward.cu, M <= ROWS <= 16.
// Work      a CTA computes 32 columns of x w (GATED: 16 of a gate and the 16 of up) with 8 warps. W_ALONG
//           kDepth: a warp takes four columns, its lanes neighbouring vectors of K. W_ALONG kLines: eight lanes take
//           four columns each; the other lanes and warps take other rows of w, four at a time. Their sums are added in
//           shared memory, and all threads finish results.
// Budget    bound by bytes of w in flight: four loads of 16 (kLines with narrow items: 8) bytes a thread, 16 warps an
//           SM; x is read through L1, each item for 32 columns. Registers: 4 * ROWS sums. Shared memory: 32 * ROWS
//           floats, for kLines in each warp.
// Edges     rows from M on repeat the last, and are not stored; depths and columns beyond the arrays are zeros and not
//           read. VEC is 1 unless lines are whole aligned vectors.
#if !defined(DTYPE) || !defined(THREADS) || !defined(ROWS) || !defined(MIN_CTAS) || !defined(W_ALONG) || \
    !defined(ACTIVATION) || !defined(GATED) || !defined(VEC) || !defined(SHARED_BYTES)
#error \
    "DTYPE, THREADS, ROWS, MIN_CTAS, W_ALONG, ACTIVATION, GATED, VEC and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "product.cuh"

using Scalar = DTYPE;
using Act = ACTIVATION;
constexpr bool kGated = GATED;
constexpr Along kAlong = Along::W_ALONG;
constexpr int kWarps = THREADS / kWarpSize;
constexpr int kColumns = 32;  // of w, to a CTA
constexpr int kResults = kGated ? kColumns / 2 : kColumns;
constexpr int kThreadSums = 4;  // columns of a thread
constexpr int kParts = kAlong == Along::kDepth ? 1 : kWarps;
struct Smem {
  float sums[kParts][ROWS][kColumns];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table allocates what the kernel uses");
static_assert(kAlong == Along::kLines || kWarps * kThreadSums == kColumns, "a warp for every four columns");

// Column `local` of the CTA: its place in w, and the number of columns from it on.
struct Columns {
  int64 first, extent;  // gated: of a half

  __device__ __forceinline__ int64 place(int local) const {
    return first + local % kResults + (local >= kResults ? extent : 0);
  }
  __device__ __forceinline__ int64 left(int local) const { return extent - first - local % kResults; }
};

// A warp's four columns, over all K.
__device__ __forceinline__ void sum_along_depth(Smem& smem, const Scalar* x, const Scalar* w, const Columns& columns,
                                                const FloatProductParams& params) {
  constexpr int kItems = VEC == 1 ? 1 : kLoadItems<Scalar>;  // item by item, neighbouring lanes take neighbours
  const int first_local = warp_index() * kThreadSums;
  float sums[ROWS][kThreadSums] = {};
#pragma unroll 1
  for (int64 k = lane_index() * kItems; k < params.depth; k += kWarpSize * kItems) {
    Vec<Scalar, kItems> lines[kThreadSums];
#pragma unroll
    for (int c = 0; c < kThreadSums; c++) {
      const int64 count = columns.left(first_local + c) > 0 ? params.depth - k : 0;
      load_items<VEC>(lines[c], w + columns.place(first_local + c) * params.b_stride + k, count);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      Vec<Scalar, kItems> row;
      load_items<VEC>(row, x + min(int64{r}, params.rows - 1) * params.a_stride + k, params.depth - k);
#pragma unroll
      for (int i = 0; i < kItems; i++) {
#pragma unroll
        for (int c = 0; c < kThreadSums; c++) {
          sums[r][c] = __fmaf_rn(to_float(row.item[i]), to_float(lines[c].item[i]), sums[r][c]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int c = 0; c < kThreadSums; c++) {
      const float sum = warp_reduce<Sum>(sums[r][c]);
      if (lane_index() == 0) smem.sums[0][r][first_local + c] = sum;
    }
  }
}

// Four columns of each lane, over the lane's quarter of its warp's depths.
__device__ __forceinline__ void sum_along_lines(Smem& smem, const Scalar* x, const Scalar* w, const Columns& columns,
                                                const FloatProductParams& params) {
  constexpr int kLanes = kColumns / kThreadSums;
  constexpr int kDepth = 4;  // of a thread at a time
  constexpr int kVec = VEC == 1 ? 1 : kThreadSums;
  const int local = lane_index() % kLanes * kThreadSums;
  const int64 count = columns.left(local);
  const Scalar* const w_g = w + columns.place(local);
  const int first = (warp_index() * (kWarpSize / kLanes) + lane_index() / kLanes) * kDepth;
  float sums[ROWS][kThreadSums] = {};
#pragma unroll 1
  for (int64 k = first; k < params.depth; k += kDepth * THREADS / kLanes) {
    Vec<Scalar, kThreadSums> lines[kDepth];
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      load_items<kVec>(lines[d], w_g + (k + d) * params.b_stride, k + d < params.depth ? count : 0);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      Vec<Scalar, kDepth> row;
      load_items<kVec>(row, x + min(int64{r}, params.rows - 1) * params.a_stride + k, params.depth - k);
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
#pragma unroll
        for (int c = 0; c < kThreadSums; c++) {
          sums[r][c] = __fmaf_rn(to_float(row.item[d]), to_float(lines[d].item[c]), sums[r][c]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int c = 0; c < kThreadSums; c++) {
#pragma unroll
      for (int lanes = kLanes; lanes < kWarpSize; lanes *= 2) {
        sums[r][c] += __shfl_xor_sync(kFullWarp, sums[r][c], lanes);
      }
    }
    if (lane_index() < kLanes) {
      const uint32 at_s = shared_address(&smem.sums[warp_index()][r][local]);
      st_shared(at_s, {sums[r][0], sums[r][1], sums[r][2], sums[r][3]});
    }
  }
}

// x w + b of a row and a column of the CTA.
__device__ __forceinline__ float total(const Smem& smem, const Scalar* b, const Columns& columns, int row, int local) {
  float sum = b == nullptr ? 0.f : to_float(b[columns.place(local)]);
#pragma unroll
  for (int part = 0; part < kParts; part++) sum += smem.sums[part][row][local];
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_thin_f32(const Scalar* __restrict__ x, const Scalar* __restrict__ w, const Scalar* __restrict__ b,
                    const Scalar* __restrict__ residual, Scalar* __restrict__ out, Scalar* __restrict__ preactivation,
                    FloatProductParams params) {
  __shared__ __align__(16) Smem smem;
  const Columns columns{int64{blockIdx.x} * kResults, params.columns};
  if constexpr (kAlong == Along::kDepth) {
    sum_along_depth(smem, x, w, columns, params);
  } else {
    sum_along_lines(smem, x, w, columns, params);
  }
  __syncthreads();  // all sums are there

#pragma unroll 1
  for (int at = threadIdx.x; at < ROWS * kResults; at += THREADS) {
    const int row = at / kResults, local = at % kResults;
    if (row >= params.rows || columns.left(local) <= 0) continue;
    const int64 column = columns.place(local);
    Scalar* const preactivation_g =
        preactivation == nullptr ? nullptr : preactivation + row * params.preactivation_stride + column;
    const float z = total(smem, b, columns, row, local);
    if (preactivation_g != nullptr) *preactivation_g = from_float<Scalar>(z);
    float y = Act::value(z);
    if constexpr (kGated) {
      const float up = total(smem, b, columns, row, local + kResults);
      if (preactivation_g != nullptr) preactivation_g[params.columns] = from_float<Scalar>(up);
      y *= up;
    }
    if (residual != nullptr) y += to_float(residual[row * params.residual_stride + column]);
    out[row * params.result_stride + column] = from_float<Scalar>(y);
  }
}
