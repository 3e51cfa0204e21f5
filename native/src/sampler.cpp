#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace hotset {
namespace {

using Candidate = SamplerWorkspace::Candidate;

// Logits per block. Blocks below a threshold are skipped by their maximum. Inside a block, loops run over plain arrays
// of fixed length without branches, and sums and maxima are folded in halves: this is what compilers vectorise, and
// the order of the additions is the same for every vector width.
constexpr int64_t kBlock = 256;
constexpr int kMaxHalvings = 40;     // at most this many times is a band of logits halved
constexpr int64_t kSmallBand = 256;  // so few candidates are sorted rather than narrowed further
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t num_blocks(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }

bool comes_before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

float block_maximum(const float* x, int32_t* num_nan) {
  float fold[kBlock / 2];
  int32_t nan = 0;
  for (int64_t i = 0; i < kBlock; ++i) nan += x[i] != x[i];
  for (int64_t i = 0; i < kBlock / 2; ++i) fold[i] = x[i] > x[i + kBlock / 2] ? x[i] : x[i + kBlock / 2];
  for (int64_t half = kBlock / 4; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) fold[i] = fold[i] > fold[i + half] ? fold[i] : fold[i + half];
  }
  *num_nan += nan;
  return fold[0];
}

// Fills block_max. Returns the largest logit, or NaN when the row holds a NaN.
float find_maxima(const float* logits, SamplerWorkspace& ws) {
  float largest = -kInfinity;
  int32_t num_nan = 0;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    const int64_t count = std::min(kBlock, ws.vocab - b * kBlock);
    const float* x = logits + b * kBlock;
    float padded[kBlock];
    if (count < kBlock) {
      std::fill(std::copy(x, x + count, padded), padded + kBlock, -kInfinity);
      x = padded;
    }
    ws.block_max[b] = block_maximum(x, &num_nan);
    largest = std::max(largest, ws.block_max[b]);
  }
  return num_nan ? std::numeric_limits<float>::quiet_NaN() : largest;
}

int32_t first_equal(const float* logits, float value, const SamplerWorkspace& ws) {
  int64_t b = 0;
  while (ws.block_max[b] != value) ++b;
  int64_t i = b * kBlock;
  while (logits[i] != value) ++i;
  return static_cast<int32_t>(i);
}

// out[i] = exp(x[i]) for one block of x <= 0: relative error below 3e-7, exactly 0 below -87.
void exp_block(const float* x, float* out) {
  float clamped[kBlock];
  int32_t bits[kBlock];
  float scale[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) clamped[i] = x[i] > -87.0f ? x[i] : -87.0f;
  for (int64_t i = 0; i < kBlock; ++i) {
    const int32_t exponent = static_cast<int32_t>(clamped[i] * 1.44269504f - 0.5f);
    const float n = static_cast<float>(exponent);
    const float r = (clamped[i] - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts (Cody and Waite)
    float p = 1.9875691500e-4f;                                            // the polynomial of Cephes expf
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    out[i] = p * (r * r) + r + 1.0f;
    bits[i] = (exponent + 127) << 23;  // 2^exponent
  }
  std::memcpy(scale, bits, sizeof scale);
  for (int64_t i = 0; i < kBlock; ++i) scale[i] = x[i] >= -87.0f ? scale[i] : 0.0f;
  for (int64_t i = 0; i < kBlock; ++i) out[i] *= scale[i];
}

void fill_weights(float largest, float temperature, SamplerWorkspace& ws) {
  const float inverse = 1.0f / temperature;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    const float* x = ws.logits.data() + b * kBlock;
    float scaled[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) scaled[i] = (x[i] - largest) * inverse;
    exp_block(scaled, ws.weights.data() + b * kBlock);
  }
}

struct Measure {
  int64_t count = 0;
  double mass = 0.0;
};

// Number and weight of the tokens of block `b` with a logit of at least `threshold`.
Measure measure_block(const SamplerWorkspace& ws, int64_t b, float threshold) {
  const float* x = ws.logits.data() + b * kBlock;
  const float* w = ws.weights.data() + b * kBlock;
  float fold[kBlock];
  int32_t count = 0;
  for (int64_t i = 0; i < kBlock; ++i) count += x[i] >= threshold;
  for (int64_t i = 0; i < kBlock; ++i) fold[i] = x[i] >= threshold ? w[i] : 0.0f;
  for (int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) fold[i] += fold[i + half];
  }
  Measure sum;
  sum.count = count;
  sum.mass = fold[0];
  return sum;
}

