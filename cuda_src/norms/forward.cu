// Layer norm (CENTRED) and RMS norm over the last axis, forward, with an optional residual addition.
//
//   s = round(x + residual),   out_i = (s_i - mean) rstd (weight_offset + weight_i) + bias_i
//   layer norm: mean = mean_j s_j,  rstd = (mean_j (s_j - mean)^2 + eps)^(-1/2)   (Ba et al., arXiv:1607.06450)
//   RMS norm:   mean = 0,           rstd = (mean_j s_j^2 + eps)^(-1/2)       (Zhang, Sennrich, arXiv:1910.07467)
//
// STREAM: x and s are float32, everything else is a 16-bit dtype, except scale: s = x + scale residual. x is the
// residual stream of a transformer, which float16 does not hold, and residual what a layer adds to it. A scale is a
// power of two that a row of the layer's weight was divided by, so the product is exact. With inner_weight the residual
// is normalised first, by an RMS norm of its own, without a rounding:
//
//   s_i = round(x_i + scale_i residual_i (mean_j residual_j^2 + inner_eps)^(-1/2) (inner_offset + inner_weight_i))
//
// The statistics are of the sum as it is stored, so that a backward that reads it computes with the same numbers.
//
// Shapes    x, residual, out and total (s) of any rank and any outer strides, last axis contiguous (RowsParams,
//           rows.cuh); weight, bias, scale and inner_weight (length,); mean and rstd one float for each row.
//           With codes (int8, in C order) and their scales (one float a row), out is rounded to its dtype, quantised
//           and, with ROTATED, rotated (common/row_codes.cuh), and not written itself.
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: the row's items in their own dtype, STRIPS * VEC a thread, and as many of the residual until it
//           is added, then of weight and bias; for a row that is not RESIDENT: VEC items of each, and a second read.
//           A row of float32 takes twice the registers. An inner norm reads a residual that is not RESIDENT twice.
//           Shared memory: 10 floats per warp.
// Edges     columns beyond the row do not count; a row with a NaN or an infinity gives NaN (RMS norm of a row with
//           infinities: zeros, and NaN at the infinities); rows without items have mean 0 and rstd eps^(-1/2).
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) ||                  \
    !defined(RESIDENT) || !defined(CENTRED) || !defined(WITH_RESIDUAL) || !defined(WITH_WEIGHT) ||                   \
    !defined(WITH_BIAS) || !defined(WITH_MEAN) || !defined(WITH_RSTD) || !defined(STREAM) || !defined(WITH_SCALE) || \
    !defined(WITH_INNER_WEIGHT) || !defined(WITH_CODES) || !defined(ROTATED)
#error \
    "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT, CENTRED, WITH_RESIDUAL, WITH_WEIGHT, WITH_BIAS, WITH_MEAN, WITH_RSTD, STREAM, WITH_SCALE, WITH_INNER_WEIGHT, WITH_CODES and ROTATED come from a launch-configuration table"
#endif
#include "../common/row_codes.cuh"
#include "moments.cuh"

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
enum Array { kX, kResidual, kOut, kTotal, kMean, kRstd };
static_assert(!ROTATED || WITH_CODES, "only codes are rotated");
static_assert(!WITH_CODES || (RESIDENT && VEC > 1 && LANES * VEC >= kRotation), "rows in registers, by vectors");
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

// If several warps share a row of few registers, a layer norm requests as many threads a multiprocessor as 65,536
// registers allow without spills (sm_80 and later; Turing has room for 1024 threads in any case). A row waits for its
// first load and for two barriers; other rows run meanwhile. At widths of 2048 and 4096 it takes 19.8 and 37.9 us this
// way, and 21.8 and 43.9 us without (H200, compute_75 code, 8192 rows of float16, 2026-11-24,
// `python -m cupyattn.benchmark layers --quick`).
constexpr bool kManyThreads = CENTRED && !STREAM && !WITH_CODES && Rows::kResident &&
                              kHeldRegisters<Rows, Scalar> <= 8 && Rows::kLanes > kWarpSize;
constexpr int kThreadsPerSm = !kManyThreads ? THREADS : WITH_MEAN ? 1280 : 1536;

// Whether weight and bias are loaded before the row's statistics are known: if registers hold them and the row.
constexpr bool kHoldColumns =
    Rows::kResident && !kManyThreads &&
    (1 + STREAM + WITH_WEIGHT + WITH_BIAS) * kHeldRegisters<Rows, Scalar> <= kFreeRegisters<Rows>;
