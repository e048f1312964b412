// Probes: small kernels by which tests read what the headers of cuda_src compute. A test compiles one, by its macro.

#ifdef PROBE_ACTIVATIONS
// Probe of activations.cuh: value and derivative of one activation.
#include "common/activations.cuh"

extern "C" __global__ void probe_activations(const float* x_g, float* value_g, float* derivative_g, int count) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= count) return;
  value_g[i] = ACTIVATION::value(x_g[i]);
  derivative_g[i] = ACTIVATION::derivative(x_g[i]);
}
#endif

#ifdef PROBE_BACKWARD_PARAMS
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
#endif

#ifdef PROBE_DISTANCE
// Probe of scores.cuh: how far a thread's query is behind its key, some rows and keys further.
#include "attention/scores.cuh"

extern "C" __global__ void probe_distance(const long long* distances_g, const int* rows_g, const int* keys_g,
                                          float* result_g, int count) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at < count) result_g[at] = Distance(distances_g[at]).plus(rows_g[at], keys_g[at]);
}
#endif

#ifdef PROBE_ELEMENTS_PARAMS
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
#endif

#ifdef PROBE_GRID_ORDER
// Probe of the order of CTAs: each writes which tile of which head it has, of query rows and of keys.
#include "attention/backward_params.cuh"

extern "C" __global__ void probe_grid_order(int* rows_g, int* keys_g, const BackwardParams params) {
  const AttentionParams& attention = params.attention;
  const TileCoordinates rows = coordinates_of_cta(attention, TILE, /*last_rows_first=*/true);
  if (blockIdx.x < attention.heads * params.batch * div_up(attention.sq, TILE)) {
    rows_g[2 * blockIdx.x] = rows.batch * attention.heads + rows.head;
    rows_g[2 * blockIdx.x + 1] = rows.first_row;
  }
  const KeyTileCoordinates keys(attention, TILE);
  const int kv_heads = attention.heads / attention.group;
  if (blockIdx.x < kv_heads * params.batch * div_up(attention.sk, TILE)) {
    keys_g[2 * blockIdx.x] = keys.batch * kv_heads + keys.kv_head;
    keys_g[2 * blockIdx.x + 1] = keys.first_key;
  }
}
#endif

#ifdef PROBE_MASK
// Probe of masks.cuh: a thread asks for the keys that one row sees.
#include "attention/masks.cuh"

extern "C" __global__ void probe_mask(const int* rows_g, int* begin_g, int* end_g, int count, long long q_offset,
                                      long long left, long long right, int keys) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  const KeyRange range = KeyWindow(q_offset, left, right, keys).of_row(rows_g[at]);
  begin_g[at] = range.begin;
  end_g[at] = range.end;
}
#endif

#ifdef PROBE_NUMERIC
// Probe of numeric.cuh and vec.cuh: every item goes through float32 and back, and through ex2 and lg2.
#include "common/vec.cuh"

extern "C" __global__ void probe_numeric(const DTYPE* x_g, float* float_g, DTYPE* rounded_g, float* ex2_g, float* lg2_g,
                                         int count) {
  const int first = (blockIdx.x * THREADS + threadIdx.x) * VEC;
  if (first >= count) return;
  float x[VEC], doubled[VEC];
  load_vec(x, x_g + first);
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    float_g[first + i] = x[i];
    ex2_g[first + i] = ex2_approx(x[i]);
    lg2_g[first + i] = lg2_approx(x[i]);
    doubled[i] = 1.0009765625f * x[i];  // needs rounding to every narrower dtype
  }
  store_vec(rounded_g + first, doubled);
}
#endif

#ifdef PROBE_ONLINE_SOFTMAX
// Probe of online_softmax.cuh: a thread folds one row of scores in tiles of TILE, with a weighted sum beside it.
#include "common/online_softmax.cuh"

