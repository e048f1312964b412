// Probe of the struct that backward kernels take by value: each field is written out by its C name.
#include "attention/backward_params.cuh"

extern "C" __global__ void probe_backward_params(long long* fields_g, float* scale_g, const BackwardParams params) {
  long long* next = fields_g;
  *next++ = params.attention.heads;
  const Strides* arrays[] = {&params.dout, &params.dlse, &params.dq, &params.dk, &params.dv};
  for (const Strides* strides : arrays) {
    *next++ = strides->batch;
    *next++ = strides->seq;
    *next++ = strides->head;
  }
  *next++ = params.dbias.batch;
  *next++ = params.dbias.head;
  *next++ = params.dbias.row;
  *next++ = params.dbias.key;
  *next++ = params.dsinks_stride;
  *next++ = params.zeroed;
  *next++ = params.batch;
  *next++ = params.rows_padded;
  *next++ = params.accumulate;
  *scale_g = params.scale;
}
