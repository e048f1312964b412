// Attention backward on tensor cores: the gradient of a bias that broadcasts.
//
//   P = exp(s - lse),  dbias = sum of P * (dout V^T - delta) over all scores that the bias is added to
//
// A CTA owns a tile of one bias's gradient, in float32 registers, and goes through the pairs of batch elements and
// heads that the bias is of: for each it forms S = Q K^T and dP = dout V^T again. So dS is summed in one order without
// a trip through memory, for two products more.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh). dbias as
//           (batches, heads, Sq, Sk), where the pairs of one item are distributed over several CTAs with `parts` along
//           an axis of the pairs. Along an axis that the bias broadcasts along too it has an item for each warp's rows,
//           or each tile's keys.
// Tiles     kRows = WARPS * M_TILES * 16 query rows by TILE_K keys, 16 at a time; a warp owns its rows alone.
// Grid      batches * heads * parts * ceil(Sq / kRows) * ceil(Sk / TILE_K) CTAs; those at work together have one pair.
// Budget    registers: Q and dout (M_TILES * (D + Dv) / 4, D in steps of 32) and dbias (M_TILES * TILE_K / 2). Shared
//           memory: K and V twice. Q and dout come straight to registers (quad_rows.cuh).
// Barriers  one per pair.
// Edges     rows beyond Sq have L = +inf, hence dS = 0, and are not stored; keys beyond the sequence are zeros and
//           masked. Tiles that no query sees, or that a block mask leaves empty (block_states.cuh), add nothing.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || \
    !defined(TILE_K) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SCORE_VEC) || !defined(SLOPES) || !defined(SOFTCAP) || \
    !defined(DROPOUT) || !defined(MODIFIED) || !defined(DBIAS)
#error "BIAS, MASK, SCORE_VEC, SLOPES, SOFTCAP, DROPOUT, MODIFIED, DBIAS come from a launch-configuration table"
#endif
#include "bias_pairs.cuh"
#include "products.cuh"
#include "quad_rows.cuh"
#include "score_gradient.cuh"
#include "../backward_sequences.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kRows = WARPS * kWarpRows;
  static constexpr int kGroups = quad_chunks(kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV) / kQuadGroup;
  static constexpr int kSubKeys = 16;  // at a time: those that dropout draws for
  static constexpr int kSubs = kTileK / kSubKeys;

  using KTile = QuadTile<kTileK, kHeadDim>;
  using VTile = QuadTile<kTileK, kHeadDimV>;
  using TileCoordinates = DbiasCoordinates<kRows, kTileK>;
  using States = TileStates<decltype(Modifiers::blocks), kRows, kTileK, kWarpRows>;
  using Tile = ScoreTile<kMTiles, kSubKeys / 8, Along::kN8, SCORE_VEC>;
  using QRows = QuadRows<kHeadDim, kMTiles>;
  using DoutRows = QuadRows<kHeadDimV, kMTiles>;
  using KTileLoader = TileLoader<KTile, kHeadDim, kVec, kThreads, Tile>;
  using VTileLoader = TileLoader<VTile, kHeadDimV, kVec, kThreads, Tile>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kSubs >= 2, "K and V are fetched one after the other");
};

