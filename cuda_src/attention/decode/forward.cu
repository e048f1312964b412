// Attention of a few query tokens over a paged key-value cache, or over dense keys: as fast as memory brings K and V.
//
//   s_ij = softmax_scale * q_i . k_j (+ options),   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// Flash-decoding's split of the keys (Dao et al., 2023) over the blocks of PagedAttention (Kwon et al.,
// arXiv:2309.06180), in equal shares: each CTA takes as many units of keys as every other (splits.cuh). A segment that
// lies within one share is finished here; of one that shares cut, each CTA leaves its part in scratch memory, and
// combine.cu merges them. Short sequences are not shared: each segment has its own CTA, and there is no
// combine.cu.
//
// Shapes    DecodeParams (params.cuh). All query rows of a key-value head, tokens times heads of its group, read one
//           pass over K and V; more than kRows of them are cut into tiles, with a pass each.
// Work      WARPS warps take the tiles of 16 keys of a unit, one each, with a maximum, sum and accumulator of their
//           own. Loads go straight to registers, K's of the next tile as soon as those of this one are consumed, and
//           V's.
// Grid      `ctas` of DecodeParams, whatever the lengths are, or as many as segments.
// Caches    floats, or integers with a scale for each token and head (../stored_items.cuh). Where keys of KEYS are
//           CENTRED, c (G, D) was subtracted from them (../quantize_keys.cu), and q_i . c is added to each product.
// Budget    registers for MIN_CTAS CTAs an SM; shared memory for 8 rows of each warp, where a segment's parts meet.
// Loader      computes the position of a tile: BlockFeed looks its block up in a table, DenseFeed counts.
// Edges     of a block's slots from the sequence's end on, K is masked and V cleared, or their scales: they may hold
//           NaN. Tiles that no row sees are not read, and neither are their entries of the table. The last tile of
//           dense keys ends with them. A row without keys gives out = 0 and lse = -inf, or its sink.
#if !defined(DTYPE) || !defined(CACHE) || !defined(HEAD_DIM) || !defined(QUERY_ROWS) || !defined(WARPS) || \
    !defined(VEC) || !defined(LANES) || !defined(SHARED_BYTES)
#error "DTYPE, CACHE, HEAD_DIM, QUERY_ROWS, WARPS, VEC, LANES, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(FEED) || !defined(TILES_AHEAD) || !defined(MIN_CTAS) || !defined(KEYS) || !defined(CENTRED)
#error "FEED, TILES_AHEAD, MIN_CTAS, KEYS and CENTRED come from a launch-configuration table"
#endif
#if !defined(SLOPES) || !defined(SOFTCAP) || !defined(SINKS)
#error "SLOPES, SOFTCAP and SINKS come from a launch-configuration table"
#endif
#if LANES == 0  // no lanes share a row: tensor cores
#include "streamed_rows.cuh"
#else
#include "float_rows.cuh"
#endif
#include "block_loader.cuh"
#include "../row_sum.cuh"
#include "splits.cuh"

struct Traits {
  using Scalar = DTYPE;
  using Loader = FEED;
#if LANES == 0
  using Rows = ChosenRows<DTYPE, CACHE, KEYS, HEAD_DIM, QUERY_ROWS, TILES_AHEAD>::Type;
#else
  using Rows = FloatRows<DTYPE, CACHE, HEAD_DIM, VEC, LANES, QUERY_ROWS, KEYS>;
#endif
  using Options = ScoreOptions<void, false, SLOPES, SOFTCAP, false>;
  using Scores = LaneScores<Options, Rows::kLaneRows>;
  using End = RowSum<HEAD_DIM>;
  // A maximum is kept until a score exceeds it by so much: P reaches 2^8, of which float16 holds 2^16, bfloat16 2^127.
  static constexpr float kSlackLog2 = 8.f;
  static constexpr int kStride = round_up(HEAD_DIM, 4) + 4;  // of a row in shared memory: rows 2 t are 8 banks apart
};

