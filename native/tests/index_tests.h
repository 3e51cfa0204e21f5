// The indexer: Hadamard transform, e2m1 rows and queries, scores of heads, selection.
#pragma once

#include "product_tests.h"

namespace hotset {

inline void test_hadamard(Tests& tests, const KernelTable& kernels) {
  Test test("Hadamard transform", true);
  for (int32_t width : {16, 32, 128, 256}) {
    Random random(static_cast<uint64_t>(width));
    const std::vector<float> x = random.normals(width);
    std::vector<float> y = x;
    kernels.hadamard(y.data(), width);
    test.hash(y.data(), width);
    for (int32_t i = 0; i < width; ++i) {
      double want = 0, size = 0;
      for (int32_t j = 0; j < width; ++j) {
        want += (__builtin_popcount(static_cast<unsigned>(i & j)) % 2 != 0 ? -1.0 : 1.0) * x[j];
        size += std::fabs(x[j]);
      }
      const double norm = std::sqrt(static_cast<double>(width));
      test.expect(test.is_near(y[i] - want / norm, 1e-6 * size / norm, size / norm),
                  "width %d at %d: %.9g, judge %.9g", width, i, y[i], want / norm);
    }
  }
  tests.push_back(test);
}

// e2m1 of 32 numbers: values after rounding, by the nearest of all sixteen (ties to the even code).
inline std::vector<double> judged_e2m1(const float* x, int* exponent) {
  double top = 6 * 0x1p-126;
  for (int i = 0; i < 32; ++i) top = std::max(top, std::fabs(static_cast<double>(x[i])));
  int scale = -127;
  while (std::ldexp(6.0, scale) < top) ++scale;
  std::vector<double> out;
  for (int i = 0; i < 32; ++i) {
    const double v = std::ldexp(std::fabs(static_cast<double>(x[i])), -scale);
    int best = 0;
    for (int code = 1; code < 8; ++code) {
      const double gain = std::fabs(v - e2m1_value(best)) - std::fabs(v - e2m1_value(code));
      if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
    }
    out.push_back(std::copysign(std::ldexp(e2m1_value(best), scale), x[i]));
  }
  *exponent = scale;
  return out;
}

inline std::vector<float> index_row(int32_t width, int64_t variant, Random& random) {
  std::vector<float> x = random.normals(width, variant % 3 == 1 ? 1e-3f : 1.0f);
  for (int32_t i = 0; i < width; ++i) {
    if (variant % 5 == 4) x[i] = 0.0f;
    if (variant % 5 == 3) x[i] = i % 32 == 0 ? 6.0f : 0.25f * static_cast<float>(random.below(49) - 24);  // ties
    if (variant % 5 == 2 && i % 32 < 2) x[i] = 1e-42f;
  }
  return x;
}

// Tiles of rows and query heads, and what they are as numbers.
struct IndexCase {
  int64_t num_rows, num_heads;
  int32_t width;
  std::vector<uint8_t> tiles;
  std::vector<std::vector<double>> rows, heads;
  std::vector<int8_t> q;
  std::vector<float> d, weights;
  std::vector<int32_t> terms;
  Act act{};

