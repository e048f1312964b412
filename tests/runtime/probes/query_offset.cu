// Probe of params.cuh: the offset of one batch's queries, and the keys that its last query sees under causal order.
#include "attention/params.cuh"

extern "C" __global__ void probe_query_offset(const void* q_offsets_g, const void* seqused_k_g, long long* offset_g,
                                              int* behind_g, const AttentionParams params) {
  const int batch = blockIdx.x;
  offset_g[batch] = query_offset(params, q_offsets_g, batch);
  behind_g[batch] = sequence_window(params, q_offsets_g, seqused_k_g, batch).of_row(params.sq - 1).end;
}
