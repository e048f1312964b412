// Definitions for every kernel: integer types, the size of a warp, and rounding of compile-time counts.
//
// The launch configurations (kernels.py of a family) set tile sizes and dtypes as macros. Sources have no defaults: a
// missing macro is an #error, and a static_assert checks each one.
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
