// Add an array to a float32 sum, item by item and in place.
//
//   total += x
//
// Shapes    x and total of one shape, any rank and any outer strides, last axis contiguous (elements.cuh); total
//           float32.
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; grid ceil(units / units of
//           a CTA).
// Budget    registers: below 40; no shared memory.
// Edges     NaN and infinities stay.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC)
#error "DTYPE, THREADS, LANES, VECTORS and VEC come from a launch-configuration table"
#endif
#include "../common/elements.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kTotal, kX, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    add_to(float* total_g, const DTYPE* x_g, const Loop::Params params) {
  const Loop loop(params);
  const auto total = loop.load(total_g, kTotal);
  const auto x = loop.load(x_g, kX);
  float sum[VECTORS][VEC];
  each_item<Traits>([&](int v, int i) { sum[v][i] = total(v, i) + x(v, i); });
  loop.store(total_g, kTotal, sum);
}
