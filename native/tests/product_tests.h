// Products: every format against the judge, at every number of tokens, and the same bits for each of them.
#pragma once

#include <algorithm>

#include "judge.h"

namespace hotset {

// Exactly as many bytes as the layout in types.h says, so that a sanitizer sees one byte too many.
class PackedInput {
 public:
  PackedInput(const KernelTable& kernels, ActKind kind, const std::vector<float>& x, int64_t k, int64_t n) {
    act_ = Act{};
    if (is_q8(kind)) {
      q_.resize(n * k), d_.resize(n * k / 32), terms_.resize(n * k / term_inputs(kind));
      act_.q = q_.data(), act_.d = d_.data(), act_.terms = terms_.data();
    } else if (kind == ActKind::kBF16) {
      bf16_.resize(n * k), act_.bf16 = bf16_.data();
    } else {
      f32_.resize(n * k), act_.f32 = f32_.data();
    }
    const int64_t ld = (k + 15) / 16 * 16;
    for (int64_t t = 0; t < n; ++t) kernels.pack_act[static_cast<int>(kind)](x.data() + t * ld, k, n, t, act_);
  }
  const Act& act() const { return act_; }

 private:
  std::vector<int8_t> q_;
  std::vector<float> d_, f32_;
  std::vector<int32_t> terms_;
  std::vector<uint16_t> bf16_;
  Act act_;
};

// Input rows with the awkward ones in front: blocks of one value (the largest codes), then its negative, then
// a large row (a saturated gate), then zeros.
inline std::vector<float> input_rows(int64_t n, int64_t k, uint64_t seed) {
  Random random(seed);
  const int64_t ld = (k + 15) / 16 * 16;
  std::vector<float> x(n * ld, 0.0f);
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t i = 0; i < k; ++i) {
      const float value = random.normal();
      x[t * ld + i] = t == 0 ? 1.5f : t == 1 ? -1.5f : t == 2 ? 300.0f * value : t == 3 ? 0.0f : value;
    }
  }
  return x;
}

// One weight of a test (a gated one has an up matrix too), packed by the kernels under test.
class Product {
 public:
  Product(const KernelTable& kernels, int32_t format, bool is_gated, int64_t num_rows, int64_t k, uint64_t seed,
          float limit = 0.0f)
      : kernels_(kernels),
        is_gated_(is_gated),
        limit_(limit),
        gate_(format, num_rows, k, seed),
        up_(format, is_gated ? num_rows : 1, k, seed + 1) {
    tiles_.resize(gate_.num_tiles() * gate_.tile_bytes() * (is_gated ? 2 : 1));
    for (int64_t tile = 0; tile < gate_.num_tiles(); ++tile) {
      gate_.pack(kernels, tile, tiles_.data() + tile * stride());
      if (is_gated) up_.pack(kernels, tile, tiles_.data() + tile * stride() + gate_.tile_bytes());
    }
  }
  int64_t stride() const { return gate_.tile_bytes() * (is_gated_ ? 2 : 1); }
  int64_t width() const { return gate_.num_tiles() * kTileRows; }
  const JudgedWeight& weight() const { return gate_; }

