// Rows that are key and value in one: their formats, attention over tiles of them, pooling, head norms.
#pragma once

#include <algorithm>

#include "product_tests.h"

namespace hotset {

// What a row becomes: channels before `plain` in groups of 64 as e4m3 with the smallest power-of-two scale that fits the
// BF16 values (largest at least 1e-4), the others BF16.
struct JudgedRow {
  std::vector<double> values;
  std::vector<uint8_t> codes, scales;
};
inline JudgedRow judged_row(RowKind kind, const float* x, int32_t width, int32_t plain) {
  JudgedRow out;
  const float most = kind == RowKind::kBF16Exact ? 3.3895313892515355e38f : 0x1.cp127f;  // largest that fits
  for (int32_t i = 0; i < width; ++i)
    out.values.push_back(bf16_value(bf16_of(std::fmin(std::fmax(x[i], -most), most))));
  if (kind == RowKind::kBF16Exact) return out;
  for (int32_t first = 0; first < plain; first += 64) {
    const int32_t end = std::min(first + 64, plain);
    double top = 1e-4f;
    for (int32_t i = first; i < end; ++i) top = std::max(top, std::fabs(out.values[i]));
    int scale = -127;
    while (std::ldexp(448.0, scale) < top) ++scale;
    out.scales.push_back(static_cast<uint8_t>(scale + 127));
    for (int32_t i = first; i < end; ++i) {
      const double v = std::ldexp(out.values[i], -scale);
      int e = -6;
      double units = std::nearbyint(std::fabs(v) * 0x1p9);
      if (std::fabs(v) >= 0x1p-6) units = round_to(v, 4, -6, &e);
      const int code = std::fabs(v) < 0x1p-6 ? static_cast<int>(units) : (e + 6) * 8 + static_cast<int>(units);
      out.codes.push_back(static_cast<uint8_t>(code | (std::signbit(v) ? 0x80 : 0)));
      out.values[i] = std::ldexp(e4m3_value(out.codes.back()), scale);
    }
  }
  return out;
}

inline std::vector<float> row_of(int32_t width, int variant, Random& random) {
  std::vector<float> x = random.normals(width, variant == 1 ? 1e-6f : variant == 2 ? 1e4f : 1.0f);
  const float special[] = {INFINITY, -INFINITY, 3.3e38f, 1e-40f, -0.0f, 0.0f, 448.0f, 449.0f, 0x1.88p-9f};
  for (int32_t i = 0; i < width; ++i) {
    if (variant == 3) x[i] = 0.0f;
    if (variant == 4 && random.below(8) == 0) x[i] = special[random.below(9)];
    // Ties between neighbours of e4m3, normal and subnormal, under a scale of 1.
    if (variant == 5) x[i] = i % 64 == 0 ? 448.0f : static_cast<float>(random.below(33)) * 0x1p-10f;
    if (variant == 6) x[i] = i % 64 == 0 ? -448.0f : static_cast<float>(16 + random.below(17)) * 4.0f;
  }
  return x;
}

// Room for one cached row of any kind.
struct StoredRow {
  std::vector<uint8_t> data, scales;
  StoredRow(const KernelTable& kernels, RowKind kind, const std::vector<float>& x, int32_t plain) {
    const int32_t width = static_cast<int32_t>(x.size());
    data.resize(kind == RowKind::kFP8 ? plain + 2 * (width - plain) : 2 * width);
    scales.resize((plain + 63) / 64 + 1, 0xee);
    kernels.encode_row[static_cast<int>(kind)](x.data(), width, plain, data.data(), scales.data());
  }
};

inline void check_encoded(Test& test, const KernelTable& kernels, RowKind kind, const std::vector<float>& x,
                          int32_t plain) {
  const int32_t width = static_cast<int32_t>(x.size());
  const StoredRow row(kernels, kind, x, plain);
  const JudgedRow want = judged_row(kind, x.data(), width, plain);
  test.hash(row.data.data(), static_cast<int64_t>(row.data.size()));
  const bool is_fp8 = kind == RowKind::kFP8;
  for (int32_t i = 0; i < width; ++i) {
    if (is_fp8 && i < plain) {
      test.expect(row.data[i] == want.codes[i], "%.9g is %02x, want %02x", x[i], row.data[i], want.codes[i]);
      continue;
    }
    const double got = bf16_value(u16_at(&row.data[is_fp8 ? plain + 2 * (i - plain) : 2 * i]));
    test.expect(got == want.values[i], "kind %d channel %d: %.9g is %.9g, want %.9g", static_cast<int>(kind), i, x[i],
                got, want.values[i]);
  }
  for (size_t g = 0; is_fp8 && g < want.scales.size(); ++g)
    test.expect(row.scales[g] == want.scales[g], "scale %d, want %d", row.scales[g], want.scales[g]);
  test.expect(row.scales.back() == (is_fp8 ? 0 : 0xee), "byte after the scales: %d", row.scales.back());
}

// A tile of 64 rows, of which only [first, last) are there.
struct TestTile {
  std::vector<StoredRow> rows;
  std::vector<JudgedRow> judged;
  std::vector<uint16_t> keys, values;
  int32_t dim, plain, first, last;
  TestTile(const KernelTable& kernels, RowKind kind, int32_t dim, int32_t plain, int32_t first, int32_t last,
           uint64_t seed)
      : keys(dim * kTileKeys, 0x7f80), values(keys), dim(dim), plain(plain), first(first), last(last) {
    Random random(seed);
    AttendTile tile{};
    tile.first = first, tile.last = last;
    for (int r = 0; r < kTileKeys; ++r) {
      const std::vector<float> x = row_of(dim, r % 8 == 7 ? 3 : 0, random);
      rows.emplace_back(kernels, kind, x, plain);
      judged.push_back(judged_row(kind, x.data(), dim, plain));
      if (r < first || r >= last) continue;
      tile.data[r] = rows[r].data.data(), tile.scales[r] = rows[r].scales.data();
    }
    kernels.expand_tile[static_cast<int>(kind)](tile, dim, plain, keys.data(), values.data());
  }
  double value(int r, int32_t i) const { return r < first || r >= last ? 0.0 : judged[r].values[i]; }
  void check(Test& test) const {
    for (int r = 0; r < kTileKeys; ++r)
      for (int32_t i = 0; i < dim; ++i) {
        const uint16_t k = keys[(i / 2 * kTileKeys + r) * 2 + i % 2], v = values[(r / 2 * dim + i) * 2 + r % 2];
        test.expect(bf16_value(k) == value(r, i), "dim %d row %d channel %d: key %04x", dim, r, i, k);
        test.expect(v == k, "dim %d row %d channel %d: value %04x, key %04x", dim, r, i, v, k);
      }
  }
};

inline void test_encode_rows(Tests& tests, const KernelTable& kernels) {
  const char* names[] = {"rows as FP8", "rows as BF16 of FP8", "rows as BF16"};
  std::vector<std::vector<uint16_t>> keys;
  for (RowKind kind : {RowKind::kFP8, RowKind::kBF16, RowKind::kBF16Exact}) {
    Test test(names[static_cast<int>(kind)], true);
    for (const auto& [width, plain] : {std::pair{512, 448}, {128, 64}, {64, 48}, {16, 0}, {160, 144}}) {
      Random random(static_cast<uint64_t>(width));
      for (int variant = 0; variant < 7; ++variant)
        check_encoded(test, kernels, kind, row_of(width, variant, random), plain);
      for (const auto& [first, last] : {std::pair{0, 64}, {1, 64}, {0, 1}, {17, 18}, {30, 63}, {5, 5}}) {
        const TestTile tile(kernels, kind, width, plain, first, last, static_cast<uint64_t>(width + first));
        tile.check(test);
        test.hash(tile.keys.data(), static_cast<int64_t>(tile.keys.size()));
        if (kind == RowKind::kFP8) keys.push_back(tile.keys);
        if (kind != RowKind::kBF16) continue;
        test.expect(tile.keys == keys.front(), "width %d: BF16 and FP8 rows differ in bits", width);
        keys.erase(keys.begin());
      }
    }
    tests.push_back(test);
  }
}

// Queries over two tiles, each with its own range of rows.
class TileQueries {
 public:
  TileQueries(const KernelTable& kernels, RowKind kind, int32_t dim, int32_t plain, int32_t num_rows, float sharpness,
              uint64_t seed)
      : kernels_(kernels), scale_(sharpness / std::sqrt(static_cast<float>(dim))), dim_(dim) {
    tiles_.emplace_back(kernels, kind, dim, plain, 0, 64, seed);
    tiles_.emplace_back(kernels, kind, dim, plain, 3, 50, seed + 1);
    Random random(seed + 2);
    q_ = random.normals(static_cast<int64_t>(num_rows) * dim);
    for (int32_t r = 0; r < num_rows; ++r) {
      // Whole tiles, one row, none, and anything.
      const int kind_of = r % 5;
      const auto a = static_cast<int32_t>(random.below(65)), b = static_cast<int32_t>(random.below(65));
      ranges_.push_back({kind_of == 0 ? 0 : kind_of == 1 ? 63 : kind_of == 2 ? 9 : std::min(a, b),
                         kind_of == 0 ? 64 : kind_of == 1 ? 64 : kind_of == 2 ? 9 : std::max(a, b)});
    }
  }
  int32_t num_rows() const { return static_cast<int32_t>(ranges_.size()); }
  int32_t dim() const { return dim_; }
  // The part of its range that query r sees in tile i. In the second tile queries see only rows that are there.
  std::pair<int32_t, int32_t> seen(int32_t r, int i) const {
    const auto [first, last] = ranges_[r];
    const int32_t from = std::max(first, tiles_[i].first);
    return {from, std::max(std::min(last, tiles_[i].last), from)};
  }
  TestTile& tile(int i) { return tiles_[i]; }

