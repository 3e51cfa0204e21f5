// Manifold-constrained hyper-connections: from n residual streams to a sublayer's input, and its output back into them.
// The formulas are those of HyperMix and HyperMerge in src/hotset/program/program.py.

constexpr int kMaxMix = kMaxStreams * (kMaxStreams + 2);

// 1 / sqrt(mean(x^2) + eps) over `count` floats, a multiple of 16.
inline float inverse_rms(const float* x, int64_t count, float eps) {
  f32x16 sums[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sums[i] = f32_zero();
  int64_t at = 0;
  for (; at + 64 <= count; at += 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const f32x16 v = f32_load(x + at + 16 * i);
      sums[i] = f32_fma(v, v, sums[i]);
    }
  }
  for (; at < count; at += 16) sums[0] = f32_fma(f32_load(x + at), f32_load(x + at), sums[0]);
  const float sum = f32_sum_lanes(f32_add(f32_add(sums[0], sums[1]), f32_add(sums[2], sums[3])));
  return 1.0f / std::sqrt(sum / static_cast<float>(count) + eps);
}

// x[i] = factor / (1 + exp(-x[i])). The clamp keeps exp finite.
inline void sigmoids(float* x, int count, float factor) {
  for (int i = 0; i < count; i += 16) {
    const f32x16 e = exp16(f32_sub(f32_zero(), f32_max(f32_load(x + i), f32_splat(-80.0f))));
    f32_store(x + i, f32_div(f32_splat(factor), f32_add(f32_splat(1.0f), e)));
  }
}

// c [n][n], rows first: softmax of each row, then columns and rows in turn are divided by their sums.
inline void balance(float* c, int n, int iterations, float eps) {
  for (int j = 0; j < n; ++j) {
    float top = c[j * n];
    for (int k = 1; k < n; ++k) top = c[j * n + k] > top ? c[j * n + k] : top;
    for (int k = 0; k < n; ++k) c[j * n + k] -= top;
  }
  for (int i = 0; i < n * n; i += 16) f32_store(c + i, exp16(f32_load(c + i)));
  const auto divide = [&](int outer, int inner, float extra) {  // every line of n numbers, `inner` apart
    for (int j = 0; j < n; ++j) {
      float sum = 0.0f;
      for (int k = 0; k < n; ++k) sum += c[j * outer + k * inner];
      for (int k = 0; k < n; ++k) c[j * outer + k * inner] /= sum + extra;
    }
  };
  divide(n, 1, 0.0f);
  for (int i = 0; i < n * n; ++i) c[i] += eps;
  divide(1, n, eps);
  for (int round = 1; round < iterations; ++round) divide(n, 1, eps), divide(1, n, eps);
}

void hyper_mix(const HyperArgs& a) {
  const int n = a.num_streams;
  const float r = inverse_rms(a.x, n * a.width, a.norm_eps);
  // Room for whole vectors behind each of the three.
  alignas(64) float pre[kMaxStreams + 16] = {}, post[kMaxStreams + 16] = {}, c[kMaxMix + 16] = {};
  for (int j = 0; j < n; ++j) pre[j] = a.mix[j] * r * a.scale[0] + a.base[j];
  sigmoids(pre, n, 1.0f);
  for (int j = 0; j < n; ++j) pre[j] += a.eps;
  if (a.coefficients != nullptr) {
    for (int j = 0; j < n; ++j) post[j] = a.mix[n + j] * r * a.scale[1] + a.base[n + j];
    sigmoids(post, n, 2.0f);
    for (int i = 0; i < n * n; ++i) c[i] = a.mix[2 * n + i] * r * a.scale[2] + a.base[2 * n + i];
    balance(c, n, a.iterations, a.eps);
    std::memcpy(a.coefficients, post, sizeof(float) * n);
    std::memcpy(a.coefficients + n, c, sizeof(float) * n * n);
  }
  for (int64_t i = 0; i < a.width; i += 16) {
    f32x16 sum = f32_mul(f32_load(a.x + i), f32_splat(pre[0]));
    for (int j = 1; j < n; ++j) sum = f32_fma(f32_load(a.x + j * a.width + i), f32_splat(pre[j]), sum);
    f32_store(a.out + i, sum);
  }
}

void hyper_merge(float* x, int64_t width, int64_t first, int64_t count, const float* y, const float* coefficients,
                 int32_t num_streams) {
  const int n = num_streams;
  const float *post = coefficients, *c = coefficients + n;
  for (int64_t i = first; i < first + count; i += 16) {
    f32x16 old[kMaxStreams];
    for (int j = 0; j < n; ++j) old[j] = f32_load(x + j * width + i);
    for (int k = 0; k < n; ++k) {
      f32x16 sum = f32_mul(f32_load(y + i), f32_splat(post[k]));
      for (int j = 0; j < n; ++j) sum = f32_fma(old[j], f32_splat(c[j * n + k]), sum);
      f32_store(x + k * width + i, sum);
    }
  }
}