struct Smem : Traits::Rows::Queries {
  alignas(16) float rows[WARPS][Traits::Rows::kPassRows][Traits::kStride];
  float2 sums[WARPS][Traits::Rows::kPassRows];  // m and l
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// Over the lanes that share rows; all of them receive the result.
template <typename Op>
__device__ __forceinline__ float reduce_row(float x, Op op = Op()) {
#pragma unroll
  for (int distance = Traits::Rows::kRowLanes; distance < kWarpSize; distance *= 2) {
    x = op(x, __shfl_xor_sync(kFullWarp, x, distance));
  }
  return x;
}

template <typename Rows>
__device__ __forceinline__ void begin_rows(Rows& rows, const SegmentRows& segment, const Traits::Scalar* q_g,
                                           Smem& smem) {
  if constexpr (Rows::kStreams) {
    rows.template begin<WARPS>(segment, q_g, smem);
    __syncthreads();  // smem: q is written by every warp
    rows.prepare();
  } else {
    rows.begin(segment, q_g);
  }
}

// One warp's part of a segment's rows.
struct Warp {
  static constexpr int kLaneRows = Traits::Rows::kLaneRows, kLaneKeys = Traits::Rows::kLaneKeys;

  Traits::Rows rows;
  float m[kLaneRows], l[kLaneRows];
#if CENTRED
  float shift[kLaneRows];  // of products

  // q . c of the lane's rows, whose columns the lanes that share them divide.
  __device__ __forceinline__ void begin_shift(const SegmentRows& segment, const Traits::Scalar* q_g,
                                              const float* centre_g) {
    constexpr int kSharers = kWarpSize / Traits::Rows::kRowLanes;
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) {
      const Traits::Scalar* row_g = segment.q(q_g, min(rows.row_of(i), segment.count - 1));
      shift[i] = 0.f;
#pragma unroll 4
      for (int column = lane_index() / Traits::Rows::kRowLanes; column < HEAD_DIM; column += kSharers) {
        shift[i] = __fmaf_rn(to_float(row_g[column]), centre_g[column], shift[i]);
      }
      shift[i] = reduce_row<Sum>(shift[i]);
    }
  }
#endif

  __device__ __forceinline__ void begin(const SegmentRows& segment, const Traits::Scalar* q_g, Smem& smem) {
    begin_rows(rows, segment, q_g, smem);
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) {
      m[i] = Traits::End::kLowest;
      l[i] = 0.f;
    }
  }

  // Products to scores; at an edge those of keys that a row does not see, or another tile has, become -inf.
  __device__ __forceinline__ void score(Traits::Scores& scores, int first_key, int own_key, bool edge) {
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) {
#pragma unroll
      for (int j = 0; j < kLaneKeys; j++) {
        float& s = rows.score(i, j);
#if CENTRED
        s += shift[i];
#endif
        s = scores.score(s, i, first_key + rows.key_of(j));
      }
    }
    if (!edge) return;
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) {
#pragma unroll
      for (int j = 0; j < kLaneKeys; j++) {
        const int key = first_key + rows.key_of(j);
        if (key < own_key || !scores.sees(i, key)) rows.score(i, j) = -kInfinity;
      }
    }
  }

  // Scores to weights. Maxima stay as they are while they will do, and so does the accumulator.
  __device__ __forceinline__ void weigh() {
    float top[kLaneRows];
    bool exceeded = false;
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) {
      top[i] = rows.score(i, 0);
#pragma unroll
      for (int j = 1; j < kLaneKeys; j++) top[i] = fmaxf(top[i], rows.score(i, j));
      exceeded |= top[i] > m[i] + Traits::kSlackLog2;
    }
    if (__any_sync(kFullWarp, exceeded)) {
      float factor[kLaneRows];
#pragma unroll
      for (int i = 0; i < kLaneRows; i++) {
        const float next = fmaxf(m[i], reduce_row<Max>(top[i]));
        factor[i] = ex2_approx(m[i] - next);
        l[i] *= factor[i];
        m[i] = next;
      }
      rows.rescale(factor);
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) {
#pragma unroll
      for (int j = 0; j < kLaneKeys; j++) {
        float& s = rows.score(i, j);
        s = ex2_approx(s - m[i]);
        l[i] += s;
      }
    }
  }

  __device__ __forceinline__ void finish() {
    rows.finish();
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) l[i] = reduce_row<Sum>(l[i]);
  }

  __device__ __forceinline__ void store(Smem& smem, int pass) const {
    const int warp = warp_index();
    rows.template store<Traits::kStride>(pass, smem.rows[warp][0]);
    if (lane_index() >= Traits::Rows::kRowLanes) return;
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) {
      const int row = rows.row_of(i) - pass * Traits::Rows::kPassRows;
      if (row >= 0 && row < Traits::Rows::kPassRows) smem.sums[warp][row] = make_float2(m[i], l[i]);
    }
  }
};

