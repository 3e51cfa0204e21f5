// The lightning indexer's rows: 32 channels share a power-of-two scale and are e2m1 numbers, in tiles of sixteen rows
// that are MXFP4 weights; a token's query heads are the int8 inputs of a product with them.

// Sums and differences of numbers kHalf apart. A constant distance lets the compiler use vectors.
template <int kHalf> inline void butterflies(float* x, int32_t width) {
  for (int32_t i = 0; i < width; i += 2 * kHalf) {
    for (int32_t j = 0; j < kHalf; ++j) {
      const float a = x[i + j], b = x[i + j + kHalf];
      x[i + j] = a + b, x[i + j + kHalf] = a - b;
    }
  }
}

// Normalised Walsh-Hadamard transform, natural order, in place.
void hadamard(float* x, int32_t width) {
  butterflies<1>(x, width);
  butterflies<2>(x, width);
  butterflies<4>(x, width);
  butterflies<8>(x, width);
  for (int32_t half = 16; half < width; half *= 2) {
    for (int32_t i = 0; i < width; i += 2 * half) {
      for (int32_t j = i; j < i + half; j += 16) {
        const f32x16 a = f32_load(x + j), b = f32_load(x + j + half);
        f32_store(x + j, f32_add(a, b));
        f32_store(x + j + half, f32_sub(a, b));
      }
    }
  }
  const f32x16 scale = f32_splat(static_cast<float>(1 / std::sqrt(static_cast<double>(width))));
  for (int32_t i = 0; i < width; i += 16) f32_store(x + i, f32_mul(f32_load(x + i), scale));
}

// e2m1 codes of 32 numbers; returns the exponent of their scale, the smallest with which all of them fit.
inline int e2m1_group(const float* x, uint8_t* codes) {
  const f32x16 most = f32_splat(FLT_MAX);
  const f32x16 low = f32_min(f32_abs(f32_load(x)), most), high = f32_min(f32_abs(f32_load(x + 16)), most);
  const float top = f32_max_lanes(f32_max(low, high));
  const int exponent = e2m1_scale_exponent(top < 6 * 0x1p-126f ? 6 * 0x1p-126f : top);
  const float inverse = power_of_two(-exponent);
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = bits_of_float(x[i] * inverse);
    codes[i] = static_cast<uint8_t>(e2m1_magnitude(float_of_bits(bits & 0x7fffffff)) | bits >> 31 << 3);
  }
  return exponent;
}

// Row `lane` of a tile.
void store_index_row(const float* x, int32_t width, uint8_t* tile, int32_t lane) {
  uint8_t codes[32];
  for (int32_t b = 0; b < width / 32; ++b, tile += kMxBlockBytes) {
    tile[lane] = static_cast<uint8_t>(e2m1_group(x + 32 * b, codes) + 127);
    for (int i = 0; i < 16; ++i)
      tile[16 + i / 4 * 64 + 4 * lane + i % 4] = static_cast<uint8_t>(codes[i] | codes[16 + i] << 4);
  }
}

// As pack_act: row t, a head, of n.
void pack_index_query(const float* x, int64_t k, int64_t n, int64_t t, const Act& act) {
  int64_t first;
  int size;
  find_group(n, t, &first, &size);
  const int64_t lane = t - first;
  int8_t* q = act.q + first * k + lane * 32;
  float* d = act.d + first * (k / 32) + lane;
  int32_t* terms = act.terms + first * (k / 32) + lane;
  uint8_t codes[32];
  for (int64_t b = 0; b < k / 32; ++b, q += 32 * size, d += size, terms += size) {
    *d = power_of_two(e2m1_group(x + 32 * b, codes) - 1);
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += q[i] = kTwiceE2m1[codes[i]];
    *terms = -kE2m1Offset * sum;
  }
}

// scores += sum over the S heads from `first` on of weight times the product, where positive.
template <int S>
HOTSET_INLINE f32x16 index_heads(const uint8_t* tile, int64_t k, const Act& act, int64_t first, const float* weights,
                                 f32x16 scores) {
  constexpr int NT = S < kMaxTokens ? S : kMaxTokens;
  for (int slice = 0; slice < S; slice += NT) {
    f32x16 acc[NT];
    tile_q8<FormatMXFP4, NT, S>(tile, k, act, first, slice, acc);
#pragma GCC unroll 16
    for (int h = 0; h < NT; ++h)
      scores = f32_fma(f32_splat(weights[first + slice + h]), f32_max(acc[h], f32_zero()), scores);
  }
  return scores;
}

void index_scores(const uint8_t* tiles, int64_t num_tiles, int64_t k, const Act& act, int64_t num_heads,
                  const float* weights, float* scores) {
  for (int64_t i = 0; i < num_tiles; ++i, tiles += k / 32 * kMxBlockBytes, scores += 16) {
    f32x16 sum = f32_zero();
    for (int64_t h = 0; h < num_heads;) {
      const int size = group_size(num_heads - h);
      switch (size) {
        case 16: sum = index_heads<16>(tiles, k, act, h, weights, sum); break;
        case 8: sum = index_heads<8>(tiles, k, act, h, weights, sum); break;
        case 4: sum = index_heads<4>(tiles, k, act, h, weights, sum); break;
        case 2: sum = index_heads<2>(tiles, k, act, h, weights, sum); break;
        default: sum = index_heads<1>(tiles, k, act, h, weights, sum);
      }
      h += size;
    }
    f32_store(scores, sum);
  }
}

int64_t select_above(const float* scores, int64_t n, float threshold, int32_t first_index, float* out_scores,
                     int32_t* out_index) {
  int64_t count = 0;
  const auto append = [&](int64_t i) {
    out_scores[count] = scores[i];
    out_index[count] = first_index + static_cast<int32_t>(i);
    ++count;
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (uint32_t lanes = f32_lanes_from(f32_load(scores + i), f32_splat(threshold)); lanes != 0; lanes &= lanes - 1)
      append(i + __builtin_ctz(lanes));
  }
  for (; i < n; ++i)
    if (scores[i] >= threshold) append(i);
  return count;
}