  // Rows [first, first + n) of x, as a call of n tokens over tiles [begin, end); y has `ld` floats a row.
  // Token t goes to row output_rows[t] where given.
  void run(const std::vector<float>& x, int64_t first, int64_t n, int64_t begin, int64_t end, bool add, float* y,
           int64_t ld, const int32_t* output_rows = nullptr) const {
    const int64_t x_ld = (gate_.k() + 15) / 16 * 16;
    const std::vector<float> rows(x.begin() + first * x_ld, x.begin() + (first + n) * x_ld);
    const PackedInput input(kernels_, format_info(gate_.format()).act, rows, gate_.k(), n);
    const LinearArgs args{tiles_.data() + begin * stride(),
                          gate_.tile_bytes(),
                          stride(),
                          end - begin,
                          gate_.k(),
                          n,
                          &input.act(),
                          y + begin * kTileRows,
                          ld,
                          add,
                          output_rows,
                          limit_};
    (is_gated_ ? kernels_.gated : kernels_.linear)[gate_.format()](args);
  }
  Judgement judge(int64_t row, const float* x, const std::vector<double>& rounded) const {
    const Judgement g = gate_.judge(row, x, rounded);
    if (!is_gated_) return g;
    const Judgement u = up_.judge(row, x, rounded);
    auto silu = [](double v) { return v / (1 + std::exp(-v)); };
    auto gate = [&](double v) { return silu(limit_ > 0 ? std::fmin(v, limit_) : v); };
    auto up = [&](double v) { return limit_ > 0 ? std::fmax(std::fmin(v, limit_), -limit_) : v; };
    // |silu'| < 1.1; exp and the division add a few units in the last place.
    const double bound = 1.1 * g.bound * (std::fabs(up(u.value)) + u.bound) +
                         std::fabs(gate(g.value)) * (u.bound + 1e-6 * std::fabs(up(u.value)));
    // In units of what its own rounding would be if the factors were exact.
    const double size = 1.1 * g.size * std::fabs(up(u.value)) + std::fabs(gate(g.value)) * u.size;
    return {gate(g.value) * up(u.value), bound + 1e-30, gate(g.exact) * up(u.exact), size + 1e-30};
  }

 private:
  const KernelTable& kernels_;
  bool is_gated_;
  float limit_;
  JudgedWeight gate_, up_;
  std::vector<uint8_t> tiles_;
};

// How far results lie from exact weights times unrounded activations, relative to the rms of the exact results.
struct Accuracy {
  double max = 0, squares = 0, signal = 0;
  int64_t count = 0;
  void add(double got, double exact) {
    max = std::max(max, std::fabs(got - exact));
    squares += (got - exact) * (got - exact), signal += exact * exact, ++count;
  }
  std::string text() const {
    const double rms = std::sqrt(signal / static_cast<double>(count));
    char out[128];
    std::snprintf(out, sizeof out, "against unrounded activations: rms %.1e, max %.1e of the result's rms",
                  std::sqrt(squares / static_cast<double>(count)) / rms, max / rms);
    return out;
  }
};

// Checks every value of `base`, the results of one-token calls for the first `judged` rows of x.
inline void check_judge(Test& test, const Product& p, const std::vector<float>& x, int64_t judged,
                        const std::vector<float>& base, Accuracy* accuracy) {
  const JudgedWeight& w = p.weight();
  const int64_t x_ld = (w.k() + 15) / 16 * 16;
  for (int64_t t = 0; t < judged; ++t) {
    const std::vector<double> rounded = rounded_input(format_info(w.format()).act, x.data() + t * x_ld, w.k());
    for (int64_t r = 0; r < w.num_rows(); ++r) {
      const Judgement j = p.judge(r, x.data() + t * x_ld, rounded);
      const double got = base[t * p.width() + r];
      test.expect(test.is_near(got - j.value, j.bound, j.size),
                  "rows %ld k %ld token %ld row %ld: %.9g, judge %.9g, bound %.2g", w.num_rows(), w.k(), t, r, got, j.value,
                  j.bound);
      if (accuracy != nullptr && t >= 4 && r >= 2) accuracy->add(got, j.exact);
    }
    for (int64_t r = w.num_rows(); r < p.width(); ++r) {
      test.expect(base[t * p.width() + r] == 0.0f, "missing row %ld of the last tile is not zero", r);
    }
  }
}

