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
