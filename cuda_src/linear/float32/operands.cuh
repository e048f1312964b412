// Loads of the factors of a product C = A B in float32 arithmetic. One step of the sum ahead, each thread loads its
// part from global memory to registers, and later stores it, as float32, to the buffer in shared memory that is not
// being multiplied.
//
// A factor is a number of lines (rows of A, columns of B) by the depth of the sum. It is contiguous in memory along one
// of the two; in shared memory the lines of one depth are contiguous. A step is two loads of 16 bytes deep, so that the
// 32 bytes of a line, a sector, are loaded together.
//
// Banks     a load along the depth is stored item by item: two threads to a line, 16 lines of a warp. XORing the lines
//           of the second load's depths with 16 puts the two into different banks; readers load four lines at once,
//           which the XOR keeps adjacent.
#pragma once

#include "../../common/activations.cuh"
#include "../../common/memory.cuh"
#include "../../common/vec.cuh"

enum class Along { kDepth, kLines };  // where the neighbours of an item lie

template <typename Scalar>
constexpr int kLoadItems = kVectorBytes / sizeof(Scalar);
template <typename Scalar>
constexpr int kStepDepth = 2 * kLoadItems<Scalar>;

constexpr int kPairedLines = 32;  // columns of a gate, and then of what it multiplies, side by side in a tile

template <bool kFirst, typename First, typename Second>
struct Choice {
  using Type = First;
};
template <typename First, typename Second>
struct Choice<false, First, Second> {
  using Type = Second;
};

// `count` of the items from `source_g` on; the others are zeros and not read. kVec is all of them, or 1.
template <int kVec, typename Scalar, int kItems>
__device__ __forceinline__ void load_items(Vec<Scalar, kItems>& items, const Scalar* source_g, int64 count) {
  static_assert(kVec == 1 || kVec == kItems, "a whole vector, or item by item");
  if constexpr (kVec == kItems && sizeof(items) == kVectorBytes) {
    const uint4 loaded = count > 0 ? ld_global_v4(static_cast<const void*>(source_g)) : make_uint4(0u, 0u, 0u, 0u);
    items = *reinterpret_cast<const Vec<Scalar, kItems>*>(&loaded);
  } else if constexpr (kVec == kItems && sizeof(items) == kVectorBytes / 2) {
    const uint2 loaded = count > 0 ? ld_global_v2(source_g) : make_uint2(0u, 0u);
    items = *reinterpret_cast<const Vec<Scalar, kItems>*>(&loaded);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) items.item[i] = i < count ? source_g[i] : from_float<Scalar>(0.f);
  }
}

// The numbers of an array, unchanged.
template <typename Scalar_, int kVec>
struct Numbers {
  using Scalar = Scalar_;
  static constexpr int kItems = kLoadItems<Scalar>;
  struct Fetched {
    Vec<Scalar, kItems> x;
  };

  const Scalar* first_g;
  int64 stride;  // of lines of neighbours, in items

  __device__ __forceinline__ void fetch(Fetched& fetched, int64 line, int64 place, int64 count) const {
    load_items<kVec>(fetched.x, first_g + line * stride + place, count);
  }
  __device__ __forceinline__ void finish(float (&values)[kItems], const Fetched& fetched, int64) const {
#pragma unroll
    for (int i = 0; i < kItems; i++) values[i] = to_float(fetched.x.item[i]);
  }
};

// The numbers of an array of any strides, unchanged. Whole vectors are neighbours in memory: the item stride is 1.
template <typename Scalar_, int kVec>
struct StridedNumbers : Numbers<Scalar_, kVec> {
  using Scalar = Scalar_;
  using Base = Numbers<Scalar, kVec>;

  int64 item_stride;  // from neighbour to neighbour, in items

  __device__ __forceinline__ StridedNumbers(const Scalar* array_g, int64 line_stride, int64 items)
      : Base{array_g, line_stride}, item_stride(items) {}

