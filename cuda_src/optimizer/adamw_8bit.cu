// One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2) in place, with running means of eight bits
// in blocks of 256 items with one scale each (Dettmers et al., arXiv:2110.02861, sections 2.1 and 2.2).
//
//   m = scale_m decode(code_m),   v = scale_v decode(code_v),   then as adamw.cu:   g = grad_scale grad,
//   m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2,
//   param <- decay param - step_size m / (sqrt(v) / bias2 + eps)
//   scale <- max |m|, max v of the block;   code <- encode(m / scale_m), encode(v / scale_v)
//
// A code p > 0 is a dynamic tree: its leading bit i is the decade, the bits below it divide the decade evenly, and the
// largest code is exactly 1:   decode(p) = 10^(i - D + 1) (0.1 + 0.9 (p - 2^i + 1) / 2^i).   v has D = 8 decades; m has
// D = 7 and a sign. encode takes the nearest code, but a positive v never becomes 0: the next step would divide by eps
// alone.
//
// Shapes    param, grad, m and v of `count` items side by side; param and grad float32, m int8, v uint8; scales float32
//           (ceil(count / 256),).
// Work      a warp owns a block, a lane 8 of its items; grid ceil(blocks / warps of a CTA).
// Budget    registers: 32 floats and the arithmetic of the codes, below 64 in all; no shared memory.
// Edges     every operation rounds as written and none is contracted, so NumPy's float32 gives the same bits. A block
//           of zeros has the scale 0. NaN and infinities of a gradient reach param and the scale of its block, which
//           spoils the block's next step.
#if !defined(THREADS) || !defined(VEC) || !defined(BLOCK)
#error "THREADS, VEC and BLOCK come from a launch-configuration table"
#endif
#include "../common/reduce.cuh"
#include "../common/vec.cuh"

using int8 = signed char;
using uint8 = unsigned char;

constexpr int kItems = BLOCK / kWarpSize;  // of a lane
constexpr int kLoads = kItems / VEC;
constexpr int kDecadesOfM = 7, kDecadesOfV = 8;  // 2^7 - 1 codes with a sign, 2^8 - 1 without
static_assert(BLOCK % (kWarpSize * VEC) == 0 && THREADS % kWarpSize == 0, "whole warps, each with whole loads");

// The maximum of numbers that are not negative, with NaN above all others: as integers their bits have that order.
struct Greatest {
  __device__ __forceinline__ uint32 operator()(uint32 a, uint32 b) const { return a > b ? a : b; }
};

// 10^k or 10^-k for k from 0 to 7, of powers 1, 2 and 4.
__device__ __forceinline__ float power(int k, float first, float second, float fourth) {
  const float low = __fmul_rn(k & 1 ? first : 1.f, k & 2 ? second : 1.f);
  return __fmul_rn(low, k & 4 ? fourth : 1.f);
}

template <int kDecades>
__device__ __forceinline__ float decode(int p) {
  if (p == 0) return 0.f;
  const int decade = 31 - __clz(p);
  const float part = __fmul_rn(static_cast<float>(p - (1 << decade) + 1), __int_as_float((127 - decade) << 23));
  const float size = power(kDecades - 1 - decade, 0.1f, 0.01f, 0.0001f);
  return __fmul_rn(size, __fadd_rn(0.1f, __fmul_rn(0.9f, part)));
}

// The code of x >= 0 over the block's largest number; it is 0 for 0 / 0 and for NaN.
template <int kDecades>
__device__ __forceinline__ int encode(float x, float largest) {
  float y = fminf(fmaxf(__fdiv_rn(x, largest), 0.f), 1.f);
  int below = 0;  // decades
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    const float raised = __fmul_rn(y, step == 4 ? 10000.f : step == 2 ? 100.f : 10.f);
    if (raised <= 1.f && below + step < kDecades) y = raised, below += step;
  }
  const int decade = kDecades - 1 - below;
  const float parts = __int_as_float((127 + decade) << 23);
  const float part = __fmul_rn(__fsub_rn(y, 0.1f), __fmul_rn(1.1111112f, parts));
  return (1 << decade) - 1 + static_cast<int>(rintf(part));
}

// This lane's items of a block; items beyond the end are 0.
template <typename Scalar>
struct BlockItems {
  using Items = Vec<Scalar, VEC>;
  Items loaded[kLoads] = {};

