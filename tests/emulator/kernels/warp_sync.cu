// Lanes of a warp that come to one exchange by different ways.
typedef unsigned int u32;

// A lane skips what is 3 in its column of x, and ballots over the rest until it has done so `turns` times.
extern "C" __global__ void continues(const int* x, int turns, u32* out) {
  u32 total = 0;
  for (int row = 0, done = 0; done < turns; row++) {
    int v = x[row * blockDim.x + threadIdx.x];
    if (v == 3) continue;
    total = 3 * total + __ballot_sync(0xffffffffu, v == 2);
    done++;
  }
  out[threadIdx.x] = total;
}
