// The norm of many arrays, first step: sums of squares, one for each CTA (cooperative thread array, a block of
// threads).
//
//   partials_c = sum of x^2 over the items of CTA c
//
// Shapes    up to ARRAYS arrays x0, x1, ... of one dtype, each as rows of neighbouring items with any row stride;
//           partials from params.first_partial on, one float32 for each CTA.
// Work      array a has the CTAs from params.first_cta[a] on. Rows are cut into units of THREADS vectors; the CTAs of
//           an array take its units round robin. A row's last items, fewer than a vector, are loaded one a thread.
//           The order of all additions is fixed.
// Budget    one float per warp of shared memory; VECTORS * VEC storage items, below 48 registers in all.
// Edges     squares are float32: infinite for items above 1.8e19, zero below 1.1e-19. NaN and infinities are kept.
#if !defined(DTYPE) || !defined(THREADS) || !defined(VEC) || !defined(VECTORS) || !defined(ARRAYS)
#error "DTYPE, THREADS, VEC, VECTORS and ARRAYS come from a launch-configuration table"
#endif
#include "../common/reduce.cuh"
#include "../common/streaming.cuh"
#include "../common/vec.cuh"

// Field for field the structured dtype NORM_PARAMS of cupyattn/ops/optimizer/kernels.
struct NormParams {
  int64 length[ARRAYS], stride[ARRAYS];  // of a row, and from one to the next
  int64 units[ARRAYS], rows[ARRAYS];     // units of a row
  uint32 first_cta[ARRAYS + 1];
  uint32 first_partial;
};
static_assert(sizeof(NormParams) == NORM_PARAMS_BYTES, "its dtype in Python describes another struct");
static_assert(ARRAYS == 8, "the entry has eight pointers");

constexpr int kUnitItems = THREADS * VECTORS * VEC;
static_assert(VEC == 1 || VEC * sizeof(DTYPE) == kVectorBytes, "a load is of one item or of 16 bytes");

// The sum of the squares of this thread's items in at most kUnitItems neighbours. Vectors are loaded without branches
// (see streaming.cuh), so the items after a row's last whole vector are loaded separately, one a thread.
__device__ __forceinline__ float squares(const DTYPE* first_g, int64 left) {
  using Items = Vec<DTYPE, VEC>;
  Items loaded[VECTORS] = {};
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * VEC;
    if constexpr (VEC > 1) {
      *reinterpret_cast<uint4*>(&loaded[v]) = ld_once_v4(first_g + at, at + VEC <= left);
    } else if (at < left) {
      *reinterpret_cast<WordsOf<Items>*>(&loaded[v]) = *reinterpret_cast<const WordsOf<Items>*>(first_g + at);
    }
  }
  float sum = 0.f;
  if constexpr (VEC > 1) {
    const int ragged = static_cast<int>(left % VEC);
    if (left < kUnitItems && threadIdx.x < ragged) {
      const float x = to_float(first_g[left - ragged + threadIdx.x]);
      sum = x * x;
    }
  }
  float sums[VECTORS] = {};
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
#pragma unroll
    for (int i = 0; i < VEC; i++) sums[v] += to_float(loaded[v].item[i]) * to_float(loaded[v].item[i]);
    sum += sums[v];
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_partials(const DTYPE* x0_g, const DTYPE* x1_g, const DTYPE* x2_g, const DTYPE* x3_g, const DTYPE* x4_g,
                  const DTYPE* x5_g, const DTYPE* x6_g, const DTYPE* x7_g, float* partials_g, const NormParams params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  // Phase 1: which array is this CTA's. Selected, not indexed: parameters have no index.
  const DTYPE* const arrays_g[ARRAYS] = {x0_g, x1_g, x2_g, x3_g, x4_g, x5_g, x6_g, x7_g};
  const DTYPE* x_g = nullptr;
  int64 length = 0, stride = 0, units = 0, rows = 0;
  uint32 cta = 0, ctas = 1;
#pragma unroll
  for (int a = 0; a < ARRAYS; a++) {
    if (blockIdx.x >= params.first_cta[a] && blockIdx.x < params.first_cta[a + 1]) {
      x_g = arrays_g[a], length = params.length[a], stride = params.stride[a];
      units = params.units[a], rows = params.rows[a];
      cta = blockIdx.x - params.first_cta[a], ctas = params.first_cta[a + 1] - params.first_cta[a];
    }
  }

  // Phase 2: the CTA's units, then the sum over the CTA.
  float sum = 0.f;
  for (int64 unit = cta; unit < rows * units; unit += ctas) {
    const int64 row = rows == 1 ? 0 : unit / units;
    const int64 column = (unit - row * units) * kUnitItems;
    sum += squares(x_g + row * stride + column, length - column);
  }
  sum = cta_reduce<Sum, THREADS>(sum, partial_s);
  if (threadIdx.x == 0) partials_g[params.first_partial + blockIdx.x] = sum;
}