  __device__ __forceinline__ void fetch(typename Base::Fetched& fetched, int64 line, int64 place, int64 count) const {
    if constexpr (kVec > 1) {
      Base::fetch(fetched, line, place, count);
    } else {
      const Scalar* const source_g = this->first_g + line * this->stride + place * item_stride;
#pragma unroll
      for (int i = 0; i < Base::kItems; i++) {
        fetched.x.item[i] = i < count ? source_g[i * item_stride] : from_float<Scalar>(0.f);
      }
    }
  }
};

// dz = dout * activation'(z). With a gated activation, whose z has `half` columns of the gate and as many of up, it is
// dout * up * activation'(gate), followed by dout * activation(gate).
//
// Its inputs are in flight during a step. A gated dz, item by item, would need more registers than there are: it is
// computed as soon as it is loaded.
template <typename Scalar_, int kVec, typename Activation, bool kGated>
struct PreactivationGradient {
  using Scalar = Scalar_;
  static constexpr int kItems = kLoadItems<Scalar>;
  static constexpr bool kPlain = kIsIdentity<Activation>;
  static constexpr bool kAtOnce = kGated && kVec == 1;
  struct Arrays {
    Vec<Scalar, kItems> dout, z, up;
  };
  struct Values {
    float dz[kItems];
  };
  using Fetched = typename Choice<kAtOnce, Values, Arrays>::Type;

  const Scalar* dout_g;
  const Scalar* z_g;
  int64 dout_stride, z_stride;
  int64 half;

  __device__ __forceinline__ void fetch(Fetched& fetched, int64 row, int64 column, int64 count) const {
    const Scalar* const dout_row_g = dout_g + row * dout_stride;
    const Scalar* const z_row_g = z_g + row * z_stride;
    if constexpr (kAtOnce) {
#pragma unroll
      for (int i = 0; i < kItems; i++) {
        const bool upper = column + i >= half;
        const int64 place = upper ? column + i - half : column + i;
        fetched.dz[i] = 0.f;
        if (i < count) {
          const float up = upper ? 0.f : to_float(z_row_g[half + place]);
          fetched.dz[i] = gated(to_float(dout_row_g[place]), to_float(z_row_g[place]), up, upper);
        }
      }
    } else if constexpr (kGated) {  // half is whole vectors: none has items of both
      const int64 place = column < half ? column : column - half;
      load_items<kVec>(fetched.dout, dout_row_g + place, count);
      load_items<kVec>(fetched.z, z_row_g + place, count);
      load_items<kVec>(fetched.up, z_row_g + half + place, column < half ? count : 0);
    } else {
      load_items<kVec>(fetched.dout, dout_row_g + column, count);
      if constexpr (!kPlain) load_items<kVec>(fetched.z, z_row_g + column, count);
    }
  }

