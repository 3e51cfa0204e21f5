// Attention over shuffled blocks: against a double judge, and the same bits however rows and spans are grouped.
#pragma once

#include <algorithm>

#include "support.h"

namespace hotset {

// A cache of two layers and two kv heads, all NaN at first: what a row may not see must never reach its result.
class TestCache {
 public:
  TestCache(const KernelTable& kernels, int64_t context, int32_t dim, uint64_t seed) : dim_(dim), context_(context) {
    Random random(seed);
    const int64_t used = (context + kBlockTokens - 1) / kBlockTokens;
    for (int32_t id = 0; id < used + 3; ++id) blocks_.push_back(id);
    for (size_t i = blocks_.size() - 1; i > 0; --i)
      std::swap(blocks_[i], blocks_[random.below(static_cast<int64_t>(i) + 1)]);
    head_bytes_ = static_cast<int64_t>(kBlockTokens) * dim * 2;
    cache_.assign(blocks_.size() * block_stride() / 2, 0x7e00);
    blocks_.resize(used);
    keys_ = random.normals(context * dim);
    values_ = random.normals(context * dim);
    for (int64_t t = 0; t < context; ++t) {
      uint8_t* block = bytes() + blocks_[t / kBlockTokens] * block_stride();
      kernels.store_kv(&keys_[t * dim], &values_[t * dim], dim, t % kBlockTokens, block + key_offset(),
                       block + value_offset());
    }
  }
  int32_t dim() const { return dim_; }
  int64_t num_spans() const { return (context_ + kSpanTokens - 1) / kSpanTokens; }
  int64_t block_stride() const { return 8 * head_bytes_; }
  int64_t key_offset() const { return 5 * head_bytes_; }  // layer 1, head 1 of 2
  int64_t value_offset() const { return 7 * head_bytes_; }
  const int32_t* blocks() const { return blocks_.data(); }
  uint8_t* bytes() { return reinterpret_cast<uint8_t*>(cache_.data()); }
  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(cache_.data()); }
  float key(int64_t t, int32_t i) const { return static_cast<float>(half_value(half_of(keys_[t * dim_ + i]))); }
  float value(int64_t t, int32_t i) const { return static_cast<float>(half_value(half_of(values_[t * dim_ + i]))); }

  // The stored halves are the rounded rows, and no other half has changed.
  void check_stored(Test& test) const {
    std::vector<uint16_t> want(cache_.size(), 0x7e00);
    for (int64_t t = 0; t < context_; ++t) {
      const int64_t block = blocks_[t / kBlockTokens] * block_stride() / 2, r = t % kBlockTokens;
      for (int32_t i = 0; i < dim_; ++i) {
        want[block + key_offset() / 2 + (r / kKeyGroup * dim_ + i) * kKeyGroup + r % kKeyGroup] =
            half_of(keys_[t * dim_ + i]);
        want[block + value_offset() / 2 + r * dim_ + i] = half_of(values_[t * dim_ + i]);
      }
    }
    test.expect(want == cache_, "context %ld: stored keys and values", context_);
  }

 private:
  int32_t dim_;
  int64_t context_, head_bytes_;
  std::vector<int32_t> blocks_;
  std::vector<uint16_t> cache_;
  std::vector<float> keys_, values_;
};

struct Queries {
  std::vector<float> q;          // [rows][dim]
  std::vector<int64_t> visible;  // [rows]
  float scale;
};

// Rows [first, first + rows) over spans [span, span + num_spans): (m, l, o) per row.
inline std::vector<float> attend(const KernelTable& kernels, const TestCache& cache, const Queries& queries, int first,
                                 int rows, int64_t span, int64_t num_spans) {
  const int32_t dim = cache.dim();
  std::vector<float> q(rows * dim), scores(rows * kBlockTokens), values(rows * dim), part(rows * (dim + 2)),
      total(rows * (dim + 2));
  const AttendScratch scratch{q.data(), scores.data(), values.data(), part.data(), total.data()};
  std::vector<const float*> pointers;
  for (int r = 0; r < rows; ++r) pointers.push_back(queries.q.data() + (first + r) * dim);
  const AttendArgs args{pointers.data(),
                        queries.visible.data() + first,
                        rows,
                        dim,
                        queries.scale,
                        static_cast<int32_t>(span),
                        static_cast<int32_t>(num_spans),
                        cache.bytes(),
                        cache.blocks(),
                        cache.block_stride(),
                        cache.key_offset(),
                        cache.value_offset(),
                        &scratch};
  kernels.attend_rows(args);
  return total;
}

