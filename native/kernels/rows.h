// Cached rows that are key and value in one: into their format, and out of it for the attention over a tile of rows.

constexpr float kLargestBf16 = 3.3895313892515355e38f;
constexpr float kLargestScaled = 0x1.cp127f;  // the largest e4m3 times a power of two that is a BF16 number

// BF16, clamped to the finite: an infinite row would reach other queries as 0 times infinity.
inline void row_to_bf16(const float* x, int32_t width, float most, uint16_t* out) {
  for (int32_t i = 0; i < width; i += 16) {
    bf16_store(out + i, f32_min(f32_max(f32_load(x + i), f32_splat(-most)), f32_splat(most)));
  }
}

// e4m3 codes of up to kRowGroup BF16 numbers and the exponent of their scale: the smallest power of two with which all
// of them fit, from largest magnitude 1e-4 on.
inline int e4m3_group(const uint16_t* x, int count, uint8_t* codes) {
  uint16_t largest = 0;
  for (int i = 0; i < count; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float top = float_of_bits(static_cast<uint32_t>(largest) << 16);
  const int exponent = e4m3_scale_exponent(top < 1e-4f ? 1e-4f : top);
  const float inverse = power_of_two(-exponent);
  for (int i = 0; i < count; ++i) {
    const float magnitude = float_of_bits((x[i] & 0x7fffu) << 16) * inverse;
    codes[i] = static_cast<uint8_t>(e4m3_magnitude(magnitude) | (x[i] & 0x8000u) >> 8);
  }
  return exponent;
}

template <RowKind kKind>
void encode_row(const float* x, int32_t width, int32_t plain, uint8_t* data, uint8_t* scales) {
  uint16_t rounded[kMaxHeadDim];
  row_to_bf16(x, width, kKind == RowKind::kBF16Exact ? kLargestBf16 : kLargestScaled, rounded);
  if (kKind == RowKind::kBF16Exact) {
    std::memcpy(data, rounded, 2 * width);
    return;
  }
  alignas(64) uint8_t codes[kRowGroup];
  for (int32_t c = 0; c < plain; c += kRowGroup) {
    const int count = plain - c < kRowGroup ? plain - c : kRowGroup;
    const int exponent = e4m3_group(rounded + c, count, codes);
    if (kKind == RowKind::kFP8) {
      std::memcpy(data + c, codes, count);
      scales[c / kRowGroup] = static_cast<uint8_t>(exponent + 127);
    } else {
      uint16_t values[kRowGroup];
      bf16_expand_e4m3(codes, exponent, values);
      std::memcpy(rounded + c, values, 2 * count);
    }
  }
  if (kKind == RowKind::kFP8) {
    std::memcpy(data + plain, rounded + plain, 2 * (width - plain));
    scales[(plain + kRowGroup - 1) / kRowGroup] = 0;
  } else {
    std::memcpy(data, rounded, 2 * width);
  }
}

// Channels [first, first + count) of keys[dim/2][64][2] and values[32][dim][2]; rows[r] begin at channel `first`.
inline void tile_of_rows(const uint16_t* const* rows, int32_t first, int32_t count, int32_t dim, uint16_t* keys,
                         uint16_t* values) {
  for (int32_t j = 0; j < count; j += 32) {
    for (int r = 0; r < kTileKeys; r += 16) {
      const uint32_t* words[16];
      for (int i = 0; i < 16; ++i) words[i] = reinterpret_cast<const uint32_t*>(rows[r + i] + j);
      uint32_t* out = reinterpret_cast<uint32_t*>(keys) + (first + j) / 2 * kTileKeys + r;
      if (count - j >= 32) {
        u32_transpose16(words, out, kTileKeys);
      } else {
        for (int i = 0; i < 8; ++i)
          for (int row = 0; row < 16; ++row) std::memcpy(out + i * kTileKeys + row, words[row] + i, 4);
      }
    }
  }
  for (int r = 0; r < kTileKeys; r += 2) {
    const uint16_t *even = rows[r], *odd = rows[r + 1];
    uint32_t* out = reinterpret_cast<uint32_t*>(values) + r / 2 * dim + first;
    for (int32_t j = 0; j < count; ++j) out[j] = even[j] | static_cast<uint32_t>(odd[j]) << 16;
  }
}

alignas(64) inline const uint16_t kAbsentRow[kMaxHeadDim] = {};

// The scaled channels of an FP8 tile, a group of every row at a time so that the expanded numbers stay in the L1 cache.
inline void fp8_tile_groups(const AttendTile& tile, int32_t dim, int32_t plain, uint16_t* keys, uint16_t* values) {
  alignas(64) uint16_t expanded[kTileKeys * kRowGroup];
  const uint16_t* rows[kTileKeys];
  for (int r = 0; r < kTileKeys; ++r) rows[r] = r < tile.first || r >= tile.last ? kAbsentRow : expanded + r * kRowGroup;
  for (int32_t c = 0; c < plain; c += kRowGroup) {
    const int32_t count = plain - c < kRowGroup ? plain - c : kRowGroup;
    for (int r = tile.first; r < tile.last; ++r) {
      const uint8_t* data = tile.data[r] + c;
      alignas(64) uint8_t codes[kRowGroup] = {};
      if (count < kRowGroup) std::memcpy(codes, data, count);
      bf16_expand_e4m3(count < kRowGroup ? codes : data, tile.scales[r][c / kRowGroup] - 127, expanded + r * kRowGroup);
    }
    tile_of_rows(rows, c, count, dim, keys, values);
  }
}

template <RowKind kKind>
void expand_tile(const AttendTile& tile, int32_t dim, int32_t plain, uint16_t* keys, uint16_t* values) {
  // What is left of an FP8 row is BF16 behind its codes.
  const int32_t first = kKind == RowKind::kFP8 ? plain : 0;
  if (kKind == RowKind::kFP8) fp8_tile_groups(tile, dim, plain, keys, values);
  const uint16_t* rows[kTileKeys];
  for (int r = 0; r < kTileKeys; ++r) {
    const bool is_absent = r < tile.first || r >= tile.last;
    rows[r] = is_absent ? kAbsentRow : reinterpret_cast<const uint16_t*>(tile.data[r] + first);
  }
  tile_of_rows(rows, first, dim - first, dim, keys, values);
}

// One pooled row: per channel a softmax of g + ape over the tokens, times k.
void compress_pool(const CompressArgs& a) {
  for (int32_t c = 0; c < a.width; c += 16) {
    f32x16 top = f32_splat(-INFINITY);
    const auto score = [&](int32_t t) { return f32_add(f32_load(a.g[t] + c), f32_load(a.ape[t] + c)); };
    for (int32_t t = 0; t < a.num_tokens; ++t) top = f32_max(score(t), top);
    f32x16 sum = f32_zero(), pooled = f32_zero();
    for (int32_t t = 0; t < a.num_tokens; ++t) {
      const f32x16 weight = exp16(f32_sub(score(t), top));
      sum = f32_add(sum, weight);
      pooled = f32_fma(weight, f32_load(a.k[t] + c), pooled);
    }
    f32_store(a.out + c, f32_div(pooled, sum));
  }
}

// x / sqrt(mean(x^2) + eps), in place.
void head_norm(float* x, int32_t dim, float eps) {
  f32x16 sum = f32_zero();
  for (int32_t i = 0; i < dim; i += 16) {
    const f32x16 v = f32_load(x + i);
    sum = f32_fma(v, v, sum);
  }
  const f32x16 scale = f32_splat(1.0f / std::sqrt(f32_sum_lanes(sum) / static_cast<float>(dim) + eps));
  for (int32_t i = 0; i < dim; i += 16) f32_store(x + i, f32_mul(f32_load(x + i), scale));
}
