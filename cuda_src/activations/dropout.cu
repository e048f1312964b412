// Dropout, item by item, with an optional residual; the forward and the backward are one kernel.
//
//   out_e = (keep_e ? keep_scale x_e : 0) + residual_e,   keep_e = field_e(seed) >= keep_from
//
// e is the item's number in C order, field_e its 16 random bits (philox.cuh). The mask depends on nothing else.
//
// Shapes    x, residual and out of one shape, any rank and any outer strides, last axis contiguous (elements.cuh).
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; one Philox call has the
//           random bits of eight items: a vector of 16-bit items, or two vectors where VEC is 4. Grid ceil(units /
//           units of a CTA).
// Budget    registers: below 64; no shared memory. Philox takes about 80 instructions a call.
// Edges     a dropped item is 0 (or the residual) for any x, also NaN. out may be x or residual itself.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC)
#error "DTYPE, THREADS, LANES, VECTORS and VEC come from a launch-configuration table"
#endif
#if !defined(WITH_RESIDUAL)
#error "WITH_RESIDUAL comes from a launch-configuration table"
#endif
#include "../common/elements.cuh"
#include "../common/philox.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kX, kResidual, kOut, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");
static_assert(8 % VEC == 0, "a vector has the fields of one Philox call");

extern "C" __global__ void __launch_bounds__(THREADS)
    dropout(const DTYPE* x_g, const DTYPE* residual_g, DTYPE* out_g, uint64 seed, uint32 keep_from, float keep_scale,
            const Loop::Params params) {
  const Loop loop(params);
  const auto x = loop.load(x_g, kX);
  const auto residual = loop.present<WITH_RESIDUAL>(residual_g, kResidual);
  float out[VECTORS][VEC];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const uint64 index = loop.index() + v * Loop::kStep;
    const Philox4 words = element_words(seed, index / 8);
    const int first = VEC == 8 ? 0 : static_cast<int>(index % 8);  // a vector starts at a multiple of its length
#pragma unroll
    for (int i = 0; i < VEC; i++) {
      const bool keep = element_field(words, first + i) >= keep_from;
      out[v][i] = (keep ? keep_scale * x(v, i) : 0.f) + residual(v, i);
    }
  }
  loop.store(out_g, kOut, out);
}
