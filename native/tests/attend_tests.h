// Attention over shuffled blocks: against a double judge, and the same bits however rows and spans are grouped.
#pragma once

#include <algorithm>

#include "support.h"

namespace hotset {

// A cache of two layers and two kv heads, full of what must never reach a result: NaN, or the largest number in the
// BF16 cache, where the unseen half of a pair of tokens is multiplied by zero.
class TestCache {
 public:
  TestCache(const KernelTable& kernels, CacheKind kind, int64_t context, int32_t dim, uint64_t seed)
      : kernels_(kernels), kind_(kind), dim_(dim), context_(context) {
    Random random(seed);
    const int64_t used = (context + kBlockTokens - 1) / kBlockTokens;
    for (int32_t id = 0; id < used + 3; ++id) blocks_.push_back(id);
    for (size_t i = blocks_.size() - 1; i > 0; --i) {
      std::swap(blocks_[i], blocks_[random.below(static_cast<int64_t>(i) + 1)]);
    }
    head_bytes_ = static_cast<int64_t>(kBlockTokens) * dim * 2;
    cache_.assign(blocks_.size() * block_stride() / 2, filler());
    blocks_.resize(used);
    keys_ = random.normals(context * dim);
    values_ = random.normals(context * dim);
    keys_[0] = 1e30f, values_[dim - 1] = -1e30f;  // F16 has no such numbers: they become its largest
    for (int64_t t = 0; t < context; ++t) {
      uint8_t* block = reinterpret_cast<uint8_t*>(cache_.data()) + blocks_[t / kBlockTokens] * block_stride();
      kernels.store_kv[static_cast<int>(kind)](&keys_[t * dim], &values_[t * dim], dim, t % kBlockTokens,
                                               block + key_offset(), block + value_offset());
    }
    for (float& x : keys_) x = static_cast<float>(value_of(rounded(x)));
    for (float& x : values_) x = static_cast<float>(value_of(rounded(x)));
  }
  const KernelTable& kernels() const { return kernels_; }
  CacheKind kind() const { return kind_; }
  int32_t dim() const { return dim_; }
  int64_t num_spans() const { return (context_ + kSpanTokens - 1) / kSpanTokens; }
  int64_t block_stride() const { return 8 * head_bytes_; }
  int64_t key_offset() const { return 5 * head_bytes_; }  // layer 1, head 1 of 2
  int64_t value_offset() const { return 7 * head_bytes_; }
  const int32_t* blocks() const { return blocks_.data(); }
  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(cache_.data()); }
  // As stored.
  float key(int64_t t, int32_t i) const { return keys_[t * dim_ + i]; }
  float value(int64_t t, int32_t i) const { return values_[t * dim_ + i]; }

  // The stored rows are the rounded ones, each in its place, and nothing else has changed.
  void check_stored(Test& test) const {
    std::vector<uint16_t> want(cache_.size(), filler());
    for (int64_t t = 0; t < context_; ++t) {
      uint16_t* block = want.data() + blocks_[t / kBlockTokens] * block_stride() / 2;
      for (int32_t i = 0; i < dim_; ++i) {
        block[key_offset() / 2 + key_place(t % kBlockTokens, i)] = rounded(key(t, i));
        block[value_offset() / 2 + value_place(t % kBlockTokens, i)] = rounded(value(t, i));
      }
    }
    test.expect(want == cache_, "context %ld: stored keys and values", context_);
  }

 private:
  uint16_t filler() const { return kind_ == CacheKind::kF16 ? 0x7e00 : 0x7f7f; }
  uint16_t rounded(float x) const {
    return kind_ == CacheKind::kBF16 ? bf16_of(x) : half_of(std::fmin(std::fmax(x, -65504.0f), 65504.0f));
  }
  double value_of(uint16_t bits) const { return kind_ == CacheKind::kBF16 ? bf16_value(bits) : half_value(bits); }
  int64_t key_place(int64_t r, int64_t i) const {
    const int64_t group = r / kKeyGroup * kKeyGroup * dim_, lane = r % kKeyGroup;
    return kind_ == CacheKind::kF16 ? group + i * kKeyGroup + lane
                                    : group + (i / 2 * kKeyGroup + lane) * 2 + i % 2;
  }
  int64_t value_place(int64_t r, int64_t i) const {
    return kind_ == CacheKind::kF16 ? r * dim_ + i : (r / 2 * dim_ + i) * 2 + r % 2;
  }

