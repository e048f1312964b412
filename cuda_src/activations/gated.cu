// A gated activation, item by item: SwiGLU and GeGLU (Shazeer, arXiv:2002.05202).
//
//   out = f(gate) up
//
// Shapes    gate, up and out of one shape, any rank and any outer strides, last axis contiguous (elements.cuh): gate
//           and up may be the halves of one array.
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; grid ceil(units / units of
//           a CTA).
// Budget    registers: 2 * VECTORS * VEC floats, below 80 in all; no shared memory.
// Edges     f has its limits at -inf and inf; f(-inf) = -0 times an infinite up is NaN. out may be gate or up.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC)
#error "DTYPE, THREADS, LANES, VECTORS and VEC come from a launch-configuration table"
#endif
#if !defined(ACTIVATION)
#error "ACTIVATION, one of activations.cuh, comes from a launch-configuration table"
#endif
#include "../common/activations.cuh"
#include "../common/elements.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kGate, kUp, kOut, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    gated(const DTYPE* gate_g, const DTYPE* up_g, DTYPE* out_g, const Loop::Params params) {
  const Loop loop(params);
  const auto gate = loop.load(gate_g, kGate);
  const auto up = loop.load(up_g, kUp);
  float out[VECTORS][VEC];
  each_item<Traits>([&](int v, int i) { out[v][i] = ACTIVATION::value(gate(v, i)) * up(v, i); });
  loop.store(out_g, kOut, out);
}
