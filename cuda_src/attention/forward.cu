// Attention forward on tensor cores: float16 in and out, float32 accumulation; the last step of naive -> tiled ->
// flash.
//
//   s_ij = softmax_scale * q_i . k_j (+ options),   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// FlashAttention-2's loop (Dao, arXiv:2307.08691, algorithm 1), shaped for Turing, whose shared memory delivers half of
// what its tensor cores could consume: a warp owns 32 query rows (two m16 tiles), so that each fragment of K and V
// read from shared memory feeds two products; Q stays in registers; the softmax is lean (lean_softmax.cuh); tiles that
// need a mask are walked first (key_walk.cuh).
//
// Shapes    AttentionParams (params.cuh); HEAD_DIM and HEAD_DIM_V from 1 to 256 in steps of 8 columns, zero-filled.
// Tiles     kTileQ = WARPS * M_TILES * 16 query rows by TILE_K keys; a warp owns its rows alone.
// Grid      B * H * ceil(Sq / kTileQ) CTAs of WARPS warps; under causal order the longest rows start first.
// Budget    shared memory: K and V twice (one half computed, one half filled), or Q or the output tile, which are there
//           before and after; registers: Q (M_TILES * D / 4), the accumulator (M_TILES * Dv / 2), the scores.
// Barriers  one per key tile.
// Edges     rows beyond Sq are zeros and not stored; keys beyond the sequence are zeros and masked; a row without keys
//           gives out = 0 and lse = -inf, or its sink.
#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || !defined(TILE_K) || \
    !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(BIAS_VEC) || !defined(MASK) || !defined(MASK_VEC) || !defined(SLOPES) || \
    !defined(SOFTCAP) || !defined(SINKS) || !defined(DROPOUT)
#error "BIAS, BIAS_VEC, MASK, MASK_VEC, SLOPES, SOFTCAP, SINKS and DROPOUT come from a launch-configuration table"
#endif
#include "forward_dropout.cuh"
#include "forward_epilogue.cuh"
#include "key_walk.cuh"
#include "lean_softmax.cuh"
#include "resident_rows.cuh"
#include "score_options.cuh"
#include "stage.cuh"
#include "tile_products.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kTileQ = WARPS * kWarpRows;
  static constexpr int kSteps = div_up(kHeadDim, 8);      // k8 steps of Q K^T
  static constexpr int kOutTiles = div_up(kHeadDimV, 8);  // n8 tiles of the output
  static constexpr int kKeyTiles = kTileK / 8;            // n8 tiles of the scores, k8 steps of P V

  using QTile = SwizzledTile<kTileQ, kSteps>;
  using KTile = SwizzledTile<kTileK, kSteps>;
  using VTile = SwizzledTile<kTileK, kOutTiles>;
  using OutTile = SwizzledTile<kTileQ, kOutTiles>;
  using Options = ScoreOptions<BIAS, BIAS_VEC, MASK, SLOPES, SOFTCAP, MASK_VEC>;
  static constexpr KeyOrder kOrder = Options::kQuads ? KeyOrder::kQuads : KeyOrder::kPairs;
  using KStage = TileStage<KTile, kHeadDim, kVec, kThreads, kOrder>;
  using VStage = TileStage<VTile, kHeadDimV, kVec, kThreads, kOrder>;
  using Scores = ScoreFragment<kMTiles, kKeyTiles, kOrder>;
  using OptionItems = Options::Items<Scores>;
  using Probabilities = PackedProbabilities<Scores>;
  using Softmax = LeanSoftmax<kMTiles, kOutTiles>;

  static constexpr bool kSinks = kGiven<SINKS>;
  static constexpr bool kDropout = DROPOUT;

  // One set of registers stages K, then V: with one for each, ptxas spilled.
  static constexpr int kQuads = KStage::kQuads > VStage::kQuads ? KStage::kQuads : VStage::kQuads;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kTileK % 16 == 0, "dropout draws for 16 keys at least");
  static_assert(kOrder == KeyOrder::kPairs || !kDropout, "a Philox call serves pairs of keys");
  static_assert(kThreads <= 1024, "a CTA has at most 1,024 threads");
};

