// How dS keeps within float16's range: a power of two, 2^-k, for each key-value head of a sequence. bfloat16 has
// float32's range, in which dS is computed: its kernels have neither sizes nor scales.
//
//   |dS_ij| <= P_ij (|dP_ij| + |delta_i|) <= keep_scale * max_i |dout_i| * max_j |v_j| + max_i |delta_i|
//
// (P is at most 1; Cauchy and Schwarz for dP = dout V^T; keep_scale is dropout's; queries that see no key do not count,
// as V of keys that a mask hides does: which those are is known in the loop alone.) k is 0 where that is below 2^15,
// and otherwise brings it there: what is left to 65504 is for a P that the errors of its score take above 1. A CTA
// keeps V or dout in registers for its whole life and needs it for dP alone: that, and delta, are taken times 2^-k
// before the loop. dP and dS then are too, without an instruction more in the loop, and P and dV as they were. dQ and
// dK get their 2^k back as they are stored, and dbias in the loop, where it is. Powers of two change no digit: where k
// is 0, all bits are those of a kernel without them. Where it is not, dS below 2^(k - 24), and what of V or dout is,
// has no digits left.
#pragma once

#if !defined(DTYPE)
#error "DTYPE, that of q, k, v and dout, comes from a launch-configuration table"
#endif
#include "../../common/pack.cuh"
#include "../backward_params.cuh"
#include "tile_loader.cuh"

constexpr int kMostLog2 = 15;      // of the bound where k is 0
constexpr int kMostDownLog2 = 15;  // of k: statistics, times 2^98, leave float32 at 2^30

struct GradientScale {
  float down = 1.f, up = 1.f;  // 2^-k, 2^k
};

// How large some rows are, at most: the square of the norm of one of dout or V, and |delta|. What is not finite does
// not count: it may spoil its own results, but no others.
struct Sizes {
  float square = 0.f, delta = 0.f;

  __device__ __forceinline__ void take_square(float x) { square = x < kInfinity ? fmaxf(square, x) : square; }
  __device__ __forceinline__ void take_delta(float x) { delta = x < kInfinity ? fmaxf(delta, x) : delta; }
};

// In scratch: of each query head, those of a group the same; and 2^k again where a CTA finds it at its end by its
// number alone. What leads to its head it would otherwise keep in registers through its loop: dK and dV of head dim 128
// with scalar loads then spilled 148 bytes (NVRTC 12.9.86, 2026-11-24).
struct ScaleArrays {
  const float* heads_g;
  float* ctas_g;

  __device__ __forceinline__ GradientScale of_head(const BackwardParams& params, int batch, int head) const {
    if constexpr (!kNarrowRange<DTYPE>) return {};
    const auto pair = reinterpret_cast<const float2*>(heads_g)[batch * params.attention.heads + head];
    return {pair.x, pair.y};
  }
  // To be called before a barrier, and after it.
  __device__ __forceinline__ void set_aside(const GradientScale& scale) const {
    if (kNarrowRange<DTYPE> && threadIdx.x == 0) ctas_g[blockIdx.x] = scale.up;
  }
  __device__ __forceinline__ float up() const { return kNarrowRange<DTYPE> ? ctas_g[blockIdx.x] : 1.f; }
};

__device__ __forceinline__ uint4 times(const uint4& quad, uint32 both) {
  if constexpr (!kNarrowRange<DTYPE>) return quad;
  return make_uint4(mul_f16x2(quad.x, both), mul_f16x2(quad.y, both), mul_f16x2(quad.z, both), mul_f16x2(quad.w, both));
}

// Rows of dout on their way to shared memory, as resident_rows.cuh takes them. (As fragments in the kernel of dQ they
// model 0.04 lower with dropout or a softcap, and V on this way 0.05 lower with a softcap: T4, 2026-11-24.)
template <int kCols, int kVec>
struct ChunksTimes {
  uint32 both;

  __device__ __forceinline__ explicit ChunksTimes(float factor) : both(pack_halves(factor, factor)) {}
  __device__ __forceinline__ uint4 operator()(const DTYPE* chunk_g, int /*item*/, int chunk) const {
    return times(load_chunk<kCols, kVec>(chunk_g, chunk), both);
  }
};

// A fragments of V.
template <int kMTiles, int kSteps>
__device__ __forceinline__ void scale_fragments(uint32 (&a)[kMTiles][kSteps][2], float factor) {
  if constexpr (!kNarrowRange<DTYPE>) return;
  const uint32 both = pack_halves(factor, factor);
#pragma unroll
  for (int i = 0; i < kMTiles; i++) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      a[i][step][0] = mul_f16x2(a[i][step][0], both);
      a[i][step][1] = mul_f16x2(a[i][step][1], both);
    }
  }
}