extern "C" __global__ void probe_online_softmax(const float* scores_g, const float* values_g, float* out_g,
                                                float* lse_g, int rows, int length) {
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= rows) return;
  OnlineSoftmax<UNIT> softmax;
  float acc = 0.f;
  for (int first = 0; first < length; first += TILE) {
    const int end = min(first + TILE, length);
    float largest = -kInfinity;
    for (int j = first; j < end; j++) largest = fmaxf(largest, scores_g[row * length + j]);
    acc *= softmax.raise(largest);
    for (int j = first; j < end; j++) {
      const float p = softmax.weight(scores_g[row * length + j]);
      softmax.l += p;
      acc += p * values_g[row * length + j];
    }
  }
  out_g[row] = acc * softmax.normaliser();
  lse_g[row] = softmax.lse();
}
#endif

#ifdef PROBE_PACK
// Probe of pack.cuh: each thread packs two neighbours, plainly and shifted by 2^-112, and masks the first away.
#include "common/pack.cuh"

extern "C" __global__ void probe_pack(const float* x_g, uint32* halves_g, uint32* shifted_g, uint32* with_nan_g,
                                      uint32* masked_g) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  const float x = x_g[2 * at], y = x_g[2 * at + 1];
  const float low = __uint_as_float(0x07800000u);  // 2^-112
  halves_g[at] = pack_halves(x, y);
  shifted_g[at] = pack_shifted(x * low, y * low);
  with_nan_g[at] = pack_shifted<true>(x * low, y * low);
  masked_g[at] = halves_g[at] & halves_mask(false, true);
}
#endif

#ifdef PROBE_PACKED_ORDER
// Probe of the order of packed sequences' CTAs, each a warp: which tile of which head of which sequence it has.
#include "attention/packed_rows.cuh"

extern "C" __global__ void probe_packed_order(const int* cu_seqlens_g, int* found_g, int batch, int total, int longest,
                                              int heads, int together) {
  const PackedRows rows = {cu_seqlens_g, {/*stride=*/1, /*is_int64=*/0}, batch, total, longest};
  const PackedTile tile = rows.of_cta(heads, together, TILE, rows.lane_tiles(0, TILE));
  if (lane_index() != 0) return;
  reinterpret_cast<int4*>(found_g)[blockIdx.x] = make_int4(tile.batch, tile.head, tile.tile, tile.tiles);
}
#endif

#ifdef PROBE_PARAMS
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
#endif

#ifdef PROBE_QUERY_OFFSET
// Probe of params.cuh: the offset of one batch's queries, and the keys that its last query sees under causal order.
#include "attention/params.cuh"

extern "C" __global__ void probe_query_offset(const void* q_offsets_g, const void* seqused_k_g, long long* offset_g,
                                              int* behind_g, const AttentionParams params) {
  const int batch = blockIdx.x;
  offset_g[batch] = query_offset(params, q_offsets_g, batch);
  behind_g[batch] = sequence_window(params, q_offsets_g, seqused_k_g, batch).of_row(params.sq - 1).end;
}
#endif

#ifdef PROBE_REDUCE
// Probe of reduce.cuh: each CTA reduces its THREADS items, over warps, parts of warps and the whole CTA.
#include "common/reduce.cuh"

extern "C" __global__ void probe_reduce(const float* x_g, float* warp_sum_g, float* part_max_g, float* cta_sum_g,
                                        float* cta_max_g) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int at = blockIdx.x * THREADS + threadIdx.x;
  const float x = x_g[at];
  warp_sum_g[at] = warp_reduce<Sum>(x);
  part_max_g[at] = warp_reduce<Max, 8>(x);
  cta_sum_g[at] = cta_reduce<Sum, THREADS>(x, partial_s);
  cta_max_g[at] = cta_reduce<Max, THREADS>(x, partial_s);  // shares partial_s with the sum before it
}
#endif

#ifdef PROBE_ROWS_PARAMS
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
#endif
