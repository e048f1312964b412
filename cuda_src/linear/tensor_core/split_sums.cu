// The sum of the parts of a split product (product.cu), in their order, and its epilogue:
//
//   z = sum over p of partials_p + b,   result = activation(z) + addend
//
// Shapes    partials (parts, rows, columns) float32, contiguous; result and addend (rows, columns), rows contiguous,
//           and b (columns,), of DTYPE. With PAIRED, partials, b and preactivation = z have 2 columns for each of the
//           result, those of a gate, then those of up. b, addend (perhaps the result itself) and preactivation may be
//           null.
// Work      a thread owns VEC neighbouring columns of a row of the result. Grid ceil(rows * columns / (VEC * THREADS)).
// Budget    VEC floats of each half in registers.
// Edges     threads beyond the last column do nothing.
#if !defined(DTYPE) || !defined(ACTIVATION) || !defined(PAIRED) || !defined(VEC) || !defined(THREADS)
#error "DTYPE, ACTIVATION, PAIRED, VEC and THREADS come from a launch-configuration table"
#endif
#include "../../common/vec.cuh"
#include "../../common/activations.cuh"

static_assert(VEC == 1 || VEC * sizeof(float) == kVectorBytes, "single items or whole vectors");

constexpr int kHalves = PAIRED ? 2 : 1;

template <typename Scalar>
__device__ __forceinline__ void add(float (&sums)[VEC], const Scalar* terms_g) {
  float terms[VEC];
  load_vec(terms, terms_g);
#pragma unroll
  for (int i = 0; i < VEC; i++) sums[i] += terms[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_split_sums(const float* partials_g, const DTYPE* b_g, const DTYPE* addend_g, DTYPE* preactivation_g,
                      DTYPE* result_g, int64 rows, int64 columns, int64 parts, int64 addend_stride,
                      int64 preactivation_stride, int64 result_stride) {
  const int64 at = (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) * VEC;
  if (at >= rows * columns) return;
  const int64 row = at / columns, column = at - row * columns, width = kHalves * columns;

  float z[kHalves][VEC] = {};
#pragma unroll
  for (int half = 0; half < kHalves; half++) {
    const int64 own = half * columns + column;
    for (int64 part = 0; part < parts; part++) add(z[half], partials_g + (part * rows + row) * width + own);
    if (b_g != nullptr) add(z[half], b_g + own);
    if (preactivation_g != nullptr) store_vec(preactivation_g + row * preactivation_stride + own, z[half]);
  }
  float result[VEC];
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    result[i] = ACTIVATION::value(z[0][i]);
    if constexpr (PAIRED) result[i] *= z[kHalves - 1][i];
  }
  if (addend_g != nullptr) add(result, addend_g + row * addend_stride + column);
  store_vec(result_g + row * result_stride + column, result);
}
