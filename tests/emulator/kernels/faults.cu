// Faulty kernels, one fault each. `ok` and other arguments take the fault out: each check is seen to pass and to fail.
#define KERNEL extern "C" __global__ void
typedef unsigned int u32;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

KERNEL load_shifted(const float* x, float* y, int shift) {
  y[threadIdx.x] = x[(int)(blockIdx.x * blockDim.x + threadIdx.x) + shift];  // LOAD
}
KERNEL store_shifted(const float* x, float* y, int shift) {
  float v = x[threadIdx.x];
  y[(int)threadIdx.x + shift] = v;  // STORE
}
KERNEL add_shifted(float* y, int shift) {
  atomicAdd(y + (int)threadIdx.x + shift, 1.f);  // ADD
}
KERNEL load_vector(const float* x, float4* y, int shift) {
  y[threadIdx.x] = *(const float4*)(x + 4 * threadIdx.x + shift);  // VECTOR
}
KERNEL shared_overrun(float* y, int shift) {
  extern __shared__ float s[];
  s[(int)threadIdx.x + shift] = 1.f;  // OVERRUN
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}
KERNEL local_overrun(float* y, int n) {
  float buffer[8];
  for (int i = 0; i < 8; i++) buffer[i] = y[i];
  y[threadIdx.x] = buffer[n + threadIdx.x];  // LOCAL
}
KERNEL unwritten(float* y, int count) {
  __shared__ float s[64];
  if ((int)threadIdx.x < count) s[threadIdx.x] = 1.f;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];  // UNWRITTEN
}
KERNEL sums_of_unwritten(const float* x, const int* k, float* y, int* z, int n) {  // none begins at 0
  float sum;
  int count;
  for (int i = 0; i < n; i++) {
    sum += x[i];
    count += k[i];
  }
  y[threadIdx.x] = sum;
  z[threadIdx.x] = count;
}
KERNEL race_between_warps(float* y, int ok) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  if (ok) __syncthreads();
  y[threadIdx.x] = s[threadIdx.x ^ 32];  // RAW
}
KERNEL race_in_warp(float* y, int ok) {
  __shared__ float s[32];
  s[threadIdx.x] = threadIdx.x;
  if (ok) __syncwarp();
  y[threadIdx.x] = s[threadIdx.x ^ 1];  // WARP_RAW
}
KERNEL race_after_read(float* y, int ok) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  float v = s[threadIdx.x ^ 32];
  if (ok) __syncthreads();
  s[threadIdx.x] = v + 1.f;  // WAR
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x ^ 32];
}
KERNEL race_after_other_write(float* y, int ok) {  // what is written between is not what was read
  __shared__ float s[128];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  float v = s[threadIdx.x ^ 32];
  s[64 + threadIdx.x] = v;
  v += s[64 + threadIdx.x];
  if (ok) __syncthreads();
  s[threadIdx.x] = v;  // WAR_LATER
}
KERNEL race_after_many_reads(float* y, int ok) {
  __shared__ volatile float s[128];
  s[threadIdx.x] = s[64 + threadIdx.x] = threadIdx.x;
  __syncthreads();
  float v = s[threadIdx.x ^ 32];
  for (int i = 0; i < 600; i++) v += s[64 + threadIdx.x];
  if (ok) __syncthreads();
  s[threadIdx.x] = v;  // WAR_MANY_READS
}
KERNEL race_of_one_block(float* y, int read, int write) {  // the other blocks pass a barrier
  __shared__ volatile float s[64];
  s[threadIdx.x] = threadIdx.x;
  if ((int)blockIdx.x != read) __syncthreads();
  float v = s[threadIdx.x ^ 32];  // ONE_RAW
  if ((int)blockIdx.x != write) __syncthreads();
  s[threadIdx.x] = v + 1.f;  // ONE_WAR
}
KERNEL race_of_three_readers(float* y, int writer) {  // one word read by all warps, then written by one
  __shared__ float s[1];
  if (threadIdx.x == 0) s[0] = 1.f;
  __syncthreads();
  y[threadIdx.x] = s[0];
  if ((int)threadIdx.x == writer) s[0] = 2.f;  // WAR_MANY
}
KERNEL race_after_read_of_equal(float* y, int ok) {  // the store changes nothing
  __shared__ float s[64];
  s[threadIdx.x] = 1.f;
  __syncthreads();
  float v = s[threadIdx.x ^ 32];
  if (ok) __syncthreads();
  s[threadIdx.x] = 1.f;  // WAR_EQUAL
  __syncthreads();
  y[threadIdx.x] = v + s[threadIdx.x ^ 32];
}
KERNEL race_past_half_a_warp(float* y, int ok) {  // each half of a warp waits for itself alone
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncwarp(threadIdx.x & 16 ? 0xFFFF0000u : 0xFFFFu);
  y[threadIdx.x] = s[threadIdx.x ^ (ok ? 8 : 16)];  // HALF_RAW
}
KERNEL race_of_half_a_warp(float* y, int writer) {  // 16 lanes read one word, then one lane writes it
  __shared__ float s[1];
  if (threadIdx.x == 0) s[0] = 1.f;
  __syncwarp();
  if (threadIdx.x < 16) {
    y[threadIdx.x] = s[0];
    __syncwarp(0xFFFFu);
  }
  if ((int)threadIdx.x == writer) s[0] = 2.f;  // HALF_WAR
}
KERNEL chain_of_half_warps(float* y, int reader) {  // lane 0 -> lanes 8 to 15 -> lanes 16 to 23
  __shared__ volatile float s[1];
  if (threadIdx.x == 0) s[0] = 1.f;
  if (threadIdx.x < 16) __syncwarp(0xFFFFu);
  if (threadIdx.x >= 8 && threadIdx.x < 24) __syncwarp(0xFFFF00u);
  if ((int)threadIdx.x == reader) y[0] = s[0];  // CHAIN
}
KERNEL rows_of_half_warps(u32* y, int ok) {  // ldmatrix reads for all lanes what half of them has waited for
  __shared__ __align__(16) u32 s[32];
  s[threadIdx.x] = threadIdx.x;
  if (ok)
    __syncwarp();
  else
    __syncwarp(threadIdx.x & 16 ? 0xFFFF0000u : 0xFFFFu);
  u32 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(shared_address(s) + (threadIdx.x & 7) * 16)  // HALF_LDMATRIX
               : "memory");
  s[threadIdx.x] = r;  // no race: the warp has read together
  y[threadIdx.x] = r;
}
KERNEL own_data(float* y, int shift) {  // no barrier needed for what a thread wrote itself
  __shared__ volatile float s[64];
  s[threadIdx.x] = threadIdx.x;
  s[threadIdx.x] = s[threadIdx.x] + 1.f;
  y[threadIdx.x] = s[threadIdx.x ^ shift];  // OWN
}
KERNEL race_of_writes(float* y, int ok) {
  __shared__ float s[1];
  s[0] = ok ? 1.f : (float)threadIdx.x;  // WAW
  __syncthreads();
  y[threadIdx.x] = s[0];
}
KERNEL race_of_warp_writes(float* y, int ok) {
  __shared__ float s[1];
  if (threadIdx.x == 0) s[0] = 1.f;
  if (threadIdx.x == 32) s[0] = ok ? 1.f : 2.f;  // WARP_WAW
  __syncthreads();
  y[threadIdx.x] = s[0];
}
KERNEL race_with_atomic(u32* y, int ok) {
  __shared__ u32 s[1];
  if (threadIdx.x == 0) s[0] = 0;
  __syncthreads();
  atomicAdd(s, 1u);
  if (ok) __syncthreads();
  y[threadIdx.x] = s[0];  // ATOMIC
}
KERNEL race_before_ldmatrix(u32* y, int ok) {
  __shared__ __align__(16) u32 s[32];
  s[threadIdx.x] = threadIdx.x;
  if (ok) __syncwarp();
  u32 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(shared_address(s) + (threadIdx.x & 7) * 16)  // LDMATRIX
               : "memory");
  y[threadIdx.x] = r;
}
// Pairs of warps hand data over through a named barrier of their own; the bug mixes the pairs up.
KERNEL named_barriers(float* y, int ok) {
  __shared__ float s[128];
  u32 warp = threadIdx.x / 32, pair = ok ? warp / 2 : warp & 1;
  s[threadIdx.x] = threadIdx.x;
  asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory");
  y[threadIdx.x] = s[threadIdx.x ^ 32];  // NAMED
}
// Warp 0 fills a buffer and only announces it; warp 1 waits. Then the other way round.
KERNEL producer_consumer(float* y, int rounds, int ok) {
  __shared__ float s[32];
  u32 lane = threadIdx.x & 31;
  float sum = 0.f;
  for (int i = 0; i < rounds; i++) {
    if (threadIdx.x < 32) {
      if (i > 0 && ok) asm volatile("bar.sync 2, 64;" ::: "memory");
      s[lane] = i + lane;  // PRODUCE
      asm volatile("bar.arrive 1, 64;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 64;" ::: "memory");
      sum += s[lane ^ 1];
      if (i + 1 < rounds && ok) asm volatile("bar.arrive 2, 64;" ::: "memory");
    }
  }
  if (threadIdx.x >= 32) y[lane] = sum;
}
// Warp 0 announces itself; warp 1 waits for that in every round but the last, and then perhaps.
KERNEL arrives_in_vain(float* y, int rounds, int ok) {
  for (int i = 0; i < rounds; i++) {
    if (threadIdx.x < 32)
      asm volatile("bar.arrive 3, 64;" ::: "memory");  // ARRIVAL
    else if (i + 1 < rounds || ok)
      asm volatile("bar.sync 3, 64;" ::: "memory");
    __syncthreads();
  }
  y[threadIdx.x] = rounds;
}
// Both warps arrive and none waits, which completes a barrier: the next use of it begins anew.
KERNEL arrives_alone(float* y) {
  __shared__ float s[64];
  asm volatile("bar.arrive 1, 64;" ::: "memory");
  s[threadIdx.x] = threadIdx.x;
  asm volatile("bar.sync 1, 64;" ::: "memory");
  y[threadIdx.x] = s[threadIdx.x ^ 32];
}
KERNEL divergent_barrier(float* y, int split) {
  if ((int)threadIdx.x < split) {
    y[threadIdx.x] = 1.f;
    asm volatile("bar.sync 0;" ::: "memory");  // FIRST_BARRIER
    y[threadIdx.x] += 2.f;
  } else {
    y[threadIdx.x] = 3.f;
    asm volatile("bar.sync 0;" ::: "memory");  // SECOND_BARRIER
    y[threadIdx.x] += 4.f;
  }
}
KERNEL missed_barrier(float* y, int count) {
  __shared__ float s[64];
  if ((int)threadIdx.x >= count) return;
  s[threadIdx.x] = 1.f;
  __syncthreads();  // MISSED
  y[threadIdx.x] = s[threadIdx.x ^ 1];
}
KERNEL barrier_in_branch(float* y, int count) {
  __shared__ float s[64];
  if ((int)threadIdx.x < count) {
    s[threadIdx.x] = y[threadIdx.x];
    asm volatile("bar.sync 0;" ::: "memory");  // BRANCH_BARRIER
    y[threadIdx.x] = s[threadIdx.x];
  }
}
KERNEL barrier_deadlock(float* y, int waiting) {
  if ((int)threadIdx.x < waiting) asm volatile("bar.sync 1, 64;" ::: "memory");  // DEADLOCK
  y[threadIdx.x] = 1.f;
}
KERNEL barrier_operands(float* y, int id, int count) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(count) : "memory");  // OPERANDS
  y[threadIdx.x] = 1.f;
}
KERNEL warp_barrier_absent(float* y, u32 mask) {
  if (threadIdx.x < 16) {
    y[threadIdx.x] = 1.f;
    __syncwarp(mask);  // SYNCWARP
    y[threadIdx.x ^ 1] += 2.f;
  } else {
    y[threadIdx.x] = 5.f;
    __syncthreads();
  }
}
KERNEL shuffle_absent(u32* y, u32 mask) {
  if (threadIdx.x & 1) {
    u32 v = __shfl_xor_sync(mask, threadIdx.x * 3, 2);  // SHUFFLE
    y[threadIdx.x] = v;
  }
}
KERNEL shuffle_returned(u32* y, int count) {
  if ((int)threadIdx.x >= count) return;
  y[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 16);  // RETURNED
}
KERNEL vote_absent(u32* y, u32 mask) {
  if (threadIdx.x < 8) {
    u32 v = __ballot_sync(mask, threadIdx.x & 1);  // VOTE
    y[threadIdx.x] = v;
  }
}
KERNEL match_absent(u32* y, u32 mask) {
  if (threadIdx.x < 8) {
    u32 v = __match_any_sync(mask, threadIdx.x & 1);  // MATCH
    y[threadIdx.x] = v;
  }
}
KERNEL mask_without_caller(u32* y, u32 mask) {
  if (threadIdx.x < 16) {
    u32 v = __ballot_sync(mask, threadIdx.x & 1);  // OWN_BIT
    y[threadIdx.x] = v;
  }
}
KERNEL barrier_without_caller(u32* y, u32 mask) {
  __syncwarp(mask);  // OWN_BARRIER_BIT
  y[threadIdx.x] = 1;
}
KERNEL shuffle_outside_mask(u32* y, int distance) {
  u32 half = threadIdx.x & 16 ? 0xFFFF0000u : 0xFFFFu;
  y[threadIdx.x] = __shfl_xor_sync(half, threadIdx.x, distance);  // OUTSIDE_MASK
}
KERNEL unequal_masks(u32* y, u32 mask) {
  u32 v = __ballot_sync(threadIdx.x == 3 ? mask : ~0u, threadIdx.x & 1);  // UNEQUAL
  y[threadIdx.x] = v;
}
KERNEL divergent_mma(float* y, int count) {
  float c[4] = {0.f, 0.f, 0.f, 0.f};
  if ((int)threadIdx.x < count) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4}, {%4}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(threadIdx.x));  // MMA
    y[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
  }
}
KERNEL ldmatrix_addresses(u32* y, int used, int unused) {
  __shared__ __align__(16) u32 s[64];
  s[threadIdx.x] = s[threadIdx.x + 32] = threadIdx.x;
  __syncthreads();
  u32 r, a = shared_address(s) + (threadIdx.x & 7) * 16 + (threadIdx.x < 8 ? used : unused);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(a) : "memory");  // ADDRESSES
  y[threadIdx.x] = r;
}
KERNEL fails(float* y, int trap) {
  if (trap && threadIdx.x == 5) asm volatile("trap;");  // TRAP
  y[threadIdx.x] = 1.f;
}
KERNEL endless(volatile float* y) {
  while (y[0] == 0.f) y[1] = 1.f;  // ENDLESS
}
KERNEL spins_from(volatile float* y, int first) {
  if ((int)threadIdx.x < first) return;
  while (y[0] == 0.f) y[1] = 1.f;  // SPIN
}
#if __CUDA_ARCH__ >= 800  // copies from global to shared memory, of 64 threads
// A macro, so that a copy has the line of its use.
#define COPY(TO, FROM, BYTES)                                                                                   \
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(TO)), "l"(FROM), "r"(BYTES) \
               : "memory")
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <int most>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(most) : "memory");
}

