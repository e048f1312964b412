// int8 codes and a scale of each key and head, after the centre of its sequence was subtracted.
//
//   x = k - c,   scale = max_d |x_d| / 127,   code_d = round(x_d (127 / max_d |x_d|))
//
// Every operation is float32, correctly rounded, and subnormal results are 0: codes and scales equal NumPy's for the
// same k. A score of attention is then q.c + scale sum_d q_d code_d (Zhang et al., "SageAttention", arXiv:2410.02367,
// section 4.2). Keys, and queries in place, are rotated first if there is a TABLE, as in rope/rotate.cu (Su et al.,
// arXiv:2104.09864, equation 34), in float32 and with no rounding to DTYPE in between.
//
// Shapes    k, codes (B, S, G, D), scales (B, S, G) and q (B, S, H, D) with any outer strides, or packed (total, G, D).
//           centre (G, D) or (sequences, G, D) float32, whose stride of sequences may be 0. cos and sin (positions,
//           R/2) of TABLE, which is void without a rotation.
// Work      LANES (4 to 32) lanes of a warp own kKeys neighbouring tokens of one head; a lane has 8 items of each, and
//           reads their centre once. Neighbouring rows of lanes have neighbouring heads, then tokens, then queries
//           after keys. Grid ceil(rows / rows of a CTA).
// Budget    registers: kKeys loads of 16 bytes (32 for float32) in flight, 8 items of the centre; no shared memory.
// Edges     as in common/row_codes.cuh, but a key whose |x| are all below 2^-100 has the scale kLeastScale: no scale is
//           0. A key with a NaN or an infinity has scale NaN and codes 0. Packed keys before or after all sequences
//           belong to the first or the last one.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VEC) || !defined(PACKED) || !defined(TABLE) || \
    !defined(INTERLEAVED)
#error "DTYPE, THREADS, LANES, VEC, PACKED, TABLE and INTERLEAVED come from a launch-configuration table"
#endif
#include "packed_rows.cuh"
#include "../common/row_codes.cuh"
#include "../rope/rotation.cuh"

constexpr int kKeys = 4;   // of one head that a row of lanes has
constexpr int kItems = 8;  // of a key that a lane has
constexpr int kRowsPerCta = THREADS / LANES;
static_assert(LANES >= kKeys && LANES <= kWarpSize && (LANES & (LANES - 1)) == 0, "a row of lanes is in one warp");
static_assert(kKeys == 4, "two steps give each lane of four a key");
static_assert(VEC == 1 || VEC == kItems, "single items or all of them");

// Field for field the structured dtype KEYS_PARAMS of cupyattn/ops/attention/structs. Strides are in items.
struct KeysParams {
  Strides k, codes, scales, q;
  int64 centre_batch, centre_head;
  BatchIntegers bounds;
  HeadRotationParams rotation;
  uint32 groups;                   // of kKeys tokens, in a batch element
  uint32 key_rows, rows;           // of lanes: batch elements * groups * G, and those of queries too
  int32 seq, heads, q_heads, dim;  // seq is S, or the total of packed keys
  int32 sequences;
};
static_assert(sizeof(KeysParams) == KEYS_PARAMS_BYTES, "its dtype in Python describes another struct");

using Items = float[kItems];
using Rotation = HeadRotation<TABLE, INTERLEAVED, (VEC > 1)>;

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

// The codes of this lane's items of a row. A factor of 0 makes all of them 0.
__device__ __forceinline__ void store_codes(signed char* row_g, const Items& x, float factor, int column, int dim) {
  const RowCodes codes = {0.f, factor, true};
  if constexpr (VEC > 1) {
    const uint32 low = codes.word(x), high = codes.word(x + 4);
    if (column < dim) st_global_v2(row_g + column, factor != 0.f ? make_uint2(low, high) : make_uint2(0, 0));
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (column + i < dim) row_g[column + i] = static_cast<signed char>(factor != 0.f ? codes.code(x[i]) : 0);
    }
  }
}

