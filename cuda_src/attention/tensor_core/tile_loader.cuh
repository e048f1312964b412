// The way of one tile of rows: global memory to registers, and later registers to shared memory, so that the latency of
// the loads passes under the arithmetic in between. Or, from sm_80 on, straight to shared memory (`copy`).
//
// A thread owns one chunk (8 columns) of every kPassRows-th row. kPassRows is a multiple of what the swizzle needs to
// be a constant flip from pass to pass. Columns from kCols on and rows from `valid_rows` on become zero and are not
// read.
#pragma once

#include "../../common/numeric.cuh"
#include "../../common/swizzle.cuh"
#include "../../common/vec.cuh"

// The eight 16-bit items of a row's chunk as one register quad. kVec is 8 for rows aligned to 16 bytes, otherwise 1.
template <int kCols, int kVec>
__device__ __forceinline__ uint4 load_chunk(const void* chunk_g, int chunk) {
  if constexpr (kVec == kChunkItems) {
    return ld_global_v4(chunk_g);
  } else {
    const uint16* items_g = static_cast<const uint16*>(chunk_g);
    uint32 item[kChunkItems];
#pragma unroll
    for (int i = 0; i < kChunkItems; i++) item[i] = chunk * kChunkItems + i < kCols ? items_g[i] : 0;
    return make_uint4(item[0] | item[1] << 16, item[2] | item[3] << 16, item[4] | item[5] << 16,
                      item[6] | item[7] << 16);
  }
}

template <int kCols, int kVec>
__device__ __forceinline__ void load_chunk(uint4& quad, const void* chunk_g, int chunk) {
  quad = load_chunk<kCols, kVec>(chunk_g, chunk);
}

// The chunk to shared memory (sm_80 or later); zeros if it does not exist, which only kMayLack allows. A whole chunk is
// under way until cp_async_wait_group.
template <int kCols, int kVec, bool kMayLack>
__device__ __forceinline__ void copy_chunk(uint32 to_s, const char* chunk_g, int chunk, bool exists) {
  if constexpr (kVec != kChunkItems) {
    st_shared_v4(to_s, exists ? load_chunk<kCols, kVec>(chunk_g, chunk) : make_uint4(0, 0, 0, 0));
  } else if constexpr (kMayLack) {
    cp_async_16(to_s, chunk_g, exists);
  } else {
    cp_async_16(to_s, chunk_g);
  }
}

// Row `row` of a tile in shared memory is item `item_of_row(row)` of its array: here the same.
struct RowsInOrder {
  static constexpr bool kInOrder = true;
  __device__ __forceinline__ static int item_of_row(int row) { return row; }
};

// Which of a thread's chunks of a tile are moved at a time: all, or a part of them between other work.
struct TilePart {
  int part = 0, parts = 1;

  __device__ __forceinline__ bool has(int chunk, int chunks) const { return chunk * parts / chunks == part; }
};

// The threads are kThreads from number kFirstThread of the CTA on.
// kLanes: so many lanes have the chunks of a row; 0 for the number that the swizzle suggests.
template <typename Tile_, int kCols, int kVec, int kThreads, typename Order = RowsInOrder, int kFirstThread = 0,
          int kLanes = 0>
struct TileLoader {
  using Tile = Tile_;
  static_assert(kVec == 1 || (kVec == kChunkItems && kCols % kChunkItems == 0), "single items or whole chunks");

  // Neighbouring lanes take neighbouring chunks; where that left threads without a row, all chunks of a row.
  static constexpr int kSwizzledLanes = Tile::kXorBits == 3 ? 8 : Tile::kXorBits == 2 ? 4 : Tile::kChunks;
  static constexpr int kUsualLanes = kThreads / kSwizzledLanes > Tile::kRows ? Tile::kChunks : kSwizzledLanes;
  static constexpr int kRowLanes = kLanes > 0 ? kLanes : kUsualLanes;
  static constexpr int kColumnGroups = Tile::kChunks / kRowLanes;
  static constexpr int kPassUnit = Tile::kXorBits > 0 ? 4 : kThreads / kRowLanes >= 8 ? 8 : 1;
  static constexpr int kPassRows = kThreads / kRowLanes / kPassUnit * kPassUnit;
  static constexpr int kPasses = div_up(Tile::kRows, kPassRows);
  static constexpr int kQuads = kPasses * kColumnGroups;  // register quads per thread
  static constexpr int kThreadCount = kThreads;
  static constexpr int kLines = Tile::kRows * div_up(Tile::kChunks * kChunkBytes, kLineBytes);
  static_assert(kPassRows > 0 && kRowLanes * kColumnGroups == Tile::kChunks, "every chunk has a thread");

