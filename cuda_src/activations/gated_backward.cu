// The gradients of a gated activation's inputs, item by item.
//
//   dgate = dout up f'(gate),   dup = dout f(gate)   (+ the previous contents, with ACCUMULATE)
//
// Shapes    dout, gate, up, dgate and dup of one shape, any rank and any outer strides, last axis contiguous
//           (elements.cuh): gate and up, and so dgate and dup, may be the halves of one array.
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; grid ceil(units / units of
//           a CTA).
// Budget    registers: 3 * VECTORS * VEC floats, below 72 in all, 104 with ACCUMULATE; no shared memory.
// Edges     f's limits at -inf and inf; NaN stays NaN. dgate and dup may be any two of the inputs.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC)
#error "DTYPE, THREADS, LANES, VECTORS and VEC come from a launch-configuration table"
#endif
#if !defined(ACTIVATION) || !defined(ACCUMULATE)
#error "ACTIVATION, one of activations.cuh, and ACCUMULATE come from a launch-configuration table"
#endif
#include "../common/activations.cuh"
#include "../common/elements.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kDout, kGate, kUp, kDgate, kDup, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_backward(const DTYPE* dout_g, const DTYPE* gate_g, const DTYPE* up_g, DTYPE* dgate_g, DTYPE* dup_g,
                   const Loop::Params params) {
  const Loop loop(params);
  const auto dout = loop.load(dout_g, kDout);
  const auto gate = loop.load(gate_g, kGate);
  const auto up = loop.load(up_g, kUp);
  const auto dgate_present = loop.present<ACCUMULATE>(dgate_g, kDgate);
  const auto dup_present = loop.present<ACCUMULATE>(dup_g, kDup);
  float dgate[VECTORS][VEC], dup[VECTORS][VEC];
  each_item<Traits>([&](int v, int i) {
    dgate[v][i] = dout(v, i) * up(v, i) * ACTIVATION::derivative(gate(v, i)) + dgate_present(v, i);
    dup[v][i] = dout(v, i) * ACTIVATION::value(gate(v, i)) + dup_present(v, i);
  });
  loop.store(dgate_g, kDgate, dgate);
  loop.store(dup_g, kDup, dup);
}
