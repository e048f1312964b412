// Sums of the parts of a product that was split (product.cu), in their order:  result = sum over p of partials_p + addend.
//
// Shapes    partials (parts, rows, columns) float32, contiguous; result and addend (rows, columns), rows contiguous. addend
//           may be null, or the result itself.
// Work      a thread owns VEC neighbouring columns of a row. Grid ceil(rows * columns / (VEC * THREADS)).
// Budget    VEC floats in registers.
// Edges     threads beyond the last column do nothing.
#if !defined(VEC) || !defined(THREADS)
#error "VEC and THREADS come from a launch-configuration table"
#endif
#include "../../common/vec.cuh"

static_assert(VEC == 1 || VEC * sizeof(float) == kVectorBytes, "single items or whole vectors");

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_split_sums(const float* partials_g, const float16* addend_g, float16* result_g, int64 rows, int64 columns,
                      int64 parts, int64 addend_stride, int64 result_stride) {
  const int64 at = (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) * VEC;
  if (at >= rows * columns) return;
  const int64 row = at / columns, column = at - row * columns;

  float sums[VEC] = {};
  for (int64 part = 0; part < parts; part++) {
    float terms[VEC];
    load_vec(terms, partials_g + part * rows * columns + at);
#pragma unroll
    for (int i = 0; i < VEC; i++) sums[i] += terms[i];
  }
  if (addend_g != nullptr) {
    float addend[VEC];
    load_vec(addend, addend_g + row * addend_stride + column);
#pragma unroll
    for (int i = 0; i < VEC; i++) sums[i] += addend[i];
  }
  store_vec(result_g + row * result_stride + column, sums);
}
