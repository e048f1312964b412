// Attention backward on tensor cores for head dims of more than 256 columns: dK and dV, and with ONE_PASS dQ as well,
// as attention_backward_dkdv computes them (see there).
//
// Here all warps of a CTA share 32 keys, by columns. Each of the first kSlices warps keeps its columns of K and of dK
// and reads Q; each of the others keeps its columns of V and of dV and reads dout. A product of scores is a sum over
// columns: the warps write their parts of S^T and dP^T to shared memory, the warps of values add them up, turn one tile
// of scores each into P and dS, and write those for all. So a fragment of Q or dout serves 32 keys, which halves the
// reads of shared memory; its bandwidth binds here. dQ += dS K takes K from registers: an 8x8 matrix of A fragments,
// transposed by movmatrix, is a B fragment.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); head dims
//           in steps of 128 columns, zero-filled.
// Tiles     kKeys = 32 keys by TILE_Q queries; a warp's slice is a quarter of the columns.
// Grid      B * G * ceil(Sk / kKeys) CTAs; each loops over the query tiles of all query heads of its group.
// Budget    registers: K and dK, or V and dV: 3 / 8 of the head dim. Shared memory: one tile of Q and dout (NATIVE:
//           two), the parts of S^T and dP^T, P^T and dS^T.
// Barriers  per query tile two of the CTA and two of each kind of warps; where NATIVE three of the CTA.
// Edges     as attention_backward_dkdv.
#include "dkdv.cuh"

constexpr int kKeyTiles = 2;  // m16 tiles of a CTA's keys

struct Traits : DkdvTraits</*kMTiles=*/1, kKeyTiles, TILE_Q / 16, /*kDqRowWarps=*/1, /*kSlices=*/WARPS / 2> {
  static constexpr int kQueryTiles = kTileQ / 8;
  static constexpr int kHeadChunks = div_up(kHeadDim, kChunkItems);  // of dQ's accumulator
  using Parts = PartialScores<kSlices, kQueryTiles, kKeyTiles>;
  static_assert(kSlices == 4 && kKeyTiles * kQueryTiles == kSlices * kSubTiles, "a share of the scores for each warp");
};

union Smem {
  struct {
    Traits::Loader::Tiles queries[Traits::kBuffers];
    alignas(128) Traits::Parts s, dp;
    alignas(128) unsigned char p[Traits::DsTile::kBytes];
    alignas(128) unsigned char ds[2][Traits::DsTile::kBytes];  // of this tile and of the one before
  } loop;
  alignas(128) unsigned char k[Traits::KTile::kBytes];  // K before the loop, dK after it
  alignas(128) unsigned char v[Traits::VTile::kBytes];  // V before the loop, dV after it
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

using Cta = CtaOfTwoKinds<Smem>;

// The warps of values wait for the parts of scores.
__device__ __forceinline__ void arrive_with_scores() { bar_arrive(1, Traits::kThreads); }
__device__ __forceinline__ void wait_for_scores() { bar_sync(1, Traits::kThreads); }
// Warps of one kind wait for each other.
template <bool kOfKeys>
__device__ __forceinline__ void kind_barrier() {
  bar_sync(kOfKeys ? 2 : 3, Traits::kThreads / 2);
}
__device__ __forceinline__ int slice_index() { return warp_index() % Traits::kSlices; }

// A warp's registers in the loop, for its columns of K or V: the rows as A fragments, their gradients, and where its
// lanes read Q or dout.
template <bool kOfKeys_, typename RowsTile, typename QueriesTile>
struct SliceWarp : ColumnSlice<RowsTile, QueriesTile, Traits::kSlices, kKeyTiles, Traits::kQueryTiles> {
  using Slice = ColumnSlice<RowsTile, QueriesTile, Traits::kSlices, kKeyTiles, Traits::kQueryTiles>;

  static constexpr bool kOfKeys = kOfKeys_;

  typename Slice::Sums gradients;

  __device__ __forceinline__ SliceWarp() : Slice(slice_index()) { clear(gradients); }
  __device__ __forceinline__ void take(uint32 rows_s) {
    load_a_fragments<RowsTile>(this->rows, rows_s, 0, this->first_chunk);
  }
  __device__ __forceinline__ void give(uint32 rows_s, float scale) const {
    round_to_tile<RowsTile, DTYPE>(rows_s, 0, gradients, scale, this->first_chunk);
  }
  // A part of the next tile of Q or dout, on its way while the present one is in use.
  template <int kPart, typename Loader>
  __device__ __forceinline__ static void fetch_part(Loader& loader) {
    if constexpr (!Traits::kNative) loader.template fetch_part<kOfKeys, kPart>();
  }
  template <int kPart, typename Loader>
  __device__ __forceinline__ static void store_part(Loader& loader) {
    if constexpr (!Traits::kNative) loader.template store_part<kOfKeys, kPart>();
  }
  // dK += dS^T Q, or dV += P^T dout.
  template <typename Loader>
  __device__ __forceinline__ void add_gradients(Loader& loader, const unsigned char* weights, uint32 queries_s) {
    this->template add_weighted<DTYPE>(gradients, shared_address(weights), queries_s, [&] { fetch_part<0>(loader); });
  }
};

// A warp of keys: its columns of K and dK / scale.
struct KeyWarp : SliceWarp</*kOfKeys=*/true, Traits::KTile, Traits::QTile> {
  static constexpr int kChunksTogether = 4;  // chunks: independent sums for the tensor cores
  static constexpr int kFirstHalf = kSteps / kChunksTogether / 2 * kChunksTogether;