union Smem {
  struct {
    alignas(128) unsigned char k[2][Traits::KTile::kBytes];
    alignas(128) unsigned char v[2][Traits::VTile::kBytes];
  } loop;
  alignas(128) unsigned char q[Traits::QTile::kBytes];
  alignas(128) unsigned char out[Traits::OutTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// What a warp keeps in registers through the walk.
struct Warp {
  uint32 q[Traits::kMTiles][Traits::kSteps][2];  // A fragments
  Traits::Softmax softmax;
  int first_row;  // of the sequence
};

// What every thread of the CTA knows of the walk.
struct Cta {
  uint32 k_s, v_s;  // shared addresses of the two K and the two V tiles
  FragmentAddress<Traits::KTile> k_fragment;
  FragmentAddress<Traits::VTile> v_fragment;
  Traits::KStage k_stage;
  Traits::VStage v_stage;
  const AttentionParams& params;
  const KeyWindow& window;
  const Traits::Options& options;
  Place place;
};

// S += Q K^T over the columns of a group and those behind it, group by group.
template <int kGroup = 0>
__device__ __forceinline__ void add_scores(Traits::Scores& scores, const Warp& warp, const Cta& cta, uint32 k_s) {
#pragma unroll
  for (int n = 0; n < Traits::kKeyTiles; n++) {
    add_product_nt<kGroup>(scores.s[n], warp.q, k_s + n * 8 * Traits::KTile::kRowBytes, cta.k_fragment);
  }
  if constexpr (kGroup + 1 < chunk_groups(Traits::kSteps)) add_scores<kGroup + 1>(scores, warp, cta, k_s);
}

// O += P V for 8 keys, likewise.
template <int kGroup = 0>
__device__ __forceinline__ void add_output(Warp& warp, const Cta& cta, const uint32 (&p)[Traits::kMTiles][2],
                                           uint32 v_s) {
  add_product_nn<kGroup>(warp.softmax.acc, p, v_s, cta.v_fragment);
  if constexpr (kGroup + 1 < chunk_groups(Traits::kOutTiles)) add_output<kGroup + 1>(warp, cta, p, v_s);
}

// Scores to packed probabilities; m and l are kept right.
template <bool kMasked>
__device__ __forceinline__ void softmax_tile(Traits::Probabilities& packed, Traits::Scores& scores, Warp& warp,
                                             const Traits::OptionItems& items, const Cta& cta, int first_key,
                                             bool whole) {
  constexpr bool kPass = kMasked || Traits::Options::kPass;
  float sum[Traits::kMTiles][2];
  if (kPass) cta.options.template apply<kMasked>(scores, items, warp.first_row, first_key);
  if (kMasked && !whole) scores.mask([&](int row) { return cta.window.of_row(warp.first_row + row); }, first_key);
  if (kMasked) {
    warp.softmax.raise(scores);
    warp.softmax.exponentiate(packed, sum, scores, kLog2E);
  } else {
    warp.softmax.exponentiate(packed, sum, scores, kPass ? kLog2E : cta.params.scale_log2);
    if (warp.softmax.overflows(sum)) {  // rare: a score rose far above the stale maximum
      if (!kPass) cta.options.template apply<false>(scores, items, warp.first_row, first_key);
      warp.softmax.raise(scores);
      warp.softmax.exponentiate(packed, sum, scores, kLog2E);
    }
  }
  warp.softmax.add(sum);
}

// One key tile: compute it from one half of the K and V buffers while the next one, at next_k_g and next_v_g, is
// fetched to registers and from there to the other half.
template <bool kMasked>
__device__ __forceinline__ void key_tile(Warp& warp, const Cta& cta, int first_key, int parity, bool more,
                                         const char* next_k_g, const char* next_v_g, int next_valid) {
  const uint32 k_s = cta.k_s + parity * Traits::KTile::kBytes, v_s = cta.v_s + parity * Traits::VTile::kBytes;
  const uint32 next_k_s = cta.k_s + (parity ^ 1) * Traits::KTile::kBytes;
  const uint32 next_v_s = cta.v_s + (parity ^ 1) * Traits::VTile::kBytes;

  // In a masked tile a warp may see nothing, or everything.
  bool active = true, whole = true;
  if (kMasked) {
    const KeyRange top = cta.window.of_row(warp.first_row);
    const KeyRange bottom = cta.window.of_row(warp.first_row + Traits::kWarpRows - 1);
    active = first_key < bottom.end && first_key + Traits::kTileK > top.begin;
    whole = first_key + Traits::kTileK <= top.end && first_key >= bottom.begin;
  }

  uint4 quads[Traits::kQuads];
  Traits::OptionItems items;
  Traits::Scores scores;
  if (more) cta.k_stage.template load<kMasked>(quads, next_k_g, cta.params.k.seq, next_valid);
  // No buffer: ptxas would else sink K's loads. (With 32 rows a warp it does not, and this made it place V's worse.)
  if (Traits::kMTiles == 1) __syncwarp();
  if (active) {
    if (!kMasked) cta.options.template load<false>(items, warp.first_row, first_key);
    clear(scores.s);
    add_scores(scores, warp, cta, k_s);
  }
  if (more) {
    cta.k_stage.store(next_k_s, quads);
    __syncwarp();  // no buffer: ptxas would else load V first, and the stores of K then wait for V
    cta.v_stage.template load<kMasked>(quads, next_v_g, cta.params.v.seq, next_valid);
  }
  if (active) {
    if (kMasked) cta.options.template load<true>(items, warp.first_row, first_key);
    Traits::Probabilities packed;
    softmax_tile<kMasked>(packed, scores, warp, items, cta, first_key, whole);
    if (DROPOUT) drop(packed, cta.params.scores, cta.place, warp.first_row, first_key);
#pragma unroll
    for (int n = 0; n < Traits::kKeyTiles; n++) {
      add_output(warp, cta, packed.p[n], v_s + n * 8 * Traits::VTile::kRowBytes);
    }
  }
  if (more) cta.v_stage.store(next_v_s, quads);
  __syncthreads();  // K and V: this half has been read, the other one written
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward(const float16* q_g, const float16* k_g, const float16* v_g, float16* out_g, float* lse_g,
                      const void* q_offsets_g, const void* seqused_k_g, const void* bias_g, const void* mask_g,
                      const void* slopes_g, const void* sinks_g, const AttentionParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);

  // Phase 1: place and mask. Under causal order later rows see more keys: they start first.
  const Place place = place_of_cta(params, Traits::kTileQ, /*last_rows_first=*/true);
  const KeyWindow window = sequence_window(params, q_offsets_g, seqused_k_g, place.batch);
  const int rows = min(Traits::kTileQ, params.sq - place.first_row);
  const KeyWalk<Traits::kTileK> walk(window, place.first_row, rows);
  const Traits::Options options(params, bias_g, mask_g, slopes_g, place,
                                query_offset(params, q_offsets_g, place.batch));

  // Phase 2: Q, through shared memory into registers.
  Warp warp;
  warp.first_row = place.first_row + warp_index() * Traits::kWarpRows;
  load_rows<Traits::QTile, Traits::kHeadDim, Traits::kVec, Traits::kThreads>(
      shared_address(smem.q), head_rows(q_g, params.q, place.batch, place.head, place.first_row), params.q.seq, rows);
  __syncthreads();  // q: written
  load_a_fragments<Traits::QTile>(warp.q, shared_address(smem.q), warp_index() * Traits::kWarpRows);
  warp.softmax.clear();
  __syncthreads();  // q: read; K and V take its place

  // Phase 3: the walk over the keys, masked tiles first.
  Cta cta = {shared_address(smem.loop.k),
             shared_address(smem.loop.v),
             {},
             {},
             Traits::KStage(params.k.seq),
             Traits::VStage(params.v.seq),
             params,
             window,
             options,
             place};
  const char* k_rows_g = Traits::KStage::lowest(head_rows(k_g, params.k, place.batch, place.kv_head, 0), params.k.seq);
  const char* v_rows_g = Traits::VStage::lowest(head_rows(v_g, params.v, place.batch, place.kv_head, 0), params.v.seq);
  const int64 k_tile_bytes = params.k.seq * Traits::kTileK * sizeof(float16);
  const int64 v_tile_bytes = params.v.seq * Traits::kTileK * sizeof(float16);
  int left = walk.tiles();
  const int full = left - walk.masked;
  int tile = walk.first;
  const char *next_k_g = k_rows_g + tile * k_tile_bytes, *next_v_g = v_rows_g + tile * v_tile_bytes;
  if (left > 0) {
    uint4 k_quads[Traits::KStage::kQuads], v_quads[Traits::VStage::kQuads];
    cta.k_stage.load<true>(k_quads, next_k_g, params.k.seq, window.keys - tile * Traits::kTileK);
    cta.k_stage.store(cta.k_s + (left & 1) * Traits::KTile::kBytes, k_quads);
    cta.v_stage.load<true>(v_quads, next_v_g, params.v.seq, window.keys - tile * Traits::kTileK);
    cta.v_stage.store(cta.v_s + (left & 1) * Traits::VTile::kBytes, v_quads);
  }
  __syncthreads();  // K and V: the first tile has been written
#pragma unroll 1
  for (; left > full; left--) {
    const int next = walk.after(tile);
    next_k_g = k_rows_g + next * k_tile_bytes;
    next_v_g = v_rows_g + next * v_tile_bytes;
    key_tile<true>(warp, cta, tile * Traits::kTileK, left & 1, left > 1, next_k_g, next_v_g,
                   window.keys - next * Traits::kTileK);
    tile = next;
  }
  warp.softmax.renew();
  cta.k_stage.renew();
  cta.v_stage.renew();
#pragma unroll 1
  for (; left > 0; left--, tile++) {
    next_k_g += k_tile_bytes;
    next_v_g += v_tile_bytes;
    key_tile<false>(warp, cta, tile * Traits::kTileK, left & 1, left > 1, next_k_g, next_v_g, Traits::kTileK);
  }

  // Phase 4: normalise, and store through shared memory: fragments hold 4 bytes of a row each.
  const OutputRows<Traits> output = {params, place, warp.first_row};
  output.finish(warp.softmax, shared_address(smem.out), sink_log2<SINKS>(sinks_g, params, place.head), lse_g);
  __syncwarp();  // out: each warp reads what it wrote itself
  output.store(smem.out, out_g);
}
