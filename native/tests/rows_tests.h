// Rows that are key and value in one: their formats, attention over tiles of them, pooling, head norms.
#pragma once

#include <algorithm>

#include "product_tests.h"

namespace hotset {

// What a row becomes: BF16, of which the channels before `plain` e4m3 in groups of 64, or e2m1 in groups of 32.
struct JudgedRow {
  std::vector<double> values;
  std::vector<uint8_t> codes, scales;
};
inline JudgedRow judged_row(RowKind kind, const float* x, int32_t width, int32_t plain) {
  JudgedRow out;
  const bool is_e4m3 = kind != RowKind::kFP4;
  const int32_t size = is_e4m3 ? 64 : 32;
  // The largest number that fits.
  const float most = kind == RowKind::kBF16Exact ? 3.3895313892515355e38f : is_e4m3 ? 0x1.cp127f : 0x1.8p127f;
  for (int32_t i = 0; i < width; ++i)
    out.values.push_back(bf16_value(bf16_of(std::fmin(std::fmax(x[i], -most), most))));
  if (kind == RowKind::kBF16Exact) return out;
  for (int32_t first = 0; first < plain; first += size) {
    const auto begin = out.values.begin() + first, end = out.values.begin() + std::min(first + size, plain);
    const JudgedCodes group(is_e4m3, {begin, end});
    out.scales.push_back(static_cast<uint8_t>(group.exponent + 127));
    out.codes.insert(out.codes.end(), group.codes.begin(), group.codes.end());
    for (size_t i = 0; i < group.codes.size(); ++i) out.values[first + i] = group.value(i);
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
    // And of e2m1.
    if (variant == 7) x[i] = i % 32 == 0 ? 6.0f : 0.25f * static_cast<float>(random.below(49) - 24);
  }
  return x;
}

// Room for one cached row of any kind, and a byte behind each part.
struct StoredRow {
  int32_t data_bytes, scale_bytes = 0;
  std::vector<uint8_t> data, scales;
  StoredRow(const KernelTable& kernels, RowKind kind, const std::vector<float>& x, int32_t plain) {
    const int32_t width = static_cast<int32_t>(x.size());
    data_bytes = 2 * width;
    if (kind == RowKind::kFP8) data_bytes -= plain, scale_bytes = (plain + 63) / 64 + 1;
    if (kind == RowKind::kFP4) data_bytes -= plain / 2 * 3, scale_bytes = (plain + 511) / 512 * 16;
    data.resize(data_bytes + 1, 0xee);
    scales.resize(scale_bytes + 1, 0xee);
    kernels.encode_row[static_cast<int>(kind)](x.data(), width, plain, data.data(), scales.data());
  }
};

inline void check_encoded(Test& test, const KernelTable& kernels, RowKind kind, const std::vector<float>& x,
                          int32_t plain) {
  const int32_t width = static_cast<int32_t>(x.size());
  const StoredRow row(kernels, kind, x, plain);
  const JudgedRow want = judged_row(kind, x.data(), width, plain);
  test.hash(row.data.data(), static_cast<int64_t>(row.data.size()));
  test.hash(row.scales.data(), static_cast<int64_t>(row.scales.size()));
  const bool is_fp8 = kind == RowKind::kFP8, is_fp4 = kind == RowKind::kFP4, has_codes = is_fp8 || is_fp4;
  for (int32_t i = 0; i < width; ++i) {
    if (has_codes && i < plain) {
      const int code = is_fp8 ? row.data[i] : row.data[i / 2] >> 4 * (i % 2) & 15;
      test.expect(code == want.codes[i], "kind %d: %.9g is %02x, want %02x", static_cast<int>(kind), x[i], code,
                  want.codes[i]);
      continue;
    }
    const double got = bf16_value(u16_at(&row.data[row.data_bytes - 2 * (width - i)]));
    test.expect(got == want.values[i], "kind %d channel %d: %.9g is %.9g, want %.9g", static_cast<int>(kind), i, x[i],
                got, want.values[i]);
  }
  for (int32_t g = 0; g < row.scale_bytes; ++g) {
    const int scale = g < static_cast<int32_t>(want.scales.size()) ? want.scales[g] : 0;
    test.expect(row.scales[g] == scale, "kind %d: scale %d, want %d", static_cast<int>(kind), row.scales[g], scale);
  }
  test.expect(row.data.back() == 0xee && row.scales.back() == 0xee, "kind %d: bytes after the row: %02x, %02x",
              static_cast<int>(kind), row.data.back(), row.scales.back());
}

// A tile of 64 rows, of which only [first, last) are there.
struct TestTile {
  std::vector<StoredRow> rows;
  std::vector<JudgedRow> judged;
  AttendTile tile{};
  RowKind kind;
  int32_t dim, plain, first, last;
  TestTile(const KernelTable& kernels, RowKind kind, int32_t dim, int32_t plain, int32_t first, int32_t last,
           uint64_t seed)
      : kind(kind), dim(dim), plain(plain), first(first), last(last) {
    Random random(seed);
    tile.first = first, tile.last = last;
    for (int r = 0; r < kTileKeys; ++r) {
      const std::vector<float> x = row_of(dim, r % 8 == 7 ? 3 : 0, random);
      rows.emplace_back(kernels, kind, x, plain);
      judged.push_back(judged_row(kind, x.data(), dim, plain));
    }
    for (int r = first; r < last; ++r) tile.data[r] = rows[r].data.data(), tile.scales[r] = rows[r].scales.data();
  }
  double value(int r, int32_t i) const { return r < first || r >= last ? 0.0 : judged[r].values[i]; }
  void attend(const KernelTable& kernels, const uint16_t* q, int32_t count, const int32_t* from, const int32_t* to,
              const AttendTile* next, float* acc) const {
    std::vector<float> scratch(tile_attend_scratch(count));
    kernels.attend_tile[static_cast<int>(kind)](
        {&tile, next, (rows[0].data_bytes + 63) / 64, q, count, dim, plain, 1, from, to, acc, scratch.data()});
  }
  // What a query that sees one row alone comes to: the row's score, one, and the row itself, to the last bit.
  std::vector<float> check(Test& test, const KernelTable& kernels) const {
    Random random(static_cast<uint64_t>(dim));
    const std::vector<float> query = random.normals(dim);
    const float* q = query.data();
    std::vector<uint16_t> packed(dim);
    kernels.pack_tile_queries(&q, 1, dim, 1.0f, packed.data());
    std::vector<float> all;
    for (int32_t r = first; r < last; ++r) {
      const int32_t after = r + 1;
      std::vector<float> acc(dim + 2, 0.0f);
      attend(kernels, packed.data(), 1, &r, &after, r % 2 == 0 ? &tile : nullptr, acc.data());
      double score = 0, size = 0;
      for (int32_t i = 0; i < dim; ++i) {
        const double term = bf16_value(bf16_of(query[i])) * value(r, i);
        score += term, size += std::fabs(term);
        test.expect(acc[2 + i] == value(r, i), "dim %d row %d channel %d: %.9g", dim, r, i, acc[2 + i]);
      }
      test.expect(test.is_near(acc[0] - score, 1e-5 * size, size + 1e-30) && acc[1] == 1.0f,
                  "dim %d row %d: score %.9g, judge %.9g; sum %.9g", dim, r, acc[0], score, acc[1]);
      all.insert(all.end(), acc.begin(), acc.end());
    }
    return all;
  }
};

inline void test_encode_rows(Tests& tests, const KernelTable& kernels) {
  const char* names[] = {"rows as FP8", "rows as BF16 of FP8", "rows as BF16", "rows as FP4"};
  std::vector<std::vector<float>> seen;
  for (RowKind kind : {RowKind::kFP8, RowKind::kBF16, RowKind::kBF16Exact, RowKind::kFP4}) {
    Test test(names[static_cast<int>(kind)], true);
    for (const auto& [width, plain] : {std::pair{512, 448}, {128, 64}, {64, 48}, {16, 0}, {160, 144}}) {
      Random random(static_cast<uint64_t>(width));
      for (int variant = 0; variant < 8; ++variant)
        check_encoded(test, kernels, kind, row_of(width, variant, random), plain);
      for (const auto& [first, last] : {std::pair{0, 64}, {1, 64}, {0, 1}, {17, 18}, {30, 63}, {5, 5}}) {
        const TestTile tile(kernels, kind, width, plain, first, last, static_cast<uint64_t>(width + first));
        const std::vector<float> found = tile.check(test, kernels);
        if (kind == RowKind::kFP8) seen.push_back(found);
        if (kind != RowKind::kBF16) continue;
        test.expect(found == seen.front(), "width %d: BF16 and FP8 rows differ in bits", width);
        seen.erase(seen.begin());
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
    std::vector<float> acc(count * (dim_ + 2));
    for (int32_t r = 0; r < count; ++r) acc[r * (dim_ + 2) + 1] = 0.0f;
    for (int i = 0; i < 2; ++i) {
      std::vector<int32_t> first, last;
      for (int32_t r = begin; r < end; ++r) first.push_back(seen(r, i).first), last.push_back(seen(r, i).second);
      tiles_[i].attend(kernels_, packed.data(), count, first.data(), last.data(), i == 0 ? &tiles_[1].tile : nullptr,
                       acc.data());
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
  std::vector<float> numbers(dim);
  for (int32_t i = 0; i < dim; ++i) numbers[i] = (i % 2 == 0 ? 1.0f : -1.0f) * (1e30f + static_cast<float>(i) * 1e28f);
  const StoredRow wild(kernels, queries.tile(0).kind, numbers, queries.tile(0).plain);
  for (int32_t r = 0; r < num_rows; r += 3) {
    for (int i = 0; i < 2; ++i) {
      TestTile& tile = queries.tile(i);
      const AttendTile before = tile.tile;
      for (int row = tile.first; row < tile.last; ++row) {
        if (row >= queries.seen(r, i).first && row < queries.seen(r, i).second) continue;
        tile.tile.data[row] = wild.data.data(), tile.tile.scales[row] = wild.scales.data();
      }
      test.expect(same(&alone[r * ld], queries.run(r, r + 1).data()), "dim %d: query %d sees hidden rows", dim, r);
      tile.tile = before;
    }
  }
}

inline void test_attend_tiles(Tests& tests, const KernelTable& kernels) {
  Test test("attention over tiles of rows", false);
  for (const auto& [dim, plain] : {std::pair{512, 448}, {16, 0}, {48, 32}, {128, 64}}) {
    for (RowKind kind : {RowKind::kFP8, RowKind::kBF16Exact, RowKind::kFP4}) {
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