// A lane's view of the caches: from its own first row and items of a tile on.
struct Caches {
  using Rows = Traits::Rows;
  using KeyTile = CacheTile<KEYS>;
  using Tile = CacheTile<CACHE>;

  const DecodeParams& params;
  const KEYS* k_g;
  const CACHE* v_g;
  const float *k_scales_g, *v_scales_g;

  __device__ __forceinline__ Caches(const KEYS* k_cache_g, const CACHE* v_cache_g, const float* k_all_scales_g,
                                    const float* v_all_scales_g, const DecodeParams& params_, int kv_head)
      : params(params_),
        k_g(head_rows(k_cache_g, params.attention.k, 0, kv_head, Rows::k_coords().row) + Rows::k_coords().item),
        v_g(head_rows(v_cache_g, params.attention.v, 0, kv_head, Rows::v_coords().row) + Rows::v_coords().item),
        k_scales_g(head_rows(k_all_scales_g, params.k_scales, 0, kv_head, Rows::key_of(0))),
        v_scales_g(head_rows(v_all_scales_g, params.v_scales, 0, kv_head, Rows::key_of(0))) {}

  __device__ __forceinline__ KeyTile k(const KeyTilePosition& position) const {
    return tile(k_g, params.attention.k, k_scales_g, params.k_scales, position);
  }
  __device__ __forceinline__ Tile v(const KeyTilePosition& position) const {
    return tile(v_g, params.attention.v, v_scales_g, params.v_scales, position);
  }

 private:
  template <typename Item>
  __device__ __forceinline__ static CacheTile<Item> tile(const Item* lane_g, const Strides& strides,
                                                         const float* scales_g, const Strides& scale_strides,
                                                         const KeyTilePosition& position) {
    return {lane_g + tile_offset(strides, position), strides.seq, scales_g + tile_offset(scale_strides, position),
            scale_strides.seq};
  }
};

// One warp's tiles of a segment, of which kTilesAhead are on the way.
template <typename Rows>
__device__ __forceinline__ void loop(Warp& warp, Rows& rows, const Caches& caches, Traits::Loader& loader,
                                     const KeyWindow& window, Traits::Scores& scores, int sq) {
  if (loader.count <= 0) return;
  const int seen_by_all = window.of_row(sq - 1).begin, seen_to = window.of_row(0).end;
  constexpr int kAhead = Rows::kTilesAhead, kSlots = Rows::kSlots;
#pragma unroll
  for (int j = 0; j < kAhead; j++) {
    if (j >= loader.count) break;
    const KeyTilePosition position = loader.position(j);
    rows.load_k(j, caches.k(position));
    rows.load_v(j, caches.v(position));
  }
#pragma unroll 1
  for (int first = 0; first < loader.count; first += kSlots) {
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
      const int j = first + slot;
      if (j >= loader.count) break;
      const bool more = j + kAhead < loader.count;
      KeyTilePosition position{};  // of the tile to load: kAhead after this one, or this one
      if (more) position = loader.position(j + kAhead);
      const int first_key = loader.first_key(j), own_key = loader.tile(j) * kTileKeys;
      if (kAhead == 0) rows.load_k(slot, caches.k(position));
      rows.multiply_keys(slot, caches.k(position));
      if (kAhead > 0 && more) rows.load_k(slot, caches.k(position));
      if (kAhead == 0) rows.load_v(slot, caches.v(position));
      const bool edge = first_key < max(seen_by_all, own_key) || first_key + kTileKeys > seen_to;
      warp.score(scores, first_key, own_key, edge);
      if (edge) rows.clear_v(slot, window.keys - first_key);
      warp.weigh();
      rows.add_values(slot, caches.v(position), window.keys - first_key);
      if (kAhead > 0 && more) rows.load_v(slot, caches.v(position));
    }
  }
}

