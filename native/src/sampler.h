// Choosing one token from one row of logits.
//
// Order of work, the same as in Hugging Face transformers:
//   penalties -> temperature -> top-k -> top-p -> min-p -> draw
// Candidates are ordered by (logit descending, index ascending) everywhere, so ties go to the lower index.
// Every filter keeps a prefix of that order, and the draw walks the kept tokens in rising index.
//
// The draw is a pure function of (seed, position): the same seed gives the same token at the same position of a
// sequence, whatever else is in the batch. Sums are made in a fixed order; with -ffp-contract=off they are the same
// on every instruction set.
#pragma once

#include <cstdint>
#include <vector>

namespace hotset {

struct SamplingParams {
  float temperature = 0.0f;         // 0: greedy, the filters below do not matter
  int32_t top_k = 0;                // keep the k largest; 0: off
  float top_p = 1.0f;               // keep the fewest whose share of what top-k left reaches p; 1: off
  float min_p = 0.0f;               // keep those with at least this share of the most likely one; 0: off
  float repetition_penalty = 1.0f;  // every token of prompt and output: logit / r when positive, logit * r otherwise
  float presence_penalty = 0.0f;    // subtracted once for every token of the output
  float frequency_penalty = 0.0f;   // subtracted once per occurrence in the output
  uint64_t seed = 0;
  int64_t num_prompt = 0;           // how many of the history's tokens are prompt
};

// What sample_token returns instead of a token: a NaN, +inf, or no finite logit at all.
constexpr int32_t kLogitsNotFinite = -1;

// Scratch memory for one vocabulary size. Nothing is allocated after construction. Not shared between threads.
class SamplerWorkspace {
 public:
  explicit SamplerWorkspace(int64_t vocab);

  struct Candidate {
    float value;
    int32_t index;
  };

  int64_t vocab;
  std::vector<float> logits;            // penalised copy, padded to whole blocks with -inf
  std::vector<float> weights;           // exp((logit - max) / temperature), padded with 0
  std::vector<float> block_max;         // largest logit of each block
  std::vector<double> block_mass;       // kept weight of each block
  std::vector<uint32_t> counts;         // occurrences in the history; all 0 between calls
  std::vector<Candidate> candidates;    // the band of logits in which a filter's border lies
};

// Returns the chosen token, or kLogitsNotFinite. `logits` is float32 [vocab]; `history` holds the tokens of the
// sequence so far, prompt first, each in [0, vocab); `position` is the place of the new token in its sequence.
int32_t sample_token(const float* logits, int64_t vocab, const SamplingParams& params, const int32_t* history,
                     int64_t num_history, uint64_t position, SamplerWorkspace& workspace);

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in place.
void philox4x32_10(uint32_t counter[4], const uint32_t key[2]);

// The uniform number in [0, 1), 53 bits, that decides the token at `position` under `seed`.
double sample_uniform(uint64_t seed, uint64_t position);

}  // namespace hotset