constexpr bool kInner = WITH_RESIDUAL && WITH_INNER_WEIGHT;

struct Smem {
  RowSums<Rows, 1> sums;                              // buffer 1: of the inner norm
  RowSums<Rows, 2> moments;                           // of a resident row
  RowMoments<Rows> parts;                             // of a longer one
  uint32 most[WITH_CODES ? THREADS / kWarpSize : 1];  // the largest |out| of each warp, as bits
};

struct Statistics {
  float pivot = 0.f, shift = 0.f;  // the mean is their sum
  float rstd;

  __device__ __forceinline__ float normalised(float x) const {
    return CENTRED ? (x - pivot) * rstd - shift * rstd : x * rstd;
  }
};

// This row, and the columns that all rows share.
struct Row {
  const Total* x_g;
  const Scalar *residual_g, *weight_g, *bias_g;
  Scalar* out_g;
  Total* total_g;
  int64 length;
  const float* scale_g;
  const Scalar* inner_weight_g;
  float inner_offset;
};

// Computes s from the loads of x and residual, and writes it over x.
__device__ __forceinline__ void add_residual(HeldTotal& x, const Held& residual, const Row& row, int64 segment,
                                             float inner_rstd) {
  if constexpr (WITH_RESIDUAL) {
    float total[Rows::kVec], added[Rows::kVec];
    x.get(total);
    residual.get(added);
    if constexpr (kInner) {
      float weight[Rows::kVec];
      load_segment<Rows>(weight, row.inner_weight_g, segment, row.length, 0.f);
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) added[i] *= inner_rstd * (row.inner_offset + weight[i]);
    }
    float scale[Rows::kVec];
    if constexpr (WITH_SCALE) load_segment<Rows>(scale, row.scale_g, segment, row.length, 0.f);
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) total[i] += WITH_SCALE ? scale[i] * added[i] : added[i];
    x.set(total);
    store_segment<Rows>(row.total_g, total, segment, row.length);
  }
}

__device__ __forceinline__ void load(HeldTotal& x, Held& residual, const Row& row, int64 segment) {
  x.load(row.x_g, segment, row.length);
  if constexpr (WITH_RESIDUAL) residual.load(row.residual_g, segment, row.length);
}

__device__ __forceinline__ float sum_of(const float (&x)[Rows::kVec]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < Rows::kVec; i++) sum += x[i];
  return sum;
}

// The moments of a resident row: its mean, then the squares about it.
__device__ __forceinline__ Moments moments_of(const HeldTotal (&held)[Rows::kHeldSegments], int64 length,
                                              Smem& smem_s) {
  float x[Rows::kVec], sum[1] = {0.f};
#pragma unroll
  for (int segment = 0; segment < Rows::kHeldSegments; segment++) {
    held[segment].get(x);
    sum[0] += sum_of(x);
  }
  smem_s.sums.add_up(sum, 0);
  Moments part;
  part.count = static_cast<float>(length);
  part.pivot = sum[0] * inverse(part.count);
#pragma unroll
  for (int segment = 0; segment < Rows::kHeldSegments; segment++) {
    held[segment].get(x);
    if (segment_exists<Rows>(segment, length)) part.add(x);
  }
  float about[2] = {part.s1, part.s2};
  smem_s.moments.add_up(about, 0);
  part.s1 = about[0], part.s2 = about[1];
  return part;
}

template <typename Segment>
__device__ __forceinline__ float squares_of(const Segment& held) {
  float x[Rows::kVec], sum = 0.f;
  held.get(x);
#pragma unroll
  for (int i = 0; i < Rows::kVec; i++) sum += x[i] * x[i];
  return sum;
}

__device__ __forceinline__ void normalise(float (&x)[Rows::kVec], const HeldTotal& held, const Held& weight_r,
                                          const Held& bias_r, const Statistics& statistics, float weight_offset) {
  float weight[Rows::kVec], bias[Rows::kVec];
  held.get(x);
  if constexpr (WITH_WEIGHT) weight_r.get(weight);
  if constexpr (WITH_BIAS) bias_r.get(bias);
#pragma unroll
  for (int i = 0; i < Rows::kVec; i++) {
    x[i] = statistics.normalised(x[i]);
    if constexpr (WITH_WEIGHT) x[i] *= CENTRED ? weight[i] : weight_offset + weight[i];  // layer norm has no offset
    if constexpr (WITH_BIAS) x[i] += bias[i];
  }
}

