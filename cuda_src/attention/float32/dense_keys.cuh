// The keys of a call without a cache: where the float32 forward has the K and V of a head from.
#pragma once

#include "forward.cuh"

struct DenseKeys {
  using Loader = Traits::DenseLoader;

  const AttentionParams& params;
  const Traits::Scalar *k_g, *v_g;

  __device__ __forceinline__ Loader loader(const TileCoordinates& coords, const KeyWindow& window,
                                           const Traits::Scalar* q_rows_g, int rows) const {
    return {params,
            q_rows_g,
            head_rows(k_g, params.k, coords.batch, coords.kv_head, 0),
            head_rows(v_g, params.v, coords.batch, coords.kv_head, 0),
            rows,
            window.keys};
  }
};
