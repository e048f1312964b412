// Sampling, last step: the token of each row whose score with Gumbel noise is the largest among those that are kept.
//
//   out = argmax over kept tokens j of s_j - log2(-log2 u_j),     s_j = (x_j - max x) log2(e) / temperature
//
// draws j with the probability of the softmax over the kept tokens (the Gumbel-max trick; Maddison, Tarlow and Minka,
// "A* sampling", arXiv:1411.0030). u_j is from Philox with the row's seed as key and (j / 4, step) as counter. The
// filters keep the top_k largest scores; of those the fewest largest ones whose probability reaches top_p (Holtzman et
// al., arXiv:1904.09751; see RowFilters::share); and of those the ones with at least min_p of the largest probability
// (Nguyen et al., arXiv:2407.01082). Equal scores are kept together. A row with temperature 0 takes its
// first largest logit.
//
// Shapes    logits (rows, V), last axis contiguous; previous (rows, width); options one a row; out (rows,). Scratch:
//           maxima and bins of the previous steps; for each row two counters, zeroed; best (rows, parts); candidates
//           (rows, CANDIDATES).
// Work      a CTA for each part of PART tokens of each row. Tokens in bins that are kept whole are drawn from at once.
//           Tokens in bins that contain a cut are candidates, and are put into a list; the last CTA of the row to
//           arrive finds the cuts by further digits, and draws. If the list is full, it reads the row again.
// Budget    PART / THREADS logits of a thread in registers, of which there are up to 116; with FILTERED 16 KB of shared
//           memory for bins. Two CTAs on a multiprocessor are enough: a row of 128,256 tokens has 32, a T4 40 of these.
// Edges     a row without a logit above -inf gives -1. NaN logits are never drawn. A row with +inf takes the first one.
#if !defined(DTYPE) || !defined(THREADS) || !defined(PART) || !defined(ALIGNED) || !defined(PENALISED) || \
    !defined(FILTERED) || !defined(CANDIDATES)
#error "DTYPE, THREADS, PART, ALIGNED, PENALISED, FILTERED and CANDIDATES come from a launch-configuration table"
#endif
#include "logits.cuh"
#include "bins.cuh"

using Part = PartTraits<DTYPE, THREADS, PART, ALIGNED, PENALISED>;
using Scan = BinScan<THREADS>;
constexpr int kWarps = THREADS / kWarpSize;

// The largest key and its token, the first one of equal keys.
struct Best {
  float key;
  int token;

  __device__ __forceinline__ void take(float other_key, int other_token) {
    if (other_key > key || (other_key == key && other_token < token)) key = other_key, token = other_token;
  }
};

struct alignas(kVectorBytes) Candidate {
  uint32 distance;
  int token;
  float score;
};

struct Smem {
  Previous<Part> previous;
  float partial[kWarps];
  Best best[kWarps];
  bool is_last;
};

// Used only with FILTERED.
struct FilterSmem {
  Bins<THREADS> bins;
  Scan::Shared scan;
};

// A row; every thread of its CTAs has the same values.
struct Row {
  const DTYPE* logits_g;
  const int* previous_g;
  const uint32* bins_g;
  uint32* counters_g;  // how many candidates there are, and how many CTAs have arrived
  Candidate* candidates_g;
  int64 index;
  uint64 seed, step;
  float penalty;
  RowFilters filters;
  float scale, largest;  // the factor of differences of logits, and the largest logit

  __device__ __forceinline__ float key_of(int token, float score) const {
    return __fadd_rn(score, token_gumbel(seed, step, token));
  }
};

// The bins of a row in which a cut is or may be: tokens in bins before `kept` are kept, those in other bins are not.
struct Cuts {
  uint32 kept = kBins, low = 1, high = 0;  // low to high: of top-p
  uint32 of_top_k = kBins;

  __device__ __forceinline__ bool may_be_in(uint32 bin) const { return (low <= bin && bin <= high) || bin == of_top_k; }
};

