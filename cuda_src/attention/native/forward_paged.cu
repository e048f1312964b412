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
#if HEAD_DIM <= 256 && HEAD_DIM_V <= 256
#include "forward.cuh"
#else
#include "forward_wide.cuh"
#endif
#include "../paged_keys.cuh"

// The rows of tiles of a paged cache. K and V have the same strides, so one place of a row serves both.
template <typename TileLoader>
struct PagedRows {
  using Tile = typename TileLoader::Tile;
  using Groups = GroupTable<Tile::kRows, false>;
  static constexpr int kPassRows = TileLoader::kPassRows;
  // A thread's rows either all have one position in their groups, or their addresses go on from row to row; then
  // each lane counts its group's place from where the tile would begin.
  static constexpr bool kEven = kPassRows % kGroupKeys == 0;

  TileLoader rows_of;
  Groups groups;
  const PagedParams& params;
  const char *k_g, *v_g;  // of the head
  uint32 lane_bytes;      // to this thread's chunk of its row in a group or tile

  template <typename Scalar>
  __device__ __forceinline__ PagedRows(const PagedParams& all, const Groups& groups_, const TileCoordinates& coords,
                                       const Scalar* k_cache_g, const Scalar* v_cache_g)
      : groups(groups_),
        params(all),
        k_g(reinterpret_cast<const char*>(k_cache_g + coords.kv_head * all.attention.k.head)),
        v_g(reinterpret_cast<const char*>(v_cache_g + coords.kv_head * all.attention.v.head)),
        lane_bytes(rows_of.chunk * kChunkBytes +
                   (kEven ? rows_of.row % kGroupKeys : rows_of.row) * static_cast<uint32>(row_bytes())) {}

  // The place of this lane's group of a tile that was looked up.
  __device__ __forceinline__ int place_of(const GroupEntry<false>& entry) const {
    const int place = entry.coords(params.units);
    return !kEven && Groups::kGroups > 1 ? place - lane_index() * params.units.group : place;
  }

  // body(offset of a row's first chunk in the tile, its bytes from the head's first, whether it is seen), for each row
  // of this thread.
  template <bool kRagged, typename Body>
  __device__ __forceinline__ void for_each_row(int own, int keys, const Body& body) const {
#pragma unroll
    for (int pass = 0; pass < TileLoader::kPasses; pass++) {
      const int key = rows_of.key_of_pass(pass);
      const int place = Groups::of_group(own, key / kGroupKeys);  // in all lanes: some threads may have no row
      if (!rows_of.owns(pass)) continue;
      const uint32 lane = kEven ? lane_bytes : lane_bytes + pass * kPassRows * row_bytes();
      const uint32 flip = Tile::flip(pass * kPassRows % 8) * kChunkBytes;
      body((rows_of.shared_offset ^ flip) + pass * kPassRows * Tile::kRowBytes,
           mad_wide(lane, 1u, mad_wide(place, params.units.bytes, 0)), !kRagged || groups.exists(key, keys));
    }
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

 private:
  __device__ __forceinline__ int row_bytes() const {
    return static_cast<int>(params.attention.k.seq * sizeof(Traits::Scalar));
  }
};

#if HEAD_DIM <= 256
// As AsyncKeyLoader.
template <typename TileLoader, typename...>
struct PagedTileLoader : PagedRows<TileLoader> {
  using PagedRows<TileLoader>::PagedRows;
  struct Rows {};  // those that were looked up last

  int own = 0;  // the place of this lane's group of the tile that was looked up last

  __device__ __forceinline__ Rows rows(int) const { return {}; }

  // Only where there are keys: a sequence without any has no entries either.
  __device__ __forceinline__ void look_up(int tile) {
    if (this->groups.last >= 0) own = this->place_of(this->groups.look_up(tile));
  }

  template <bool kRagged>
  __device__ __forceinline__ void copy(uint32 stage_s, const Rows&, int keys) const {
    this->template for_each_row<kRagged>(own, keys, [&](uint32 offset, int64 bytes, bool seen) {
      this->template copy_row<kRagged>(stage_s + offset, this->k_g + bytes, seen);
      this->template copy_row<kRagged>(Traits::Loader::v_s(stage_s + offset), this->v_g + bytes, seen);
    });
  }
};
#else
// As CopiedKeyLoader, which see.
template <typename TileLoader, typename Tiles>
struct PagedTileLoader : PagedRows<TileLoader> {
  using Entry = GroupEntry<false>;
  struct Rows {
    int place;  // of this lane's group of the tile
  };
  static constexpr LookUp kLookUp = LookUp::kFirst;
  static constexpr int kParts = 1;  // the places of all rows are known at once

  uint32 k_both_s, v_both_s;  // both halves

  template <typename Scalar>
  __device__ __forceinline__ PagedTileLoader(const PagedParams& all,
                                             const typename PagedRows<TileLoader>::Groups& groups,
                                             const TileCoordinates& coords, const Scalar* k_cache_g,
                                             const Scalar* v_cache_g, const Tiles& tiles)
      : PagedRows<TileLoader>(all, groups, coords, k_cache_g, v_cache_g),
        k_both_s(shared_address(tiles.k)),
        v_both_s(shared_address(tiles.v)) {}

  // Only where there are keys: a sequence without any has no entries either.
  __device__ __forceinline__ Rows rows(int tile) const {
    return {this->groups.last < 0 ? 0 : this->place_of(this->groups.look_up(tile))};
  }
  __device__ __forceinline__ Entry look_up(int tile) const { return this->groups.look_up(tile); }
  __device__ __forceinline__ void keep(Rows& next, const Entry& ahead) const { next = {this->place_of(ahead)}; }
  __device__ __forceinline__ void move_to(Rows&, int) const {}
  __device__ __forceinline__ void move_on(Rows&) const {}
  __device__ __forceinline__ void renew() const {}
  __device__ __forceinline__ uint32 k_s(int half) const { return k_both_s + Tiles::k_bytes(half); }
  __device__ __forceinline__ uint32 v_s(int half) const { return v_both_s + half * Tiles::VTile::kBytes; }

  template <bool kRagged>
  __device__ __forceinline__ void copy_k(uint32 to_s, const Rows& from, int keys, TilePart) const {
    copy<kRagged>(to_s, this->k_g, from, keys);
  }
  template <bool kRagged>
  __device__ __forceinline__ void copy_v(uint32 to_s, const Rows& from, int keys, TilePart) const {
    copy<kRagged>(to_s, this->v_g, from, keys);
  }

 private:
  template <bool kRagged>
  __device__ __forceinline__ void copy(uint32 to_s, const char* head_g, const Rows& from, int keys) const {
    this->template for_each_row<kRagged>(from.place, keys, [&](uint32 offset, int64 bytes, bool seen) {
      this->template copy_row<kRagged>(to_s + offset, head_g + bytes, seen);
    });
  }
};
#endif

struct PagedTiles {
  static constexpr bool kLooksUp = true;

  const PagedParams& params;
  const DTYPE *k_g, *v_g;
  const int* table_g;

  template <typename T, typename... Tiles>
  __device__ __forceinline__ auto loader(const AttentionParams&, const TileCoordinates& coords, const KeyWindow& window,
                                         int rows, const Tiles&... tiles) const
      -> PagedTileLoader<typename T::KTileLoader, Tiles...> {
    return {params, {params, table_g, coords, window, rows}, coords, k_g, v_g, tiles...};
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
