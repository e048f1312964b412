// Probe of activations.cuh: value and derivative of one activation.
#include "common/activations.cuh"

extern "C" __global__ void probe_activations(const float* x_g, float* value_g, float* derivative_g, int count) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= count) return;
  value_g[i] = ACTIVATION::value(x_g[i]);
  derivative_g[i] = ACTIVATION::derivative(x_g[i]);
}
