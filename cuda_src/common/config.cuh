// Words that every kernel uses: integer widths, the shape of a warp, and rounding of compile-time counts.
//
// A kernel takes its tile sizes and dtypes as macros from the launch configurations (kernels.py of a family)
// and has no defaults of its own: a missing macro is an #error, and each is restated by a static_assert.
#pragma once

using int32 = int;
using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr int kWarpSize = 32;
constexpr uint32 kFullWarp = 0xffffffffu;  // the member mask of a whole warp
constexpr int kVectorBytes = 16;           // the widest load or store of one thread

__host__ __device__ constexpr int div_up(int count, int part) { return (count + part - 1) / part; }
__host__ __device__ constexpr int round_up(int count, int part) { return div_up(count, part) * part; }

__device__ __forceinline__ int lane_index() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / kWarpSize; }
