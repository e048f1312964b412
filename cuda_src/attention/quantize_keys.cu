// int8 codes and a scale of each key and head, after the centre of its sequence was subtracted.
//
//   x = k - c,   scale = max_d |x_d| / 127,   code_d = round(x_d (127 / max_d |x_d|))
//
// Every operation is float32, correctly rounded, and subnormal results are 0: codes and scales equal NumPy's. A score of
// attention is then q.c + scale sum_d q_d code_d (Zhang et al., "SageAttention", arXiv:2410.02367, section 4.2).
//
// Shapes    k, codes (B, S, G, D) and scales (B, S, G) with any outer strides, or packed (total, G, D). centre (G, D) or
//           (sequences, G, D) float32, whose stride of sequences may be 0.
// Work      LANES lanes of a warp own kKeys neighbouring keys of one head; a lane has 8 items of each and reads their
//           centre once. Neighbouring rows of lanes have neighbouring heads, then keys. Grid ceil(rows / rows of a CTA).
// Budget    registers: kKeys loads of 16 bytes (32 for float32) in flight, 8 items of the centre; no shared memory.
// Edges     as in common/row_codes.cuh, but a key whose |x| are all below 2^-100 has the scale kLeastScale: no scale is
//           0. A key with a NaN or an infinity has scale NaN and codes 0. Packed keys before or after all sequences
//           belong to the first or the last one.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VEC) || !defined(PACKED)
#error "DTYPE, THREADS, LANES, VEC and PACKED come from a launch-configuration table"
#endif
#include "packed_rows.cuh"
#include "../common/row_codes.cuh"
#include "../common/vec.cuh"

constexpr int kKeys = 4;   // of one head that a row of lanes has
constexpr int kItems = 8;  // of a key that a lane has
constexpr int kRowsPerCta = THREADS / LANES;
static_assert(LANES >= 1 && LANES <= kWarpSize && (LANES & (LANES - 1)) == 0, "a row of lanes is in one warp");
static_assert(VEC == 1 || VEC == kItems, "single items or all of them");

// Field for field the structured dtype KEYS_PARAMS of cupyattn/ops/attention/structs. Strides are in items.
struct KeysParams {
  Strides k, codes, scales;
  int64 centre_batch, centre_head;
  BatchIntegers bounds;
  uint32 groups;          // of kKeys keys, in a batch element
  uint32 rows;            // of lanes: batch elements * groups * heads
  int32 seq, heads, dim;  // seq is S, or the total of packed keys
  int32 sequences;
};
static_assert(sizeof(KeysParams) == KEYS_PARAMS_BYTES, "its dtype in Python describes another struct");

using Items = float[kItems];

// Load this lane's items of a row; those beyond it are 0.
template <typename Scalar>
__device__ __forceinline__ void load_items(Items& x, const Scalar* row_g, int column, int dim) {
#pragma unroll
  for (int i = 0; i < kItems; i++) x[i] = 0.f;
  if constexpr (VEC > 1) {
    if (column < dim) load_vec(x, row_g + column);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (column + i < dim) x[i] = to_float(row_g[column + i]);
    }
  }
}

__device__ __forceinline__ void store_codes(signed char* row_g, const Items& x, const RowCodes& codes, int column,
                                            int dim) {
  if constexpr (VEC > 1) {
    if (column < dim) codes.store(row_g + column, x);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (column + i < dim) row_g[column + i] = static_cast<signed char>(codes.code(x[i]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_keys(const DTYPE* k_g, const void* cu_seqlens_g, const float* centre_g, signed char* codes_g,
                  float* scales_g, const KeysParams params) {
  // Phase 1: the head and keys of this row of lanes. Rows beyond the last one have no keys.
  const uint32 row = blockIdx.x * static_cast<uint32>(kRowsPerCta) + threadIdx.x / LANES;
  const uint32 index = row / params.heads, head = row - index * params.heads;
  const uint32 batch = index / params.groups;
  const int first = (index - batch * params.groups) * kKeys;
  const int keys = row < params.rows ? min(kKeys, params.seq - first) : 0;
  const int column = threadIdx.x % LANES * kItems;
  k_g += batch * params.k.batch + first * params.k.seq + head * params.k.head;
  codes_g += batch * params.codes.batch + first * params.codes.seq + head * params.codes.head;
  scales_g += batch * params.scales.batch + first * params.scales.seq + head * params.scales.head;
  centre_g += head * params.centre_head;

  // Phase 2: all loads.
  Items x[kKeys], centre = {};
#pragma unroll
  for (int i = 0; i < kKeys; i++) load_items(x[i], k_g + i * params.k.seq, column, i < keys ? params.dim : 0);
  if constexpr (!PACKED) {
    load_items(centre, centre_g + batch * params.centre_batch, column, keys > 0 ? params.dim : 0);
  }

  // Phase 3: codes and scales, key by key. Every lane of the warp takes part in the maxima.
  const PackedRows rows = {cu_seqlens_g, params.bounds, params.sequences, params.seq, params.seq};
#pragma unroll
  for (int i = 0; i < kKeys; i++) {
    const int dim = i < keys ? params.dim : 0;
    if constexpr (PACKED) {
      const int sequence = rows.last_from(first + i, [&](int b) { return rows.of(b).begin; });
      load_items(centre, centre_g + sequence * params.centre_batch, column, dim);
    }
#pragma unroll
    for (int item = 0; item < kItems; item++) x[i][item] -= centre[item];
    const RowCodes codes = RowCodes::of_key(warp_reduce<MaxBits, LANES>(max_bits(0, x[i])));
    if (column == 0 && dim > 0) scales_g[i * params.scales.seq] = codes.scale;
    store_codes(codes_g + i * params.codes.seq, x[i], codes, column, dim);
  }
}