Measure measure(const SamplerWorkspace& ws, float threshold) {
  Measure sum;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    if (ws.block_max[b] < threshold) continue;
    const Measure block = measure_block(ws, b, threshold);
    sum.count += block.count;
    sum.mass += block.mass;
  }
  return sum;
}

// The last token that a filter keeps: tokens after it in (logit descending, index ascending) are dropped.
using Border = Candidate;

constexpr Border kKeepAll = {kLowest, std::numeric_limits<int32_t>::max()};

// The weight of all tokens up to `border`.
double kept_mass(const Border& border, const SamplerWorkspace& ws) {
  double mass = measure(ws, border.value).mass;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {  // tokens as large as the last one kept, but after it
    if (ws.block_max[b] < border.value) continue;
    const int64_t first = std::max(b * kBlock, static_cast<int64_t>(border.index) + 1);
    for (int64_t i = first; i < (b + 1) * kBlock; ++i) {
      if (ws.logits[i] == border.value) mass -= ws.weights[i];
    }
  }
  return mass;
}

// Gathers the tokens with logits in [below, above), in order.
void collect_band(float below, float above, SamplerWorkspace& ws) {
  ws.candidates.clear();
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    if (ws.block_max[b] < below) continue;
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      if (ws.logits[i] >= below && ws.logits[i] < above) {
        ws.candidates.push_back({ws.logits[i], static_cast<int32_t>(i)});
      }
    }
  }
  // Ties, however many, are gathered in order already.
  if (!std::is_sorted(ws.candidates.begin(), ws.candidates.end(), comes_before)) {
    std::sort(ws.candidates.begin(), ws.candidates.end(), comes_before);
  }
}

// Finds the shortest prefix of the order whose count (or weight) reaches `target`, by narrowing a band of logits
// until it is small enough to sort. Each step reads only the blocks whose maximum lies above its threshold.
template <typename Reach>
Border find_border(float largest, float first_step, double target, const Measure& total, SamplerWorkspace& ws,
                   Reach reach) {
  if (target >= reach(total)) return kKeepAll;
  float above = kInfinity;  // tokens with logits >= above do not reach the target,
  Measure inner;            // this is what they have;
  float below = largest;    // tokens with logits >= below do reach it
  Measure outer = measure(ws, below);
  for (float step = first_step; reach(outer) < target; step *= 2.0f) {
    above = below;
    inner = outer;
    below = std::max(kLowest, largest - step);
    outer = measure(ws, below);
  }
  for (int i = 0; i < kMaxHalvings && above != kInfinity && outer.count - inner.count > kSmallBand; ++i) {
    const float middle = below + (above - below) * 0.5f;
    if (!(middle > below && middle < above)) break;
    const Measure half = measure(ws, middle);
    (reach(half) < target ? above : below) = middle;
    (reach(half) < target ? inner : outer) = half;
  }
  collect_band(below, above, ws);
  double sum = reach(inner);
  for (const Candidate& candidate : ws.candidates) {
    sum += reach(Measure{1, ws.weights[candidate.index]});
    if (sum >= target) return candidate;
  }
  return ws.candidates.back();  // the same sum in another order fell short of the target by its rounding
}

// Sets the weight of every token after `border`, or lighter than `min_weight`, to 0. Fills block_mass with the sums of
// what is left and returns their total.
double drop_weights(const Border& border, float min_weight, SamplerWorkspace& ws) {
  double total = 0.0;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    ws.block_mass[b] = 0.0;
    if (ws.block_max[b] < border.value) continue;
    const float* x = ws.logits.data() + b * kBlock;
    float* w = ws.weights.data() + b * kBlock;
    const int32_t first = static_cast<int32_t>(b * kBlock);
    int32_t is_kept[kBlock];
    for (int32_t i = 0; i < kBlock; ++i) is_kept[i] = first + i <= border.index;
    for (int32_t i = 0; i < kBlock; ++i) is_kept[i] &= x[i] == border.value;
    for (int32_t i = 0; i < kBlock; ++i) is_kept[i] |= x[i] > border.value;
    for (int32_t i = 0; i < kBlock; ++i) is_kept[i] &= w[i] >= min_weight;
    for (int32_t i = 0; i < kBlock; ++i) w[i] = is_kept[i] ? w[i] : 0.0f;
    ws.block_mass[b] = measure_block(ws, b, kLowest).mass;
    total += ws.block_mass[b];
  }
  return total;
}