__device__ __forceinline__ Cuts find_cuts(Row& row, FilterSmem& smem_s) {
  Cuts cuts;
  smem_s.bins.copy(row.bins_g);
  __syncthreads();  // smem_s.bins: written
  Scan bins;
  bins.scan(smem_s.bins, smem_s.scan);
  if (row.filters.top_k >= bins.total.count) row.filters.top_k = 0;  // it keeps all tokens
  if (bins.total.count == 0) row.filters.top_p = 1.f;
  uint64 least = bins.total.weight, most = least;  // of the tokens that top-k keeps
  if (row.filters.has_top_k()) {
    const Found found = bins.find(kTokens, row.filters.top_k, smem_s.scan);
    cuts.kept = cuts.of_top_k = found.bin;
    least = found.before.weight, most = found.through.weight;
  }
  if (row.filters.has_top_p()) {
    cuts.kept = cuts.low = bins.find(kWeights, row.filters.share(least), smem_s.scan).bin;
    cuts.high = bins.find(kWeights, row.filters.share(most), smem_s.scan).bin;
  }
  return cuts;
}

// Take the best of the tokens of a group that have a bit in `kept`.
__device__ __forceinline__ void draw(Best& best, const Row& row, bool greedy, int token,
                                     const float (&score)[Part::kItems], uint32 kept) {
#pragma unroll
  for (int quad = 0; quad < Part::kItems; quad += 4) {
    if (!(kept >> quad & 0xfu)) continue;
    float key[4] = {score[quad], score[quad + 1], score[quad + 2], score[quad + 3]};
    if (!greedy) {
      const Philox4 words = token_words(row.seed, row.step, (token + quad) / 4);
#pragma unroll
      for (int i = 0; i < 4; i++) key[i] = __fadd_rn(key[i], gumbel_log2(words.word[i]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (kept >> (quad + i) & 1u) best.take(key[i], token + quad + i);
    }
  }
}

// Put the tokens of a group that have a bit in `chosen` into the row's list, or only count them if it is full.
__device__ __forceinline__ void append(const Row& row, int token, const float (&score)[Part::kItems], uint32 chosen) {
  uint32 slot = atomicAdd(&row.counters_g[0], static_cast<uint32>(__popc(chosen)));
#pragma unroll
  for (int i = 0; i < Part::kItems; i++) {
    if (!(chosen >> i & 1u) || slot >= CANDIDATES) continue;
    const uint4 candidate = {distance_of(score[i]), static_cast<uint32>(token + i), __float_as_uint(score[i]), 0u};
    *reinterpret_cast<uint4*>(&row.candidates_g[slot++]) = candidate;
  }
}

// Call take(distance, token, score) of every candidate, or of every token of the row if the list is too short.
template <typename Take>
__device__ __forceinline__ void each_candidate(const Row& row, const SampleParams& params, Previous<Part>& previous_s,
                                               Take take) {
  const uint32 count = __ldcg(&row.counters_g[0]);
  if (count <= CANDIDATES) {
    for (uint32 i = threadIdx.x; i < count; i += THREADS) {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(&row.candidates_g[i]));
      take(words.x, static_cast<int>(words.y), __uint_as_float(words.z));
    }
    return;
  }
  for (int first = 0; first < params.vocabulary; first += Part::kTokens) {
    if (Part::kPenalised) __syncthreads();  // previous_s: the part before has been read
    previous_s.gather(row.previous_g, params, row.index, first);
    for (int place = threadIdx.x; place < min(Part::kTokens, params.vocabulary - first); place += THREADS) {
      const float x = previous_s.weakened(to_float(row.logits_g[first + place]), place, row.penalty);
      if (x == -kInfinity) continue;
      const float score = score_of(x, row.largest, row.scale);
      take(distance_of(score), first + place, score);
    }
  }
}

// Run by the last CTA of a row: find the cuts, digit by digit, and the best of the candidates that are kept.
__device__ __forceinline__ void draw_candidates(Best& best, const Row& row, uint32 first_bin,
                                                const SampleParams& params, Previous<Part>& previous_s,
                                                FilterSmem& smem_s) {
  if (!row.filters.cuts()) return;
  Bins<THREADS>& bins_s = smem_s.bins;
  uint32 farthest = row.filters.farthest();
  uint64 weight = ~0ull;  // of the tokens that top-k keeps
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
    const Measure measure = pass == 0 ? kTokens : kWeights;
    if (measure == kTokens ? !row.filters.has_top_k() : !row.filters.has_top_p()) continue;
    uint64 wanted = row.filters.top_k;
    Found found = {0, {0, 0}, {0, 0}};  // its bin is the digits of the distance so far
#pragma unroll 1
    for (int shift = 2 * kDigitBits; shift >= 0; shift -= kDigitBits) {
      // The barriers of `find` lie between this and the last look at the previous bins.
      if (shift == 2 * kDigitBits) {
        bins_s.copy(row.bins_g);
      } else {
        bins_s.clear();
        __syncthreads();  // bins_s: zero
        each_candidate(row, params, previous_s, [&](uint32 distance, int, float) {
          if (distance >> (shift + kDigitBits) == found.bin) {
            bins_s.count(distance >> shift & (kBins - 1), weight_of(distance));
          }
        });
      }
      __syncthreads();  // bins_s: written
      Scan bins;
      bins.scan(bins_s, smem_s.scan);
      if (measure == kWeights && shift == 2 * kDigitBits) wanted = row.filters.share(min(weight, bins.total.weight));
      const Found next = bins.find(measure, wanted - found.before.of(measure), smem_s.scan);
      found = {found.bin << kDigitBits | next.bin, found.before + next.before, found.before + next.through};
    }
    farthest = min(farthest, found.bin), weight = found.through.weight;
  }
  each_candidate(row, params, previous_s, [&](uint32 distance, int token, float score) {
    if (first_digit(distance) >= first_bin && distance <= farthest) best.take(row.key_of(token, score), token);
  });
}