  __device__ __forceinline__ BlockItems(const Scalar* block_g, int rest) {
#pragma unroll
    for (int load = 0; load < kLoads; load++) {
      const int at = (load * kWarpSize + lane_index()) * VEC;
      if (at + VEC <= rest) {
        *reinterpret_cast<WordsOf<Items>*>(&loaded[load]) = *reinterpret_cast<const WordsOf<Items>*>(block_g + at);
      } else {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
          if (at + i < rest) loaded[load].item[i] = block_g[at + i];
        }
      }
    }
  }

  __device__ __forceinline__ void store(Scalar* block_g, int rest) const {
#pragma unroll
    for (int load = 0; load < kLoads; load++) {
      const int at = (load * kWarpSize + lane_index()) * VEC;
      if (at + VEC <= rest) {
        *reinterpret_cast<WordsOf<Items>*>(block_g + at) = *reinterpret_cast<const WordsOf<Items>*>(&loaded[load]);
      } else {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
          if (at + i < rest) block_g[at + i] = loaded[load].item[i];
        }
      }
    }
  }

  __device__ __forceinline__ Scalar& operator()(int i) { return loaded[i / VEC].item[i % VEC]; }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_8bit(float* param_g, int8* m_g, uint8* v_g, float* m_scales_g, float* v_scales_g, const float* grad_g,
               const float* scale_g, float scale, float beta1, float rest1, float beta2, float rest2, float step_size,
               float inverse_bias2, float eps, float decay, int64 count) {
  const int64 block = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  const int64 first = block * BLOCK;
  if (first >= count) return;
  const int rest = static_cast<int>(count - first < BLOCK ? count - first : BLOCK);

  // Phase 1: all loads are under way before the first is used.
  BlockItems<float> param(param_g + first, rest), grad(grad_g + first, rest);
  BlockItems<int8> m_code(m_g + first, rest);
  BlockItems<uint8> v_code(v_g + first, rest);
  const float m_scale = m_scales_g[block], v_scale = v_scales_g[block];
  const float grad_scale = scale_g == nullptr ? scale : __fmul_rn(scale, *scale_g);

  // Phase 2: the step, and the largest of the new means.
  float m[kItems], v[kItems];
  uint32 largest_m = 0, largest_v = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const int code = m_code(i);
    const float size = __fmul_rn(m_scale, decode<kDecadesOfM>(abs(code)));
    const float g = __fmul_rn(grad_scale, grad(i));
    m[i] = __fadd_rn(__fmul_rn(beta1, code < 0 ? -size : size), __fmul_rn(rest1, g));
    v[i] = __fmul_rn(beta2, __fmul_rn(v_scale, decode<kDecadesOfV>(v_code(i))));
    v[i] = __fadd_rn(v[i], __fmul_rn(__fmul_rn(rest2, g), g));
    const float root = __fadd_rn(__fmul_rn(__fsqrt_rn(v[i]), inverse_bias2), eps);
    param(i) = __fsub_rn(__fmul_rn(decay, param(i)), __fmul_rn(step_size, __fdiv_rn(m[i], root)));
    largest_m = Greatest()(largest_m, __float_as_uint(fabsf(m[i])));
    largest_v = Greatest()(largest_v, __float_as_uint(v[i]));
  }
  param.store(param_g + first, rest);

  // Phase 3: the block's new scales, and codes. Items beyond the end are 0, so they do not change the largest.
  const float new_m_scale = __uint_as_float(warp_reduce<Greatest>(largest_m));
  const float new_v_scale = __uint_as_float(warp_reduce<Greatest>(largest_v));
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const int size = encode<kDecadesOfM>(fabsf(m[i]), new_m_scale);
    m_code(i) = static_cast<int8>(m[i] < 0.f ? -size : size);
    const int code = encode<kDecadesOfV>(v[i], new_v_scale);
    v_code(i) = static_cast<uint8>(code == 0 && v[i] > 0.f ? 1 : code);
  }
  m_code.store(m_g + first, rest);
  v_code.store(v_g + first, rest);
  if (lane_index() == 0) m_scales_g[block] = new_m_scale, v_scales_g[block] = new_v_scale;
}
