// Layer norm (WITH_MEAN) and RMS norm over the last axis, backward: from dout (dL/dout) and the normalised array, x.
//
//   n_i = (x_i - mean) rstd - c,   c = mean_j (x_j - mean) rstd,   g_i = dout_i (weight_offset + weight_i)
//   dx_i = rstd (g_i - mean_j g_j - n_i mean_j (g_j n_j)) + dtotal_i
//   dweight_i = sum over rows of dout_i n_i,   dbias_i = sum over rows of dout_i
//
// c corrects the rounding of the mean to one float: up to 5e-4 for a mean of 1e4, which matters for a standard
// deviation of 1e-2. mean_j (g_j n_j) also follows from sums of n without c. RMS norm has mean 0, no c and no
// mean_j g_j. If the forward also returned the sum x + residual, then x here is that sum, dtotal the gradient with
// respect to it, and dx the gradient with respect to both of its terms.
//
// STREAM: x, dtotal and dx are float32 and everything else is a 16-bit dtype (forward.cu). dx is then the gradient with
// respect to the sum; that of a 16-bit term is its rounding.
//
// Shapes    dout, x, dtotal and dx of any rank and any outer strides, last axis contiguous (RowsParams, rows.cuh);
//           weight (length,); mean and rstd one float for each row; partial sums (CTAs, length) float32.
// Work      LANES threads own a row; a CTA loops over rows gridDim.x * kRowsPerCta apart. While it computes a row, the
//           loads of the next row are in flight, if registers hold both. column_sums.cu adds the CTAs' partial sums.
// Budget    registers, for STRIPS * VEC items a thread: x, dout and dtotal of one or two rows and the weight, in their
//           own dtype, and float sums of dweight and dbias; for a row that is not RESIDENT: VEC items of each, a
//           second read, and sums in global memory. Shared memory: three floats per warp (RMS norm: one), twice;
//           one row segment of column sums.
// Edges     columns beyond the row do not count.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || \
    !defined(RESIDENT) || !defined(WITH_DTOTAL) || !defined(WITH_WEIGHT) || !defined(WITH_BIAS) ||  \
    !defined(WITH_MEAN) || !defined(STREAM)
#error \
    "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT, WITH_DTOTAL, WITH_WEIGHT, WITH_BIAS, WITH_MEAN, STREAM come from a launch-configuration table"
#endif
#include "../common/rows.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<6>;
using Held = HeldSegment<Rows, Scalar>;
#if STREAM
using Total = float;
using HeldTotal = HeldFloats<Rows>;
#else
using Total = Scalar;
using HeldTotal = Held;
#endif
enum Array { kDout, kX, kDtotal, kMean, kRstd, kDx };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

// The weight and one or two rows stay in a thread's registers, if they fit with the float sums and as many floats in
// flight.
constexpr int kWeight = WITH_WEIGHT * kHeldRegisters<Rows, Scalar>;
constexpr int kRow = ((WITH_DTOTAL ? 3 : 2) + (STREAM ? 1 + WITH_DTOTAL : 0)) * kHeldRegisters<Rows, Scalar>;
constexpr int kFree = kFreeRegisters<Rows> - (1 + WITH_WEIGHT + WITH_BIAS) * Rows::kHeldSegments * Rows::kVec;
constexpr bool kAhead = Rows::kResident && kWeight + 2 * kRow <= kFree;
constexpr bool kHoldWeight = Rows::kResident && kWeight + kRow <= kFree;

// Sums over a row in phase 1: of g n, and for layer norm also of g and of n.
constexpr int kSums = WITH_MEAN ? 3 : 1;

struct Smem {
  RowSums<Rows, kSums> sums;
  float columns[ColumnSums<Rows>::kSharedFloats];
};

struct Arrays {
  const Scalar* dout_g;
  const Total *x_g, *dtotal_g;
  const float *mean_g, *rstd_g;
};

// A row: its offsets, its statistics, and the segments of it that this thread holds.
struct Row {
  Held dout[Rows::kHeldSegments];
  HeldTotal x[Rows::kHeldSegments], dtotal[Rows::kHeldSegments];
  const Scalar* dout_g;
  const Total *x_g, *dtotal_g;
  int64 length;  // 0 of a row beyond the last, which takes part with no columns
  float mean, rstd;

  __device__ __forceinline__ void load_segment(int held, int64 segment) {
    dout[held].load(dout_g, segment, length);
    x[held].load(x_g, segment, length);
    if constexpr (WITH_DTOTAL) dtotal[held].load(dtotal_g, segment, length);
  }

  // The loads of the row start here. A row beyond the last has none.
  __device__ __forceinline__ void begin(const Arrays& arrays, const Params& params, int64 index) {
    const bool exists = index < params.rows;
    int64 offsets[kDx];
    row_offsets(offsets, params, exists ? index : 0);
    length = exists ? params.length : 0;
    dout_g = arrays.dout_g + offsets[kDout];
    x_g = arrays.x_g + offsets[kX];
    if constexpr (WITH_DTOTAL) dtotal_g = arrays.dtotal_g + offsets[kDtotal];
    mean = rstd = 0.f;
    if (exists) rstd = arrays.rstd_g[offsets[kRstd]];
    if (WITH_MEAN && exists) mean = arrays.mean_g[offsets[kMean]];
    if constexpr (Rows::kResident) {
#pragma unroll
      for (int segment = 0; segment < Rows::kHeldSegments; segment++) load_segment(segment, segment);
    }
  }
};