  // Accumulators of rows [begin, end) after both tiles.
  std::vector<float> run(int32_t begin, int32_t end) const {
    const int32_t count = end - begin;
    std::vector<const float*> pointers;
    for (int32_t r = begin; r < end; ++r) pointers.push_back(q_.data() + r * dim_);
    std::vector<uint16_t> packed(count * dim_);
    kernels_.pack_tile_queries(pointers.data(), count, dim_, scale_, packed.data());
    std::vector<float> acc(count * (dim_ + 2)), scratch(tile_attend_scratch(count, dim_));
    for (int32_t r = 0; r < count; ++r) acc[r * (dim_ + 2) + 1] = 0.0f;
    for (int i = 0; i < 2; ++i) {
      std::vector<int32_t> first, last;
      for (int32_t r = begin; r < end; ++r) first.push_back(seen(r, i).first), last.push_back(seen(r, i).second);
      kernels_.attend_tile({packed.data(), count, dim_, first.data(), last.data(), tiles_[i].keys.data(),
                            tiles_[i].values.data(), acc.data(), scratch.data()});
    }
    return acc;
  }
  void judge(Test& test, int32_t r, float sink, const float* got) const {
    std::vector<double> scores, out(dim_, 0.0), size(dim_, 0.0), query(dim_);
    std::vector<std::pair<int, int>> rows;
    double largest = 0, top = sink, sum = 0;
    for (int32_t i = 0; i < dim_; ++i) query[i] = bf16_value(bf16_of(q_[r * dim_ + i] * scale_));
    for (int t = 0; t < 2; ++t)
      for (int32_t row = seen(r, t).first; row < seen(r, t).second; ++row) {
        double score = 0, magnitude = 0;
        for (int32_t i = 0; i < dim_; ++i) {
          score += query[i] * tiles_[t].value(row, i), magnitude += std::fabs(query[i] * tiles_[t].value(row, i));
        }
        rows.push_back({t, row}), scores.push_back(score);
        top = std::max(top, score), largest = std::max(largest, magnitude);
      }
    for (double& s : scores) sum += s = std::exp(s - top);
    sum += rows.empty() ? 1 : std::exp(sink - top);
    for (size_t j = 0; j < rows.size(); ++j)
      for (int32_t i = 0; i < dim_; ++i) {
        const double v = tiles_[rows[j].first].value(rows[j].second, i);
        out[i] += scores[j] / sum * v, size[i] += scores[j] / sum * std::fabs(v);
      }
    for (int32_t i = 0; i < dim_; ++i) {
      const double bound = (4 * 0x1p-24 * largest + 2e-6 + 0x1p-8) * size[i] + 1e-37;
      test.expect(test.is_near(got[i] - out[i], bound, size[i] + 1e-30),
                  "dim %d query %d channel %d: %.9g, judge %.9g, bound %.2g", dim_, r, i, got[i], out[i], bound);
    }
  }

