// rotary.cu of packed sequences: positions begin anew in each.
//
// Shapes    VarlenParams (varlen_params.cuh); cos and sin (positions, R/2) of TABLE.
// Work      as rotary.cu; each thread finds the sequence of its row by bisection.
// Grid      as rotary.cu, of the rows of the arrays.
// Budget    as rotary.cu.
// Edges     as rotary.cu; rows that belong to no sequence are left as they are.
#include "rotary.cuh"
#include "varlen_params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_rotary_varlen(const DTYPE* x0_g, const DTYPE* x1_g, const TABLE* cos_g, const TABLE* sin_g,
                            const void* cu_seqlens_q_g, const void* cu_seqlens_k_g, const void* q_offsets_g,
                            const void* seqused_k_g, DTYPE* out0_g, DTYPE* out1_g, const VarlenParams varlen,
                            const RotaryParams params) {
  const AttentionParams& longest = varlen.attention;
  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, q_offsets_g, seqused_k_g};
  rotate(params, {x0_g, x1_g, cos_g, sin_g, out0_g, out1_g}, [&](Token& token, bool keys, uint32 number) {
    const PackedRows rows =
        keys ? packed_keys(varlen.packed, longest, pointers) : packed_queries(varlen.packed, longest, pointers);
    const int row = static_cast<int>(number);
    const int batch = rows.last_from(row, [&](int b) { return rows.of(b).begin; });
    const PackedSequence sequence(varlen.packed, longest, pointers, batch);
    const int within = row - (keys ? sequence.keys : sequence.queries).begin;
    token = {0, number, within + (keys ? 0 : sequence.q_offset),
             keys || !sequence.window(longest).of_row(within).empty()};
    return within >= 0 && within < (keys ? sequence.keys_in_use : sequence.queries.count);
  });
}
