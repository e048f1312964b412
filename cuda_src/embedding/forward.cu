// Rows of a table by their numbers.
//
//   out_t = table[ids_t], bit for bit;   with WIDE  out_t = scale table[ids_t], in float32
//
// Shapes    table (rows, length), with any row stride; ids of any shape and strides, out (*ids.shape,
//           length) of any outer strides, last axis contiguous (elements.cuh, a row for each id).
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; grid ceil(units / units of
//           a CTA).
// Budget    registers: VECTORS * VEC storage items, below 40 in all; no shared memory.
// Edges     an id outside of the table gives a row of NaN, and nothing is read.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC) || !defined(IDS) || \
    !defined(WIDE)
#error "DTYPE, THREADS, LANES, VECTORS, VEC, IDS and WIDE come from a launch-configuration table"
#endif
#include "../common/elements.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kIds, kOut, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
#if WIDE
    embedding(const DTYPE* table_g, const IDS* ids_g, float* out_g, int64 table_rows, int64 table_stride, float scale,
#else
    embedding(const DTYPE* table_g, const IDS* ids_g, DTYPE* out_g, int64 table_rows, int64 table_stride,
#endif
              const Loop::Params params) {
  const Loop loop(params);
  if (loop.rest <= 0) return;
  const int64 id = ids_g[loop.outer.offset(params, kIds)];
  LoadedItems<Traits, DTYPE> out;
  if (id >= 0 && id < table_rows) {
    out = loop.load_from(table_g + id * table_stride + loop.column);
  } else {
    each_item<Traits>([&](int v, int i) { out.vectors[v].item[i] = from_float<DTYPE>(__int_as_float(0x7fc00000)); });
  }
#if WIDE
  float wide[Traits::kVectors][Traits::kVec];
  each_item<Traits>([&](int v, int i) { wide[v][i] = scale * out(v, i); });
  loop.store(out_g, kOut, wide);
#else
  loop.store(out_g, kOut, out);
#endif
}