// The largest absolute value of a row, as bits, from that of each thread.
__device__ __forceinline__ uint32 row_max(uint32 most, Smem& smem_s) {
  constexpr int kWarps = Rows::kLanes <= kWarpSize ? 1 : Rows::kLanes / kWarpSize;
  most = warp_reduce<MaxBits, Rows::kLanes / kWarps>(most);
  if constexpr (kWarps > 1) {
    if (lane_index() == 0) smem_s.most[warp_index()] = most;
    row_barrier<Rows>();  // most: written by every warp of the row, once in a kernel
    most = warp_reduce<MaxBits, kWarps>(smem_s.most[warp_index() / kWarps * kWarps + lane_index() % kWarps]);
  }
  return most;
}

// Quantise the normalised row; it is in registers. Columns beyond the row are zeros. Without codes there is nothing to
// instantiate: Codes is the rows' traits.
template <typename Codes, typename Normalised>
__device__ __forceinline__ void store_codes(signed char* row_g, float* scale_g, int64 length, Smem& smem_s,
                                            const Normalised& normalised) {
  if constexpr (WITH_CODES) {
    float v[Codes::kHeldSegments][Codes::kVec];
    uint32 most = 0;
#pragma unroll
    for (int segment = 0; segment < Codes::kHeldSegments; segment++) {
      normalised(v[segment], segment);
      HeldSegment<Codes, Scalar> rounded;
      rounded.set(v[segment]);
      const bool is_there = segment_exists<Codes>(segment, length);
#pragma unroll
      for (int i = 0; i < Codes::kVec; i++) v[segment][i] = is_there ? v[segment][i] : 0.f;
      if constexpr (ROTATED) rotate_blocks<Codes::kVec>(v[segment]);
      most = max_bits(most, v[segment]);
    }
    const RowCodes codes = RowCodes::of<ROTATED>(row_max(most, smem_s));
#pragma unroll
    for (int segment = 0; segment < Codes::kHeldSegments; segment++) {
      if (!segment_exists<Codes>(segment, length)) continue;
      codes.store<Codes::kVec>(row_g + segment_column<Codes>(segment), v[segment]);
    }
    if (scale_g != nullptr && threadIdx.x % Codes::kLanes == 0) *scale_g = codes.scale;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, kThreadsPerSm / THREADS)
    norm_forward(const Total* x_g, const Scalar* residual_g, const Scalar* weight_g, const Scalar* bias_g,
#if STREAM
                 const float* scale_g, const Scalar* inner_weight_g, Scalar* out_g, Total* total_g, float* mean_g,
                 float* rstd_g, float eps, float weight_offset, float inner_eps, float inner_offset,
                 const Params params) {
#elif WITH_CODES
                 Scalar* out_g, Total* total_g, float* mean_g, float* rstd_g, signed char* codes_g, float* scales_g,
                 float eps, float weight_offset, const Params params) {
#else
                 Scalar* out_g, Total* total_g, float* mean_g, float* rstd_g, float eps, float weight_offset,
                 const Params params) {
#endif
#if !STREAM
  const float* const scale_g = nullptr;
  const Scalar* const inner_weight_g = nullptr;
  const float inner_eps = 0.f, inner_offset = 0.f;
#endif
#if !WITH_CODES
  signed char* const codes_g = nullptr;
  float* const scales_g = nullptr;
#endif
  __shared__ Smem smem_s;
  const int64 index = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  const bool exists = index < params.rows;  // a warp may hold rows beyond the last: they take part with no columns
  int64 offsets[kMean];
  row_offsets(offsets, params, exists ? index : 0);
  const Row row = {x_g + offsets[kX],
                   WITH_RESIDUAL ? residual_g + offsets[kResidual] : nullptr,
                   weight_g,
                   bias_g,
                   WITH_CODES ? nullptr : out_g + offsets[kOut],
                   WITH_RESIDUAL ? total_g + offsets[kTotal] : nullptr,
                   exists ? params.length : 0,
                   scale_g,
                   inner_weight_g,
                   inner_offset};

  // Phase 1: read the row, add, and sum it up.
  const int64 segments = Rows::segments(row.length);
  HeldTotal x[Rows::kHeldSegments];
  Held added[Rows::kHeldSegments], weight[Rows::kHeldSegments], bias[Rows::kHeldSegments];
  Moments part;
  float squares[1] = {0.f}, inner_squares[1] = {0.f}, inner_rstd = 1.f;
  if constexpr (kInner && !Rows::kResident) {
    for (int64 segment = 0; segment < segments; segment++) {
      added[0].load(row.residual_g, segment, row.length);
      inner_squares[0] += squares_of(added[0]);
    }
  }
  if constexpr (Rows::kResident) {
#pragma unroll
    for (int segment = 0; segment < Rows::kHeldSegments; segment++) load(x[segment], added[segment], row, segment);
#pragma unroll
    for (int segment = 0; segment < Rows::kHeldSegments; segment++) {
      if constexpr (kInner) inner_squares[0] += squares_of(added[segment]);
    }
  }
  if constexpr (kInner) {
    smem_s.sums.add_up(inner_squares, 1);
    inner_rstd = rsqrtf(inner_squares[0] * inverse(static_cast<float>(row.length)) + inner_eps);
  }
  if constexpr (Rows::kResident) {
#pragma unroll
    for (int segment = 0; segment < Rows::kHeldSegments; segment++) {
      add_residual(x[segment], added[segment], row, segment, inner_rstd);
      if constexpr (kHoldColumns && WITH_WEIGHT) weight[segment].load(weight_g, segment, row.length);
      if constexpr (kHoldColumns && WITH_BIAS) bias[segment].load(bias_g, segment, row.length);
      if constexpr (!CENTRED) squares[0] += squares_of(x[segment]);
    }
    if constexpr (CENTRED) part = moments_of(x, row.length, smem_s);
  } else {
    for (int64 segment = 0; segment < segments; segment++) {
      load(x[0], added[0], row, segment);
      add_residual(x[0], added[0], row, segment, inner_rstd);
      if constexpr (!CENTRED) squares[0] += squares_of(x[0]);
      if (CENTRED && segment_exists<Rows>(segment, row.length)) {
        float values[Rows::kVec];
        x[0].get(values);
        if (segment == 0) part.pivot = sum_of(values) * (1.f / Rows::kVec);
        part.count += Rows::kVec;
        part.add(values);
      }
    }
  }

  // Phase 2: the row's statistics.
  Statistics statistics;
  float mean_square;  // of what is normalised
  if constexpr (CENTRED) {
    if constexpr (!Rows::kResident) smem_s.parts.merge(part);
    statistics.pivot = part.pivot;
    statistics.shift = part.shift();
    mean_square = part.variance();
  } else {
    smem_s.sums.add_up(squares, 0);
    mean_square = squares[0] * inverse(static_cast<float>(row.length));
  }
  statistics.rstd = rsqrtf(mean_square + eps);

  // Phase 3: out, from the registers or a second read, or its codes.
  if constexpr (WITH_CODES) {
    store_codes<Rows>(codes_g + index * params.length, exists ? scales_g + index : nullptr, row.length, smem_s,
                      [&](float (&values)[Rows::kVec], int segment) {
                        if constexpr (!kHoldColumns && WITH_WEIGHT) weight[segment].load(weight_g, segment, row.length);
                        if constexpr (!kHoldColumns && WITH_BIAS) bias[segment].load(bias_g, segment, row.length);
                        normalise(values, x[segment], weight[segment], bias[segment], statistics, weight_offset);
                      });
  } else {
#pragma unroll Rows::kHeldSegments
    for (int64 segment = 0; segment < segments; segment++) {
      const int held = Rows::held(segment);
      if constexpr (!Rows::kResident) x[0].load(WITH_RESIDUAL ? row.total_g : row.x_g, segment, row.length);
      if constexpr (!kHoldColumns && WITH_WEIGHT) weight[held].load(weight_g, segment, row.length);
      if constexpr (!kHoldColumns && WITH_BIAS) bias[held].load(bias_g, segment, row.length);
      float values[Rows::kVec];
      normalise(values, x[held], weight[held], bias[held], statistics, weight_offset);
      store_segment<Rows>(row.out_g, values, segment, row.length);
    }
  }

  if (exists && threadIdx.x % Rows::kLanes == 0) {
    const float mean = statistics.pivot + statistics.shift;
    if constexpr (WITH_MEAN) mean_g[row_offset(params, kMean, index)] = isnan(statistics.rstd) ? statistics.rstd : mean;
    if constexpr (WITH_RSTD) rstd_g[row_offset(params, kRstd, index)] = statistics.rstd;
  }
}
