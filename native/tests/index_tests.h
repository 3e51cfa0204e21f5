// The indexer: Hadamard transform, rows and queries of every kind, scores of heads, selection.
#pragma once

#include <cfloat>

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

inline std::vector<float> index_row(int32_t width, int64_t variant, Random& random) {
  std::vector<float> x = random.normals(width, variant % 3 == 1 ? 1e-3f : 1.0f);
  for (int32_t i = 0; i < width; ++i) {
    if (variant % 5 == 4) x[i] = 0.0f;
    if (variant % 5 == 3) x[i] = i % 32 == 0 ? 6.0f : 0.25f * static_cast<float>(random.below(49) - 24);  // ties
    if (variant % 5 == 2 && i % 32 < 2) x[i] = 1e-42f;
  }
  return x;
}

// What rows and heads of a kind become.
inline std::vector<double> judged_index_row(IndexKind kind, const std::vector<float>& x) {
  std::vector<double> out;
  if (kind == IndexKind::kBF16Exact) {
    for (float v : x) out.push_back(bf16_value(bf16_of(v)));
    return out;
  }
  const size_t size = kind == IndexKind::kFP8 ? x.size() : 32;
  for (size_t first = 0; first < x.size(); first += size) {
    const JudgedCodes group(kind == IndexKind::kFP8, {x.begin() + first, x.begin() + first + size});
    for (size_t i = 0; i < size; ++i) out.push_back(group.value(i));
  }
  return out;
}

// Row `lane` of a tile.
inline std::vector<float> read_index_row(const KernelTable& kernels, IndexKind kind, const uint8_t* tile, int32_t width,
                                         int lane) {
  std::vector<float> out(width);
  if (kind != IndexKind::kFP8) {
    kernels.unpack_row(kind == IndexKind::kMXFP4 ? kMXFP4 : kBF16, tile, lane, width, out.data());
    return out;
  }
  std::vector<uint8_t> weights(fp8_header_bytes(width), 127);
  weights.insert(weights.end(), tile, tile + kTileRows * width);
  kernels.unpack_row(kFP8, weights.data(), lane, width, out.data());
  float scale;
  std::memcpy(&scale, tile + kTileRows * width + 4 * lane, 4);
  for (float& v : out) v *= scale;
  return out;
}

// Tiles of rows and query heads, and what they are as numbers.
struct IndexCase {
  IndexKind kind;
  int64_t num_rows, num_heads;
  int32_t width;
  std::vector<uint8_t> tiles;
  std::vector<std::vector<double>> rows, heads;
  std::vector<int8_t> q;
  std::vector<uint16_t> bf16;
  std::vector<float> d, weights;
  std::vector<int32_t> terms;
  Act act{};

  IndexCase(Test& test, const KernelTable& kernels, IndexKind kind, int64_t num_rows, int64_t num_heads, int32_t width)
      : kind(kind), num_rows(num_rows), num_heads(num_heads), width(width) {
    Random random(static_cast<uint64_t>(num_rows * 100 + num_heads + width));
    tiles.resize((num_rows + 15) / 16 * tile_bytes(), 0);
    for (int64_t r = 0; r < num_rows; ++r) {
      const std::vector<float> x = index_row(width, r, random);
      uint8_t* tile = tiles.data() + r / 16 * tile_bytes();
      kernels.store_index_row[at()](x.data(), width, tile, static_cast<int32_t>(r % 16));
      rows.push_back(judged_index_row(kind, x));
      const std::vector<float> back = read_index_row(kernels, kind, tile, width, static_cast<int>(r % 16));
      for (int32_t i = 0; i < width; ++i)
        test.expect(back[i] == rows[r][i], "row %ld channel %d: %.9g is %.9g, want %.9g", r, i, x[i], back[i],
                    rows[r][i]);
    }
    test.hash(tiles.data(), static_cast<int64_t>(tiles.size()));
    q.resize(num_heads * width), d.resize(q.size() / 32), terms.resize(q.size() / 32), bf16.resize(q.size());
    act.q = q.data(), act.d = d.data(), act.terms = terms.data(), act.bf16 = bf16.data();
    for (int64_t h = 0; h < num_heads; ++h) {
      const std::vector<float> x = index_row(width, h + 1, random);
      kernels.pack_index_query[at()](x.data(), width, num_heads, h, act);
      heads.push_back(judged_index_row(kind, x));
      weights.push_back(0.1f * random.normal());
    }
    test.hash(q.data(), static_cast<int64_t>(q.size()));
    test.hash(bf16.data(), static_cast<int64_t>(bf16.size()));
  }
  int at() const { return static_cast<int>(kind); }
  int64_t tile_bytes() const { return index_tile_bytes(kind, width); }
  void check_scores(Test& test, const KernelTable& kernels) const {
    const int64_t num_tiles = (num_rows + 15) / 16;
    // Integer products are exact but for a few roundings per 32 channels.
    const double roundings = static_cast<double>(kind == IndexKind::kMXFP4 ? 16 : width + num_heads + 2);
    std::vector<float> scores(16 * num_tiles), apart = scores;
    IndexHeads prepared{act, weights.data(), width, num_heads};
    kernels.prepare_index_heads[at()](prepared);
    kernels.index_scores[at()]({&prepared, tiles.data(), num_tiles, nullptr, scores.data()});
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
      test.expect(test.is_near(scores[r] - want, roundings * 0x1p-24 * size + 1e-37, size + 1e-30),
                  "%ld rows, %ld heads, row %ld: %.9g, judge %.9g", num_rows, num_heads, r, scores[r], want);
    }
    for (int64_t t = 0; t < num_tiles; ++t) {
      kernels.index_scores[at()]({&prepared, tiles.data() + t * tile_bytes(), 1, nullptr, apart.data() + 16 * t});
    }
    test.expect(same_bits(scores.data(), apart.data(), 16 * num_tiles), "%ld rows: tiles one by one differ", num_rows);
  }
};