 private:
  const KernelTable& kernels_;
  float scale_;
  int32_t dim_;
  std::vector<TestTile> tiles_;
  std::vector<float> q_;
  std::vector<std::pair<int32_t, int32_t>> ranges_;
};

inline void test_tile_queries(Test& test, const KernelTable& kernels, TileQueries& queries) {
  const int32_t num_rows = queries.num_rows(), dim = queries.dim(), ld = dim + 2;
  std::vector<float> alone;
  for (int32_t r = 0; r < num_rows; ++r) {
    const std::vector<float> acc = queries.run(r, r + 1);
    alone.insert(alone.end(), acc.begin(), acc.end());
    const float sinks[] = {-2.0f, 0.0f, 3.0f, 500.0f, -500.0f};
    std::vector<float> out(dim);
    kernels.attend_finish_sink(acc.data(), dim, sinks[r % 5], out.data());
    test.hash(out.data(), dim);
    queries.judge(test, r, sinks[r % 5], out.data());
  }
  // An accumulator that has seen nothing holds nothing but its l.
  const auto same = [&](const float* a, const float* b) {
    return a[1] == 0.0f ? b[1] == 0.0f : same_bits(a, b, ld);
  };
  for (int32_t size : {2, 3, 5, 7, 8, 9, 13, 16, 31, 64}) {
    for (int32_t begin = 0; begin < num_rows; begin += size) {
      const std::vector<float> acc = queries.run(begin, std::min(begin + size, num_rows));
      for (int32_t r = begin; r < std::min(begin + size, num_rows); ++r)
        test.expect(same(&alone[r * ld], &acc[(r - begin) * ld]), "dim %d: query %d of %d together differs", dim, r,
                    size);
    }
  }
  // Rows of a tile that a query does not see may hold any finite number.
  for (int32_t r = 0; r < num_rows; r += 3) {
    for (int i = 0; i < 2; ++i) {
      TestTile& tile = queries.tile(i);
      const std::vector<uint16_t> keys = tile.keys, values = tile.values;
      for (int row = 0; row < kTileKeys; ++row) {
        if (row >= queries.seen(r, i).first && row < queries.seen(r, i).second) continue;
        for (int32_t c = 0; c < dim; ++c) {
          tile.keys[(c / 2 * kTileKeys + row) * 2 + c % 2] = static_cast<uint16_t>(0x4f00 + c);
          tile.values[(row / 2 * dim + c) * 2 + row % 2] = static_cast<uint16_t>(0x7f7f ^ (c & 1) << 15);
        }
      }
      test.expect(same(&alone[r * ld], queries.run(r, r + 1).data()), "dim %d: query %d sees hidden rows", dim, r);
      tile.keys = keys, tile.values = values;
    }
  }
}

inline void test_attend_tiles(Tests& tests, const KernelTable& kernels) {
  Test test("attention over tiles of rows", false);
  for (const auto& [dim, plain] : {std::pair{512, 448}, {16, 0}, {48, 32}, {128, 64}}) {
    for (RowKind kind : {RowKind::kFP8, RowKind::kBF16Exact}) {
      TileQueries queries(kernels, kind, dim, plain, dim == 512 ? 64 : 21, 1.0f, static_cast<uint64_t>(dim));
      test_tile_queries(test, kernels, queries);
    }
  }
  TileQueries sharp(kernels, RowKind::kFP8, 128, 64, 17, 40.0f, 5);
  test_tile_queries(test, kernels, sharp);
  tests.push_back(test);
}

inline void test_pool(Tests& tests, const KernelTable& kernels) {
  Test test("pooling", true);
  for (int32_t width : {16, 128, 512}) {
    for (int32_t num_tokens : {1, 4, 8, 128}) {
      Random random(static_cast<uint64_t>(width + num_tokens));
      const std::vector<float> k = random.normals(num_tokens * width), ape = random.normals(num_tokens * width);
      const std::vector<float> g = random.normals(num_tokens * width, num_tokens == 8 ? 50.0f : 1.0f);
      std::vector<const float*> rows[3];
      for (int32_t t = 0; t < num_tokens; ++t) {
        rows[0].push_back(&k[t * width]), rows[1].push_back(&g[t * width]), rows[2].push_back(&ape[t * width]);
      }
      std::vector<float> out(width);
      kernels.compress_pool({rows[0].data(), rows[1].data(), rows[2].data(), num_tokens, width, out.data()});
      test.hash(out.data(), width);
      for (int32_t c = 0; c < width; ++c) {
        double top = -1e300, sum = 0, want = 0, size = 0;
        const auto score = [&](int32_t t) { return static_cast<double>(g[t * width + c]) + ape[t * width + c]; };
        for (int32_t t = 0; t < num_tokens; ++t) top = std::max(top, score(t));
        for (int32_t t = 0; t < num_tokens; ++t) sum += std::exp(score(t) - top);
        for (int32_t t = 0; t < num_tokens; ++t) {
          const double part = std::exp(score(t) - top) / sum * k[t * width + c];
          want += part, size += std::fabs(part);
        }
        // Scores are sums of floats up to 200: each is off by up to 2^-17.
        test.expect(test.is_near(out[c] - want, 2e-5 * size, size), "%d tokens channel %d: %.9g, judge %.9g",
                    num_tokens, c, out[c], want);
      }
    }
  }
  tests.push_back(test);
}

inline void test_head_norm(Tests& tests, const KernelTable& kernels) {
  Test test("head norm", true);
  for (int32_t dim : {16, 48, 128, 512}) {
    for (float size : {1.0f, 1e-4f}) {
      constexpr float kEps = 1e-6f;
      Random random(static_cast<uint64_t>(dim));
      const std::vector<float> x = random.normals(dim, size);
      std::vector<float> y = x;
      kernels.head_norm(y.data(), dim, kEps);
      test.hash(y.data(), dim);
      double sum = 0;
      for (float v : x) sum += static_cast<double>(v) * v;
      for (int32_t i = 0; i < dim; ++i) {
        const double want = x[i] / std::sqrt(sum / dim + kEps);
        test.expect(test.is_near(y[i] - want, 1e-6 * std::fabs(want), std::fabs(want)),
                    "dim %d at %d: %.9g, judge %.9g", dim, i, y[i], want);
      }
    }
  }
  tests.push_back(test);
}

}  // namespace hotset