// A thread's values of a row segment: dout, the normalised x, and dout times the weight. Beyond the row dout is 0.
struct Terms {
  float dout[Rows::kVec], normal[Rows::kVec], g[Rows::kVec];

  __device__ __forceinline__ Terms(const Row& row, int held, const Held& weight_r, float weight_offset, float c) {
    row.dout[held].get(dout);
    row.x[held].get(normal);
    if constexpr (WITH_WEIGHT) weight_r.get(g);
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) {
      normal[i] = (normal[i] - row.mean) * row.rstd - c;
      g[i] = !WITH_WEIGHT ? dout[i] : dout[i] * (WITH_MEAN ? g[i] : weight_offset + g[i]);  // layer norm has no offset
    }
  }
};

__device__ __forceinline__ void store_dx(const Row& row, const Terms& terms, int held, int64 segment, Total* dx_row_g,
                                         float g_shift, float n_slope, bool accumulate) {
  float dx[Rows::kVec], more[Rows::kVec];
#pragma unroll
  for (int i = 0; i < Rows::kVec; i++) dx[i] = row.rstd * terms.g[i] - g_shift - terms.normal[i] * n_slope;
  if constexpr (WITH_DTOTAL) {
    row.dtotal[held].get(more);
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) dx[i] += more[i];
  }
  if (accumulate) {
    load_segment<Rows>(more, dx_row_g, segment, row.length, 0.f);
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) dx[i] += more[i];
  }
  store_segment<Rows>(dx_row_g, dx, segment, row.length);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_backward(const Scalar* dout_g, const Total* x_g, const Total* dtotal_g, const Scalar* weight_g, const Scalar*,
                  const float* mean_g, const float* rstd_g, Total* dx_g, float* dweight_g, float* dbias_g,
                  float weight_offset, int accumulate, const Params params) {
  __shared__ Smem smem_s;
  const Arrays arrays = {dout_g, x_g, dtotal_g, mean_g, rstd_g};
  const int64 step = static_cast<int64>(gridDim.x) * Rows::kRowsPerCta;
  const int64 first = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta);
  const float each = 1.f / static_cast<float>(params.length);
  float* dweight_row_g = dweight_g + blockIdx.x * params.length;
  float* dbias_row_g = dbias_g + blockIdx.x * params.length;
  ColumnSums<Rows> dweight, dbias;

  Held weight[Rows::kHeldSegments];
  if constexpr (kHoldWeight && WITH_WEIGHT) {
#pragma unroll
    for (int segment = 0; segment < Rows::kHeldSegments; segment++)
      weight[segment].load(weight_g, segment, params.length);
  }

  Row row, next;
  if constexpr (kAhead) next.begin(arrays, params, first + threadIdx.x / Rows::kLanes);
  int buffer = 0;
  for (int64 start = first; start < params.rows; start += step, buffer ^= 1) {
    const int64 index = start + threadIdx.x / Rows::kLanes, segments = Rows::segments(params.length);
    if constexpr (kAhead) {
      row = next;
      next.begin(arrays, params, index + step);
    } else {
      row.begin(arrays, params, index);
    }

    // Phase 1: the means of g n, g and n.
    float sums[kSums] = {};
#pragma unroll Rows::kHeldSegments
    for (int64 segment = 0; segment < segments; segment++) {
      const int held = Rows::held(segment);
      if constexpr (!Rows::kResident) row.load_segment(held, segment);
      if constexpr (!kHoldWeight && WITH_WEIGHT) weight[held].load(weight_g, segment, params.length);
      const Terms terms(row, held, weight[held], weight_offset, 0.f);
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) {
        sums[0] += terms.g[i] * terms.normal[i];
        if constexpr (WITH_MEAN) {
          sums[1] += terms.g[i];
          if (segment_exists<Rows>(segment, row.length)) sums[2] += terms.normal[i];
        }
      }
    }
    smem_s.sums.add_up(sums, buffer);
    float c = 0.f, g_shift = 0.f;
    if constexpr (WITH_MEAN) {
      c = sums[2] * each;
      g_shift = row.rstd * (sums[1] * each);
      sums[0] -= c * sums[1];
    }
    const float n_slope = row.rstd * (sums[0] * each);

    // Phase 2: dx, and this row's terms of dweight and dbias; from the registers or a second read.
    Total* dx_row_g = dx_g + row_offset(params, kDx, index < params.rows ? index : 0);
#pragma unroll Rows::kHeldSegments
    for (int64 segment = 0; segment < segments; segment++) {
      const int held = Rows::held(segment);
      if constexpr (!Rows::kResident) row.load_segment(held, segment);
      if constexpr (!kHoldWeight && WITH_WEIGHT) weight[held].load(weight_g, segment, params.length);
      Terms terms(row, held, weight[held], weight_offset, c);
      store_dx(row, terms, held, segment, dx_row_g, g_shift, n_slope, accumulate);
      if constexpr (WITH_BIAS) dbias.add(terms.dout, segment, start == first, dbias_row_g, params.length);
      if constexpr (WITH_WEIGHT) {
#pragma unroll
        for (int i = 0; i < Rows::kVec; i++) terms.normal[i] *= terms.dout[i];
        dweight.add(terms.normal, segment, start == first, dweight_row_g, params.length);
      }
    }
  }
  if constexpr (WITH_WEIGHT) dweight.store(dweight_row_g, params.length, smem_s.columns);
  if constexpr (WITH_BIAS) dbias.store(dbias_row_g, params.length, smem_s.columns);
}