// Rows that are not finite, or would not be after rounding, are kept finite.
inline void test_index_limits(Test& test, const KernelTable& kernels, IndexKind kind) {
  constexpr int32_t kWidth = 64;
  const double most = kind == IndexKind::kFP8 ? 0x1.cp127 : 3.3895313892515355e38;
  for (float x : {INFINITY, -INFINITY, FLT_MAX}) {
    std::vector<float> row(kWidth, 1.0f);
    row[5] = x;
    std::vector<uint8_t> tile(index_tile_bytes(kind, kWidth));
    kernels.store_index_row[static_cast<int>(kind)](row.data(), kWidth, tile.data(), 3);
    const float got = read_index_row(kernels, kind, tile.data(), kWidth, 3)[5];
    test.expect(got == std::copysign(most, x), "%g is %g", x, got);
  }
}

// Numbers of `width` channels whose groups of 32 have scales up to 2^spread apart; every third vector has the largest
// numbers that there are.
inline std::vector<float> scaled_channels(Random& random, int32_t width, int spread, int64_t number) {
  std::vector<float> x = random.normals(width);
  for (int32_t i = 0; i < width; ++i) {
    if (number % 3 == 0) x[i] = std::copysign(6.0f, x[i]);
    x[i] *= static_cast<float>(1 << (i / 32 + number) % (spread + 1));
  }
  return x;
}

// A row's score does not depend on the rows beside it: scales that are close together, of some rows of a tile or of all.
inline void test_common_scales(Tests& tests, const KernelTable& kernels) {
  Test test("index scores of any neighbours", true);
  constexpr int32_t kWidth = 128;
  constexpr int64_t kHeads = 32;
  const int mx = static_cast<int>(IndexKind::kMXFP4);
  Random random(3);
  std::vector<int8_t> q(kHeads * kWidth);
  std::vector<float> d(kHeads * kWidth / 32), weights(kHeads);
  std::vector<int32_t> terms(d.size());
  Act act{};
  act.q = q.data(), act.d = d.data(), act.terms = terms.data();
  for (int trial = 0; trial < 64; ++trial) {
    const int head_spread = trial % 5, row_spread = trial / 5 % 5;
    for (int64_t h = 0; h < kHeads; ++h) {
      kernels.pack_index_query[mx](scaled_channels(random, kWidth, head_spread, h).data(), kWidth, kHeads, h, act);
      weights[h] = random.normal();
    }
    IndexHeads heads{act, weights.data(), kWidth, kHeads};
    kernels.prepare_index_heads[mx](heads);
    std::vector<uint8_t> tile(tile_bytes(kMXFP4, kWidth));
    for (int32_t r = 0; r < 16; ++r)
      kernels.store_index_row[mx](scaled_channels(random, kWidth, row_spread, r).data(), kWidth, tile.data(), r);
    std::vector<float> alike(16), apart(16);
    kernels.index_scores[mx]({&heads, tile.data(), 1, nullptr, alike.data()});
    test.hash(alike.data(), 16);
    const int32_t odd = trial % 16;
    std::vector<float> x(kWidth, 0.0f);
    x[0] = 1e6f, x[40] = 1e-3f;
    kernels.store_index_row[mx](x.data(), kWidth, tile.data(), odd);
    kernels.index_scores[mx]({&heads, tile.data(), 1, tile.data(), apart.data()});
    for (int32_t r = 0; r < 16; ++r)
      test.expect(r == odd || same_bits(&alike[r], &apart[r], 1), "scales of heads %d, of rows %d apart, row %d: %.9g and %.9g",
                  head_spread, row_spread, r, alike[r], apart[r]);
  }
  tests.push_back(test);
}

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
  const char* names[] = {"MXFP4", "FP8", "BF16"};
  for (IndexKind kind : {IndexKind::kMXFP4, IndexKind::kFP8, IndexKind::kBF16Exact}) {
    const std::string name = names[static_cast<int>(kind)];
    Test rows("index rows as " + name, true), scores("index scores of " + name, kind == IndexKind::kMXFP4);
    for (int32_t width : {32, 128, 160}) {
      for (int64_t num_heads : {1, 2, 3, 7, 16, 17, 64}) {
        for (int64_t num_rows : {1, 15, 16, 17, 80})
          IndexCase(rows, kernels, kind, num_rows, num_heads, width).check_scores(scores, kernels);
      }
    }
    if (kind != IndexKind::kMXFP4) test_index_limits(rows, kernels, kind);
    tests.push_back(rows);
    tests.push_back(scores);
  }
  test_common_scales(tests, kernels);
  test_selection(tests, kernels);
}

}  // namespace hotset
