// Element-wise kernels: arrays of one shape and any rank, whose last axis is contiguous, as rows of `length` items.
//
// Axes that are one even step in all arrays are merged into rows, so contiguous arrays are one long row. A row is split
// into units of LANES threads times VECTORS vectors of VEC items; neighbouring units are neighbours in the row. Each
// thread belongs to one unit, without a loop. It loads all its vectors of all arrays before it computes: independent
// loads in flight hide the memory latency. Indices within a unit have 32 bits, and a single row needs no division.
//
// Edges     a unit's vector that crosses the end of a row is loaded and stored item by item.
#pragma once

#include "vec.cuh"

constexpr int kElementsAxes = 4;  // axes before the rows, after merging

// The fields are those of the structured dtype elements_params(arrays) in cupyattn/runtime/structs.py.
template <int kArrays>
struct ElementsParams {
  int64 shape[kElementsAxes];
  int64 strides[kArrays][kElementsAxes];  // in items
  int64 offsets[kArrays];                 // of the first item in its array, in items
  int64 length;                           // of a row
  uint32 rows, units;                     // units of a row
};

template <int kThreads_, int kLanes_, int kVectors_, int kVec_>
struct ElementTraits {
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kVec = kVec_;
  static constexpr int kUnits = kThreads_ / kLanes;  // of a CTA
  static constexpr int kUnitItems = kLanes * kVectors * kVec;
  static constexpr int kItems = kVectors * kVec;  // of a thread

  static_assert(kThreads_ % kLanes == 0 && kLanes % 8 == 0, "whole units, whose vectors fill sectors of 32 bytes");
};

// A thread's items of one array, loaded but not converted yet, so that no conversion waits before all loads are issued.
template <typename Traits, typename Scalar>
struct LoadedItems {
  using Items = Vec<Scalar, Traits::kVec>;

  Items vectors[Traits::kVectors];

  __device__ __forceinline__ float operator()(int v, int i) const { return to_float(vectors[v].item[i]); }

  // Load a whole vector as words. If it is assigned as items, the compiler splits it in the branch of the load, which
  // then waits for it: the gated activations took 10 to 28 % longer (an H200 with compute_75 code, 2026-11-22, `python
  // -m cupyattn.benchmark layers --operation swiglu geglu`).
  __device__ __forceinline__ void load(int v, const Scalar* source_g) {
    auto& words = *reinterpret_cast<WordsOf<Items>*>(&vectors[v]);
    if constexpr (sizeof(Items) == kVectorBytes) {
      words = ld_global_128b_v4(source_g);
    } else {
      words = *reinterpret_cast<const WordsOf<Items>*>(source_g);
    }
  }

  __device__ __forceinline__ void store(int v, Scalar* target_g) const {
    const auto& words = *reinterpret_cast<const WordsOf<Items>*>(&vectors[v]);
    if constexpr (sizeof(Items) == kVectorBytes) {
      st_global_v4(target_g, words);
    } else {
      *reinterpret_cast<WordsOf<Items>*>(target_g) = words;
    }
  }
};

// A row's index along each axis.
template <int kArrays>
struct OuterCoordinates {
  uint32 row = 0;
  uint32 along[kElementsAxes] = {};

  OuterCoordinates() = default;
  __device__ __forceinline__ OuterCoordinates(const ElementsParams<kArrays>& params, uint32 row_) : row(row_) {
    uint32 rows = row;
#pragma unroll
    for (int axis = kElementsAxes - 1; axis >= 0 && rows > 0; axis--) {
      const uint32 extent = static_cast<uint32>(params.shape[axis]);
      const uint32 next = rows < extent ? 0 : rows / extent;  // usually only one axis is left: no division
      along[axis] = rows - next * extent;
      rows = next;
    }
  }

  // The offset of the row's first item in an array.
  __device__ __forceinline__ int64 offset(const ElementsParams<kArrays>& params, int array) const {
    int64 offset = params.offsets[array];
    if (row > 0) {
#pragma unroll
      for (int axis = 0; axis < kElementsAxes; axis++) offset += along[axis] * params.strides[array][axis];
    }
    return offset;
  }
};

