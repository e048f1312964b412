// Probe of RowsParams (rows.cuh): each field is written out, and the offset of each row.
#include "common/rows.cuh"

static_assert(sizeof(RowsParams<ARRAYS>) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void probe_rows_params(long long* fields_g, long long* offsets_g,
                                             const RowsParams<ARRAYS> params) {
  long long* next = fields_g;
  for (int axis = 0; axis < kOuterAxes; axis++) *next++ = params.shape[axis];
  for (int array = 0; array < ARRAYS; array++) {
    for (int axis = 0; axis < kOuterAxes; axis++) *next++ = params.strides[array][axis];
  }
  *next++ = params.rows;
  *next++ = params.length;
  for (int array = 0; array < ARRAYS; array++) {
    for (int row = 0; row < params.rows; row++) *offsets_g++ = row_offset(params, array, row);
  }
}
