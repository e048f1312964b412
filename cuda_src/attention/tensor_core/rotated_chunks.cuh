// The chunks of a CTA's query rows, rotated on their way to shared memory (../rotary.cu documents what is computed): a
// thread reads those that its own is rotated with, which other threads read too, from L1, and no chunk waits for
// another.
#pragma once

#if !defined(TABLE) || !defined(INTERLEAVED)
#error "TABLE and INTERLEAVED come from a launch-configuration table"
#endif
#include "../../common/pack.cuh"
#include "../../rope/rotation.cuh"
#include "tile_loader.cuh"

// Field for field the structured dtype ROTARY_TABLES of cupyattn/ops/attention/structs.
struct RotaryTables {
  int64 cos_stride, sin_stride;  // of a position, in items: whole 16 bytes
  int64 length;                  // in positions
  int64 half;                    // pairs of features that are rotated: whole chunks of either feature
};
static_assert(sizeof(RotaryTables) == ROTARY_TABLES_BYTES, "its dtype in Python describes another struct");

template <int kCols, int kVec>
struct RotatedChunks {
  const TABLE *cos_g, *sin_g;
  const RotaryTables& tables;
  int64 first_position;  // of the first row

  __device__ __forceinline__ uint4 operator()(const float16* chunk_g, int item, int chunk) const {
    const uint4 own = load_chunk<kCols, kVec>(chunk_g, chunk);
    const int half = static_cast<int>(tables.half), column = chunk * kChunkItems;
    if (column >= 2 * half) return own;
    // With halves the items of a chunk are all first ones or all second ones; neighbours alternate.
    const bool second = column >= half;
    const int partner = second ? column - half : column + half;
    const uint4 other =
        INTERLEAVED ? own : load_chunk<kCols, kVec>(chunk_g + (partner - column), partner / kChunkItems);
    constexpr int kAngles = INTERLEAVED ? kChunkItems / 2 : kChunkItems;
    float cos[kAngles], sin[kAngles];
    load_angles(cos, sin, first_position + item, INTERLEAVED ? column / 2 : second ? partner : column);

    const auto x = __builtin_bit_cast(Items, own), y = __builtin_bit_cast(Items, other);
    float rotated_items[kChunkItems];
#pragma unroll
    for (int i = 0; i < kChunkItems; i++) {
      const int angle = INTERLEAVED ? i / 2 : i;
      const bool is_second = INTERLEAVED ? i % 2 : second;
      const float of_pair = to_float(INTERLEAVED ? x.item[i ^ 1] : y.item[i]);
      rotated_items[i] = rotated(to_float(x.item[i]), of_pair, cos[angle], is_second ? sin[angle] : -sin[angle]);
    }
    return make_uint4(pack_halves(rotated_items[0], rotated_items[1]), pack_halves(rotated_items[2], rotated_items[3]),
                      pack_halves(rotated_items[4], rotated_items[5]), pack_halves(rotated_items[6], rotated_items[7]));
  }

 private:
  using Items = Vec<float16, kChunkItems>;

  // NaN where there is no such position.
  template <int kAngles>
  __device__ __forceinline__ void load_angles(float (&cos)[kAngles], float (&sin)[kAngles], int64 position,
                                              int first) const {
    if (position >= 0 && position < tables.length) {
      load_table<true>(cos, cos_g + position * tables.cos_stride + first);
      load_table<true>(sin, sin_g + position * tables.sin_stride + first);
    } else {
#pragma unroll
      for (int i = 0; i < kAngles; i++) cos[i] = sin[i] = __int_as_float(0x7fc00000);
    }
  }
};