// A call of n tokens gives each the bits of its one-token call; adds to what is there when asked; writes nothing
// beyond its columns.
inline void check_call(Test& test, const Product& p, const std::vector<float>& x, int64_t n,
                       const std::vector<float>& base, bool add) {
  constexpr float kCanary = 12345.5f;
  const int64_t ld = p.width() + 16;
  std::vector<float> y(n * ld, kCanary), before;
  Random random(static_cast<uint64_t>(n));
  if (add) {
    for (int64_t t = 0; t < n; ++t)
      for (int64_t r = 0; r < p.width(); ++r) y[t * ld + r] = random.normal();
  }
  before = y;
  p.run(x, 0, n, 0, p.weight().num_tiles(), add, y.data(), ld);
  for (int64_t t = 0; t < n; ++t) {
    std::vector<float> want(base.begin() + t * p.width(), base.begin() + (t + 1) * p.width());
    if (add) {
      for (int64_t r = 0; r < p.width(); ++r) want[r] = before[t * ld + r] + want[r];
    }
    test.expect(same_bits(y.data() + t * ld, want.data(), p.width()),
                "rows %ld k %ld: token %ld differs in a call of %ld%s", p.weight().num_rows(), p.weight().k(), t, n,
                add ? " with add" : "");
    for (int64_t r = p.width(); r < ld; ++r) test.expect(y[t * ld + r] == kCanary, "wrote past column %ld", p.width());
  }
}

// Tokens that go to rows of their own choice, none of them written twice.
inline void check_output_rows(Test& test, const Product& p, const std::vector<float>& x, int64_t n,
                              const std::vector<float>& base) {
  constexpr float kCanary = 12345.5f;
  const int64_t ld = p.width();
  std::vector<float> y(2 * n * ld, kCanary);
  std::vector<int32_t> rows;
  for (int64_t t = 0; t < n; ++t) rows.push_back(static_cast<int32_t>(2 * (n - 1 - t) + t % 2));
  p.run(x, 0, n, 0, p.weight().num_tiles(), false, y.data(), ld, rows.data());
  std::vector<float> want(2 * n * ld, kCanary);
  for (int64_t t = 0; t < n; ++t) std::copy_n(base.begin() + t * ld, ld, want.begin() + rows[t] * ld);
  test.expect(same_bits(y.data(), want.data(), 2 * n * ld), "rows %ld k %ld: %ld tokens to rows of their choice",
              p.weight().num_rows(), p.weight().k(), n);
}

inline void test_product(Test& test, const KernelTable& kernels, int32_t format, bool is_gated, int64_t num_rows,
                         int64_t k, const std::vector<int64_t>& calls, Accuracy* accuracy) {
  const Product p(kernels, format, is_gated, num_rows, k,
                  static_cast<uint64_t>(format * 1000 + num_rows * 10 + is_gated));
  const int64_t most = *std::max_element(calls.begin(), calls.end());
  const std::vector<float> x = input_rows(most, k, static_cast<uint64_t>(format + k));
  std::vector<float> base(most * p.width());
  for (int64_t t = 0; t < most; ++t) {
    p.run(x, t, 1, 0, p.weight().num_tiles(), false, base.data() + t * p.width(), p.width());
  }
  test.hash(base.data(), static_cast<int64_t>(base.size()));
  check_judge(test, p, x, std::min<int64_t>(most, 40), base, accuracy);
  for (int64_t n : calls) check_call(test, p, x, n, base, false);
  check_output_rows(test, p, x, most, base);
  if (!is_gated) check_call(test, p, x, most, base, true);
  // One tile at a time, as threads would share them.
  std::vector<float> y(most * p.width());
  for (int64_t tile = p.weight().num_tiles() - 1; tile >= 0; --tile)
    p.run(x, 0, most, tile, tile + 1, false, y.data(), p.width());
  test.expect(same_bits(y.data(), base.data(), static_cast<int64_t>(y.size())),
              "rows %ld k %ld: tiles one by one differ", num_rows, k);
}

