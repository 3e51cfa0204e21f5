// Row-wise kernels: norms, rotary angles, activation packing, SiLU, exponentials.

inline f32x16 exp16(f32x16 x) {
  // exp(x) = 2^n exp(r), r in [-ln2/2, ln2/2]; degree-6 polynomial, relative error below 2e-7; 0 below -87.
  const f32x16 low = f32_splat(-87.0f);
  f32x16 y = f32_max(x, low);
  f32x16 n = f32_round(f32_mul(y, f32_splat(1.44269504088896341f)));
  f32x16 r = f32_fma(n, f32_splat(-0.693359375f), y);
  r = f32_fma(n, f32_splat(2.12194440e-4f), r);
  f32x16 p = f32_splat(1.9875691500e-4f);
  p = f32_fma(p, r, f32_splat(1.3981999507e-3f));
  p = f32_fma(p, r, f32_splat(8.3334519073e-3f));
  p = f32_fma(p, r, f32_splat(4.1665795894e-2f));
  p = f32_fma(p, r, f32_splat(1.6666665459e-1f));
  p = f32_fma(p, r, f32_splat(5.0000001201e-1f));
  p = f32_fma(f32_mul(p, r), r, f32_add(r, f32_splat(1.0f)));
  return f32_zero_below(f32_scale2(p, n), x, low);
}

inline f32x16 silu16(f32x16 x) {
  // The clamp keeps exp finite; silu(-80) is -1e-33, nothing is lost.
  f32x16 e = exp16(f32_sub(f32_zero(), f32_max(x, f32_splat(-80.0f))));
  return f32_div(x, f32_add(f32_splat(1.0f), e));
}

// y = silu(gate) * up, whole rows padded to 16 floats.
void silu_mul(const float* gate, const float* up, int64_t width, float* y) {
  for (int64_t i = 0; i < width; i += 16) f32_store(y + i, f32_mul(silu16(f32_load(gate + i)), f32_load(up + i)));
}

// y = w * x / sqrt(mean(x^2) + eps). Rows are padded to 16 floats; the padding of x is zero.
void rms_norm(const float* x, const float* w, float eps, int64_t width, float* y) {
  f32x16 s0 = f32_zero(), s1 = f32_zero(), s2 = f32_zero(), s3 = f32_zero();
  int64_t padded = (width + 15) / 16 * 16, i = 0;
  for (; i + 64 <= padded; i += 64) {
    f32x16 a = f32_load(x + i), b = f32_load(x + i + 16), c = f32_load(x + i + 32), d = f32_load(x + i + 48);
    s0 = f32_fma(a, a, s0), s1 = f32_fma(b, b, s1), s2 = f32_fma(c, c, s2), s3 = f32_fma(d, d, s3);
  }
  for (; i < padded; i += 16) {
    f32x16 a = f32_load(x + i);
    s0 = f32_fma(a, a, s0);
  }
  float sum = f32_sum_lanes(f32_add(f32_add(s0, s1), f32_add(s2, s3)));
  f32x16 scale = f32_splat(1.0f / std::sqrt(sum / static_cast<float>(width) + eps));
  for (i = 0; i < padded; i += 16) {
    f32_store(y + i, f32_mul(f32_mul(f32_load(x + i), scale), f32_load(w + i)));
  }
}

constexpr float kSmallestRun = 1e-30f;

// Pack token t of n (row x of K floats) for the products that follow.
template <ActKind kKind> void pack_act_q8(const float* x, int64_t k, int64_t n, int64_t t, const Act& act) {
  constexpr bool kHalves = kKind == ActKind::kQ8Offset32;
  int64_t first;
  int size;
  find_group(n, t, &first, &size);
  int64_t lane = t - first;
  int8_t* q = act.q + first * k + lane * 32;
  float* d = act.d + first * (k / 32) + lane;
  int32_t* terms = act.terms + first * (k / (kHalves ? 16 : 32)) + lane;
  for (int64_t b = 0; b < k / 32; ++b, q += 32 * size, d += size, terms += kHalves ? 2 * size : size) {
    f32x16 lo = f32_load(x + b * 32), hi = f32_load(x + b * 32 + 16);
    float top = f32_max_lanes(f32_max(f32_abs(lo), f32_abs(hi)));
    // 127 over a smaller number would overflow; such a run is as good as zero. A NaN stays one.
    top = top < kSmallestRun ? 0.0f : top;
    float scale = top / 127.0f;
    f32x16 inverse = f32_splat(top == 0.0f ? 0.0f : 127.0f / top);
    lo = f32_round(f32_mul(lo, inverse)), hi = f32_round(f32_mul(hi, inverse));
    i8_store_rounded(q, lo);
    i8_store_rounded(q + 16, hi);
    *d = scale;
    // Whole numbers far below 2^24: their float sums are exact.
    if (kHalves) {
      terms[0] = -32 * static_cast<int32_t>(f32_sum_lanes(lo));
      terms[size] = -32 * static_cast<int32_t>(f32_sum_lanes(hi));
    } else {
      float sum = f32_sum_lanes(f32_add(lo, hi));
      if (kKind == ActKind::kQ8Sum) {
        sum *= scale;
        std::memcpy(terms, &sum, 4);
      } else {
        constexpr int kOffset = kKind == ActKind::kQ8Offset8 ? 8 : kKind == ActKind::kQ8Offset12 ? kE2m1Offset : 128;
        *terms = -kOffset * static_cast<int32_t>(sum);
      }
    }
  }
}

void pack_act_f32(const float* x, int64_t k, int64_t n, int64_t t, const Act& act) {
  int64_t first;
  int size;
  find_group(n, t, &first, &size);
  float* out = act.f32 + first * k + (t - first);
  for (int64_t j = 0; j < k; ++j) out[j * size] = x[j];
}

void pack_act_bf16(const float* x, int64_t k, int64_t n, int64_t t, const Act& act) {
  int64_t first;
  int size;
  find_group(n, t, &first, &size);
  uint16_t* out = act.bf16 + first * k + (t - first) * 2;
  uint16_t rounded[16];
  for (int64_t j = 0; j < k; j += 16) {
    bf16_store(rounded, f32_load(x + j));
    int64_t count = k - j < 16 ? k - j : 16;
    for (int64_t i = 0; i < count; ++i) out[(j + i) / 2 * 2 * size + ((j + i) & 1)] = rounded[i];
  }
}

// Rotate one head in place; angles holds rotary/2 cosines, then rotary/2 sines.
void rope_head(float* x, const float* angles, int32_t rotary, bool adjacent) {
  int32_t half = rotary / 2;
  for (int32_t i = 0; i < half; ++i) {
    int32_t a = adjacent ? 2 * i : i, b = adjacent ? 2 * i + 1 : i + half;
    float c = angles[i], s = angles[half + i], u = x[a], v = x[b];
    x[a] = u * c - v * s;
    x[b] = v * c + u * s;
  }
}
