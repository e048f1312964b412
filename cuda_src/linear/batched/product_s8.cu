// out = a b for each member of a batch of int8 matrices: int32 sums, exact. On integer tensor cores, or
// with DOT_PRODUCTS by dp4a, for devices without them.
//
// Shapes    a (rows, inner), b (inner, columns) and out (rows, columns) of each member (batch.cuh), rows of out
//           contiguous. Shared memory has lines along the sum, because ldmatrix.trans moves items of 16 bits. A_LOADER
//           and B_LOADER say how an operand lies in global memory: PairLoader, contiguous along the sum, in whole
//           aligned chunks of 16; TransposingLoader, contiguous across the sum, in whole aligned words of 4 lines;
//           ItemLoader, of any strides.
// Sum       the main loop counts pairs of int8, so `inner` are pairs. If the number of items is odd, the first pair's
//           first item is a zero: ODD items are missing before the first one.
// Grid      the CTAs of one product, as in tensor_core/forward.cu, for one member after the other.
// Tiles, budget, barriers, edges: as in tensor_core/forward.cu.
#if !defined(A_LOADER) || !defined(B_LOADER) || !defined(DOT_PRODUCTS)
#error "A_LOADER, B_LOADER and DOT_PRODUCTS come from a launch-configuration table"
#endif
#include "../tensor_core/config.cuh"
#include "batch.cuh"

using int8 = signed char;

// Field for field BATCHED_INTEGER_PARAMS of cupyattn/ops/linear/kernels_matmul.py. The strides of `product` lead from
// row to row of a and out, and from column to column of b; those here from item to item of the sum.
struct BatchedIntegerParams {
  ProductParams product;
  BatchParams batch;
  int64 a_item_stride, b_item_stride;
  int64 odd;  // 1 if the items of the sum are odd in number
};
static_assert(sizeof(BatchedIntegerParams) == BATCHED_INTEGER_PARAMS_BYTES, "the NumPy twin is one layout");

// An operand of one member. Its lines are rows of a, or columns of b.
struct Operand {
  const int8* array_g;
  int64 line_stride, item_stride;
  int first_line, lines;  // the tile's first, of all
  int odd;
};

// Chunks as they lie in memory: those of an array of pairs.
template <typename Chunks>
struct PairLoader : ArrayLoader<Chunks, kChunkItems> {
  __device__ __forceinline__ PairLoader(const Operand& operand)
      : ArrayLoader<Chunks, kChunkItems>(reinterpret_cast<const float16*>(operand.array_g), operand.line_stride / 2,
                                         operand.first_line, operand.lines, 0) {}
};

// What the loaders of single items and of words share: positions count items of the sum from the current k-tile's
// first, which is the missing one if their number is odd.
template <typename Chunks_>
struct BytesLoader {
  using Chunks = Chunks_;
  using Tile = typename Chunks::Tile;
  static constexpr int kItems = kChunkBytes;  // of a chunk
  static constexpr int kTileItems = 2 * Tile::kInner;

  const int8* tile_g;
  int64 line_stride, item_stride;
  int lines;  // that exist from the tile's first on
  int first;  // the first item that exists in a ragged k-tile

  __device__ __forceinline__ BytesLoader(const Operand& operand)
      : tile_g(operand.array_g + operand.first_line * operand.line_stride - operand.odd * operand.item_stride),
        line_stride(operand.line_stride),
        item_stride(operand.item_stride),
        lines(operand.lines - operand.first_line),
        first(operand.odd) {}

  __device__ __forceinline__ void advance(int pairs) { tile_g += 2 * pairs * item_stride; }

  // Item `item` of the sum of line `line`, `ahead` k-tiles from the current one.
  __device__ __forceinline__ const int8* at(int line, int item, int ahead) const {
    return tile_g + (ahead * kTileItems + item) * item_stride + line * line_stride;
  }

  // Whether an item of the sum exists; `valid` pairs do, all of them unless the k-tile is ragged.
  template <bool kRagged>
  __device__ __forceinline__ bool exists(int item, int valid) const {
    return !kRagged || (item >= first && item < 2 * valid);
  }
};

// An array of any strides, item by item.
template <typename Chunks>
struct ItemLoader : BytesLoader<Chunks> {
  using Base = BytesLoader<Chunks>;
  using Fetched = uint4;
  static constexpr int kFetches = Chunks::kCount, kStores = 1;
  using Base::Base;

  template <bool kRagged>
  __device__ __forceinline__ void load(uint4& quad, int i, int ahead, int valid) const {
    if (valid <= 0) return;
    const int line = Chunks::line(i), item = 2 * Chunks::place(i);
    const unsigned char* item_g = reinterpret_cast<const unsigned char*>(this->at(line, item, ahead));
    uint32 word[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
      uint32 byte[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const bool wanted = line < this->lines && this->template exists<kRagged>(item + 4 * w + j, valid);
        byte[j] = wanted ? item_g[(4 * w + j) * this->item_stride] : 0;
      }
      word[w] = byte[0] | byte[1] << 8 | byte[2] << 16 | byte[3] << 24;
    }
    quad = make_uint4(word[0], word[1], word[2], word[3]);
  }

  __device__ __forceinline__ static void store(uint32 tile_s, const uint4& quad, int i) {
    st_shared_v4(tile_s + Chunks::shared_distance(i), quad);
  }
};