  IndexCase(Test& test, const KernelTable& kernels, int64_t num_rows, int64_t num_heads, int32_t width)
      : num_rows(num_rows), num_heads(num_heads), width(width), q(num_heads * width), d(num_heads * width / 32),
        terms(num_heads * width / 32) {
    Random random(static_cast<uint64_t>(num_rows * 100 + num_heads + width));
    const int64_t bytes = tile_bytes(kMXFP4, width);
    tiles.resize((num_rows + 15) / 16 * bytes, 0);
    for (int64_t r = 0; r < num_rows; ++r) {
      const std::vector<float> x = index_row(width, r, random);
      kernels.store_index_row(x.data(), width, tiles.data() + r / 16 * bytes, static_cast<int32_t>(r % 16));
      rows.push_back(judge(x));
      std::vector<float> back(width);
      kernels.unpack_row(kMXFP4, tiles.data() + r / 16 * bytes, static_cast<int>(r % 16), width, back.data());
      for (int32_t i = 0; i < width; ++i)
        test.expect(back[i] == rows[r][i], "row %ld channel %d: %.9g is %.9g, want %.9g", r, i, x[i], back[i],
                    rows[r][i]);
    }
    test.hash(tiles.data(), static_cast<int64_t>(tiles.size()));
    act.q = q.data(), act.d = d.data(), act.terms = terms.data();
    for (int64_t h = 0; h < num_heads; ++h) {
      const std::vector<float> x = index_row(width, h + 1, random);
      kernels.pack_index_query(x.data(), width, num_heads, h, act);
      heads.push_back(judge(x));
      weights.push_back(0.1f * random.normal());
    }
    test.hash(q.data(), static_cast<int64_t>(q.size()));
  }
  std::vector<double> judge(const std::vector<float>& x) const {
    std::vector<double> out;
    for (int32_t b = 0; b < width; b += 32) {
      int exponent;
      const std::vector<double> block = judged_e2m1(x.data() + b, &exponent);
      out.insert(out.end(), block.begin(), block.end());
    }
    return out;
  }
  void check_scores(Test& test, const KernelTable& kernels) const {
    const int64_t num_tiles = (num_rows + 15) / 16;
    std::vector<float> scores(16 * num_tiles), apart = scores;
    kernels.index_scores(tiles.data(), num_tiles, width, act, num_heads, weights.data(), scores.data());
    test.hash(scores.data(), 16 * num_tiles);
    for (int64_t r = 0; r < num_rows; ++r) {
      double want = 0, size = 0;
      for (int64_t h = 0; h < num_heads; ++h) {
        double dot = 0, magnitude = 0;
        for (int32_t i = 0; i < width; ++i) {
          dot += rows[r][i] * heads[h][i], magnitude += std::fabs(rows[r][i] * heads[h][i]);
        }
        want += weights[h] * std::max(dot, 0.0), size += std::fabs(weights[h]) * magnitude;
      }
      test.expect(test.is_near(scores[r] - want, 1e-6 * size, size + 1e-30),
                  "%ld rows, %ld heads, row %ld: %.9g, judge %.9g", num_rows, num_heads, r, scores[r], want);
    }
    for (int64_t t = 0; t < num_tiles; ++t) {
      kernels.index_scores(tiles.data() + t * tile_bytes(kMXFP4, width), 1, width, act, num_heads, weights.data(),
                           apart.data() + 16 * t);
    }
    test.expect(same_bits(scores.data(), apart.data(), 16 * num_tiles), "%ld rows: tiles one by one differ", num_rows);
  }
};

inline void test_selection(Tests& tests, const KernelTable& kernels) {
  Test test("selection", true);
  for (int64_t n : {0, 1, 15, 16, 17, 64, 1000}) {
    Random random(static_cast<uint64_t>(n));
    std::vector<float> scores = random.normals(n), got(n + 1, 77.0f);
    for (int64_t i = 0; i < n; i += 7) scores[i] = i % 14 == 0 ? 0.5f : NAN;
    for (float threshold : {-INFINITY, -1.0f, 0.5f, 2.0f, INFINITY}) {
      std::vector<int32_t> index(n + 1, -1);
      const int64_t count = kernels.select_above(scores.data(), n, threshold, 100, got.data(), index.data());
      int64_t want = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (!(scores[i] >= threshold)) continue;
        test.expect(want < count && index[want] == 100 + i && got[want] == scores[i], "n %ld: place %ld", n, i);
        ++want;
      }
      test.expect(count == want && index[n] == -1, "n %ld: %ld chosen, want %ld", n, count, want);
    }
  }
  tests.push_back(test);
}

inline void test_index(Tests& tests, const KernelTable& kernels) {
  test_hadamard(tests, kernels);
  Test test("index rows and scores", true);
  for (int32_t width : {32, 128, 160}) {
    for (int64_t num_heads : {1, 2, 3, 7, 16, 17, 64}) {
      for (int64_t num_rows : {1, 15, 16, 17, 80})
        IndexCase(test, kernels, num_rows, num_heads, width).check_scores(test, kernels);
    }
  }
  tests.push_back(test);
  test_selection(tests, kernels);
}

}  // namespace hotset
