// The gradient of an activation's input, item by item (activations.cuh).
//
//   dx = dout f'(x)   (+ the previous contents, with ACCUMULATE)
//
// Shapes    dout, x and dx of one shape, any rank and any outer strides, last axis contiguous (elements.cuh).
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; grid ceil(units / units of
//           a CTA).
// Budget    registers: 2 * VECTORS * VEC floats, below 80 in all; no shared memory.
// Edges     f's limits at -inf and inf; NaN stays NaN. dx may be dout or x itself.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC)
#error "DTYPE, THREADS, LANES, VECTORS and VEC come from a launch-configuration table"
#endif
#if !defined(ACTIVATION) || !defined(ACCUMULATE)
#error "ACTIVATION, one of activations.cuh, and ACCUMULATE come from a launch-configuration table"
#endif
#include "../common/activations.cuh"
#include "../common/elements.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kDout, kX, kDx, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    activation_backward(const DTYPE* dout_g, const DTYPE* x_g, DTYPE* dx_g, const Loop::Params params) {
  const Loop loop(params);
  const auto dout = loop.load(dout_g, kDout);
  const auto x = loop.load(x_g, kX);
  const auto present = loop.present<ACCUMULATE>(dx_g, kDx);
  float dx[VECTORS][VEC];
  each_item<Traits>([&](int v, int i) { dx[v][i] = dout(v, i) * ACTIVATION::derivative(x(v, i)) + present(v, i); });
  loop.store(dx_g, kDx, dx);
}