// Two tiles of keys: one is computed, the other filled.
struct Smem {
  alignas(128) unsigned char k[2][Traits::KTile::kBytes];
  alignas(128) unsigned char v[2][Traits::VTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

struct Arrays {
  const DTYPE *q_g, *k_g, *v_g, *dout_g;
  const float* statistics_g;
  DBIAS* dbias_g;
  OptionArrays options;
};

// A warp's registers; Q and dout are those of one pair.
struct Warp {
  Traits::QRows q;
  Traits::DoutRows dout;
  Traits::Tile::Fragment sums[Traits::kSubs];
  int first_row;  // of the sequence
};

struct Addresses {
  QuadAddress<Traits::KTile> k;
  QuadAddress<Traits::VTile> v;
};

// S += Q K^T and dP += dout V^T over the columns from this group on, group by group.
template <int kGroup = 0>
__device__ __forceinline__ void add_scores(Traits::Tile::Fragment& s, Traits::Tile::Fragment& dp, const Warp& warp,
                                           const Addresses& addresses, uint32 k_s, uint32 v_s) {
  using T = Traits;
#pragma unroll
  for (int n = 0; n < T::Tile::kNTiles; n++) {
    add_quad_product<kGroup>(s[n], warp.q, k_s + n * 8 * T::KTile::kRowBytes, addresses.k);
    add_quad_product<kGroup>(dp[n], warp.dout, v_s + n * 8 * T::VTile::kRowBytes, addresses.v);
  }
  if constexpr (kGroup + 1 < T::kGroups) add_scores<kGroup + 1>(s, dp, warp, addresses, k_s, v_s);
}

// The sum over a thread's items, then over lanes that hold further ones.
__device__ __forceinline__ float sum_of_lanes(float sum, int first_step, int last_step) {
#pragma unroll
  for (int step = first_step; step <= last_step; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  return sum;
}

// Each column's sum over the warp's rows, into the items of its first row.
__device__ __forceinline__ void sum_rows(Traits::Tile::Fragment (&sums)[Traits::kSubs]) {
#pragma unroll
  for (auto& sub : sums) {
#pragma unroll
    for (auto& tile : sub) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < Traits::kMTiles; i++) sum += tile[i][e] + tile[i][2 + e];
        tile[0][e] = sum_of_lanes(sum, 4, 16);
      }
    }
  }
}

// Each row's sum over the tile's keys, into the items of its first one.
__device__ __forceinline__ void sum_keys(Traits::Tile::Fragment (&sums)[Traits::kSubs]) {
#pragma unroll
  for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = 0.f;
#pragma unroll
      for (const auto& sub : sums) {
#pragma unroll
        for (const auto& tile : sub) sum += tile[i][2 * half] + tile[i][2 * half + 1];
      }
      sums[0][0][i][2 * half] = sum_of_lanes(sum, 1, 2);
    }
  }
}

// Parts are along the axis that they are a sum over.
__device__ __forceinline__ void store_sums(Warp& warp, const BackwardParams& params,
                                           const Traits::TileCoordinates& coords, const DbiasWork& work,
                                           DBIAS* dbias_g) {
  using Tile = Traits::Tile;
  const int batch = coords.batch + (work.batches == 1 ? coords.part : 0);
  const int head = coords.head + (work.batches == 1 ? 0 : coords.part);
  if (!work.sums_rows && !work.sums_keys) {
#pragma unroll
    for (int sub = 0; sub < Traits::kSubs; sub++) {
      const ScoreCoordinates to = {batch, head, warp.first_row, coords.first_key + sub * Traits::kSubKeys};
      store_scores<Tile>(dbias_g, params.dbias, to, params.attention, warp.sums[sub], 1.f, work.adds);
    }
    return;
  }
  if (work.sums_rows) sum_rows(warp.sums);
  if (work.sums_keys) sum_keys(warp.sums);
  const ScoreCoordinates to = {batch, head, 0, 0};
#pragma unroll
  for (int sub = 0; sub < Traits::kSubs; sub++) {
    Tile::for_each([&](int n, int i, int e) {
      int row = warp.first_row + Tile::row_of(n, i, e);
      int key = coords.first_key + sub * Traits::kSubKeys + Tile::key_of(n, i, e);
      bool stores = work.sums_rows ? i == 0 && e < 2 && lane_index() < 4 : row < params.attention.sq;
      stores &= work.sums_keys ? sub == 0 && n == 0 && e % 2 == 0 && lane_index() % 4 == 0 : key < params.attention.sk;
      if (!stores) return;
      if (work.sums_rows) row = warp.first_row / Traits::kWarpRows;
      if (work.sums_keys) key = coords.first_key / Traits::kTileK;
      *score_item(dbias_g, params.dbias, to, row, key) = from_float<DBIAS>(warp.sums[sub][n][i][e]);
    });
  }
}

// The tile's keys of a pair, or values.
template <typename Loader, int kRoom, typename OnePair>
__device__ __forceinline__ void fetch_keys(uint4 (&quads)[kRoom], const Loader& loader, const DTYPE* array_g,
                                           const AttentionParams& params, const Strides& strides,
                                           const Traits::TileCoordinates& coords, const OnePair& pair) {
  const DTYPE* rows_g = head_rows(array_g, strides, pair.sequence.batch(pair.batch), pair.head / params.group,
                                  pair.sequence.key_begin + coords.first_key);
  loader.template load<true>(quads, loader.lowest(rows_g, strides.seq), strides.seq,
                             pair.sequence.window.keys - coords.first_key);
}