  // Whether a tile has whole chunks beyond the columns.
  static constexpr bool kPadded = Tile::kChunks * kChunkItems - kCols >= kChunkItems;

  // Whether keys are as far apart from pass to pass as rows are.
  static constexpr bool kEvenPasses = Order::kInOrder || kPassRows % 16 == 0;

  int row, chunk;
  uint32 shared_offset;
  uint32 global_offset;  // bytes from the tile's lowest address to this thread's first chunk, or to that of key 0

  // For rows whose addresses the caller knows.
  __device__ __forceinline__ TileLoader()
      : row((threadIdx.x - kFirstThread) / kRowLanes),
        chunk((threadIdx.x - kFirstThread) % kRowLanes),
        shared_offset(Tile::offset(row, chunk)) {}

  __device__ __forceinline__ explicit TileLoader(int64 row_stride) : TileLoader() {
    const int key = kEvenPasses ? key_of_pass(0) : 0;
    const int from_lowest = row_stride < 0 ? key - (Tile::kRows - 1) : key;
    // The compiler would rather compute this again before every load than spend a register on it.
    global_offset = kept_in_register(from_lowest * row_bytes(row_stride) + chunk * kChunkBytes);
  }

  __device__ __forceinline__ int key_of_pass(int pass) const {
    if (kEvenPasses) return pass * kPassRows + Order::item_of_row(row);
    return Order::item_of_row(pass * kPassRows + row);
  }

  // See Softmax::renew.
  __device__ __forceinline__ void renew() { global_offset = kept_in_register(global_offset); }

  __device__ __forceinline__ static uint32 row_bytes(int64 row_stride) {
    return static_cast<uint32>(row_stride * sizeof(float16));
  }

  // The lowest address of the tile that begins at row_g: a uniform base plus an unsigned 32-bit offset is one
  // addressing mode.
  template <typename Scalar>
  __device__ __forceinline__ static const char* lowest(const Scalar* row_g, int64 row_stride) {
    return reinterpret_cast<const char*>(row_stride < 0 ? row_g + (Tile::kRows - 1) * row_stride : row_g);
  }

  __device__ __forceinline__ bool owns(int pass) const {
    constexpr bool kAllThreads = kPassRows * kRowLanes == kThreads;
    const bool loads = kAllThreads || row < kPassRows;
    const bool whole_pass = (pass + 1) * kPassRows <= Tile::kRows;
    return loads && (whole_pass || pass * kPassRows + row < Tile::kRows);
  }

  // The first column group of a part, where a thread has too few registers for its whole share of a tile.
  __device__ __forceinline__ static constexpr int part_begin(int part, int parts) {
    return kColumnGroups * part / parts;
  }

  // The places of which parts are counted: tiles that take turns in the same registers have the same.
  template <int kRoom>
  __device__ __forceinline__ static constexpr int places() {
    return kRoom > kQuads ? kRoom : kQuads;
  }

  // kRagged: rows from valid_rows on do not exist.
  template <bool kRagged, int kPart = 0, int kParts = 1, int kRoom>
  __device__ __forceinline__ void load(uint4 (&quads)[kRoom], const char* lowest_g, int64 row_stride, int valid_rows,
                                       TilePart moved = {}) const {
    // Otherwise ptxas keeps an offset for each pass: too many registers at head dims 80 and 160, whose rows keep few
    // threads busy, and where parts move. Elsewhere the same made it place the loads worse.
    const bool registers_short = kPassRows * kRowLanes != kThreads || moved.parts > 1;
    const uint32 from = !kRagged && kPasses > 2 && registers_short ? not_hoisted(global_offset) : global_offset;
    load_rows<kRagged, kPart, kParts>(
        quads, [&](int key) { return key < valid_rows; },
        [&](int pass) {
          const int keys = kEvenPasses ? pass * kPassRows : key_of_pass(pass);  // from global_offset
          return lowest_g + (from + keys * row_bytes(row_stride));
        },
        moved);
  }

