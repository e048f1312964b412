// The keys of a call without a cache: where the float32 forward has the K and V of a head from.
#pragma once

#include "forward.cuh"

struct DenseKeys {
  using Feed = Traits::DenseFeed;

  const AttentionParams& params;
  const Traits::Scalar *k_g, *v_g;

  __device__ __forceinline__ Feed feed(const Place& place, const KeyWindow& window, const Traits::Scalar* q_rows_g,
                                       int rows) const {
    return {params,
            q_rows_g,
            head_rows(k_g, params.k, place.batch, place.kv_head, 0),
            head_rows(v_g, params.v, place.batch, place.kv_head, 0),
            rows,
            window.keys};
  }
};