  static constexpr uint32 kNoTile = ~0u;

  uint32 dq_row = kNoTile;  // in scratch memory, of the tile whose second half of dQ is not added yet

  // dQ += dS K in a half of the warp's columns; `tile_g` is the accumulator of the query tile.
  template <int kHalf>
  __device__ __forceinline__ void add_dq(float* tile_g, uint32 ds_s) const {
    using T = Traits;
    const int row = lane_index() % 8, matrix = lane_index() / 8;
#pragma unroll 1
    for (int q = 0; q < T::kTileQ / 16; q++) {
      uint32 a[kKeyTiles][4];  // 16 keys by 16 queries: matrices by query within 8 keys
#pragma unroll
      for (int i = 0; i < kKeyTiles; i++) {
        ldmatrix_trans<4>(a[i], ds_s + T::DsTile::offset(16 * i + row + matrix / 2 * 8, 2 * q + matrix % 2));
      }
      float* lane_g = tile_g + (q * T::kHeadChunks + first_chunk) * 128 + lane_index();
#pragma unroll
      for (int first = kHalf ? kFirstHalf : 0; first < (kHalf ? kSteps : kFirstHalf); first += kChunksTogether) {
        float acc[1][kChunksTogether][4];
        clear(acc);
#pragma unroll
        for (int i = 0; i < kKeyTiles; i++) {
#pragma unroll
          for (int half = 0; half < 2; half += MMA_K / 8) {
#pragma unroll
            for (int c = 0; c < kChunksTogether; c++) {
              const uint32(&k)[2] = rows[i][first + c];
              if constexpr (MMA_K == 16) {
                mma_m16n8k16<DTYPE>(acc[0][c], {a[i][0], a[i][1]}, {a[i][2], a[i][3]}, movmatrix_trans(k[0]),
                                    movmatrix_trans(k[1]));
              } else {
                mma_m16n8k8<DTYPE>(acc[0][c], {a[i][2 * half], a[i][2 * half + 1]}, movmatrix_trans(k[half]));
              }
            }
          }
        }
#pragma unroll
        for (int c = 0; c < kChunksTogether; c++) {
          if (T::kSteps > T::kHeadChunks && first_chunk + first + c >= T::kHeadChunks) continue;
#pragma unroll
          for (int e = 0; e < 4; e++) red_global_add(lane_g + (first + c) * 128 + e * kWarpSize, acc[0][c][e]);
        }
      }
    }
  }

  template <typename Loader>
  __device__ __forceinline__ void query_tile(const Cta& cta, Loader& loader) {
    put_scores<DTYPE>(cta.smem.loop.s, loader.q_s);  // S^T = K Q^T
    arrive_with_scores();                            // s, dp: written; ds of the tile before the last: read
    add_second_half(cta, loader.left + 1);
    CountedBarrier::wait();  // p, ds: written; s, dp: read
    add_gradients(loader, cta.smem.loop.ds[loader.left % 2u], loader.q_s);
  }
  // The first half while the next tile is on its way, the second one while the warps of values compute its dS.
  template <typename Loader>
  __device__ __forceinline__ void add_first_half(const Cta& cta, const Loader& loader) {
#if ONE_PASS
    dq_row = loader.scratch_row;
    add_half<0>(cta, loader.left);
#endif
  }
  __device__ __forceinline__ void add_second_half(const Cta& cta, int left) {
#if ONE_PASS
    if (dq_row != kNoTile) add_half<1>(cta, left);
#endif
  }

