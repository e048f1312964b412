// Probe of philox.cuh: the ten rounds on given counters, and the dropout field of given scores.
#include "common/philox.cuh"

extern "C" __global__ void probe_philox(const unsigned* counters_g, unsigned* words_g, unsigned* fields_g, int count,
                                        unsigned key_lo, unsigned key_hi, unsigned long long seed) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  Philox4 counter;
  for (int i = 0; i < 4; i++) counter.word[i] = counters_g[4 * at + i];
  const Philox4 words = philox4x32_10(counter, key_lo, key_hi);
  for (int i = 0; i < 4; i++) words_g[4 * at + i] = words.word[i];
  const int batch = at % 3, head = at % 5, query = at / 97, key = at % 97;
  fields_g[at] = dropout_field(dropout_words(seed, batch, head, query, key, 0), key);
}