  __device__ __forceinline__ void finish(float (&values)[kItems], const Fetched& fetched, int64 column) const {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if constexpr (kAtOnce) {
        values[i] = fetched.dz[i];
      } else {
        const float dout = to_float(fetched.dout.item[i]);
        if constexpr (kPlain) {
          values[i] = dout;
        } else if constexpr (kGated) {
          values[i] = gated(dout, to_float(fetched.z.item[i]), to_float(fetched.up.item[i]), column >= half);
        } else {
          values[i] = dout * Activation::derivative(to_float(fetched.z.item[i]));
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static float gated(float dout, float gate, float up, bool upper) {
    return dout * (upper ? Activation::value(gate) : up * Activation::derivative(gate));
  }
};

// The line of the array that is a line of a tile. Paired: the array has two halves, and a tile has 32 lines of the
// first and then the same lines of the second, so that one thread holds both.
template <bool kPaired>
struct Lines {
  int64 first;   // of this tile; paired: within its half
  int64 extent;  // of the array; paired: of a half

  __device__ __forceinline__ int64 place(int line) const {
    return within(line) + (kPaired && upper(line) ? extent : 0);
  }
  // The number of lines that exist from this one on; if paired, within the group of 32.
  __device__ __forceinline__ int64 left(int line) const { return extent - within(line); }

 private:
  __device__ __forceinline__ int64 within(int line) const {
    return first + (kPaired ? line / (2 * kPairedLines) * kPairedLines + line % kPairedLines : line);
  }
  __device__ __forceinline__ static bool upper(int line) { return line / kPairedLines % 2 != 0; }
};

template <typename Source, Along kAlong, bool kPaired, int kLines_, int kThreads>
struct Operand {
  using Scalar = typename Source::Scalar;
  static constexpr int kLines = kLines_;
  static constexpr int kItems = Source::kItems;
  static constexpr int kDepth = kStepDepth<Scalar>;
  static constexpr uint32 kDepthBytes = kLines * sizeof(float);
  static constexpr uint32 kBytes = kDepth * kDepthBytes;
  static constexpr int kLoads = kLines * kDepth / kItems / kThreads;
  static_assert(kLoads * kThreads * kItems == kLines * kDepth, "whole passes");
  static_assert(kLines % (2 * kPairedLines) == 0, "whole pairs");

  struct Fetched {
    typename Source::Fetched load[kLoads];
  };

  Source source;
  Lines<kPaired> lines;
  int64 depth;  // of the whole sum

  // Items of step `step`; zeros where lines or depths do not exist.
  __device__ __forceinline__ void fetch(Fetched& fetched, int step) const {
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int line = line_of(i);
      const int64 at = depth_of(i, step);
      if constexpr (kAlong == Along::kDepth) {
        source.fetch(fetched.load[i], lines.place(line), at, lines.left(line) > 0 ? depth - at : 0);
      } else {
        source.fetch(fetched.load[i], at, lines.place(line), at < depth ? lines.left(line) : 0);
      }
    }
  }

  __device__ __forceinline__ void store(const Fetched& fetched, int step, uint32 buffer_s) const {
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int line = line_of(i);
      const int within = depth_of(i, 0);
      float values[kItems];
      source.finish(values, fetched.load[i], kAlong == Along::kDepth ? depth_of(i, step) : lines.place(line));
      if constexpr (kAlong == Along::kDepth) {
        const uint32 at_s = buffer_s + within * kDepthBytes + ((line * sizeof(float)) ^ flip(within));
#pragma unroll
        for (int d = 0; d < kItems; d++) st_shared_u32(at_s + d * kDepthBytes, __float_as_uint(values[d]));
      } else {
        const uint32 at_s = buffer_s + within * kDepthBytes + ((line * sizeof(float)) ^ flip(within));
        // Two quads of each lane: eight lanes that store the same one would conflict in pairs.
        constexpr int kQuads = kItems / 4;
        const bool other_first = kQuads == 2 && line / (4 * kItems) % 2 != 0;
#pragma unroll
        for (int quad = 0; quad < kQuads; quad++) {
          float x[4];
#pragma unroll
          for (int l = 0; l < 4; l++) {
            x[l] = other_first ? values[(kQuads - 1 - quad) * 4 + l] : values[quad * 4 + l];
          }
          const int at = other_first ? kQuads - 1 - quad : quad;
          st_shared(at_s + at * (4 * sizeof(float)), x);
        }
      }
    }
  }

  // The number that the byte offset of a line is XORed with, at a depth of a step.
  __device__ __forceinline__ static constexpr uint32 flip(int depth) {
    return depth / kItems % 2 * (16 * sizeof(float));
  }

 private:
  __device__ __forceinline__ static int load_index(int i) { return threadIdx.x + i * kThreads; }
  __device__ __forceinline__ static int line_of(int i) {
    return kAlong == Along::kDepth ? load_index(i) / 2 : load_index(i) % (kLines / kItems) * kItems;
  }
  __device__ __forceinline__ static int64 depth_of(int i, int step) {
    return step * int64{kDepth} +
           (kAlong == Along::kDepth ? load_index(i) % 2 * kItems : load_index(i) / (kLines / kItems));
  }
};