  // Fetch from any addresses: pass_g(pass) is the address of this thread's first chunk of its row. A chunk is a
  // quad, or as many bytes as it has in memory.
  template <bool kRagged, int kPart = 0, int kParts = 1, typename Chunk, int kRoom, typename Exists,
            typename PassAddress>
  __device__ __forceinline__ void load_rows(Chunk (&chunks)[kRoom], Exists exists, PassAddress pass_g,
                                            TilePart moved = {}) const {
    constexpr int kBegin = part_begin(kPart, kParts), kEnd = part_begin(kPart + 1, kParts);
    static_assert(kPasses * (kEnd - kBegin) <= kRoom, "every chunk has a place");
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
#pragma unroll
      for (int group = kBegin; group < kEnd; group++) {
        if (!moved.has(pass * kColumnGroups + group, places<kRoom>())) continue;
        Chunk& loaded = chunks[pass * (kEnd - kBegin) + group - kBegin];
        if (kRagged || kPadded) loaded = Chunk{};
        if (!owns(pass) || (kRagged && !exists(key_of_pass(pass)))) continue;
        if (kPadded && (chunk + group * kRowLanes) * kChunkItems >= kCols) continue;
        load_chunk<kCols, kVec>(loaded, pass_g(pass) + group * kRowLanes * static_cast<int>(sizeof(Chunk)),
                                chunk + group * kRowLanes);
      }
    }
  }

  // Copy the tile to shared memory, without registers where rows are whole chunks: the copies are under way until
  // cp_async_wait_group (sm_80 or later). What does not exist becomes zero, in a ragged tile as in the chunks beyond
  // the columns.
  template <bool kRagged>
  __device__ __forceinline__ void copy(uint32 tile_s, const char* lowest_g, int64 row_stride, int valid_rows,
                                       TilePart moved = {}) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      const uint32 flip = Tile::flip(pass * kPassRows % 8) * kChunkBytes;
      const uint32 to_s = ((tile_s + shared_offset) ^ flip) + pass * kPassRows * Tile::kRowBytes;
      const int keys = kEvenPasses ? pass * kPassRows : key_of_pass(pass);  // from global_offset
      const char* from_g = lowest_g + (global_offset + keys * row_bytes(row_stride));
#pragma unroll
      for (int group = 0; group < kColumnGroups; group++) {
        if (!owns(pass) || !moved.has(pass * kColumnGroups + group, kQuads)) continue;
        const int at = chunk + group * kRowLanes, ahead = group * kRowLanes * kChunkBytes;
        const bool exists = (!kRagged || key_of_pass(pass) < valid_rows) && (!kPadded || at * kChunkItems < kCols);
        copy_chunk<kCols, kVec, kRagged || kPadded>(to_s + ahead, from_g + ahead, at, exists);
      }
    }
  }

  template <int kPart = 0, int kParts = 1, int kRoom>
  __device__ __forceinline__ void store(uint32 tile_s, const uint4 (&quads)[kRoom], TilePart moved = {}) const {
    constexpr int kBegin = part_begin(kPart, kParts), kGroups = part_begin(kPart + 1, kParts) - kBegin;
    store_made<kPart, kParts>(
        tile_s, [&](int pass, int group) { return quads[pass * kGroups + group - kBegin]; }, moved, places<kRoom>());
  }

  // Bring quads that are made here.
  template <int kPart = 0, int kParts = 1, typename Quad>
  __device__ __forceinline__ void store_made(uint32 tile_s, Quad quad, TilePart moved = {},
                                             int of_places = kQuads) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      const uint32 flip = Tile::flip(pass * kPassRows % 8) * kChunkBytes;
#pragma unroll
      for (int group = part_begin(kPart, kParts); group < part_begin(kPart + 1, kParts); group++) {
        if (!owns(pass) || !moved.has(pass * kColumnGroups + group, of_places)) continue;
        const uint32 at = ((tile_s + shared_offset) ^ flip) + pass * kPassRows * Tile::kRowBytes;
        st_shared_v4(at + group * kRowLanes * kChunkBytes, quad(pass, group));
      }
    }
  }
};

// Two tiles, all of whose rows exist, to L2 ahead of their loads: a line a thread, of the first, then of the second.
// Otherwise CTAs that loop over the same rows at the same time would all wait for the one that finds a tile in no
// cache. From a tile's lowest address rows lie |stride| apart, whichever way the array runs.
template <typename First, typename Second>
__device__ __forceinline__ void bring_to_l2(const char* first_lowest_g, int64 first_stride, const char* second_lowest_g,
                                            int64 second_stride) {
  static_assert(First::kLines + Second::kLines <= First::kThreadCount, "every line has a thread");
  const int thread = not_hoisted(threadIdx.x);
  const bool of_first = thread < First::kLines;
  const int line = of_first ? thread : thread - First::kLines;
  if (line >= (of_first ? First::kLines : Second::kLines)) return;
  constexpr int kRows = First::Tile::kRows;
  static_assert(kRows == Second::Tile::kRows, "rows of both are side by side");
  const uint32 row_bytes = First::row_bytes(llabs(of_first ? first_stride : second_stride));
  const char* lowest_g = of_first ? first_lowest_g : second_lowest_g;
  prefetch_l2(lowest_g + (line % kRows * row_bytes + line / kRows * kLineBytes));
}