// The maxima over a row's lanes: lane j of it returns that of key j % kKeys. A lane gives half of its maxima away in
// each of two steps, where four reductions would take four times the shuffles.
__device__ __forceinline__ uint32 max_of_own_key(const uint32 (&most)[kKeys]) {
  uint32 pair[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const bool odd = threadIdx.x & 1;
    const uint32 kept = odd ? most[2 * i + 1] : most[2 * i], given = odd ? most[2 * i] : most[2 * i + 1];
    pair[i] = max(kept, __shfl_xor_sync(kFullWarp, given, 1));
  }
  const bool upper = threadIdx.x & 2;
  uint32 own = max(upper ? pair[1] : pair[0], __shfl_xor_sync(kFullWarp, upper ? pair[0] : pair[1], 2));
#pragma unroll
  for (int distance = kKeys; distance < LANES; distance *= 2) {
    own = max(own, __shfl_xor_sync(kFullWarp, own, distance));
  }
  return own;
}

__device__ __forceinline__ void store_items(DTYPE* row_g, const Items& x, int column, int dim) {
  if constexpr (VEC > 1) {
    if (column < dim) store_vec(row_g + column, x);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (column + i < dim) row_g[column + i] = from_float<DTYPE>(x[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_keys(const DTYPE* k_g, const void* cu_seqlens_g, const TABLE* cos_g, const TABLE* sin_g,
                  const void* positions_g, const float* centre_g, signed char* codes_g, float* scales_g, DTYPE* q_g,
                  const KeysParams params) {
  // Phase 1: the head and tokens of this row of lanes. Rows beyond the last one have no tokens.
  const uint32 row = blockIdx.x * static_cast<uint32>(kRowsPerCta) + threadIdx.x / LANES;
  const bool query = Rotation::kThere && row >= params.key_rows;
  const uint32 own = query ? row - params.key_rows : row, heads = query ? params.q_heads : params.heads;
  const uint32 index = own / heads, head = own - index * heads;
  const uint32 batch = index / params.groups;
  const int first = (index - batch * params.groups) * kKeys;
  const int tokens = row < params.rows ? min(kKeys, params.seq - first) : 0;
  const int column = threadIdx.x % LANES * kItems;
  const Strides strides = query ? params.q : params.k;
  const int64 start = batch * strides.batch + first * strides.seq + head * strides.head;
  const DTYPE* rows_g = (query ? q_g : k_g) + start;
  codes_g += batch * params.codes.batch + first * params.codes.seq + head * params.codes.head;
  scales_g += batch * params.scales.batch + first * params.scales.seq + head * params.scales.head;
  centre_g += head * params.centre_head;

  // Phase 2: all loads, but those of rotations.
  Items x[kKeys], centre = {};
#pragma unroll
  for (int i = 0; i < kKeys; i++) load_items(x[i], rows_g + i * strides.seq, column, i < tokens ? params.dim : 0);
  if constexpr (!PACKED) {
    load_items(centre, centre_g + batch * params.centre_batch, column, tokens > 0 && !query ? params.dim : 0);
  }

  // Phase 3: rotations, and the differences from the centre.
  const PackedRows rows = {cu_seqlens_g, params.bounds, params.sequences, params.seq, params.seq};
  const Rotation rotation = {cos_g, sin_g, positions_g, params.rotation};
  uint32 most[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; i++) {
    const int dim = i < tokens ? params.dim : 0, token = first + i;
    int begin = 0;
    if constexpr (PACKED) {
      const int sequence = rows.last_from(token, [&](int b) { return rows.of(b).begin; });
      begin = rows.of(sequence).begin;
      load_items(centre, centre_g + sequence * params.centre_batch, column, query ? 0 : dim);
    }
    if constexpr (Rotation::kThere) {
      if (column < dim) {
        const int64 position = rotation.position(batch, token, token - begin);
        rotation.rotate(x[i], rows_g + i * strides.seq, column, position);
      }
      __syncwarp();  // q: its other features are read by every lane before one is written
      if (query) store_items(q_g + start + i * params.q.seq, x[i], column, min(dim, 2 * params.rotation.half));
    }
#pragma unroll
    for (int item = 0; item < kItems; item++) x[i][item] -= centre[item];
    most[i] = max_bits(0, x[i]);
  }

  // Phase 4: scales and codes. Every lane of the warp takes part in the maxima.
  const RowCodes own_key = RowCodes::of_key(max_of_own_key(most));
  const int lane = threadIdx.x % LANES;
  if (lane < min(kKeys, tokens) && !query) scales_g[lane * params.scales.seq] = own_key.scale;
#pragma unroll
  for (int i = 0; i < kKeys; i++) {
    const float factor = __shfl_sync(kFullWarp, own_key.factor, i, LANES);
    if (!query) store_codes(codes_g + i * params.codes.seq, x[i], factor, column, i < tokens ? params.dim : 0);
  }
}