// Words of 4 neighbouring lines at each of 16 items of the sum, turned into chunks of 4 lines as they are stored.
// Neighbouring lanes have neighbouring words. In each store, every two lanes take another of their lines, so that eight
// lanes touch every bank once.
template <typename Chunks_>
struct TransposingLoader : BytesLoader<Chunks_> {
  using Base = BytesLoader<Chunks_>;
  using Tile = typename Base::Tile;
  using Swizzled = typename Tile::Swizzled;
  static constexpr int kThreads = CtaShape::kThreads;
  static constexpr int kWords = Tile::kOuter / 4;  // of an item of the sum
  static constexpr int kUnits = kWords * Swizzled::kChunks;
  static constexpr int kStores = 4;
  static constexpr int kFetches = div_up(kUnits, kThreads);
  struct Fetched {
    uint32 word[Base::kItems];
  };
  // The product adds the offset of a thread's first chunk to every address; here, each store has its own.
  struct Chunks : Chunks_ {
    __device__ __forceinline__ static uint32 shared_offset() { return 0; }
  };
  using Base::Base;

  __device__ __forceinline__ static int unit(int i) { return threadIdx.x + i * kThreads; }
  __device__ __forceinline__ static bool has_unit(int i) { return kUnits % kThreads == 0 || unit(i) < kUnits; }

  template <bool kRagged>
  __device__ __forceinline__ void load(Fetched& fetched, int i, int ahead, int valid) const {
    if (valid <= 0 || !has_unit(i)) return;
    const int line = unit(i) % kWords * 4, item = unit(i) / kWords * Base::kItems;
    const int8* word_g = this->at(line, item, ahead);
#pragma unroll
    for (int k = 0; k < Base::kItems; k++) {
      const bool wanted = line < this->lines && this->template exists<kRagged>(item + k, valid);
      fetched.word[k] = ld_u32_if(word_g + k * this->item_stride, wanted);
    }
  }

  __device__ __forceinline__ static void store(uint32 tile_s, const Fetched& fetched, int i) {
    const int own = i / kStores;
    if (!has_unit(own)) return;
    const uint32 byte = (i + threadIdx.x / 2) % 4;  // the line
    const uint32 pick = 0x40u + byte * 0x11u;       // that byte of both words
    uint32 word[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const uint32* of = fetched.word + 4 * w;
      word[w] = prmt(prmt(of[0], of[1], pick), prmt(of[2], of[3], pick), 0x5410);
    }
    const int line = unit(own) % kWords * 4 + byte, chunk = unit(own) / kWords;
    st_shared_v4(tile_s + Swizzled::offset(line, chunk), make_uint4(word[0], word[1], word[2], word[3]));
  }
};

// By tensor cores, or by dot products of four items where there are none.
template <bool kDots>
struct ProductBy {
  template <typename LoaderA, typename LoaderB>
  using Type = IntegerProductOf<LoaderA, LoaderB>;
};
#if !NATIVE
template <>
struct ProductBy<true> {
  template <typename LoaderA, typename LoaderB>
  using Type = TileProduct<LoaderA, LoaderB, WARP_ROWS, WARP_COLUMNS, int32, float16, ByteDots>;
};
#endif

struct Traits {
  using LoaderA = A_LOADER<Chunks<TileOfA<Lines::kAlong>, Axis<false>, CtaShape::kThreads>>;
  using LoaderB = B_LOADER<Chunks<TileOfB<Lines::kAlong>, Axis<false>, CtaShape::kThreads>>;
  using Product = ProductBy<DOT_PRODUCTS>::Type<LoaderA, LoaderB>;
};

using Product = Traits::Product;
static_assert(STAGES * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

// A warp's sums. OUT_VEC is 1 unless every row of out has whole aligned pairs.
__device__ __forceinline__ void store_integers(int32* out_g, int64 stride, const Product::Accumulators& acc,
                                               const WarpCoordinates<Axis<false>>& place) {
#pragma unroll
  for (int m = 0; m < Product::kMTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = place.row(m, half);
      if (row >= place.rows) continue;
#pragma unroll
      for (int n = 0; n < Product::kNTiles; n++) {
        const int column = place.first_place + 8 * n + lane_index() % 4 * 2;
        int32* pair_g = out_g + row * stride + column;
        const int32* pair = acc[m][n] + 2 * half;
        if constexpr (OUT_VEC > 1) {
          if (column < place.columns) *reinterpret_cast<int2*>(pair_g) = make_int2(pair[0], pair[1]);
        } else {
          if (column < place.columns) pair_g[0] = pair[0];
          if (column + 1 < place.columns) pair_g[1] = pair[1];
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    matmul_s8(const int8* a_g, const int8* b_g, int32* out_g, const BatchedIntegerParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const ProductParams& shape = params.product;

  // Phase 1: the member of the batch, and the place of this CTA.
  const uint32 member = params.batch.member();
  const TileCoordinates cta = place_of_cta(shape, params.batch.cta_of(member));
  const int first_row = cta.row_tile * CtaShape::kTileRows, first_column = cta.column_tile * CtaShape::kTileColumns;
  if (first_row >= shape.rows) return;
  const Member at = params.batch.place(member);

  // Phase 2: the product. The first k-tile is the ragged one.
  const int odd = static_cast<int>(params.odd);
  Traits::LoaderA a(Operand{a_g + at.a, shape.a_stride, params.a_item_stride, first_row, shape.rows, odd});
  Traits::LoaderB b(Operand{b_g + at.b, shape.b_stride, params.b_item_stride, first_column, shape.columns, odd});
  const int k_tiles = div_up(shape.inner, CtaShape::kInner);
  Product product(a, b, shared_address(shared_bytes), k_tiles, shape.inner - (k_tiles - 1) * CtaShape::kInner);
  Product::Accumulators acc;
  clear_sums(acc);
  product.add_to(acc);

  // Phase 3: store.
  store_integers(out_g + at.out, shape.out_stride, acc, warp_place<Product, Axis<false>>(cta, shape));
}
