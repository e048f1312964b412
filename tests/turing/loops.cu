// Two kernels in miniature whose loops the tests of the model of Turing read, as the listing
// loops.sass: products on tensor cores with a staged tile, a rare branch and a partial barrier, and
// products in float32.
extern "C" __global__ void __launch_bounds__(128) matrix_loop(const uint4* __restrict__ in, float* out, int n) {
  __shared__ uint4 tile[2][128];
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&tile[0][threadIdx.x]));
  float acc[8][4] = {}, m = 0.f;
  uint4 next = in[threadIdx.x];
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    tile[i & 1][threadIdx.x] = next;
    if (i + 1 < n) next = in[(i + 1) * 128 + threadIdx.x];
    __syncthreads();
    unsigned f[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(at + (i & 1) * 2048));
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                   : "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
                   : "r"(f[j % 4]), "r"(f[(j + 1) % 4]), "r"(f[(j + 2) % 4]));
    const float top = __shfl_xor_sync(~0u, fmaxf(acc[0][0], acc[0][1]), 1);
    if (__any_sync(~0u, top > m)) {
      m = top;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        for (int c = 0; c < 4; ++c) acc[j][c] *= exp2f(m - top) + 0.5f;
    }
    asm volatile("bar.sync 1, 64;");
  }
  float sum = 0.f;
  for (int j = 0; j < 8; ++j)
    for (int c = 0; c < 4; ++c) sum += acc[j][c];
  out[threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(64) ffma_loop(const float4* in, float* out, int n) {
  float acc[4] = {};
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const float4 a = in[i * 64 + threadIdx.x];
    const float b = reinterpret_cast<const float*>(in)[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[j] = fmaf(a.x, b, acc[j]) + fmaf(a.y, acc[j], a.w * a.z);
  }
  for (int j = 0; j < 4; ++j) out[j * 64 + threadIdx.x] = acc[j];
}