// A tile of one bias's gradient. `sequences` has their number and for each where it lies: what DenseSequences has
// (backward_summed_dbias.cu).
template <typename Sequences>
__device__ __forceinline__ void sum_dbias(const BackwardParams& longest, const Arrays& arrays, const DbiasWork& work,
                                          const Sequences& sequences) {
  using T = Traits;
  using OnePair = Pair<typename Sequences::Sequence, T::States>;
  Smem& smem = dynamic_shared<Smem>();
  const Strides &q = longest.attention.q, &k = longest.attention.k, &v = longest.attention.v, &dout = longest.dout;

  // Phase 1: the tile, and the pairs whose queries see keys of it.
  const T::TileCoordinates coords(longest.attention, work);
  const auto& blocks = arrays.options.modifiers.blocks;
  const Pairs<Sequences, T::TileCoordinates, T::States, decltype(Modifiers::blocks)> pairs(
      sequences, coords, blocks, work, longest.attention.heads);
  Warp warp;
  warp.first_row = coords.first_row + warp_index() * T::kWarpRows;
#pragma unroll
  for (auto& sub : warp.sums) clear(sub);

  // Phase 2: the rows of the first pair. Keys and values go through shared memory, queries and dout to registers.
  const T::KTileLoader k_loader(k.seq);
  const T::VTileLoader v_loader(v.seq);
  uint4 quads[T::KTileLoader::kQuads > T::VTileLoader::kQuads ? T::KTileLoader::kQuads : T::VTileLoader::kQuads];
  T::QRows::Quads q_quads;
  T::DoutRows::Quads dout_quads;
  const auto fetch_queries = [&](const OnePair& of) {
    const int rows = of.left > 0 ? sequences.queries(of.sequence) - warp.first_row : 0;
    const int batch = of.sequence.batch(of.batch), row = of.sequence.query_begin + warp.first_row;
    T::QRows::load<T::kVec>(q_quads, head_rows(arrays.q_g, q, batch, of.head, row), q.seq, rows);
    T::DoutRows::load<T::kVec>(dout_quads, head_rows(arrays.dout_g, dout, batch, of.head, row), dout.seq, rows);
  };
  const auto take_queries = [&](float down) {
    warp.q.take(q_quads);
    warp.dout.take(dout_quads, down);
  };
  OnePair pair = pairs.first();
  int half = 0;
  GradientScale scale;
  if (pair.left > 0) {
    fetch_keys(quads, k_loader, arrays.k_g, longest.attention, k, coords, pair);
    k_loader.store(shared_address(smem.k[0]), quads);
    fetch_keys(quads, v_loader, arrays.v_g, longest.attention, v, coords, pair);
    v_loader.store(shared_address(smem.v[0]), quads);
    fetch_queries(pair);
    scale = arrays.options.scales.of_head(longest, pair.batch, pair.head);
    take_queries(scale.down);
  }
  __syncthreads();  // K and V: the first tile has been written

  // Phase 3: the loop over the pairs.
  const Addresses addresses;
#pragma unroll 1
  while (pair.left > 0) {
    const OnePair next = pairs.after(pair);
    const bool more = next.left > 0;
    if (more) fetch_keys(quads, k_loader, arrays.k_g, longest.attention, k, coords, next);
    const auto& params = sequences.params_of(pair.sequence);
    const RowStatistics<T::kMTiles> statistics(arrays.statistics_g + statistics_offset(pair.sequence.scratch_begin),
                                               params, pair.sequence.batch(pair.batch), pair.head, warp.first_row);
    const GradientScale own_scale = scale;
    const uint32 k_s = shared_address(smem.k[half]), v_s = shared_address(smem.v[half]);
#pragma unroll
    for (int sub = 0; sub < T::kSubs; sub++) {
      const ScoreCoordinates at = {pair.batch, pair.head, warp.first_row, coords.first_key + sub * T::kSubKeys};
      const TileOptions<T::Options, KeptDbias, T::Tile> tile(params, pair.sequence.window, arrays.options, at,
                                                             own_scale, pair.sequence.q_offset);
      const uint32 state = pair.states.of_warp(sub);
      T::Tile::Fragment s, dp;
      if (state != kEmpty) {
        clear(s);
        clear(dp);
        add_scores(s, dp, warp, addresses, k_s + sub * T::kSubKeys * T::KTile::kRowBytes,
                   v_s + sub * T::kSubKeys * T::VTile::kRowBytes);
      }
      if (sub + 1 == T::kSubs / 2 && more) {
        k_loader.store(shared_address(smem.k[half ^ 1]), quads);
        __syncwarp();  // no buffer: ptxas would otherwise load V first, and the stores of K then wait for V
        fetch_keys(quads, v_loader, arrays.v_g, longest.attention, v, coords, next);
      }
      if (sub + 1 ==
          T::kSubs) {  // The arithmetic of this part covers the latency. `if (more)` would keep the old ones too.
        fetch_queries(next);
        if (more) scale = arrays.options.scales.of_head(longest, next.batch, next.head);
      }
      if (state == kEmpty) continue;
      T::Tile::Packed p, ds;  // in float32 dp is all that counts
      score_gradients<T::Tile>(p, ds, s, dp, statistics, tile, pair.masked, state != kFull);
      T::Tile::for_each([&](int n, int i, int e) {
        warp.sums[sub][n][i][e] = __fmaf_rn(dp[n][i][e], own_scale.up, warp.sums[sub][n][i][e]);
      });
    }
    take_queries(scale.down);
    if (more) v_loader.store(shared_address(smem.v[half ^ 1]), quads);
    __syncthreads();  // K and V: this half has been read, the other one written
    pair = next;
    half ^= 1;
  }

  // Phase 4: the gradient.
  store_sums(warp, longest, coords, work, arrays.dbias_g);
}

