// The gradient of an embedding's table, first step: ids as contiguous int32.
//
//   flat_t = ids_t, or `rows` if the table has no such row; kBeyond from the last id up to `padded`
//
// Shapes    ids of any shape and strides (elements.cuh, one item a row); flat (padded,).
// Work      a thread an id; grid ceil(padded / THREADS).
// Budget    about 20 registers.
// Edges     padded is a multiple of the ids that sort.cu reads at a time.
#if !defined(THREADS) || !defined(IDS)
#error "THREADS and IDS come from a launch-configuration table"
#endif
#include "../common/elements.cuh"

using Params = ElementsParams<1>;
static_assert(sizeof(Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");
constexpr int kBeyond = 0x7fffffff;  // larger than any row

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_ids(const IDS* ids_g, int* flat_g, int rows, int padded, const Params params) {
  const uint32 t = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  if (t >= static_cast<uint32>(padded)) return;
  int flat = kBeyond;
  if (t < params.rows) {
    const int64 id = ids_g[OuterCoordinates<1>(params, t).offset(params, 0)];
    flat = id >= 0 && id < rows ? static_cast<int>(id) : rows;
  }
  flat_g[t] = flat;
}