// Gates and ups beyond the limit, in all directions.
inline void test_limit(Tests& tests, const KernelTable& kernels) {
  Test test("gated with a limit", false);
  for (int32_t format : {kBF16, kQ4_0, kFP8, kMXFP4}) {
    for (int64_t n : {1, 19}) {
      constexpr int64_t kInputs = 256;
      const Product p(kernels, format, true, 17, kInputs, static_cast<uint64_t>(format), 0.5f);
      const std::vector<float> x = input_rows(n, kInputs, static_cast<uint64_t>(format + n));
      std::vector<float> y(n * p.width());
      p.run(x, 0, n, 0, p.weight().num_tiles(), false, y.data(), p.width());
      test.hash(y.data(), static_cast<int64_t>(y.size()));
      check_judge(test, p, x, n, y, nullptr);
    }
  }
  tests.push_back(test);
}

// FP8 products have the bits of BF16 products with weights that were multiplied by their scales before.
inline void test_scaled_before(Tests& tests, const KernelTable& kernels) {
  Test test("FP8 weights scaled before", false);
  for (int64_t k : {4, 128, 132, 384, 1000}) {
    constexpr int64_t kTokens = 19, kRows = 16;
    const JudgedWeight w(kFP8, kRows, k, static_cast<uint64_t>(k));
    std::vector<std::vector<uint16_t>> scaled(kRows, std::vector<uint16_t>(k));
    const uint8_t* rows[kTileRows];
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < k; ++i) scaled[r][i] = bf16_of(static_cast<float>(w.weight(r, i).scaled));
      rows[r] = reinterpret_cast<const uint8_t*>(scaled[r].data());
    }
    std::vector<uint8_t> tile(w.tile_bytes()), plain(tile_bytes(kBF16, k));
    w.pack(kernels, 0, tile.data());
    kernels.pack_tile(kBF16, rows, nullptr, k, plain.data());
    const PackedInput input(kernels, ActKind::kBF16, input_rows(kTokens, k, 7), k, kTokens);
    std::vector<float> y(kTokens * kRows), want = y;
    LinearArgs args{tile.data(), w.tile_bytes(), w.tile_bytes(), 1, k, kTokens, &input.act(), y.data(), kRows, false};
    kernels.linear[kFP8](args);
    args.tiles = plain.data(), args.tile_bytes = args.tile_stride = tile_bytes(kBF16, k), args.y = want.data();
    kernels.linear[kBF16](args);
    test.expect(same_bits(y.data(), want.data(), kTokens * kRows), "k %ld: other bits", k);
    test.hash(y.data(), kTokens * kRows);
  }
  tests.push_back(test);
}

// Scales from one end of their range to the other in one row: nothing overflows that need not.
inline void test_far_scales(Tests& tests, const KernelTable& kernels) {
  Test test("scales far apart", false);
  constexpr int64_t kInputs = 6 * kScaleInputs;
  std::vector<float> x(kInputs, 1.0f);
  // FP8: blocks of zeros have any scale; the largest block decides.
  const uint8_t scales[6] = {127, 0, 254, 100, 30, 126};
  const int64_t bytes = tile_bytes(kFP8, kInputs);
  std::vector<uint8_t> row(kInputs), tile(bytes);
  for (int64_t i = 0; i < kInputs; ++i) row[i] = i / kScaleInputs == 2 ? 0 : 0x38;  // 1.0, but for the largest scale
  const uint8_t *rows[kTileRows] = {row.data()}, *scale_rows[1] = {scales};
  kernels.pack_tile(kFP8, rows, scale_rows, kInputs, tile.data());
  const PackedInput input(kernels, ActKind::kBF16, x, kInputs, 1);
  float y[kTileRows];
  LinearArgs args{tile.data(), bytes, bytes, 1, kInputs, 1, &input.act(), y, kTileRows, false};
  kernels.linear[kFP8](args);
  const double want = kScaleInputs * (1.0 + 0.5 + 0x1p-27);
  test.expect(std::fabs(y[0] - want) <= 1e-5, "FP8: %.9g, want %.9g", y[0], want);
  test.hash(y, kTileRows);
  // MXFP4: the smallest scales of all.
  std::vector<uint8_t> nibbles(kInputs / 2, 0x22), low(kInputs / 32, 1), mx_tile(tile_bytes(kMXFP4, kInputs));
  for (int64_t b = 0; b < kInputs / 32; b += 2) low[b] = 0;
  const uint8_t *mx_rows[kTileRows] = {nibbles.data()}, *mx_scales[kTileRows] = {low.data()};
  kernels.pack_tile(kMXFP4, mx_rows, mx_scales, kInputs, mx_tile.data());
  for (float& v : x) v = 0x1p120f;
  const PackedInput large(kernels, ActKind::kQ8Offset12, x, kInputs, 1);
  args.tiles = mx_tile.data(), args.tile_bytes = tile_bytes(kMXFP4, kInputs), args.act = &large.act();
  kernels.linear[kMXFP4](args);
  const double small = kInputs / 2 * 3 * 0x1p-7;
  test.expect(std::fabs(y[0] - small) <= 1e-5 * small, "MXFP4: %.9g, want %.9g", y[0], small);
  test.hash(y, kTileRows);
  tests.push_back(test);
}