// The same where parts of tiles are on the way (streamed_rows.cuh).
template <typename Rows>
__device__ __forceinline__ void stream(Warp& warp, Rows& rows, const Caches& caches, Traits::Loader& loader,
                                       const KeyWindow& window, Traits::Scores& scores, int sq) {
  if (loader.count <= 0) return;
  using KeysAndValues = typename Rows::KeysAndValues;
  const auto at = [&](int j) -> KeysAndValues {
    const KeyTilePosition position = loader.position(j);
    return {caches.k(position), caches.v(position)};
  };
  const int seen_by_all = window.of_row(sq - 1).begin, seen_to = window.of_row(0).end;
  KeysAndValues tile = at(0);
  rows.start(tile);
#pragma unroll 1
  for (int j = 0; j < loader.count; j++) {
    const bool more = j + 1 < loader.count;
    const KeysAndValues next = more ? at(j + 1) : tile;
    const int first_key = loader.first_key(j), own_key = loader.tile(j) * kTileKeys;
    rows.multiply_keys(tile, next, more);
    const bool edge = first_key < max(seen_by_all, own_key) || first_key + kTileKeys > seen_to;
    warp.score(scores, first_key, own_key, edge);
    warp.weigh();
    rows.add_values(tile, next, more, edge, window.keys - first_key);
    tile = next;
  }
}

template <typename Rows>
__device__ __forceinline__ void take_tiles(Warp& warp, Rows& rows, const Caches& caches, Traits::Loader& loader,
                                           const KeyWindow& window, Traits::Scores& scores, int sq) {
  if constexpr (Rows::kStreams) {
    stream(warp, rows, caches, loader, window, scores, sq);
  } else {
    loop(warp, rows, caches, loader, window, scores, sq);
  }
}

// The destinations of the warps' parts of a row.
struct Results {
  const void* sinks_g;
  Traits::Scalar* out_g;
  float* lse_g;
  float *partial_out_g, *partial_sums_g;
  bool whole;
  int slot;

  // Each warp merges rows of the pass.
  __device__ __forceinline__ void merge(const Smem& smem, const SegmentRows& segment, int pass) const {
    const int first = pass * Traits::Rows::kPassRows;
    for (int row = warp_index(); row < min(Traits::Rows::kPassRows, segment.count - first); row += WARPS) {
      Traits::End sum;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum.m = fmaxf(sum.m, smem.sums[w][row].x);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float weight = ex2_approx(smem.sums[w][row].x - sum.m);
        sum.l = __fmaf_rn(weight, smem.sums[w][row].y, sum.l);
        sum.add(smem.rows[w][row], weight);
      }
      if (whole) {
        sum.write<SINKS>(segment.params, segment.batch, segment.head(first + row), segment.token(first + row), sinks_g,
                         out_g, lse_g);
      } else {
        leave(sum, slot * Traits::Rows::kRows + first + row);
      }
    }
  }

 private:
  __device__ __forceinline__ void leave(const Traits::End& sum, int row) const {
    float* row_g = partial_out_g + static_cast<int64>(row) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < Traits::End::kColumns; i++) {
      if (Traits::End::has(i)) row_g[Traits::End::column(i)] = sum.acc[i];
    }
    if (lane_index() == 0) reinterpret_cast<float2*>(partial_sums_g)[row] = make_float2(sum.m, sum.l);
  }
};

