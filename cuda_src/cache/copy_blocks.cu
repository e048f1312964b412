// Copy whole blocks of a cache, one copy after the other: copy-on-write needs it.
//
//   for (src, dst) in copies: array[..., dst, ...] = array[..., src, ...]
//
// Shapes    up to four arrays (caches and their scales, of one layer or of all), each with an axis of blocks of any
//           stride. A block is words along up to kCopyAxes axes of any strides. Copies are passed by value,
//           up to kPassed, or are an array (n, 2) of any strides.
// Work      a thread owns one word's place within a block of one array, and makes all copies of it in their order. So
//           an earlier or a later copy may write a source, and no thread waits for another. Grid ceil(words of one
//           block in all arrays / THREADS).
// Budget    registers: kBatch words, whose loads are in flight together; no shared memory.
// Edges     a copy from or to a block that does not exist is skipped.
#if !defined(THREADS) || !defined(WORD) || !defined(COPY)
#error "THREADS, WORD and COPY come from a launch-configuration table"
#endif
#include "formats.cuh"

constexpr int kCopyArrays = 4;
constexpr int kCopyAxes = 4;
constexpr int kPassed = 32;
constexpr int kBatch = 8;

// The fields are those of COPY_BLOCKS_PARAMS in cupyattn/ops/cache/kernels.py. Strides are in words.
struct CopyBlocksParams {
  int64 block_stride[kCopyArrays];
  int64 strides[kCopyArrays][kCopyAxes];
  int64 copy_stride, end_stride;  // of the array of copies: of a row, and from src to dst
  int64 copies;                   // those of the array
  uint32 shape[kCopyArrays][kCopyAxes];
  uint32 first_thread[kCopyArrays + 1];
  int num_blocks;
  int passed;
  int src[kPassed], dst[kPassed];
};
static_assert(sizeof(CopyBlocksParams) == COPY_BLOCKS_PARAMS_BYTES, "its dtype in Python describes another struct");

using Data = Word<WORD>::Type;

// This thread's word of block 0, and the words from there to that of the next block.
struct Place {
  Data* first_g = nullptr;
  int64 block_stride = 0;
  int num_blocks = 0;

  __device__ __forceinline__ bool has(int64 block) const { return block >= 0 && block < num_blocks; }
};

// Make kBatch copies with the result of making them one after the other. All sources are read before anything is
// written; where an earlier copy of the batch writes the source of a later one, its word replaces the one read.
__device__ __forceinline__ void copy_batch(const Place& place, const int64 (&src)[kBatch], const int64 (&dst)[kBatch]) {
  Data data[kBatch];
  bool wanted[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    wanted[i] = place.has(src[i]) && place.has(dst[i]);
    if (wanted[i]) data[i] = place.first_g[src[i] * place.block_stride];
  }
#pragma unroll
  for (int i = 1; i < kBatch; i++) {
#pragma unroll
    for (int earlier = 0; earlier < i; earlier++) {
      if (wanted[earlier] && dst[earlier] == src[i]) data[i] = data[earlier];
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    if (wanted[i]) place.first_g[dst[i] * place.block_stride] = data[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_blocks(Data* array0_g, Data* array1_g, Data* array2_g, Data* array3_g, const COPY* copies_g,
                const CopyBlocksParams params) {
  // Phase 1: which word of a block is this thread's. Selected, not indexed: parameters have no index.
  const uint32 thread = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  Data* const arrays_g[kCopyArrays] = {array0_g, array1_g, array2_g, array3_g};
  Place place;
  place.num_blocks = params.num_blocks;
#pragma unroll
  for (int a = 0; a < kCopyArrays; a++) {
    if (thread >= params.first_thread[a] && thread < params.first_thread[a + 1]) {
      uint32 rest = thread - params.first_thread[a];
      place.block_stride = params.block_stride[a];
      place.first_g = arrays_g[a];
#pragma unroll
      for (int axis = kCopyAxes - 1; axis >= 0; axis--) {
        const uint32 extent = params.shape[a][axis], next = rest / extent;
        place.first_g += (rest - next * extent) * params.strides[a][axis];
        rest = next;
      }
    }
  }
  if (place.first_g == nullptr) return;

  // Phase 2: the copies that were passed, or those of the array.
#pragma unroll
  for (int first = 0; first < kPassed; first += kBatch) {
    if (first >= params.passed) break;
    int64 src[kBatch], dst[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) src[i] = params.src[first + i], dst[i] = params.dst[first + i];
    copy_batch(place, src, dst);
  }
  for (int64 first = 0; first < params.copies; first += kBatch) {
    int64 src[kBatch], dst[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const COPY* copy_g = copies_g + (first + i) * params.copy_stride;
      const bool there = first + i < params.copies;
      src[i] = there ? static_cast<int64>(copy_g[0]) : -1;
      dst[i] = there ? static_cast<int64>(copy_g[params.end_stride]) : -1;
    }
    copy_batch(place, src, dst);
  }
}
