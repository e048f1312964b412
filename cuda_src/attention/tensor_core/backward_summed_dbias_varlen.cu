// Attention backward of packed sequences on tensor cores, the gradient of a bias that broadcasts: as
// backward_summed_dbias.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh); dbias as of the longest sequences.
// Work      as backward_summed_dbias.cu.
// Grid      as backward_summed_dbias.cu.
// Budget    as backward_summed_dbias.cu.
// Edges     as backward_summed_dbias.cu; items behind all sequences get zeros.
#include "backward_summed_dbias.cuh"
#include "../varlen_backward_params.cuh"

// As DenseSequence and DenseSequences (backward_summed_dbias.cu).
struct PackedPlace {
  int query_begin, key_begin;
  uint32 scratch_begin;
  int sq, sk;
  int64 q_offset;
  KeyWindow window;

  __device__ __forceinline__ static int batch(int) { return 0; }
};

struct PackedSequences {
  using Sequence = PackedPlace;

  const VarlenBackwardParams& params;
  const PackedPointers& pointers;

  __device__ __forceinline__ int count() const { return params.packed.batch; }
  __device__ __forceinline__ Sequence of(int batch) const {
    const PackedSequence sequence(params.packed, params.backward.attention, pointers, batch);
    const RowSpan &queries = sequence.queries, &keys = sequence.keys;
    return {queries.begin, keys.begin,        static_cast<uint32>(scratch_begin(queries, batch)), queries.count,
            keys.count,    sequence.q_offset, sequence.window(params.backward.attention)};
  }
  __device__ __forceinline__ int queries(const Sequence& sequence) const { return sequence.sq; }
  __device__ __forceinline__ BackwardParams params_of(const Sequence& sequence) const {
    BackwardParams own = params.backward;
    own.attention.sq = sequence.sq;
    own.attention.sk = sequence.sk;
    return own;
  }
};

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_summed_dbias_varlen(const float16* q_g, const float16* k_g, const float16* v_g,
                                           const float16* dout_g, const float* statistics_g, const float* scales_g,
                                           DBIAS* dbias_g, const void* cu_seqlens_q_g, const void* cu_seqlens_k_g,
                                           const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                           const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                           const VarlenBackwardParams params, int batches, int heads, int parts,
                                           int sums_rows, int sums_keys, int adds MODIFIER_STRIDES) {
  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, q_offsets_g, seqused_k_g};
  sum_dbias(params.backward,
            {q_g,
             k_g,
             v_g,
             dout_g,
             statistics_g,
             dbias_g,
             {bias_g, mask_g, slopes_g, nullptr, MODIFIERS, {scales_g, nullptr}}},
            {batches, heads, parts, sums_rows != 0, sums_keys != 0, adds != 0}, PackedSequences{params, pointers});
}
