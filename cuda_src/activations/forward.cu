// An activation, item by item (activations.cuh).
//
//   out = f(x)
//
// Shapes    x and out of one shape, any rank and any outer strides, last axis contiguous (ElementsParams,
//           elements.cuh).
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; grid ceil(units / units of
//           a CTA).
// Budget    registers: VECTORS * VEC floats, below 64 in all; no shared memory.
// Edges     f's limits at -inf and inf; NaN stays NaN. out may be x itself.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC)
#error "DTYPE, THREADS, LANES, VECTORS and VEC come from a launch-configuration table"
#endif
#if !defined(ACTIVATION)
#error "ACTIVATION, one of activations.cuh, comes from a launch-configuration table"
#endif
#include "../common/activations.cuh"
#include "../common/elements.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kX, kOut, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    activation(const DTYPE* x_g, DTYPE* out_g, const Loop::Params params) {
  const Loop loop(params);
  const auto x = loop.load(x_g, kX);
  float out[VECTORS][VEC];
  each_item<Traits>([&](int v, int i) { out[v][i] = ACTIVATION::value(x(v, i)); });
  loop.store(out_g, kOut, out);
}