#if CENTRED
#define ENTRY attention_decode_centred
#define CENTRE_ARRAY , const float* __restrict__ k_centre_g
#define CENTRE_STRIDE , int64 centre_stride
#else
#define ENTRY attention_decode
#define CENTRE_ARRAY
#define CENTRE_STRIDE
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    ENTRY(const DTYPE* __restrict__ q_g, const KEYS* __restrict__ k_cache_g, const CACHE* __restrict__ v_cache_g,
          const int* __restrict__ block_table_g, const void* __restrict__ seqlens_k_g,
          const void* __restrict__ q_offset_g, const float* __restrict__ k_scales_g,
          const float* __restrict__ v_scales_g, const void* __restrict__ alibi_slopes_g,
          const void* __restrict__ sinks_g, DTYPE* __restrict__ out_g, float* __restrict__ lse_g,
          float* __restrict__ partial_out_g, float* __restrict__ partial_sums_g CENTRE_ARRAY,
          const DecodeParams params CENTRE_STRIDE) {
  __shared__ Smem smem;
  const Lengths lengths{seqlens_k_g, q_offset_g};
  const int cta = blockIdx.x, sq = params.attention.sq;
  // One `if` around all of it takes up to 25 registers more (NVRTC 12.9, sm_75, 2026-11-23).
  Segment segment = {};
  if (params.ctas == 0) segment = segment_of_cta<WARPS>(params, lengths, cta);
  const Splits splits = params.ctas == 0 ? Splits(segment.units, 1) : splits_of<WARPS>(params, lengths);
  const int end = params.ctas == 0 ? segment.units : splits.begin(cta + 1);
  int unit = params.ctas == 0 ? 0 : splits.begin(cta);
  if (unit >= end) return;
  if (params.ctas != 0) segment = segment_at<WARPS>(params, lengths, unit);

#pragma unroll 1
  while (true) {
    const int stop = min(end, segment.first + segment.units);
    const KeyWindow window = window_of(params, lengths, segment.batch);
    const SegmentRows rows(params, segment.batch, segment.index, Traits::Rows::kRows);
    const TileSpan span(window, sq);
    const int first = (unit - segment.first) * WARPS + warp_index();
    const int count = div_up(max(min(span.count, (stop - segment.first) * WARPS) - first, 0), WARPS);

    Warp warp;
    warp.begin(rows, q_g, smem);
#if CENTRED
    warp.begin_shift(rows, q_g, k_centre_g + rows.kv_head * centre_stride);
#endif
    {
      Traits::Loader loader(params, block_table_g, segment.batch, span.first + first, WARPS, count);
      Traits::Scores scores(rows, window, alibi_slopes_g, lengths, Traits::Rows::row_of);
      const Caches caches(k_cache_g, v_cache_g, k_scales_g, v_scales_g, params, rows.kv_head);
      take_tiles(warp, warp.rows, caches, loader, window, scores, sq);
    }
    warp.finish();

    const int first_cta = splits.cta_of(segment.first);
    const bool whole = first_cta == splits.cta_of(segment.first + segment.units - 1);
    const Results results{sinks_g, out_g, lse_g, partial_out_g, partial_sums_g, whole, Segment::slot(cta, first_cta)};
#pragma unroll
    for (int pass = 0; pass < Traits::Rows::kPasses; pass++) {
      warp.store(smem, pass);
      __syncthreads();  // smem: written by every warp
      results.merge(smem, rows, pass);
      __syncthreads();  // smem: read by every warp, before the next pass or segment writes it
    }
    if (stop == end) return;
    unit = stop;
    segment = next_segment<WARPS>(params, lengths, segment);
  }
}
