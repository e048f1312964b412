// Attention backward on tensor cores: the gradient of a bias that broadcasts.
//
//   P = exp(s - lse),  dbias = sum of P * (dout V^T - delta) over all scores that the bias is added to
//
// A CTA owns a tile of one bias's gradient, in float32 registers, and goes through the pairs of batch elements and heads
// that the bias is of: for each it forms S = Q K^T and dP = dout V^T again. So dS is summed in one order without a trip
// through memory, for two products more.
//
// Shapes    BackwardParams (backward_params.cuh). dbias as (batches, heads, Sq, Sk), where the pairs of one item are shared
//           out to several CTAs with `parts` along an axis of the pairs. Along an axis that the bias broadcasts along too it
//           has an item for each warp's rows, or each tile's keys.
// Tiles     kRows = WARPS * M_TILES * 16 query rows by TILE_K keys, 16 at a time; a warp owns its rows alone.
// Grid      batches * heads * parts * ceil(Sq / kRows) * ceil(Sk / TILE_K) CTAs; those at work together have one pair.
// Budget    registers: Q and dout (M_TILES * (D + Dv) / 4, D in steps of 32) and dbias (M_TILES * TILE_K / 2). Shared
//           memory: K and V twice. Q and dout come straight to registers (quad_rows.cuh).
// Barriers  one per pair.
// Edges     rows beyond Sq have L = +inf, hence dS = 0, and are not stored; keys beyond the sequence are zeros and
//           masked. Tiles that no query sees, or that a block mask leaves empty (block_states.cuh), add nothing.
#include "backward_summed_dbias.cuh"

// Where a sequence lies in the arrays, and its rows in scratch memory.
struct DenseSequence {
  static constexpr int query_begin = 0, key_begin = 0;
  static constexpr uint32 scratch_begin = 0;

  int64 q_offset;
  KeyWindow window;

  __device__ __forceinline__ static int batch(int sequence) { return sequence; }
};

struct DenseSequences {
  using Sequence = DenseSequence;

  const BackwardParams& params;
  const void *q_offsets_g, *seqused_k_g;

  __device__ __forceinline__ int count() const { return params.batch; }
  __device__ __forceinline__ Sequence of(int batch) const {
    return {query_offset(params.attention, q_offsets_g, batch),
            sequence_window(params.attention, q_offsets_g, seqused_k_g, batch)};
  }
  __device__ __forceinline__ int queries(const Sequence&) const { return params.attention.sq; }
  __device__ __forceinline__ const BackwardParams& params_of(const Sequence&) const { return params; }
};

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_summed_dbias(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                                    const float* statistics_g, const float* scales_g, DBIAS* dbias_g,
                                    const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                    const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                    const BackwardParams params, int batches, int heads, int parts, int sums_rows,
                                    int sums_keys, int adds MODIFIER_STRIDES) {
  sum_dbias(params,
            {q_g,
             k_g,
             v_g,
             dout_g,
             statistics_g,
             dbias_g,
             {bias_g, mask_g, slopes_g, nullptr, MODIFIERS, {scales_g, nullptr}}},
            {batches, heads, parts, sums_rows != 0, sums_keys != 0, adds != 0},
            DenseSequences{params, q_offsets_g, seqused_k_g});
}
