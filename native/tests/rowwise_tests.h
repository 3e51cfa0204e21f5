// Row-wise kernels: packing of product inputs, norms, SiLU, rotary angles; and the probe's reads and writes.
#pragma once

#include <algorithm>
#include <limits>

#include "product_tests.h"

namespace hotset {

// Values that meet every rule of the roundings: ties, the largest finite, subnormals, zeros of both signs.
inline std::vector<float> awkward_row(int64_t k, uint64_t seed) {
  Random random(seed);
  std::vector<float> x((k + 15) / 16 * 16, 0.0f);
  const float special[] = {1.00390625f, 1.01171875f, -1.00390625f, 3.3e38f,  1e-40f,
                           -1e-40f,     0.0f,        -0.0f,        65504.0f, 1e-7f};
  for (int64_t i = 0; i < k; ++i) x[i] = random.below(4) == 0 ? special[random.below(10)] : random.normal();
  return x;
}

// Where token t of n and input i lie in a packed input of `unit` inputs per token and step.
inline int64_t packed_at(int64_t n, int64_t t, int64_t k, int64_t i, int64_t unit) {
  int64_t first = 0;
  while (first + group_size(n - first) <= t) first += group_size(n - first);
  return first * k + (i / unit * group_size(n - first) + t - first) * unit + i % unit;
}

inline void test_pack_f32(Test& test, const KernelTable& kernels, int64_t n, int64_t k) {
  std::vector<float> packed(n * k);
  std::vector<uint16_t> halves(n * k);
  Act act{};
  act.f32 = packed.data(), act.bf16 = halves.data();
  for (int64_t t = 0; t < n; ++t) {
    const std::vector<float> x = awkward_row(k, static_cast<uint64_t>(t * 100 + k));
    kernels.pack_act[static_cast<int>(ActKind::kF32)](x.data(), k, n, t, act);
    if (k % 2 == 0) kernels.pack_act[static_cast<int>(ActKind::kBF16)](x.data(), k, n, t, act);
    for (int64_t i = 0; i < k; ++i) {
      test.expect(same_bits(&packed[packed_at(n, t, k, i, 1)], &x[i], 1), "float %ld of token %ld of %ld", i, t, n);
      if (k % 2 != 0) continue;
      const uint16_t got = halves[packed_at(n, t, k, i, 2)];
      test.expect(got == bf16_of(x[i]), "BF16 of %.9g is %04x, want %04x", x[i], got, bf16_of(x[i]));
    }
  }
  test.hash(halves.data(), n * k);
}

// What belongs to the int8 inputs of one term, as the bits that are stored.
inline int32_t term_of(ActKind kind, int32_t sum, float scale) {
  if (kind != ActKind::kQ8Sum)
    return sum * (kind == ActKind::kQ8Offset8    ? -8
                  : kind == ActKind::kQ8Offset12 ? -12
                  : kind == ActKind::kQ8Offset32 ? -32
                                                 : -128);
  const float product = static_cast<float>(sum) * scale;
  int32_t bits;
  std::memcpy(&bits, &product, 4);
  return bits;
}

inline void test_pack_q8(Test& test, const KernelTable& kernels, ActKind kind, int64_t n, int64_t k) {
  const int64_t unit = term_inputs(kind);
  std::vector<int8_t> q(n * k);
  std::vector<float> d(n * k / 32);
  std::vector<int32_t> terms(n * k / unit);
  Act act{};
  act.q = q.data(), act.d = d.data(), act.terms = terms.data();
  for (int64_t t = 0; t < n; ++t) {
    // Blocks of one token differ in size by far; token 1 is all zero; token 2 is so small that 1 / x is infinite.
    Random random(static_cast<uint64_t>(t * 100 + k));
    std::vector<float> x(k);
    for (int64_t i = 0; i < k; ++i)
      x[i] = t == 1 ? 0.0f : random.normal() * (t == 2 ? 1e-39f : i / 32 % 2 ? 1e-3f : 40.0f);
    kernels.pack_act[static_cast<int>(kind)](x.data(), k, n, t, act);
    const std::vector<double> want = rounded_input(kind, x.data(), k);
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      const int8_t got = q[packed_at(n, t, k, i, 32)];
      const float scale = d[packed_at(n, t, k / 32, i / 32, 1)];
      test.expect(static_cast<double>(scale) * got == want[i],
                  "input %ld of token %ld of %ld: %d times %.9g, want %.9g", i, t, n, got, scale, want[i]);
      sum = (i % unit == 0 ? 0 : sum) + got;
      const int32_t term = terms[packed_at(n, t, k / unit, i / unit, 1)];
      if (i % unit == unit - 1)
        test.expect(term == term_of(kind, sum, scale), "term %ld of token %ld of %ld: %d", i / unit, t, n, term);
    }
  }
  test.hash(q.data(), n * k), test.hash(d.data(), n * k / 32), test.hash(terms.data(), n * k / unit);
}

