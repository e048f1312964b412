// y = act(x w + b) + residual for one row of x, in float32 FMAs: w is read once, at the speed of memory.
//
// Like product.cu, but without tensor cores, whose fragments would be seven eighths empty: a warp loads longer runs of
// w instead. Along K, a warp owns two columns and reads 512 bytes of one at a time. Along N, a lane owns eight columns,
// and LANES lanes read 16 LANES bytes of a row; each lane reads the eight rows k of its 16 bytes of x.
//
// Shapes    tile.cuh, M = 1. Any N and K; OUT float32 for the sums of a split K (merge.cu).
// Work      A warp sums its columns over every K_WARPS-th burst of STEPS loads of x; K_WARPS warps share the columns,
//           GROUPS such groups of a CTA have neighbouring columns. Grid: splits * ceil(N / columns of a CTA).
// Budget    registers: 8 STEPS of w along K or 32 STEPS along N, 4 STEPS of x, 2 or 8 sums; shared memory: a float for
//           each warp and column.
// Edges     k beyond K: zeros on both sides, not read. Columns beyond N are not stored.
#if !defined(W_ALONG_K) || !defined(VEC) || !defined(ACTIVATION) || !defined(GATED) || !defined(OUT) ||  \
    !defined(LANES) || !defined(STEPS) || !defined(GROUPS) || !defined(K_WARPS) || !defined(MIN_CTAS) || \
    !defined(THREADS) || !defined(SHARED_BYTES)
#error \
    "W_ALONG_K, VEC, ACTIVATION, GATED, OUT, LANES, STEPS, GROUPS, K_WARPS, MIN_CTAS, THREADS and SHARED_BYTES come \
from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "tile.cuh"

constexpr int kLaneItems = 8;  // of x in one load

struct Traits {
  static constexpr bool kAlongK = W_ALONG_K;
  static constexpr int kSteps = STEPS;
  static constexpr int kGroups = GROUPS;
  static constexpr int kKWarps = K_WARPS;
  static constexpr int kWarps = kGroups * kKWarps;
  static constexpr int kLanes = LANES;  // that share the columns; the others of the warp have other k
  static constexpr int kKLanes = kWarpSize / kLanes;
  static constexpr int kStepItems = kKLanes * kLaneItems;
  static constexpr int kBurstItems = kSteps * kStepItems;
  using Tile = ColumnTile<kAlongK ? 2 : kLanes * 8, GATED>;
  static constexpr int kCtaColumns = kGroups * Tile::kColumns;
  static constexpr int kCtaResults = kGroups * Tile::kResults;
  using Part = CtaPart<sizeof(OUT) == sizeof(float), kCtaResults, kBurstItems>;

  static_assert(!kAlongK || kLanes == 1, "along K every lane has other k");
  static_assert(kKLanes >= 8, "a lane keeps one of its eight columns");
  static_assert(kWarps * kWarpSize == THREADS && kCtaColumns <= THREADS, "a thread finishes a column");
};

struct Smem {
  float sums[Traits::kWarps][Traits::Tile::kColumns];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table derives the shared memory");
static_assert(sizeof(ThinParams) == THIN_PARAMS_BYTES, "its dtype in Python describes another struct");

using Tile = Traits::Tile;

__device__ __forceinline__ void add_products(float& sum, const uint32 (&w)[4], const uint32 (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 a = unpack(w[i]), b = unpack(x[i]);
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
  }
}

// w (N, K): two columns a warp.
struct SumsAlongK {
  const float16* line_g[2];
  uint32 pairs[Traits::kSteps][2][kLaneItems / 2];
  float sum[2] = {};

  // A column beyond the last reads the last: its sum is not stored.
  __device__ __forceinline__ SumsAlongK(const float16* w_g, const ThinParams& params, int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64 line = min(Tile::result(first, i), params.outer - 1) + Tile::half(i, params.outer);
      line_g[i] = w_g + line * params.w_stride;
    }
  }

  __device__ __forceinline__ void load(int k, int end) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int step = 0; step < Traits::kSteps; step++) {
        const int skip = step * Traits::kStepItems;
        load_pairs<kLaneItems, VEC, true>(pairs[step][i], line_g[i] + k + skip, end - k - skip);
      }
    }
  }

  __device__ __forceinline__ void use(const uint32 (&x)[kLaneItems / 2], int step) {
#pragma unroll
    for (int i = 0; i < 2; i++) add_products(sum[i], pairs[step][i], x);
  }

  __device__ __forceinline__ void store(float (&sums_s)[Tile::kColumns]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float total = warp_reduce<Sum>(sum[i]);
      if (lane_index() == i) sums_s[i] = total;
    }
  }
};

// w (K, N): eight columns a lane.
struct SumsAlongN {
  const float16* columns_g;
  int64 stride;
  int count;  // of these columns that exist
  uint32 pairs[Traits::kSteps][kLaneItems][4];
  float sum[8] = {};

  __device__ __forceinline__ SumsAlongN(const float16* w_g, const ThinParams& params, int first) {
    const int column = 8 * (lane_index() % Traits::kLanes), result = Tile::result(first, column);
    columns_g = w_g + Tile::half(column, params.outer) + result;
    stride = params.w_stride;
    count = params.outer - result;
  }

