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

// How much the tokens with logits of at least some threshold are: their number, and what a filter counts (their number
// or their weight).
struct Measure {
  int64_t count = 0;
  double reach = 0.0;
};

int32_t count_block(const float* x, float threshold) {
  int32_t count = 0;
  for (int64_t i = 0; i < kBlock; ++i) count += x[i] >= threshold;
  return count;
}

float weigh_block(const float* x, const float* w, float threshold) {
  int32_t bits[kBlock];
  float fold[kBlock];
  std::memcpy(bits, w, sizeof bits);
  for (int64_t i = 0; i < kBlock; ++i) bits[i] &= -static_cast<int32_t>(x[i] >= threshold);
  std::memcpy(fold, bits, sizeof fold);
  for (int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) fold[i] += fold[i + half];
  }
  return fold[0];
}

Measure measure_count(const SamplerWorkspace& ws, float threshold) {
  Measure sum;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    if (ws.block_max[b] >= threshold) sum.count += count_block(ws.logits.data() + b * kBlock, threshold);
  }
  sum.reach = static_cast<double>(sum.count);
  return sum;
}

Measure measure_weight(const SamplerWorkspace& ws, float threshold) {
  Measure sum;
  for (int64_t b = 0; b < num_blocks(ws.vocab); ++b) {
    if (ws.block_max[b] < threshold) continue;
    const float* x = ws.logits.data() + b * kBlock;
    sum.count += count_block(x, threshold);
    sum.reach += weigh_block(x, ws.weights.data() + b * kBlock, threshold);
  }
  return sum;
}

// Tokens with logits >= above do not reach a target, `inner` is what they have; tokens with logits >= below do.
struct Band {
  float below;
  float above;
  Measure inner;
};

// Finds a band of logits in which a filter's target is reached, narrow enough to be sorted. `target` is less than what
// all tokens have. Each measurement reads only the blocks whose maximum lies above its threshold.
template <typename MeasureAt>
Band find_band(float largest, float first_step, double target, MeasureAt measure_at) {
  Band band = {largest, kInfinity, {}};
  Measure outer = measure_at(band.below);
  for (float step = first_step; outer.reach < target; step *= 2.0f) {
    band = {std::max(kLowest, largest - step), band.below, outer};
    outer = measure_at(band.below);
  }
  for (int i = 0; i < kMaxHalvings && band.above != kInfinity && outer.count - band.inner.count > kSmallBand; ++i) {
    const float middle = band.below + (band.above - band.below) * 0.5f;
    if (!(middle > band.below && middle < band.above)) break;
    const Measure half = measure_at(middle);
    if (half.reach < target) {
      band.above = middle;
      band.inner = half;
    } else {
      band.below = middle;
      outer = half;
    }
  }
  return band;
}

// Gathers the tokens with logits in [below, above), in order.
void collect(float below, float above, SamplerWorkspace& ws) {
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

// The last token that top-p keeps of the whole vocabulary.
Candidate find_top_p_border(float largest, const SamplingParams& params, SamplerWorkspace& ws) {
  const auto measure_at = [&ws](float threshold) { return measure_weight(ws, threshold); };
  const double total = measure_at(kLowest).reach;
  const double target = params.top_p * total;
  if (params.top_p >= 1.0f || target >= total) return {kLowest, std::numeric_limits<int32_t>::max()};
  const Band band = find_band(largest, params.temperature, target, measure_at);
  collect(band.below, band.above, ws);
  double sum = band.inner.reach;
  for (const Candidate& candidate : ws.candidates) {
    sum += ws.weights[candidate.index];
    if (sum >= target) return candidate;
  }
  return ws.candidates.back();  // the same sum in another order fell short of the target by its rounding
}

// Sets the weight of every token after `border` in the order, or lighter than `min_weight`, to 0. Fills block_mass with
// the sums of what is left and returns their total.
double drop_weights(const Candidate& border, float min_weight, SamplerWorkspace& ws) {
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
    ws.block_mass[b] = weigh_block(x, w, kLowest);
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

// Draws from the whole vocabulary, or from what top-p and min-p keep of it.
int32_t draw_from_all(float largest, const SamplingParams& params, double uniform, SamplerWorkspace& ws) {
  fill_weights(largest, params.temperature, ws);
  const double mass = drop_weights(find_top_p_border(largest, params, ws), params.min_p, ws);
  return walk(uniform * mass, ws);
}

// Leaves the top_k best tokens in ws.candidates, in order; fewer when fewer are finite.
void gather_top_k(float largest, int32_t top_k, SamplerWorkspace& ws) {
  const auto measure_at = [&ws](float threshold) { return measure_count(ws, threshold); };
  const bool is_all = top_k >= measure_at(kLowest).count;
  collect(is_all ? kLowest : find_band(largest, 1.0f, top_k, measure_at).below, kInfinity, ws);
  if (static_cast<int64_t>(ws.candidates.size()) > top_k) ws.candidates.resize(top_k);
}

// Replaces the logits of the candidates by their weights.
void weigh_candidates(float largest, float temperature, SamplerWorkspace& ws) {
  const float inverse = 1.0f / temperature;
  const int64_t count = static_cast<int64_t>(ws.candidates.size());
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t end = std::min(first + kBlock, count);
    float scaled[kBlock] = {};
    float weights[kBlock];
    for (int64_t i = first; i < end; ++i) scaled[i - first] = (ws.candidates[i].value - largest) * inverse;
    exp_block(scaled, weights);
    for (int64_t i = first; i < end; ++i) ws.candidates[i].value = weights[i - first];
  }
}

// Draws from the top_k best tokens, or from what top-p and min-p keep of them.
int32_t draw_from_top_k(float largest, const SamplingParams& params, double uniform, SamplerWorkspace& ws) {
  gather_top_k(largest, params.top_k, ws);
  weigh_candidates(largest, params.temperature, ws);
  double total = 0.0;
  for (const Candidate& candidate : ws.candidates) total += candidate.value;
  double sum = 0.0;
  size_t num_kept = 0;
  for (const Candidate& candidate : ws.candidates) {
    if (candidate.value == 0.0f || candidate.value < params.min_p || (params.top_p < 1.0f && sum >= params.top_p * total)) break;
    sum += candidate.value;
    ++num_kept;
  }
  ws.candidates.resize(num_kept);
  std::sort(ws.candidates.begin(), ws.candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
  double target = uniform * sum;
  for (const Candidate& candidate : ws.candidates) {
    if (target < candidate.value) return candidate.index;
    target -= candidate.value;
  }
  return ws.candidates.back().index;
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
  const double uniform = sample_uniform(params.seed, position);
  if (params.top_k > 0 && params.top_k < ws.vocab) return draw_from_top_k(largest, params, uniform, ws);
  return draw_from_all(largest, params, uniform, ws);
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
