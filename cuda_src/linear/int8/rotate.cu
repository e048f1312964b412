// Rotated rows: blocks of 64 neighbouring items times a Hadamard matrix / 8, which is its own inverse.
//
//   out = x H / 8 + addend     (common/row_codes.cuh has H, and the order of its sums)
//
// Shapes    x and out (rows, length) of any strides; length is a multiple of 64. addend, with ADDED, is out itself or
//           has the distance of out's items.
// Work      a thread owns 8 neighbouring items of a row, 8 threads a block. Grid ceil(rows * length / 8 / THREADS).
// Budget    registers for 8 items; no shared memory. If a row's items do not lie together, a thread reads and writes
//           them one by one: neighbouring rows' items come from a cache.
// Edges     the threads beyond the last block store nothing. A block with a NaN or an infinity
//           has no finite items.
#if !defined(IN_DTYPE) || !defined(OUT_DTYPE) || !defined(IN_VEC) || !defined(OUT_VEC) || !defined(THREADS) || \
    !defined(ADDED)
#error "IN_DTYPE, OUT_DTYPE, IN_VEC, OUT_VEC, THREADS and ADDED come from a launch-configuration table"
#endif
#include "../../common/row_codes.cuh"
#include "../../common/vec.cuh"

// Field for field ROTATE_PARAMS of cupyattn/ops/linear/kernels_rows.py. Strides are in items.
struct RotateParams {
  int64 x_row_stride, x_item_stride, out_row_stride, out_item_stride, addend_row_stride;
  int64 rows;
  int32 units;  // of 8 items, of a row
};
static_assert(sizeof(RotateParams) == ROTATE_PARAMS_BYTES, "its dtype in Python describes another struct");

constexpr int kItems = 8;
static_assert(IN_VEC == 1 || IN_VEC * sizeof(IN_DTYPE) == kVectorBytes, "single items or whole vectors");
static_assert(OUT_VEC == 1 || OUT_VEC * sizeof(OUT_DTYPE) == kVectorBytes, "single items or whole vectors");

template <int kVec, typename Scalar>
__device__ __forceinline__ void load_items(float (&v)[kItems], const Scalar* source_g, int64 stride) {
  if constexpr (kVec > 1) {
    load_vec(v, source_g);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) v[i] = to_float(source_g[i * stride]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_rows(const IN_DTYPE* x_g, const OUT_DTYPE* addend_g, OUT_DTYPE* out_g, const RotateParams params) {
  const int64 count = params.rows * params.units;
  const int64 thread = blockIdx.x * static_cast<int64>(THREADS) + threadIdx.x;
  const bool exists = thread < count;
  const int64 unit = exists ? thread : count - 1;  // count is a multiple of a block's 8 threads, which all exist or not
  const int64 row = unit / params.units, first = (unit - row * params.units) * kItems;

  float v[kItems];
  load_items<IN_VEC>(v, x_g + row * params.x_row_stride + first * params.x_item_stride, params.x_item_stride);
  rotate_blocks(v);
  if (!exists) return;
  OUT_DTYPE* target_g = out_g + row * params.out_row_stride + first * params.out_item_stride;
  float added[kItems] = {};
  if constexpr (ADDED) {
    const OUT_DTYPE* added_g = addend_g + row * params.addend_row_stride + first * params.out_item_stride;
    load_items<OUT_VEC>(added, added_g, params.out_item_stride);
  }
#pragma unroll
  for (int i = 0; i < kItems; i++) v[i] = ADDED ? v[i] * 0.125f + added[i] : v[i] * 0.125f;
  if constexpr (OUT_VEC > 1) {
    store_vec(target_g, v);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) target_g[i * params.out_item_stride] = from_float<OUT_DTYPE>(v[i]);
  }
}