  __device__ __forceinline__ void load(int k, int end) {
    const float16* row_g = columns_g + k * stride;
#pragma unroll
    for (int step = 0; step < Traits::kSteps; step++) {
#pragma unroll
      for (int i = 0; i < kLaneItems; i++) {
        load_pairs<8, VEC, true>(pairs[step][i], row_g, step * Traits::kStepItems + i < end - k ? count : 0);
        row_g += i + 1 < kLaneItems ? stride : (Traits::kStepItems - kLaneItems + 1) * stride;
      }
    }
  }

  __device__ __forceinline__ void use(const uint32 (&x)[kLaneItems / 2], int step) {
#pragma unroll
    for (int i = 0; i < kLaneItems; i++) {
      const float2 both = unpack(x[i / 2]);
      const float factor = i % 2 ? both.y : both.x;
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        const float2 w = unpack(pairs[step][i][pair]);
        sum[2 * pair] = fmaf(w.x, factor, sum[2 * pair]);
        sum[2 * pair + 1] = fmaf(w.y, factor, sum[2 * pair + 1]);
      }
    }
  }

  // Over the lanes with other k. Each exchange halves the columns that a lane still has, until it has one.
  __device__ __forceinline__ void store(float (&sums_s)[Tile::kColumns]) {
    int column = 8 * (lane_index() % Traits::kLanes), count = 8;
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= Traits::kLanes; distance /= 2) {
      const bool upper = lane_index() & distance;
      if (count > 1) {
        count /= 2;
#pragma unroll
        for (int i = 0; i < count; i++) {
          const float kept = upper ? sum[count + i] : sum[i], sent = upper ? sum[i] : sum[count + i];
          sum[i] = kept + __shfl_xor_sync(kFullWarp, sent, distance);
        }
        column += upper ? count : 0;
      } else {
        sum[0] += __shfl_xor_sync(kFullWarp, sum[0], distance);
      }
    }
    sums_s[column] = sum[0];
  }
};

template <bool kAlongK>
struct SumsOf {
  using Type = SumsAlongK;
};
template <>
struct SumsOf<false> {
  using Type = SumsAlongN;
};
using Sums = SumsOf<Traits::kAlongK>::Type;

__device__ __forceinline__ void burst(Sums& sums, const float16* x_g, int k, int end) {
  uint32 x[Traits::kSteps][kLaneItems / 2];
  sums.load(k, end);
#pragma unroll
  for (int step = 0; step < Traits::kSteps; step++) {
    const int skip = step * Traits::kStepItems;
    load_pairs<kLaneItems, VEC, false>(x[step], x_g + k + skip, end - k - skip);
  }
#pragma unroll
  for (int step = 0; step < Traits::kSteps; step++) sums.use(x[step], step);
}

// The sum over a group's warps, in their order.
__device__ __forceinline__ float total(const Smem& smem, int group, int column, float bias) {
#pragma unroll
  for (int warp = 0; warp < Traits::kKWarps; warp++) bias += smem.sums[group * Traits::kKWarps + warp][column];
  return bias;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_thin_row(const float16* x_g, const float16* w_g, const float16* b_g, const float16* residual_g,
                    float16* preactivation_g, OUT* out_g, const ThinParams params) {
  __shared__ Smem smem;
  const Traits::Part part(params);

  // The result that this thread finishes, and its bias, loaded before the products.
  const int column = threadIdx.x % Tile::kResults, own_group = threadIdx.x / Tile::kResults;
  const int result = part.first + threadIdx.x;
  const bool finishes = threadIdx.x < Traits::kCtaResults && result < params.outer;
  const uint16 bias = load_bias(b_g, result, finishes);
  const uint16 up_bias = load_bias(b_g, static_cast<int64>(params.outer) + result, finishes && Tile::kGated);

  // Phase 1: products. The group's warps take the bursts of this split of K in rotation, and all iterate equally often.
  Sums sums(w_g, params, part.first + warp_index() / Traits::kKWarps * Tile::kResults);
  const int end = part.end(params);
  const int k_lane = lane_index() / Traits::kLanes * kLaneItems;
  int k = (part.from + warp_index() % Traits::kKWarps) * Traits::kBurstItems + k_lane;
#pragma unroll 1
  for (int step_of_warp = part.from; step_of_warp < part.to; step_of_warp += Traits::kKWarps) {
    burst(sums, x_g, k, end);
    k += Traits::kKWarps * Traits::kBurstItems;
  }

  // Phase 2: the sum over warps and its epilogue.
  sums.store(smem.sums[warp_index()]);
  __syncthreads();  // smem.sums: written by every warp
  if (!finishes) return;
  const float z = total(smem, own_group, column, bias_of(bias));
  const float up = Tile::kGated ? total(smem, own_group, column + Tile::kResults, bias_of(up_bias)) : 0.f;
  const Epilogue<ACTIVATION, GATED, OUT> finish = {residual_g, preactivation_g, out_g + part.split * params.out_stride};
  finish.store(params, 0, result, z, up);
}