inline void test_packing(Tests& tests, const KernelTable& kernels) {
  Test floats("pack floats and BF16", true), bytes("pack int8 and terms", true);
  for (int64_t n : {1, 2, 3, 7, 8, 15, 16, 17, 31, 40}) {
    for (int64_t k : {1, 2, 15, 16, 18, 100}) test_pack_f32(floats, kernels, n, k);
    for (ActKind kind : {ActKind::kQ8Offset8, ActKind::kQ8Offset12, ActKind::kQ8Offset128, ActKind::kQ8Offset32,
                         ActKind::kQ8Sum}) {
      for (int64_t k : {32, 64, 256}) test_pack_q8(bytes, kernels, kind, n, k);
    }
  }
  tests.push_back(floats);
  tests.push_back(bytes);
}

inline void test_norm_of(Test& test, const KernelTable& kernels, int64_t width, float size) {
  constexpr float kEps = 1e-5f;
  Random random(static_cast<uint64_t>(width));
  const int64_t padded = (width + 15) / 16 * 16;
  std::vector<float> x = random.normals(padded, size), w = random.normals(padded), y(padded);
  for (int64_t i = width; i < padded; ++i) x[i] = 0.0f;
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  const double scale = 1 / std::sqrt(sum / static_cast<double>(width) + kEps);
  kernels.rms_norm(x.data(), w.data(), kEps, width, y.data());
  test.hash(y.data(), padded);
  for (int64_t i = 0; i < padded; ++i) {
    const double want = x[i] * scale * w[i];
    test.expect(std::fabs(y[i] - want) <= 1e-6 * std::fabs(want), "width %ld at %ld: %.9g, judge %.9g", width, i, y[i],
                want);
  }
  std::vector<float> same = x;
  kernels.rms_norm(same.data(), w.data(), kEps, width, same.data());
  test.expect(same_bits(same.data(), y.data(), padded), "width %ld: in place differs", width);
}

inline void test_rms_norm(Tests& tests, const KernelTable& kernels) {
  Test test("rms_norm", true);
  for (int64_t width : {1, 15, 16, 17, 63, 64, 65, 576, 4096}) {
    for (float size : {3.0f, 1e-3f}) test_norm_of(test, kernels, width, size);  // 1e-3: below the square root of eps
  }
  tests.push_back(test);
}

inline void test_silu(Tests& tests, const KernelTable& kernels) {
  Test test("silu_mul", true);
  for (int64_t width : {1, 16, 17, 576}) {
    Random random(static_cast<uint64_t>(width));
    const int64_t padded = (width + 15) / 16 * 16;
    std::vector<float> gate = random.normals(padded, 4.0f), up = random.normals(padded), y(padded);
    const float far[] = {-1e30f, -100.0f, -87.5f, -80.0f, 80.0f, 100.0f, 1e30f, 0.0f, -0.0f};
    for (int64_t i = 0; i < width; i += 3) gate[i] = far[i / 3 % 9];
    kernels.silu_mul(gate.data(), up.data(), width, y.data());
    test.hash(y.data(), padded);
    for (int64_t i = 0; i < padded; ++i) {
      const double g = gate[i], want = g / (1 + std::exp(-g)) * up[i];
      // Below -80 the result is next to nothing, and only that is promised.
      const double bound = 1e-6 * std::fabs(want) + (g < -80 ? 1e-33 * std::fabs(g * up[i]) : 1e-37);
      test.expect(std::fabs(y[i] - want) <= bound, "silu(%.9g) * %.9g: %.9g, judge %.9g", gate[i], up[i], y[i], want);
    }
  }
  tests.push_back(test);
}

