// Probe of the structs that kernels take by value: each field is written out by its C name.
#include "attention/params.cuh"

extern "C" __global__ void probe_params(long long* fields_g, float* scales_g, const AttentionParams params) {
  long long* next = fields_g;
  const Strides* arrays[] = {&params.q, &params.k, &params.v, &params.out, &params.lse};
  for (const Strides* strides : arrays) {
    *next++ = strides->batch;
    *next++ = strides->seq;
    *next++ = strides->head;
  }
  const BatchIntegers* integers[] = {&params.q_offsets, &params.seqused_k};
  for (const BatchIntegers* layout : integers) {
    *next++ = layout->stride;
    *next++ = layout->is_int64;
  }
  *next++ = params.q_offset;
  *next++ = params.offset_least;
  *next++ = params.offset_most;
  *next++ = params.left;
  *next++ = params.right;
  *next++ = params.heads;
  *next++ = params.group;
  *next++ = params.sq;
  *next++ = params.sk;
  *next++ = params.together;
  *next++ = params.kv_together;
  *next++ = params.batches;
  scales_g[0] = params.scale_log2;
  scales_g[1] = params.softmax_scale;
}