KERNEL copy_without_wait(const uint4* x, uint4* y, int other, int wait_before, int barrier, int wait_after) {
  __shared__ uint4 s[64];
  s[threadIdx.x] = make_uint4(7, 7, 7, 7);
  __syncthreads();
  COPY(s + threadIdx.x, x + threadIdx.x, 16);  // COPY
  if (wait_before) wait_all();
  if (barrier) __syncthreads();
  if (wait_after) wait_all();
  y[threadIdx.x] = s[threadIdx.x ^ other];  // EARLY
}
KERNEL copy_over_read(const uint4* x, uint4* y, int ok) {
  __shared__ uint4 s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const uint4 v = s[threadIdx.x ^ 32];
  if (ok) __syncthreads();
  COPY(s + threadIdx.x, x + threadIdx.x + 64, 16);  // COPY_WAR
  wait_all();
  y[threadIdx.x] = v;
}
KERNEL copy_over_store(const uint4* x, uint4* y, int ok) {
  __shared__ uint4 s[64];
  s[threadIdx.x ^ 32] = x[threadIdx.x];
  if (ok) __syncthreads();
  COPY(s + threadIdx.x, x + threadIdx.x + 64, 16);  // COPY_WAW
  wait_all();
  y[threadIdx.x] = s[threadIdx.x];
}
KERNEL store_over_copy(const uint4* x, uint4* y, int ok, int atomic) {
  __shared__ uint4 s[64];
  s[threadIdx.x] = x[threadIdx.x];
  COPY(s + threadIdx.x, x + threadIdx.x, 16);
  if (ok) wait_all();
  if (atomic)
    atomicAdd((u32*)(s + threadIdx.x), 1u);  // ATOMIC_OVER_COPY
  else
    s[threadIdx.x].x = 5;  // STORE_OVER_COPY
  wait_all();
  y[threadIdx.x] = s[threadIdx.x];
}
KERNEL two_copies(const uint4* x, uint4* y, int ok, int distance) {
  __shared__ uint4 s[64];
  COPY(s + threadIdx.x, x + threadIdx.x, 16);
  if (ok) wait_all();
  COPY(s + threadIdx.x, x + threadIdx.x + distance, 16);  // TWO_COPIES
  wait_all();
  y[threadIdx.x] = s[threadIdx.x];
}
KERNEL matrix_of_copies(const uint4* x, u32* y, int waits) {  // a warp reads rows that eight of its lanes copy
  __shared__ uint4 s[64];
  if (threadIdx.x % 32 < 8) COPY(s + threadIdx.x, x + threadIdx.x, 16);
  if (waits) wait_all();
  __syncthreads();
  u32 r, a = shared_address(s + (threadIdx.x & ~31) + (threadIdx.x & 7));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(a) : "memory");  // ROWS
  y[threadIdx.x] = r;
}
KERNEL copies_to_one_place(const uint4* x, uint4* y, int distance) {
  __shared__ uint4 s[64];
  COPY(s + threadIdx.x / 2, x + threadIdx.x / 2 + (threadIdx.x & 1) * distance, 16);  // ONE_PLACE
  wait_all();
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x / 2];
}
KERNEL copy_of_two(const uint4* x, u32* y, int both, int twice) {  // to a place: one of them waits
  __shared__ uint4 s[32];
  if (!twice) COPY(s + threadIdx.x / 2, x + threadIdx.x / 2, 16);
  if (twice && threadIdx.x % 2) COPY(s + threadIdx.x / 2, x + threadIdx.x / 2, 16);
  if (twice && threadIdx.x % 2 == 0) COPY(s + threadIdx.x / 2, x + threadIdx.x / 2, 16);
  if (threadIdx.x % 2 == 0 || both) wait_all();
  __syncwarp();
  if (threadIdx.x % 2 == 0) y[threadIdx.x] = s[threadIdx.x / 2].x;  // OF_TWO
}
KERNEL copy_bounds(const char* x, uint4* y, int from, int bytes, int to) {
  extern __shared__ uint4 dynamic[];
  COPY((char*)(dynamic + threadIdx.x) + to, x + 16 * threadIdx.x + from, bytes);  // COPY_BOUNDS
  wait_all();
  y[threadIdx.x] = dynamic[threadIdx.x];
}
KERNEL copy_and_leave(const uint4* x, u32* y) {
  __shared__ uint4 s[64];
  COPY(s + threadIdx.x, x + threadIdx.x, 16);
  y[threadIdx.x] = 1;
}
// y is the sum of `tiles` tiles of x, each read by another thread than copied it: in three stages, two on their way.
KERNEL copy_pipeline(const uint4* x, uint4* y, int tiles, int on_their_way, int barrier, int late) {
  constexpr int kStages = 3;
  __shared__ uint4 s[kStages][64];
  const int here = threadIdx.x, there = here ^ 32;
  for (int tile = 0; tile < kStages - 1; tile++) {
    if (tile < tiles) COPY(&s[tile][here], x + tile * 64 + here, 16);
    commit();
  }
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (int tile = 0; tile < tiles; tile++) {
    const int next = tile + kStages - 1;
    if (!late && next < tiles) COPY(&s[next % kStages][here], x + next * 64 + here, 16);  // BEFORE_BARRIER
    if (!late) commit();
    if (on_their_way == 0) wait<0>();
    if (on_their_way == 1) wait<1>();
    if (on_their_way == 2) wait<2>();
    if (barrier) __syncthreads();
    if (late && next < tiles) COPY(&s[next % kStages][here], x + next * 64 + here, 16);  // AFTER_BARRIER
    if (late) commit();
    const uint4 v = s[tile % kStages][there];  // TILE
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  y[here] = sum;
}
#endif