// The position of this thread's items: its row, its first column, and the number of columns from there on.
template <typename Traits, int kArrays>
struct ElementLoop {
  using Params = ElementsParams<kArrays>;
  static constexpr int kVec = Traits::kVec;
  static constexpr int kStep = Traits::kLanes * kVec;  // from a thread's vector to its next

  const Params& params;
  uint32 row;
  OuterCoordinates<kArrays> outer;
  int64 column;
  int rest;  // columns from `column` to the end of the unit or the row; 0 or less beyond the end

  __device__ __forceinline__ explicit ElementLoop(const Params& params_) : params(params_) {
    const uint32 unit = blockIdx.x * static_cast<uint32>(Traits::kUnits) + threadIdx.x / Traits::kLanes;
    row = params.rows == 1 ? 0 : unit / params.units;
    const int64 start = static_cast<int64>(unit - row * params.units) * Traits::kUnitItems;
    const int skipped = threadIdx.x % Traits::kLanes * kVec;
    column = start + skipped;
    const int64 left = row < params.rows ? params.length - start : 0;
    rest = static_cast<int>(left < Traits::kUnitItems ? left : Traits::kUnitItems) - skipped;
    outer = OuterCoordinates<kArrays>(params, row);
  }

  // The index of this thread's first item in C order. The next vector begins kStep items later.
  __device__ __forceinline__ int64 index() const { return row * params.length + column; }

  __device__ __forceinline__ int64 offset(int array) const { return outer.offset(params, array) + column; }

  // Items beyond the row's end read as 0.
  template <typename Scalar>
  __device__ __forceinline__ LoadedItems<Traits, Scalar> load(const Scalar* array_g, int array) const {
    return load_from(array_g + offset(array));
  }

  // Load the same columns of another row, whose first column is at first_g.
  template <typename Scalar>
  __device__ __forceinline__ LoadedItems<Traits, Scalar> load_from(const Scalar* first_g) const {
    LoadedItems<Traits, Scalar> items = {};
#pragma unroll
    for (int v = 0; v < Traits::kVectors; v++) {
      if (v * kStep + kVec <= rest) {
        items.load(v, first_g + v * kStep);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; i++) {
          if (v * kStep + i < rest) items.vectors[v].item[i] = first_g[v * kStep + i];
        }
      }
    }
    return items;
  }

  // The current items, to which an accumulated gradient is added before its one rounding; otherwise -0, a neutral term.
  template <bool kAccumulate, typename Scalar>
  __device__ __forceinline__ auto present(const Scalar* array_g, int array) const {
    if constexpr (kAccumulate) {
      return load(array_g, array);
    } else {
      return [](int, int) { return -0.f; };
    }
  }

  template <typename Scalar>
  __device__ __forceinline__ void store(Scalar* array_g, int array,
                                        const float (&items)[Traits::kVectors][kVec]) const {
    store_each(
        array_g, array, [&](int v, Scalar* target_g) { store_vec(target_g, items[v]); },
        [&](int v, int i) { return from_float<Scalar>(items[v][i]); });
  }

  // Store loaded items unchanged.
  template <typename Scalar>
  __device__ __forceinline__ void store(Scalar* array_g, int array, const LoadedItems<Traits, Scalar>& items) const {
    store_each(
        array_g, array, [&](int v, Scalar* target_g) { items.store(v, target_g); },
        [&](int v, int i) { return items.vectors[v].item[i]; });
  }

 private:
  template <typename Scalar, typename StoreVector, typename Item>
  __device__ __forceinline__ void store_each(Scalar* array_g, int array, const StoreVector& store_vector,
                                             const Item& item) const {
    Scalar* first_g = array_g + offset(array);
#pragma unroll
    for (int v = 0; v < Traits::kVectors; v++) {
      if (v * kStep + kVec <= rest) {
        store_vector(v, first_g + v * kStep);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; i++) {
          if (v * kStep + i < rest) first_g[v * kStep + i] = item(v, i);
        }
      }
    }
  }
};

// Call f(v, i) for each item i of each vector v of a thread.
template <typename Traits, typename Function>
__device__ __forceinline__ void each_item(const Function& f) {
#pragma unroll
  for (int v = 0; v < Traits::kVectors; v++) {
#pragma unroll
    for (int i = 0; i < Traits::kVec; i++) f(v, i);
  }
}
