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
  Product(const KernelTable& kernels, int32_t format, bool is_gated, int64_t num_rows, int64_t k, uint64_t seed)
      : kernels_(kernels),
        is_gated_(is_gated),
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
  void run(const std::vector<float>& x, int64_t first, int64_t n, int64_t begin, int64_t end, bool add, float* y,
           int64_t ld) const {
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
                          add};
    (is_gated_ ? kernels_.gated : kernels_.linear)[gate_.format()](args);
  }
  Judgement judge(int64_t row, const float* x, const std::vector<double>& rounded) const {
    const Judgement g = gate_.judge(row, x, rounded);
    if (!is_gated_) return g;
    const Judgement u = up_.judge(row, x, rounded);
    auto silu = [](double v) { return v / (1 + std::exp(-v)); };
    // |silu'| < 1.1; exp and the division add a few units in the last place.
    const double bound = 1.1 * g.bound * (std::fabs(u.value) + u.bound) +
                         std::fabs(silu(g.value)) * (u.bound + 1e-6 * std::fabs(u.value));
    return {silu(g.value) * u.value, bound + 1e-30, silu(g.exact) * u.exact};
  }

 private:
  const KernelTable& kernels_;
  bool is_gated_;
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
      test.expect(std::fabs(got - j.value) <= j.bound, "rows %ld k %ld token %ld row %ld: %.9g, judge %.9g, bound %.2g",
                  w.num_rows(), w.k(), t, r, got, j.value, j.bound);
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
  if (!is_gated) check_call(test, p, x, most, base, true);
  // One tile at a time, as threads would share them.
  std::vector<float> y(most * p.width());
  for (int64_t tile = p.weight().num_tiles() - 1; tile >= 0; --tile)
    p.run(x, 0, most, tile, tile + 1, false, y.data(), p.width());
  test.expect(same_bits(y.data(), base.data(), static_cast<int64_t>(y.size())),
              "rows %ld k %ld: tiles one by one differ", num_rows, k);
}

inline void test_products(Tests& tests, const KernelTable& kernels) {
  for (int32_t format = 0; format < kNumFormats; ++format) {
    const FormatInfo& info = format_info(format);
    // Floats need pairs of pairs (BF16) and no multiple of 16.
    const int64_t unit = info.block_weights == 1 ? 4 : info.block_weights;
    const int64_t many = info.block_weights == 1 ? 1532 : info.block_weights == 32 ? 1536 : 2048;
    for (bool is_gated : {false, true}) {
      Test test(std::string(is_gated ? "gated " : "linear ") + info.name, format != kBF16);
      Accuracy accuracy;
      for (int64_t num_rows : {1, 15, 16, 17, 48}) {
        for (int64_t k : {unit, 2 * unit, many}) {
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
      for (int64_t k : {unit, 3 * unit}) {
        const JudgedWeight w(format, num_rows, k, static_cast<uint64_t>(num_rows * 7 + format));
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