// The position of a sequence in the arrays, and of its rows in scratch memory.
#if PACKED
struct OneSequence {
  int query_begin, key_begin;
  uint32 scratch_begin;
  int sq, sk;
  int64 q_offset;
  KeyWindow window;

  __device__ __forceinline__ static int batch(int) { return 0; }
};

struct AllSequences {
  using Sequence = OneSequence;

  const GradientParams& params;
  const Sequences& sequences;

  __device__ __forceinline__ int count() const { return params.packed.batch; }
  __device__ __forceinline__ Sequence of(int batch) const {
    const PackedSequence sequence(sequences.packed, sequences.attention, sequences.pointers, batch);
    const RowSpan &queries = sequence.queries, &keys = sequence.keys;
    return {queries.begin,
            keys.begin,
            static_cast<uint32>(scratch_begin(queries, batch)),
            queries.count,
            keys.count,
            sequence.q_offset,
            sequence.window(sequences.attention)};
  }
  __device__ __forceinline__ int queries(const Sequence& sequence) const { return sequence.sq; }
  __device__ __forceinline__ BackwardParams params_of(const Sequence& sequence) const {
    return ::params_of(params, {0, sequence.sq}, {0, sequence.sk});
  }
};
#else
struct OneSequence {
  static constexpr int query_begin = 0, key_begin = 0;
  static constexpr uint32 scratch_begin = 0;

  int64 q_offset;
  KeyWindow window;

  __device__ __forceinline__ static int batch(int sequence) { return sequence; }
};

struct AllSequences {
  using Sequence = OneSequence;

  const GradientParams& params;
  const Sequences& sequences;

  __device__ __forceinline__ int count() const { return params.batch; }
  __device__ __forceinline__ Sequence of(int batch) const {
    return {sequences.q_offset(batch), sequences.window(batch)};
  }
  __device__ __forceinline__ int queries(const Sequence&) const { return params.attention.sq; }
  __device__ __forceinline__ const BackwardParams& params_of(const Sequence&) const { return params; }
};
#endif

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS) ENTRY(attention_backward_summed_dbias)(
    const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, const DTYPE* dout_g, const float* statistics_g,
    const float* scales_g, DBIAS* dbias_g PACKED_ARRAYS, const void* q_offsets_g, const void* seqused_k_g,
    const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, const GradientParams params,
    int batches, int heads, int parts, int sums_rows, int sums_keys, int adds MODIFIER_STRIDES) {
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  sum_dbias(backward_of(params),
            {q_g,
             k_g,
             v_g,
             dout_g,
             statistics_g,
             dbias_g,
             {bias_g, mask_g, slopes_g, nullptr, MODIFIERS, {scales_g, nullptr}}},
            {batches, heads, parts, sums_rows != 0, sums_keys != 0, adds != 0}, AllSequences{params, sequences});
}
