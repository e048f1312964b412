// One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2), item by item and in place.
//
//   g = grad_scale grad,   m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
//   param <- decay param - step_size m / (sqrt(v) / bias2 + eps)
//
// with decay = 1 - lr weight_decay, step_size = lr / (1 - beta1^step) and bias2 = sqrt(1 - beta2^step), which the host
// computes. grad_scale is scale times *scale_g, if that is given: a number that stays on the device, such as the factor
// that clips a gradient's norm.
//
// Shapes    param, grad, m and v of one shape, any rank and any outer strides, last axis contiguous (elements.cuh); m
//           and v float32.
// Work      a unit of LANES threads owns VECTORS * LANES * VEC neighbouring items of a row; grid ceil(units / units of
//           a CTA).
// Budget    registers: 4 * VECTORS * VEC floats, below 96 in all; no shared memory.
// Edges     NaN and infinities of a gradient reach m, v and param.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VECTORS) || !defined(VEC)
#error "DTYPE, THREADS, LANES, VECTORS and VEC come from a launch-configuration table"
#endif
#include "../common/elements.cuh"

using Traits = ElementTraits<THREADS, LANES, VECTORS, VEC>;
enum Array { kParam, kM, kV, kGrad, kArrays };
using Loop = ElementLoop<Traits, kArrays>;
static_assert(sizeof(Loop::Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw(DTYPE* param_g, float* m_g, float* v_g, const DTYPE* grad_g, const float* scale_g, float scale, float beta1,
          float rest1, float beta2, float rest2, float step_size, float inverse_bias2, float eps, float decay,
          const Loop::Params params) {
  const Loop loop(params);
  const auto param = loop.load(param_g, kParam);
  const auto grad = loop.load(grad_g, kGrad);
  const auto m = loop.load(m_g, kM);
  const auto v = loop.load(v_g, kV);
  const float grad_scale = scale_g == nullptr ? scale : scale * *scale_g;
  float new_param[VECTORS][VEC], new_m[VECTORS][VEC], new_v[VECTORS][VEC];
  each_item<Traits>([&](int k, int i) {
    const float g = grad_scale * grad(k, i);
    new_m[k][i] = beta1 * m(k, i) + rest1 * g;
    new_v[k][i] = beta2 * v(k, i) + rest2 * g * g;
    const float size = sqrtf(new_v[k][i]) * inverse_bias2 + eps;
    new_param[k][i] = decay * param(k, i) - step_size * (new_m[k][i] / size);
  });
  loop.store(m_g, kM, new_m);
  loop.store(v_g, kV, new_v);
  loop.store(param_g, kParam, new_param);
}