inline void judge_row(Test& test, const TestCache& cache, const float* q, int64_t visible, float scale,
                      const float* got) {
  const int32_t dim = cache.dim();
  std::vector<double> score(visible), out(dim, 0.0), size(dim, 0.0);
  double top = -1e300, sum = 0, largest = 0;
  for (int64_t t = 0; t < visible; ++t) {
    double dot = 0, magnitude = 0;
    for (int32_t i = 0; i < dim; ++i)
      dot += static_cast<double>(q[i]) * cache.key(t, i), magnitude += std::fabs(q[i] * cache.key(t, i));
    score[t] = dot * scale;
    top = std::max(top, score[t]);
    largest = std::max(largest, magnitude * scale);
  }
  for (int64_t t = 0; t < visible; ++t) sum += score[t] = std::exp(score[t] - top);
  for (int64_t t = 0; t < visible; ++t) {
    for (int32_t i = 0; i < dim; ++i)
      out[i] += score[t] / sum * cache.value(t, i), size[i] += score[t] / sum * std::fabs(cache.value(t, i));
  }
  for (int32_t i = 0; i < dim; ++i) {
    // A score is off by some units of its largest terms, and a weight by as much, relatively.
    const double bound = (4 * 0x1p-24 * largest + 2e-6) * size[i];
    test.expect(std::fabs(got[i] - out[i]) <= bound, "dim %d, %ld keys, channel %d: %.9g, judge %.9g, bound %.2g", dim,
                visible, i, got[i], out[i], bound);
  }
}

inline void test_context(Test& test, const KernelTable& kernels, int64_t context, int32_t dim, float sharpness,
                         bool is_judged) {
  constexpr int kRows = kMaxAttendRows;
  const TestCache cache(kernels, context, dim, static_cast<uint64_t>(context + dim));
  cache.check_stored(test);
  Random random(static_cast<uint64_t>(context * 3 + dim));
  Queries queries{random.normals(kRows * dim), {}, sharpness / std::sqrt(static_cast<float>(dim))};
  // Sixteen tokens of three heads: the later rows see up to 15 keys less, and some see one key only.
  for (int r = 0; r < kRows; ++r) queries.visible.push_back(r == 7 ? 1 : std::max<int64_t>(1, context - 15 + r / 3));
  const int64_t ld = dim + 2;
  std::vector<float> alone, split(kRows * ld), out(kRows * dim);
  for (int r = 0; r < kRows; ++r) {
    const std::vector<float> row = attend(kernels, cache, queries, r, 1, 0, cache.num_spans());
    alone.insert(alone.end(), row.begin(), row.end());
    kernels.attend_finish(row.data(), dim, out.data() + r * dim);
  }
  test.hash(out.data(), kRows * dim);
  test.hash(alone.data(), kRows * ld);
  if (is_judged) {
    for (int r : {0, 7, 20, 47})
      judge_row(test, cache, &queries.q[r * dim], queries.visible[r], queries.scale, &out[r * dim]);
  }
  for (int size : {2, 3, 4, 5, 6, 7, 9, 12, 13, 24, 31, 48}) {
    for (int first = 0; first < kRows; first += size) {
      const int rows = std::min(size, kRows - first);
      const std::vector<float> got = attend(kernels, cache, queries, first, rows, 0, cache.num_spans());
      test.expect(same_bits(got.data(), alone.data() + first * ld, rows * ld),
                  "dim %d, %ld keys: rows %d to %d together differ", dim, context, first, first + rows);
    }
  }
  for (int64_t span = 0; span < cache.num_spans(); ++span) {
    const std::vector<float> part = attend(kernels, cache, queries, 0, kRows, span, 1);
    for (int r = 0; r < kRows; ++r) kernels.attend_merge(split.data() + r * ld, part.data() + r * ld, dim);
  }
  test.expect(same_bits(split.data(), alone.data(), kRows * ld), "dim %d, %ld keys: spans apart differ", dim, context);
}

inline void test_attention(Tests& tests, const KernelTable& kernels) {
  Test test("attention", true), sharp("attention, scores far apart", true), dims("attention, head sizes", true);
  for (int64_t context : {1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 2500})
    test_context(test, kernels, context, 64, 1.0f, true);
  for (int64_t context : {17, 300, 1300}) test_context(sharp, kernels, context, 64, 60.0f, true);
  for (int32_t dim : {16, 32, 48, 80, 96, 128, 192, 256, 512}) test_context(dims, kernels, 270, dim, 1.0f, true);
  tests.push_back(test);
  tests.push_back(sharp);
  tests.push_back(dims);
}

}  // namespace hotset
