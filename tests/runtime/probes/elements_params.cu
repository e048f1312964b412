// Probe of ElementsParams (elements.cuh): each field is written out, and the offset of each row.
#include "common/elements.cuh"

static_assert(sizeof(ElementsParams<ARRAYS>) == ELEMENTS_PARAMS_BYTES, "structs describes another struct");

extern "C" __global__ void probe_elements_params(long long* fields_g, long long* offsets_g,
                                                 const ElementsParams<ARRAYS> params) {
  long long* next = fields_g;
  for (int axis = 0; axis < kElementsAxes; axis++) *next++ = params.shape[axis];
  for (int array = 0; array < ARRAYS; array++) {
    for (int axis = 0; axis < kElementsAxes; axis++) *next++ = params.strides[array][axis];
  }
  for (int array = 0; array < ARRAYS; array++) *next++ = params.offsets[array];
  *next++ = params.length;
  *next++ = params.rows;
  *next++ = params.units;
  for (int array = 0; array < ARRAYS; array++) {
    for (uint32 row = 0; row < params.rows; row++) {
      *offsets_g++ = OuterCoordinates<ARRAYS>(params, row).offset(params, array);
    }
  }
}