// Return the best of all threads of the CTA, which all take part.
__device__ __forceinline__ Best best_of_cta(Best best, Smem& smem_s) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    best.take(__shfl_xor_sync(kFullWarp, best.key, distance), __shfl_xor_sync(kFullWarp, best.token, distance));
  }
  __syncthreads();  // smem_s.best: the previous ones have been read
  if (lane_index() == 0) smem_s.best[warp_index()] = best;
  __syncthreads();  // smem_s.best: written by every warp
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) best.take(smem_s.best[warp].key, smem_s.best[warp].token);
  return best;
}

// Whether this CTA is the last of its row. If so, the results of the others can be read.
__device__ __forceinline__ bool is_last(const Row& row, int parts, Smem& smem_s) {
  __threadfence();  // what this thread has written is seen before its CTA counts as arrived
  __syncthreads();  // every thread's fence, before the one arrival
  if (threadIdx.x == 0) smem_s.is_last = atomicAdd(&row.counters_g[1], 1u) == parts - 1;
  __syncthreads();  // smem_s.is_last: written
  __threadfence();  // nothing of the others is read before
  return smem_s.is_last;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const DTYPE* logits_g, const int* previous_g, const uint64* seeds_g, const void* steps_g,
           const float* temperatures_g, const void* top_ks_g, const float* top_ps_g, const float* min_ps_g,
           const float* penalties_g, const float* maxima_g, const uint32* bins_g, uint32* counters_g, float* best_g,
           uint32* candidates_g, int* out_g, uint64 seed, int64 step, float temperature, int64 top_k, float top_p,
           float min_p, float penalty, const SampleParams params) {
  __shared__ Smem smem_s;
  __shared__ FilterSmem filter_s;
  const int64 index = blockIdx.x / params.parts;
  const int part = blockIdx.x % params.parts, first = part * Part::kTokens;
  Row row;
  row.index = index;
  row.logits_g = logits_g + index * params.logits_stride;
  row.previous_g = previous_g;
  row.bins_g = bins_g + index * (kSums * kBins);
  row.counters_g = counters_g + 2 * index;
  row.candidates_g = reinterpret_cast<Candidate*>(candidates_g) + index * CANDIDATES;
  row.seed = option(seeds_g, params.seed_stride, seed + index, index);
  row.step = integer_option(steps_g, params.step_stride, params.step_is_int64, step, index);
  row.penalty = option(penalties_g, params.repetition_penalty_stride, penalty, index);
  row.filters = {option(temperatures_g, params.temperature_stride, temperature, index),
                 option(top_ps_g, params.top_p_stride, top_p, index),
                 option(min_ps_g, params.min_p_stride, min_p, index),
                 integer_option(top_ks_g, params.top_k_stride, params.top_k_is_int64, top_k, index)};
  const bool greedy = row.filters.greedy();
  row.scale = score_scale(row.filters.temperature);

  // Phase 1: the part's logits, the row's largest, and the bins that may hold a cut.
  PartLogits<Part> logits;
  logits.load(row.logits_g, first, params.vocabulary);
  smem_s.previous.gather(previous_g, params, index, first);
  if (!greedy) row.largest = largest_logit<THREADS>(maxima_g + index * params.parts, params.parts, smem_s.partial);
  Cuts cuts;
  uint32 farthest = ~0u;
  if (FILTERED && !greedy) {
    farthest = row.filters.farthest();
    if (row.filters.cuts()) cuts = find_cuts(row, filter_s);
  }

  // Phase 2: the part's tokens. Tokens that are certainly kept are drawn from; those that may be are candidates.
  Best best = {-kInfinity, kNoToken};
  logits.each_group(smem_s.previous, row.penalty, [&](int place, const float (&x)[Part::kItems]) {
    float score[Part::kItems];
    uint32 kept = 0, candidates = 0;  // a bit for each
#pragma unroll
    for (int i = 0; i < Part::kItems; i++) {
      score[i] = greedy ? x[i] : score_of(x[i], row.largest, row.scale);
      bool keep = x[i] != -kInfinity;
      if (FILTERED && keep && !greedy) {
        const uint32 distance = distance_of(score[i]), bin = first_digit(distance);
        const bool maybe = cuts.may_be_in(bin);
        candidates |= static_cast<uint32>(maybe) << i;
        keep = !maybe && bin < cuts.kept && distance <= farthest;
      }
      kept |= static_cast<uint32>(keep) << i;
    }
    if (kept) draw(best, row, greedy, first + place, score, kept);
    if (FILTERED && candidates) append(row, first + place, score, candidates);
  });

  // Phase 3: the best of the CTA; the last CTA of the row adds the others' and that of the candidates.
  best = best_of_cta(best, smem_s);
  if (params.parts > 1) {
    uint2* const row_best_g = reinterpret_cast<uint2*>(best_g) + index * params.parts;
    if (threadIdx.x == 0) row_best_g[part] = {__float_as_uint(best.key), static_cast<uint32>(best.token)};
    if (!is_last(row, params.parts, smem_s)) return;
    for (int other = threadIdx.x; other < params.parts; other += THREADS) {
      const uint2 words = __ldcg(&row_best_g[other]);
      best.take(__uint_as_float(words.x), static_cast<int>(words.y));
    }
  }
  if constexpr (FILTERED) draw_candidates(best, row, cuts.kept, params, smem_s.previous, filter_s);
  if (FILTERED || params.parts > 1) best = best_of_cta(best, smem_s);
  if (threadIdx.x == 0) out_g[index] = best.token == kNoToken ? -1 : best.token;
}
