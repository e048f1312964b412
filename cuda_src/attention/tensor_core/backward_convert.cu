// Attention backward, after the one-pass kernel: the float32 dQ, which that kernel gathered in accumulator-fragment
// order (backward_params.cuh), to DTYPE in dq's own strides.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh).
// Work      a CTA owns 64 rows of one head; a thread, 8 columns of a row at a time. Eight neighbouring threads take the
//           rows of one half of a fragment: 128 contiguous bytes. Grid B * H * rows_padded / 64,
//           of packed sequences H * rows_padded / 64: each warp looks for its sequence, 32 at a time.
// Budget    no shared memory; about 40 registers.
// Edges     rows beyond their sequence are not stored.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(THREADS) || !defined(VEC)
#error "DTYPE, HEAD_DIM, THREADS and VEC come from a launch-configuration table"
#endif
#include "../backward_sequences.cuh"
#include "gradient_scale.cuh"
#include "resident_rows.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kThreads = THREADS;
  static constexpr int kChunks = div_up(kHeadDim, kChunkItems);
  static constexpr int kUnits = kRowPad * kChunks;  // of 8 columns of a row
  static_assert(kHeadDim >= 1 && kHeadDim <= 512, "head dims are 1 to 512");
};

// kRowPad rows of the scratch from `from_row` on to rows `first_row` on of the array, as far as there are `rows` in
// all.
__device__ __forceinline__ void convert_rows(const BackwardParams& params, const float* dq_acc_g, const float* scales_g,
                                             DTYPE* dq_g, int batch, int head, int first_row, int rows,
                                             uint32 from_row) {
  const float* rows_acc_g = dq_acc_g + accumulator_offset<Traits::kChunks>(from_row);
  const float scale = params.scale * ScaleArrays{scales_g, nullptr}.of_head(params, batch, head).up;
#pragma unroll 2
  for (int unit = threadIdx.x; unit < Traits::kUnits; unit += Traits::kThreads) {
    const int chunk = unit / 8 % Traits::kChunks;
    const int eight_rows = unit / 8 / Traits::kChunks, row = eight_rows * 8 + unit % 8;
    if (first_row + row >= rows) break;
    // Items e = 2 (row / 8 % 2) and the next, of lanes 4 (row % 8) to 4 (row % 8) + 3.
    const float* even_g =
        rows_acc_g + (eight_rows / 2 * Traits::kChunks + chunk) * 128 + eight_rows % 2 * 64 + unit % 8 * 4;
    float even[4], odd[4], values[kChunkItems];
    load_vec(even, even_g);
    load_vec(odd, even_g + kWarpSize);
#pragma unroll
    for (int lane = 0; lane < 4; lane++) {
      values[2 * lane] = even[lane] * scale;
      values[2 * lane + 1] = odd[lane] * scale;
    }
    DTYPE* chunk_g = head_rows(dq_g, params.dq, batch, head, first_row + row) + chunk * kChunkItems;
    store_row_chunk<Traits::kHeadDim, VEC>(chunk_g, chunk, values, params.accumulate);
  }
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    ENTRY(attention_backward_convert)(const float* dq_acc_g, const float* scales_g, DTYPE* dq_g PACKED_QUERIES,
                                      const GradientParams params) {
  const BackwardParams& backward = backward_of(params);
  const int tiles = backward.rows_padded / kRowPad;
  const int matrix = blockIdx.x / tiles, at = blockIdx.x % tiles * kRowPad;
  const ScratchRows own(params, {CU_SEQLENS_Q}, matrix, at);
  if (own.row < 0) return;
  convert_rows(backward, dq_acc_g, scales_g, rows_from(dq_g, backward.dq, own.rows), own.batch, own.head, own.row,
               own.rows.count, own.scratch);
}