inline void test_products(Tests& tests, const KernelTable& kernels) {
  for (int32_t format = 0; format < kNumFormats; ++format) {
    const FormatInfo& info = format_info(format);
    // Floats need pairs of pairs (BF16) and no multiple of 16.
    const int64_t unit = info.block_weights == 1 ? 4 : info.block_weights;
    const int64_t many = info.block_weights == 1 ? 1532 : info.block_weights == 32 ? 1536 : 2048;
    for (bool is_gated : {false, true}) {
      Test test(std::string(is_gated ? "gated " : "linear ") + info.name, info.act != ActKind::kBF16);
      Accuracy accuracy;
      for (int64_t num_rows : {1, 15, 16, 17, 48}) {
        std::vector<int64_t> widths{unit, 2 * unit, many};
        if (format == kFP8 || format == kMXFP4) widths.insert(widths.end(), {128, 160, 256});
        for (int64_t k : widths) {
          std::vector<int64_t> calls{1, 2, 3, 5, 16, 19};
          const bool is_full = num_rows == 48 && k == many;
          if (is_full) {
            calls = {256};
            for (int64_t n = 1; n <= 40; ++n) calls.push_back(n);
          }
          test_product(test, kernels, format, is_gated, num_rows, k, calls, is_full ? &accuracy : nullptr);
        }
      }
      test.note(accuracy.text());
      tests.push_back(test);
    }
  }
}

// pack_tile loses nothing: unpack_row gives each weight, correctly rounded to float.
inline void test_unpack(Tests& tests, const KernelTable& kernels) {
  for (int32_t format = 0; format < kNumFormats; ++format) {
    const FormatInfo& info = format_info(format);
    Test test(std::string("pack and unpack ") + info.name, true);
    const int64_t unit = info.block_weights == 1 ? 4 : info.block_weights;
    for (int64_t num_rows : {1, 16, 23}) {
      for (int64_t k : {unit, 3 * unit, format == kFP8 ? 260 : 4 * unit}) {
        const JudgedWeight w(format, num_rows, k, static_cast<uint64_t>(num_rows * 7 + format + k / unit));
        std::vector<uint8_t> tile(w.tile_bytes());
        std::vector<float> y(k);
        for (int64_t t = 0; t < w.num_tiles(); ++t) {
          w.pack(kernels, t, tile.data());
          test.hash(tile.data(), w.tile_bytes());
          for (int r = 0; r < kTileRows && t * kTileRows + r < num_rows; ++r) {
            kernels.unpack_row(format, tile.data(), r, k, y.data());
            test.hash(y.data(), k);
            for (int64_t i = 0; i < k; ++i) {
              const WeightValue& value = w.weight(t * kTileRows + r, i);
              test.expect(y[i] == static_cast<float>(value.scaled + value.offset),
                          "row %d weight %ld: %.9g, judge %.9g", r, i, y[i], value.scaled + value.offset);
            }
          }
        }
      }
    }
    tests.push_back(test);
  }
}

}  // namespace hotset
