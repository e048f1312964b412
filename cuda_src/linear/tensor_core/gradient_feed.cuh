// dz, the gradient of the preactivation z = x w + b, as an operand: formed of dout and z on the way to shared memory, and
// rounded to float16 there, as a tensor core reads it.
//
//   out = f(z):           dz = dout f'(z)
//   out = f(gate) up:     dgate = dout up f'(gate),   dup = dout f(gate)        (z = gate and up)
#pragma once

#include "../../common/pack.cuh"
#include "activation.cuh"
#include "operand_feed.cuh"

__device__ __forceinline__ void unpack_quad(float (&items)[kChunkItems], const uint4& quad) {
  const uint32 words[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_halves(words[i]);
    items[2 * i] = pair.x;
    items[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack_quad(const float (&items)[kChunkItems]) {
  return make_uint4(pack_halves(items[0], items[1]), pack_halves(items[2], items[3]), pack_halves(items[4], items[5]),
                    pack_halves(items[6], items[7]));
}

// Eight columns of a row: what dz is formed of.
template <bool kPaired>
struct GradientSources {
  uint4 dout, z;
};
template <>
struct GradientSources<true> {
  uint4 dout, z, up;
};

template <typename Activation>
__device__ __forceinline__ void form_gradient(float (&dz)[1][kChunkItems], const GradientSources<false>& sources) {
  float dout[kChunkItems], z[kChunkItems];
  unpack_quad(dout, sources.dout);
  unpack_quad(z, sources.z);
#pragma unroll
  for (int i = 0; i < kChunkItems; i++) dz[0][i] = dout[i] * Activation::derivative(z[i]);
}

// That of the gate, then that of up.
template <typename Activation>
__device__ __forceinline__ void form_gradient(float (&dz)[2][kChunkItems], const GradientSources<true>& sources) {
  float dout[kChunkItems], gate[kChunkItems], up[kChunkItems];
  unpack_quad(dout, sources.dout);
  unpack_quad(gate, sources.z);
  unpack_quad(up, sources.up);
#pragma unroll
  for (int i = 0; i < kChunkItems; i++) {
    dz[0][i] = dout[i] * up[i] * Activation::derivative(gate[i]);
    dz[1][i] = dout[i] * Activation::value(gate[i]);
  }
}

// Rows of dz are contiguous: its paired axis lies along a line.
template <typename Chunks_, int kVec, typename Activation, bool kPaired>
struct GradientFeed {
  using Chunks = Chunks_;
  using Tile = typename Chunks::Tile;
  using Quad = GradientSources<kPaired>;
  static constexpr int kCount = Chunks::kCount;
  static_assert(Chunks::kTogether == (kPaired ? 2 : 1), "gate and up are formed together");

  ArrayFeed<Chunks, kVec> dout, z;
  int64 up_bytes;  // from the gate to up

  __device__ __forceinline__ GradientFeed(const float16* dout_g, const float16* z_g, int64 dout_stride, int64 z_stride,
                                          int first_outer, int outer_length, int64 first_inner, int inner_length)
      : dout(dout_g, dout_stride, first_outer, outer_length, first_inner, inner_length),
        z(z_g, z_stride, first_outer, outer_length, first_inner, inner_length),
        up_bytes((Tile::kAlong ? inner_length : outer_length) * static_cast<int64>(sizeof(float16))) {}

  template <bool kRagged>
  __device__ __forceinline__ void load(Quad& quad, int i, int ahead, int valid) const {
    dout.template load<kRagged>(quad.dout, i, ahead, valid);
    z.template load<kRagged>(quad.z, i, ahead, valid);
    if constexpr (kPaired) z.template load<kRagged>(quad.up, i, ahead, valid, up_bytes);
  }

  __device__ __forceinline__ void advance(int items) {
    dout.advance(items);
    z.advance(items);
  }

  __device__ __forceinline__ static void store(uint32 tile_s, const Quad& quad, int i) {
    float dz[Chunks::kTogether][kChunkItems];
    form_gradient<Activation>(dz, quad);
    const uint32 at = tile_s + Chunks::shared_distance(i);
    st_shared_v4(at, pack_quad(dz[0]));
    if constexpr (kPaired) st_shared_v4(at ^ kChunkBytes, pack_quad(dz[1]));
  }
};

// dz without an activation is dout.
template <typename Chunks, int kVec>
struct GradientFeed<Chunks, kVec, Identity, false> : ArrayFeed<Chunks, kVec> {
  __device__ __forceinline__ GradientFeed(const float16* dout_g, const float16*, int64 dout_stride, int64,
                                          int first_outer, int outer_length, int64 first_inner, int inner_length)
      : ArrayFeed<Chunks, kVec>(dout_g, dout_stride, first_outer, outer_length, first_inner, inner_length) {}
};