  const KernelTable& kernels_;
  CacheKind kind_;
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
inline std::vector<float> attend(const TestCache& cache, const Queries& queries, int first, int rows, int64_t span,
                                 int64_t num_spans) {
  const int32_t dim = cache.dim();
  std::vector<float> q(rows * dim), scores(rows * kBlockTokens), values(rows * dim), part(rows * (dim + 2)),
      total(rows * (dim + 2));
  const AttendScratch scratch{q.data(), scores.data(), values.data(), part.data(), total.data()};
  std::vector<const float*> pointers;
  for (int r = 0; r < rows; ++r) pointers.push_back(queries.q.data() + (first + r) * dim);
  AttendArgs args{};
  args.q = pointers.data(), args.visible = queries.visible.data() + first;
  args.rows = rows, args.head_dim = dim, args.scale = queries.scale;
  args.span_first = static_cast<int32_t>(span), args.num_spans = static_cast<int32_t>(num_spans);
  args.cache = cache.bytes(), args.blocks = cache.blocks(), args.block_stride = cache.block_stride();
  args.key_offset = cache.key_offset(), args.value_offset = cache.value_offset();
  args.scratch = &scratch;
  cache.kernels().attend_rows[static_cast<int>(cache.kind())](args);
  return total;
}

inline void judge_row(Test& test, const TestCache& cache, const float* q, int64_t visible, float scale,
                      const float* got) {
  const int32_t dim = cache.dim();
  const bool is_bf16 = cache.kind() == CacheKind::kBF16;
  std::vector<double> score(visible), out(dim, 0.0), size(dim, 0.0), query(dim);
  for (int32_t i = 0; i < dim; ++i) query[i] = is_bf16 ? bf16_value(bf16_of(q[i] * scale)) : q[i] * scale;
  double top = -1e300, sum = 0, largest = 0;
  for (int64_t t = 0; t < visible; ++t) {
    double magnitude = 0;
    for (int32_t i = 0; i < dim; ++i) {
      score[t] += query[i] * cache.key(t, i), magnitude += std::fabs(query[i] * cache.key(t, i));
    }
    top = std::max(top, score[t]);
    largest = std::max(largest, magnitude);
  }
  for (int64_t t = 0; t < visible; ++t) sum += score[t] = std::exp(score[t] - top);
  for (int64_t t = 0; t < visible; ++t) {
    for (int32_t i = 0; i < dim; ++i) {
      out[i] += score[t] / sum * cache.value(t, i), size[i] += score[t] / sum * std::fabs(cache.value(t, i));
    }
  }
  for (int32_t i = 0; i < dim; ++i) {
    // A score is off by some units of its largest terms, and a weight by as much, relatively; a BF16 weight is
    // rounded too.
    const double bound = (4 * 0x1p-24 * largest + 2e-6 + (is_bf16 ? 0x1p-8 : 0)) * size[i];
    test.expect(std::fabs(got[i] - out[i]) <= bound, "dim %d, %ld keys, channel %d: %.9g, judge %.9g, bound %.2g", dim,
                visible, i, got[i], out[i], bound);
  }
}

inline void check_groups(Test& test, const TestCache& cache, const Queries& queries, const std::vector<float>& alone) {
  constexpr int kRows = kMaxAttendRows;
  const int64_t ld = cache.dim() + 2;
  for (int size : {2, 3, 4, 5, 6, 7, 9, 12, 13, 24, 31, 48}) {
    for (int first = 0; first < kRows; first += size) {
      const int rows = std::min(size, kRows - first);
      const std::vector<float> got = attend(cache, queries, first, rows, 0, cache.num_spans());
      test.expect(same_bits(got.data(), alone.data() + first * ld, rows * ld),
                  "dim %d, %ld keys: rows %d to %d together differ", cache.dim(), queries.visible[first], first,
                  first + rows);
    }
  }
  std::vector<float> split(kRows * ld);
  for (int64_t span = 0; span < cache.num_spans(); ++span) {
    const std::vector<float> part = attend(cache, queries, 0, kRows, span, 1);
    for (int r = 0; r < kRows; ++r) {
      cache.kernels().attend_merge(split.data() + r * ld, part.data() + r * ld, cache.dim());
    }
  }
  test.expect(same_bits(split.data(), alone.data(), kRows * ld), "dim %d: spans apart differ", cache.dim());
}

inline void test_context(Test& test, const KernelTable& kernels, CacheKind kind, int64_t context, int32_t dim,
                         float sharpness) {
  constexpr int kRows = kMaxAttendRows;
  const TestCache cache(kernels, kind, context, dim, static_cast<uint64_t>(context + dim));
  cache.check_stored(test);
  Random random(static_cast<uint64_t>(context * 3 + dim));
  Queries queries{random.normals(kRows * dim), {}, sharpness / std::sqrt(static_cast<float>(dim))};
  // The first key has one huge number, which would leave nothing of all others.
  for (int r = 0; r < kRows; ++r) queries.q[r * dim] = 0.0f;
  // Sixteen tokens of three heads: the later rows see up to 15 keys less, and one row sees one key only.
  for (int r = 0; r < kRows; ++r) queries.visible.push_back(r == 7 ? 1 : std::max<int64_t>(1, context - 15 + r / 3));
  std::vector<float> alone, out(kRows * dim);
  for (int r = 0; r < kRows; ++r) {
    const std::vector<float> row = attend(cache, queries, r, 1, 0, cache.num_spans());
    alone.insert(alone.end(), row.begin(), row.end());
    kernels.attend_finish(row.data(), dim, out.data() + r * dim);
  }
  test.hash(out.data(), kRows * dim);
  test.hash(alone.data(), static_cast<int64_t>(alone.size()));
  for (int r : {0, 7, 20, 47}) {
    judge_row(test, cache, &queries.q[r * dim], queries.visible[r], queries.scale, &out[r * dim]);
  }
  check_groups(test, cache, queries, alone);
}

inline void test_attention(Tests& tests, const KernelTable& kernels) {
  for (CacheKind kind : {CacheKind::kF16, CacheKind::kBF16}) {
    const bool is_f16 = kind == CacheKind::kF16;
    const std::string name = is_f16 ? "attention, F16 cache" : "attention, BF16 cache";
    Test contexts(name, is_f16), sharp(name + ", scores far apart", is_f16), dims(name + ", head sizes", is_f16);
    for (int64_t context : {1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 2500}) {
      test_context(contexts, kernels, kind, context, 64, 1.0f);
    }
    for (int64_t context : {17, 300, 1300}) test_context(sharp, kernels, kind, context, 64, 60.0f);
    for (int32_t dim : {16, 32, 48, 80, 96, 128, 192, 256, 512}) test_context(dims, kernels, kind, 270, dim, 1.0f);
    tests.push_back(contexts);
    tests.push_back(sharp);
    tests.push_back(dims);
  }
}

}  // namespace hotset