// Walks the kept tokens in rising index until their weight exceeds `target`.
int32_t walk(double target, const SamplerWorkspace& ws) {
  int64_t block = 0;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    if (ws.block_mass[b] == 0.0) continue;
    block = b;
    if (target < ws.block_mass[b]) break;
    target -= ws.block_mass[b];
  }
  int64_t last = block * kBlock;
  for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
    if (ws.weights[i] == 0.0f) continue;
    last = i;
    if (target < ws.weights[i]) break;
    target -= ws.weights[i];
  }
  return static_cast<int32_t>(last);
}

bool has_penalties(const SamplingParams& params) {
  return params.repetition_penalty != 1.0f || params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f;
}

void apply_penalties(const SamplingParams& params, const int32_t* history, int64_t num_history, SamplerWorkspace& ws) {
  constexpr uint32_t kSeen = 1u << 31;  // in the prompt or the output; the bits below count the output
  for (int64_t i = 0; i < num_history; ++i) {
    ws.counts[history[i]] = (ws.counts[history[i]] + (i >= params.num_prompt ? 1 : 0)) | kSeen;
  }
  for (int64_t i = 0; i < num_history; ++i) {
    uint32_t& count = ws.counts[history[i]];
    if (!count) continue;  // an earlier occurrence did it
    float& x = ws.logits[history[i]];
    x = x > 0.0f ? x / params.repetition_penalty : x * params.repetition_penalty;
    if (count & ~kSeen) {
      x -= params.presence_penalty + params.frequency_penalty * static_cast<float>(count & ~kSeen);
    }
    count = 0;
  }
}

int32_t draw(float largest, const SamplingParams& params, uint64_t position, SamplerWorkspace& ws) {
  fill_weights(largest, params.temperature, ws);
  Border border = kKeepAll;
  Measure total = measure(ws, kLowest);
  if (params.top_k > 0 && params.top_k < ws.vocab) {
    border = find_border(largest, 1.0f, params.top_k, total, ws,
                         [](const Measure& m) { return static_cast<double>(m.count); });
    total.mass = kept_mass(border, ws);
  }
  if (params.top_p < 1.0f) {
    const Border narrower = find_border(largest, params.temperature, params.top_p * total.mass, total, ws,
                                        [](const Measure& m) { return m.mass; });
    if (comes_before(narrower, border)) border = narrower;
  }
  const double mass = drop_weights(border, params.min_p, ws);
  return walk(sample_uniform(params.seed, position) * mass, ws);
}

}  // namespace

SamplerWorkspace::SamplerWorkspace(int64_t vocab)
    : vocab(vocab),
      logits(num_blocks(vocab) * kBlock, -kInfinity),
      weights(num_blocks(vocab) * kBlock, 0.0f),
      block_max(num_blocks(vocab)),
      block_mass(num_blocks(vocab)),
      counts(vocab) {
  candidates.reserve(vocab);
}

int32_t sample_token(const float* logits, int64_t vocab, const SamplingParams& params, const int32_t* history,
                     int64_t num_history, uint64_t position, SamplerWorkspace& workspace) {
  SamplerWorkspace& ws = workspace;
  const bool is_greedy = params.temperature == 0.0f;
  if (!is_greedy || has_penalties(params)) {
    std::memcpy(ws.logits.data(), logits, vocab * sizeof(float));
    if (has_penalties(params)) apply_penalties(params, history, num_history, ws);
    logits = ws.logits.data();
  }
  const float largest = find_maxima(logits, ws);
  if (!(std::fabs(largest) < kInfinity)) return kLogitsNotFinite;
  return is_greedy ? first_equal(logits, largest, ws) : draw(largest, params, position, ws);
}

void philox4x32_10(uint32_t counter[4], const uint32_t key[2]) {
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t c1 = counter[1], c3 = counter[3];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    counter[3] = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

double sample_uniform(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  philox4x32_10(counter, key);
  const uint64_t bits = (uint64_t{counter[0]} << 32 | counter[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace hotset
