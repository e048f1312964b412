// Whose scores a bias that broadcasts is added to: pairs of a batch element and a head, and how a CTA with a tile of
// its gradient goes through them.
#pragma once

#include "../block_states.cuh"
#include "../params.cuh"

// The work of all CTAs: for each bias of a (batch element, head), of which there are `batches` by `heads`, `parts`
// parts of the pairs that it is the bias of, and tiles of scores.
struct DbiasWork {
  int batches, heads, parts;
  bool sums_rows, sums_keys;  // down to one item for a warp's rows, or a tile's keys
  bool adds;                  // to what there is
};

struct TileSight {
  bool any, all;  // whether any of the queries sees any of the keys, and all of them all
};

// The CTA's share: kRows queries by kTileK keys.
template <int kRows, int kTileK>
struct DbiasCoordinates {
  int batch, head, part;  // of the bias
  int first_row, first_key;

  __device__ __forceinline__ DbiasCoordinates(const AttentionParams& longest, const DbiasWork& work) {
    const uint32 key_tiles = div_up(longest.sk, kTileK), row_tiles = div_up(longest.sq, kRows);
    uint32 at = blockIdx.x;
    first_key = at % key_tiles * kTileK;
    at /= key_tiles;
    first_row = at % row_tiles * kRows;
    at /= row_tiles;
    part = at % work.parts;
    at /= work.parts;
    head = at % work.heads;
    batch = at / work.heads;
  }

  // How much queries of the tile see of its keys.
  __device__ __forceinline__ TileSight sight(const KeyWindow& window, int sq) const {
    const int rows = min(kRows, sq - first_row), after = first_key + kTileK;
    const KeyRange top = window.of_row(first_row), bottom = window.of_row(first_row + rows - 1);
    return {rows > 0 && top.begin < bottom.end && top.begin < after && first_key < bottom.end,
            bottom.begin <= first_key && after <= top.end};
  }
};

// One of the pairs of a batch element and a head whose scores have the CTA's bias.
template <typename Sequence, typename States>
struct Pair {
  int left;  // of the CTA's part of them, this one among them
  int batch, head;
  Sequence sequence;
  bool masked;
  States states;
};

// The way from pair to pair, head by head: over those of the CTA's part whose queries see keys of the tile.
template <typename Sequences, typename TileCoordinates, typename States, typename Blocks>
struct Pairs {
  using OnePair = Pair<typename Sequences::Sequence, States>;

  const Sequences& sequences;
  const TileCoordinates& coords;
  const Blocks& blocks;
  int first_head, end_head;
  int64 begin, end;

  __device__ __forceinline__ Pairs(const Sequences& all, const TileCoordinates& own, const Blocks& of_mask,
                                   const DbiasWork& work, int heads)
      : sequences(all),
        coords(own),
        blocks(of_mask),
        first_head(own.head),
        end_head(work.heads == 1 ? heads : own.head + 1) {
    const int64 count = static_cast<int64>(work.batches == 1 ? all.count() : 1) * (end_head - first_head);
    begin = own.part * count / work.parts;
    end = (own.part + 1) * count / work.parts;
  }

  __device__ __forceinline__ OnePair first() const {
    const int heads = end_head - first_head, batch = coords.batch + static_cast<int>(begin / heads);
    const int left = static_cast<int>(end - begin);
    return seen_from({left, batch, first_head + static_cast<int>(begin % heads), sequences.of(batch), false, {}});
  }
  __device__ __forceinline__ OnePair after(OnePair pair) const {
    advance(pair);
    return seen_from(pair);
  }

 private:
  __device__ __forceinline__ void advance(OnePair& pair) const {
    pair.left--;
    if (++pair.head < end_head) return;
    pair.head = first_head;
    pair.batch++;
  }
  __device__ __forceinline__ OnePair seen_from(OnePair pair) const {
#pragma unroll 1
    for (; pair.left > 0; advance(pair)) {
      pair.sequence = sequences.of(pair.batch);
      const TileSight sight = coords.sight(pair.sequence.window, sequences.queries(pair.sequence));
      pair.masked = !sight.all;
      if (!sight.any) continue;
      pair.states = States(blocks, pair.batch, pair.head, coords.first_row, coords.first_key);
      if (pair.states.any()) break;
    }
    return pair;
  }
};