 private:
  template <int kHalf>
  __device__ __forceinline__ void add_half(const Cta& cta, int left) const {
    add_dq<kHalf>(cta.dq_acc_g + accumulator_offset<Traits::kHeadChunks>(dq_row),
                  shared_address(cta.smem.loop.ds[left % 2u]));
  }
};

// A warp of values: its columns of V and dV, boosted, and a share of the scores.
struct ValueWarp : SliceWarp</*kOfKeys=*/false, Traits::VTile, Traits::DoutTile> {
  template <typename Loader>
  __device__ __forceinline__ void query_tile(const Cta& cta, Loader& loader) {
    using T = Traits;
    auto& smem = cta.smem.loop;
    const int key_tile = slice_index() % kKeyTiles, query_tile = slice_index() / kKeyTiles * T::kSubTiles;
    const int row = query_tile * 8;
    const QueryStatistics<T::kSubTiles> statistics(loader.statistics(cta.statistics_g) + row * Loader::kStatisticsStep);
    const ScoreCoordinates at = {cta.coords.batch, loader.head, loader.first_row() + row,
                                 cta.coords.first_key + key_tile * 16};
    const TileOptions<T::Options, T::Dbias, T::Tile> tile(cta.params, cta.window, cta.arrays, at, cta.scale,
                                                          cta.q_offset);
    put_scores<DTYPE>(smem.dp, loader.dout_s);  // dP^T = V dout^T
    wait_for_scores();                          // s, dp: written; ds of the tile before the last: read
    T::Tile::Fragment s, dp;
    smem.s.sum(s, query_tile, key_tile);
    smem.dp.sum(dp, query_tile, key_tile);
    T::Tile::Packed p, ds;
    score_gradients<T::Tile>(p, ds, s, dp, statistics, tile, loader.masked(), loader.state(key_tile) != kFull);
    const uint32 p_lane_s = ds_lane_address<T::DsTile>(shared_address(smem.p), key_tile * 16);
    const uint32 ds_lane_s = ds_lane_address<T::DsTile>(shared_address(smem.ds[loader.left % 2u]), key_tile * 16);
#pragma unroll
    for (int n = 0; n < T::kSubTiles; n++) {
      store_ds<T::DsTile>(p_lane_s, query_tile + n, p[n]);
      store_ds<T::DsTile>(ds_lane_s, query_tile + n, ds[n]);
    }
    CountedBarrier::wait();  // p, ds: written; s, dp: read
    add_gradients(loader, smem.p, loader.dout_s);
  }
  template <typename Loader>
  __device__ __forceinline__ void add_first_half(const Cta&, const Loader&) const {}
  __device__ __forceinline__ void add_second_half(const Cta&, int) const {}
};

// Phase 3, by tiles of queries (add_up_by_kinds).
template <typename Warp, typename Loader>
__device__ __forceinline__ void begin_tiles(Warp&, const Cta& cta, Loader& loader) {
  if constexpr (Traits::kNative) {
    loader.begin(cta.statistics_g);
  } else {
    loader.template begin_parts<Warp::kOfKeys>();
  }
}
// One query tile, while the next one is on its way.
template <typename Warp, typename Loader>
__device__ __forceinline__ void query_tile(Warp& warp, const Cta& cta, Loader& loader) {
  if constexpr (Traits::kNative) {
    loader.fetch_q();
    loader.fetch_dout();
    loader.fetch_statistics(cta.statistics_g);
    warp.query_tile(cta, loader);
    warp.add_first_half(cta, loader);
    loader.arrive();
    CountedBarrier::wait();  // Q, dout: this tile has been read, the next one written; p, ds: read
  } else {
    warp.query_tile(cta, loader);
    kind_barrier<Warp::kOfKeys>();  // Q or dout: read
    warp.template store_part<0>(loader);
    warp.template fetch_part<1>(loader);
    warp.add_first_half(cta, loader);
    warp.template store_part<1>(loader);
    kind_barrier<Warp::kOfKeys>();  // Q or dout: the next tile has been written; p: read
  }
}

template <typename Warp>
__device__ __forceinline__ void end_tiles(Warp& warp, const Cta& cta) {
  warp.add_second_half(cta, 1);
  CountedBarrier::wait();  // Q, dout, p, ds: read; dV takes their place
}

// The keys of one CTA.
template <typename... Inputs>
__device__ __forceinline__ void add_up_gradients(const Inputs&... inputs) {
  add_up_by_kinds<Traits, KeyWarp, ValueWarp>(dynamic_shared<Smem>(), inputs...);
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_backward_dkdv_wide)(const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, const DTYPE* dout_g,
                                        const float* statistics_g, const float* scales_g, float* cta_scales_g,
                                        float* dq_acc_g, DTYPE* dk_g, DTYPE* dv_g, void* dbias_g PACKED_ARRAYS,
                                        const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                        const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                        const GradientParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaKeys<Traits::kKeys, Traits::kTileQ> own(sequences, modifiers.blocks, dynamic_shared<Smem>());
  add_up_own_gradients(own, params,
                       {q_g,
                        k_g,
                        v_g,
                        dout_g,
                        statistics_g,
                        dq_acc_g,
                        {bias_g, mask_g, slopes_g, dbias_g, modifiers, {scales_g, cta_scales_g}}},
                       dk_g, dv_g);
}