inline void test_rope(Tests& tests, const KernelTable& kernels) {
  Test test("rope", true);
  for (int32_t rotary : {2, 16, 30, 64, 128}) {
    for (bool is_adjacent : {false, true}) {
      Random random(static_cast<uint64_t>(rotary));
      const int32_t half = rotary / 2, width = rotary + 16;
      std::vector<float> x = random.normals(width), y = x, angles(rotary);
      for (int32_t i = 0; i < half; ++i) {
        const double t = 2 * random.uniform() - 1;  // tangent of half the angle: no libm, same on every machine
        angles[i] = static_cast<float>((1 - t * t) / (1 + t * t));
        angles[half + i] = static_cast<float>(2 * t / (1 + t * t));
      }
      kernels.rope_head(y.data(), angles.data(), rotary, is_adjacent);
      test.hash(y.data(), width);
      for (int32_t i = 0; i < half; ++i) {
        const int32_t a = is_adjacent ? 2 * i : i, b = is_adjacent ? 2 * i + 1 : i + half;
        const double c = angles[i], s = angles[half + i], u = x[a], v = x[b];
        test.expect(std::fabs(y[a] - (u * c - v * s)) <= 3e-7 * (std::fabs(u) + std::fabs(v)),
                    "rotary %d pair %d, first", rotary, i);
        test.expect(std::fabs(y[b] - (v * c + u * s)) <= 3e-7 * (std::fabs(u) + std::fabs(v)),
                    "rotary %d pair %d, second", rotary, i);
      }
      test.expect(same_bits(y.data() + rotary, x.data() + rotary, 16),
                  "rotary %d: the part that does not rotate has changed", rotary);
    }
  }
  tests.push_back(test);
}

// The probe must read every word that it counts.
inline void test_probe(Tests& tests, const KernelTable& kernels) {
  Test test("probe reads and computes", true);
  constexpr size_t kWords = 3 * 1024 / 8;
  std::vector<uint64_t> memory(kWords + 8);
  uint64_t* words = memory.data();
  while (reinterpret_cast<uintptr_t>(words) % 64 != 0) ++words;
  Random random(5);
  uint64_t sum = 0;
  for (size_t i = 0; i < kWords; ++i) sum += words[i] = random.bits();
  for (size_t prefetch_bytes : {0, 4096}) {
    test.expect(kernels.probe.read(words, kWords * 8, 1, prefetch_bytes) == sum, "sum of one pass");
    test.expect(kernels.probe.read(words, kWords * 8, 3, prefetch_bytes) == 3 * sum, "sum of three passes");
  }
  // And write every byte that it counts, none behind them.
  std::vector<uint64_t> other(kWords + 16);
  uint64_t* target = other.data();
  while (reinterpret_cast<uintptr_t>(target) % 64 != 0) ++target;
  kernels.probe.copy(target, words, kWords * 8);
  test.expect(std::memcmp(target, words, kWords * 8) == 0 && target[kWords] == 0, "copy");
  kernels.probe.write(target, (kWords - 128) * 8);
  test.expect(std::all_of(target, target + kWords - 128, [](uint64_t word) { return word == 0x0101010101010101; }) &&
                  std::memcmp(target + kWords - 128, words + kWords - 128, 128 * 8) == 0 && target[kWords] == 0,
              "write");
  for (int i = 0; i < kernels.probe.num_computes; ++i) {
    if (can_run(kernels.probe.computes[i])) kernels.probe.computes[i].run(10);
  }
  tests.push_back(test);
}

}  // namespace hotset
