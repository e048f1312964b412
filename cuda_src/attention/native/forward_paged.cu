// Attention of many query tokens over a paged cache on the tensor cores of sm_80 and later: the loop of forward.cu with
// another loader of keys (PagedAttention, Kwon et al., arXiv:2309.06180).
//
// Shapes    PagedParams (../paged_params.cuh); HEAD_DIM_V is HEAD_DIM. DTYPE is that of q, the caches and out: over
//           caches of integers tensor_core/forward_paged.cu runs, which makes floats of them in registers.
// Work      as forward.cu; in addition every warp looks up the blocks of each tile before the copies of the tile before
//           it are waited for (../paged_keys.cuh).
// Grid      B * H * ceil(Sq / kTileQ) CTAs; of packed sequences H times as many as any lengths could need, of which
//           those beyond return: no length is read on the host.
// Budget    as forward.cu; the table takes registers alone.
// Barriers  as forward.cu.
// Edges     as forward.cu; keys beyond the sequence, and those that no row of the CTA sees, are not read, and of the
//           table nothing after the last one that is. A sequence without queries has no CTA.
#include "forward.cuh"
#include "../paged_keys.cuh"

// As AsyncKeyLoader. K and V have the same strides, so one place of a row serves both.
template <typename TileLoader>
struct PagedTileLoader {
  using Tile = typename TileLoader::Tile;
  using Groups = GroupTable<Tile::kRows, false>;
  struct Rows {};  // those that were looked up last
  static constexpr int kPassRows = TileLoader::kPassRows;
  // A thread's rows either all have one position in their groups, or their addresses go on from row to row; then
  // each lane counts its group's place from where the tile would begin.
  static constexpr bool kEven = kPassRows % kGroupKeys == 0;

  TileLoader rows_of;
  Groups groups;
  const PagedParams& params;
  const char *k_g, *v_g;  // of the head
  uint32 lane_bytes;      // to this thread's chunk of its row in a group or tile
  int own;                // the place of this lane's group of the tile that was looked up last

  template <typename Scalar>
  __device__ __forceinline__ PagedTileLoader(const PagedParams& all, const Groups& groups_,
                                             const TileCoordinates& coords, const Scalar* k_cache_g,
                                             const Scalar* v_cache_g)
      : groups(groups_),
        params(all),
        k_g(reinterpret_cast<const char*>(k_cache_g + coords.kv_head * all.attention.k.head)),
        v_g(reinterpret_cast<const char*>(v_cache_g + coords.kv_head * all.attention.v.head)),
        lane_bytes(rows_of.chunk * kChunkBytes +
                   (kEven ? rows_of.row % kGroupKeys : rows_of.row) * static_cast<uint32>(row_bytes())),
        own(0) {}

  __device__ __forceinline__ Rows rows(int) const { return {}; }

  // Only where there are keys: a sequence without any has no entries either.
  __device__ __forceinline__ void look_up(int tile) {
    if (groups.last < 0) return;
    own = groups.look_up(tile).coords(params.units);
    if (!kEven && Groups::kGroups > 1) own -= lane_index() * params.units.group;
  }

  template <bool kRagged>
  __device__ __forceinline__ void copy(uint32 stage_s, const Rows&, int keys) const {
#pragma unroll
    for (int pass = 0; pass < TileLoader::kPasses; pass++) {
      const int key = rows_of.key_of_pass(pass);
      const int place = Groups::of_group(own, key / kGroupKeys);  // in all lanes: some threads may have no row
      if (!rows_of.owns(pass)) continue;
      const uint32 lane = kEven ? lane_bytes : lane_bytes + pass * kPassRows * row_bytes();
      const int64 bytes = mad_wide(lane, 1u, mad_wide(place, params.units.bytes, 0));
      const uint32 flip = Tile::flip(pass * kPassRows % 8) * kChunkBytes;
      const uint32 to_s = ((stage_s + rows_of.shared_offset) ^ flip) + pass * kPassRows * Tile::kRowBytes;
      const bool seen = !kRagged || groups.exists(key, keys);
      copy_row<kRagged>(to_s, k_g + bytes, seen);
      copy_row<kRagged>(Traits::Loader::v_s(to_s), v_g + bytes, seen);
    }
  }

 private:
  __device__ __forceinline__ int row_bytes() const {
    return static_cast<int>(params.attention.k.seq * sizeof(Traits::Scalar));
  }

  // The chunks of a row that are this thread's.
  template <bool kRagged>
  __device__ __forceinline__ void copy_row(uint32 to_s, const char* from_g, bool seen) const {
    constexpr bool kPadded = TileLoader::kPadded;
#pragma unroll
    for (int group = 0; group < TileLoader::kColumnGroups; group++) {
      const int chunk = rows_of.chunk + group * TileLoader::kRowLanes;
      const int ahead = group * TileLoader::kRowLanes * kChunkBytes;
      copy_chunk<Traits::kHeadDim, Traits::kVec, kRagged || kPadded>(
          to_s + ahead, from_g + ahead, chunk, seen && (!kPadded || chunk * kChunkItems < Traits::kHeadDim));
    }
  }
};

struct PagedTiles {
  static constexpr bool kLooksUp = true;

  const PagedParams& params;
  const DTYPE *k_g, *v_g;
  const int* table_g;

  template <typename T>
  __device__ __forceinline__ PagedTileLoader<typename T::KTileLoader> loader(const AttentionParams&,
                                                                             const TileCoordinates& coords,
                                                                             const KeyWindow& window, int rows) const {
    return {params, {params, table_g, coords, window, rows}, coords, k_g, v_g};
  }
};

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward_native_paged(const DTYPE* q_g, const DTYPE* k_cache_g, const DTYPE* v_cache_g,
                                   const int* block_table_g, const void* seqlens_k_g, const void* cu_seqlens_q_g,
                                   const void* alibi_slopes_g, const void* sinks_g, DTYPE* out_g, float* lse_g,
                                   const PagedParams params) {
  TileCoordinates coords;
  if (!coordinates_of_cta(coords, params, cu_seqlens_q_g, Traits::kTileQ)) return;
  const AttentionParams& attention = params.attention;
  const int64 q_offset = query_offset(params, seqlens_k_g, coords);
  const KeyWindow window(q_offset, attention.left, attention.right, keys_in_use(attention, seqlens_k_g, coords.batch));
  attend(attention, {q_g, out_g, lse_g, nullptr, nullptr, alibi_slopes_g, sinks_g},
         PagedTiles{params, k_cache_g, v_cache_g, block_table_g}, coords, window, q_offset);
}
