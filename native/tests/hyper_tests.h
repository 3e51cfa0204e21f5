// Hyper-connections against their formulas in double precision.
#pragma once

#include "support.h"

namespace hotset {

struct JudgedMix {
  std::vector<double> pre, post, c;
};

inline JudgedMix judged_mix(const std::vector<float>& x, const std::vector<float>& mix, const std::vector<float>& base,
                            const std::vector<float>& scale, int n, int iterations, double eps, double norm_eps) {
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  const double r = 1 / std::sqrt(sum / static_cast<double>(x.size()) + norm_eps);
  const auto value = [&](int i, int s) { return mix[i] * r * scale[s] + base[i]; };
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  JudgedMix out;
  for (int j = 0; j < n; ++j) out.pre.push_back(sigmoid(value(j, 0)) + eps);
  if (static_cast<int>(mix.size()) == n) return out;
  for (int j = 0; j < n; ++j) out.post.push_back(2 * sigmoid(value(n + j, 1)));
  for (int j = 0; j < n; ++j) {
    double total = 0;
    for (int k = 0; k < n; ++k) total += std::exp(value(2 * n + j * n + k, 2));
    for (int k = 0; k < n; ++k) out.c.push_back(std::exp(value(2 * n + j * n + k, 2)) / total + eps);
  }
  for (int step = 0; step < 2 * iterations - 1; ++step) {
    const bool is_columns = step % 2 == 0;
    for (int j = 0; j < n; ++j) {
      double total = eps;
      for (int k = 0; k < n; ++k) total += out.c[is_columns ? k * n + j : j * n + k];
      for (int k = 0; k < n; ++k) out.c[is_columns ? k * n + j : j * n + k] /= total;
    }
  }
  return out;
}

inline void test_mix_of(Test& test, const KernelTable& kernels, int n, int64_t width, bool is_head, float size) {
  constexpr float kEps = 1e-6f, kNormEps = 1e-6f;
  constexpr int kIterations = 20;
  Random random(static_cast<uint64_t>(n * 10000 + width));
  const int columns = is_head ? n : n * (2 + n);
  const std::vector<float> x = random.normals(n * width, size);
  const std::vector<float> mix = random.normals(columns, 2.0f * size), base = random.normals(columns, 2.0f);
  const std::vector<float> scale = random.normals(3);
  std::vector<float> out(width), coefficients(n + n * n, 55.0f);
  kernels.hyper_mix({x.data(), mix.data(), base.data(), scale.data(), width, n, kIterations, kEps, kNormEps, out.data(),
                     is_head ? nullptr : coefficients.data()});
  const JudgedMix want = judged_mix(x, mix, base, scale, n, kIterations, kEps, kNormEps);
  test.hash(out.data(), width);
  for (int64_t i = 0; i < width; ++i) {
    double value = 0, magnitude = 0;
    for (int j = 0; j < n; ++j) {
      const double part = want.pre[j] * x[j * width + i];
      value += part, magnitude += std::fabs(part);
    }
    test.expect(test.is_near(out[i] - value, 4e-6 * magnitude, magnitude), "n %d width %ld at %ld: %.9g, judge %.9g", n,
                width, i, out[i], value);
  }
  if (is_head) return;
  test.hash(coefficients.data(), n + n * n);
  for (int i = 0; i < n + n * n; ++i) {
    const double value = i < n ? want.post[i] : want.c[i - n];
    test.expect(test.is_near(coefficients[i] - value, 2e-5 * std::fabs(value), std::fabs(value)),
                "n %d coefficient %d: %.9g, judge %.9g", n, i, coefficients[i], value);
  }
}

inline void test_merge_of(Test& test, const KernelTable& kernels, int n, int64_t width) {
  Random random(static_cast<uint64_t>(n * 77 + width));
  const std::vector<float> x = random.normals(n * width), y = random.normals(width), c = random.normals(n + n * n);
  std::vector<float> got = x, pieces = x;
  kernels.hyper_merge(got.data(), width, 0, width, y.data(), c.data(), n);
  test.hash(got.data(), n * width);
  for (int64_t at = 0; at < width; at += 32) {
    const int64_t count = width - at < 32 ? width - at : 32;
    kernels.hyper_merge(pieces.data(), width, at, count, y.data(), c.data(), n);
  }
  test.expect(same_bits(got.data(), pieces.data(), n * width), "n %d width %ld: in pieces differs", n, width);
  for (int k = 0; k < n; ++k) {
    for (int64_t i = 0; i < width; ++i) {
      double want = static_cast<double>(c[k]) * y[i], size = std::fabs(want);
      for (int j = 0; j < n; ++j) {
        const double part = static_cast<double>(c[n + j * n + k]) * x[j * width + i];
        want += part, size += std::fabs(part);
      }
      test.expect(test.is_near(got[k * width + i] - want, 1e-6 * size, size),
                  "n %d stream %d at %ld: %.9g, judge %.9g", n, k, i, got[k * width + i], want);
    }
  }
}

inline void test_hyper(Tests& tests, const KernelTable& kernels) {
  Test mix("hyper-connections, mix", true), merge("hyper-connections, merge", true);
  for (int n : {1, 2, 3, 4, 8}) {
    for (int64_t width : {16, 48, 256, 4096}) {
      for (float size : {1.0f, 1e-4f, 30.0f}) {
        test_mix_of(mix, kernels, n, width, false, size);
        test_mix_of(mix, kernels, n, width, true, size);
      }
      test_merge_of(merge, kernels, n, width);
    }
  }
  tests.push_back(mix);
  tests.push_back(merge);
}

}  // namespace hotset
