// Four neighbouring items of a row of a paged cache on their way to shared memory, as the cache keeps them. Floats are a
// RawQuad; integers come with their row's scale, and are multiplied by it in float32.
#pragma once

#include "../stored_items.cuh"
#include "forward_feed.cuh"

template <typename Item>
struct ScaledQuad {
  StoredItems<Item, kQuadItems> items;
  float scale;
};

template <typename Item>
struct StoredQuad {
  using Type = RawQuad<Item>;
};
template <>
struct StoredQuad<int8> {
  using Type = ScaledQuad<int8>;
};
template <>
struct StoredQuad<uint8> {
  using Type = ScaledQuad<uint8>;
};

template <typename Item>
__device__ __forceinline__ Vec<float, kQuadItems> as_floats(const ScaledQuad<Item>& quad) {
  return {quad.items.item(0) * quad.scale, quad.items.item(1) * quad.scale, quad.items.item(2) * quad.scale,
          quad.items.item(3) * quad.scale};
}

// As load_quad. kVec is 4 for rows that are aligned to the bytes of four items, otherwise 1.
template <int kVec, typename Item>
__device__ __forceinline__ typename StoredQuad<Item>::Type load_stored_quad(const Item* from_g, int columns,
                                                                            float scale) {
  if constexpr (StoredFormat<Item>::kScaled) {
    ScaledQuad<Item> quad = {{}, scale};
    if constexpr (kVec == kQuadItems) {
      if (columns > 0) quad.items.load(from_g);
    } else {
      quad.items.load_bytes(from_g, columns * StoredFormat<Item>::kBits / 8);
    }
    return quad;
  } else {
    return load_quad<kVec>(from_g, columns);
  }
}
