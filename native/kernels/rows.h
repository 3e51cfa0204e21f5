// Cached rows that are key and value in one: into their format, and out of it for the attention over a tile of rows.

constexpr float kLargestBf16 = 3.3895313892515355e38f;
constexpr float kLargestScaled = 0x1.cp127f;  // the largest e4m3 times a power of two that is a BF16 number
constexpr float kLargestNibble = 0x1.8p127f;  // the same for e2m1

// BF16, clamped to the finite: an infinite row would reach other queries as 0 times infinity.
inline void row_to_bf16(const float* x, int32_t width, float most, uint16_t* out) {
  for (int32_t i = 0; i < width; i += 16) {
    bf16_store(out + i, f32_min(f32_max(f32_load(x + i), f32_splat(-most)), f32_splat(most)));
  }
}

// e4m3 codes of BF16 numbers, or of floats, and the exponent of their scale: the smallest power of two with which all
// of them fit, from largest magnitude 1e-4 on.
template <class T> inline int e4m3_group(const T* x, int count, uint8_t* codes) {
  constexpr int kShift = 32 - 8 * sizeof(T);
  constexpr T kMagnitude = static_cast<T>(0x7fffffffu >> kShift);
  T largest = 0;
  for (int i = 0; i < count; ++i) {
    const T magnitude = x[i] & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float top = float_of_bits(static_cast<uint32_t>(largest) << kShift);
  const int exponent = e4m3_scale_exponent(top < 1e-4f ? 1e-4f : top);
  const float inverse = power_of_two(-exponent);
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(x[i]) << kShift;
    codes[i] = static_cast<uint8_t>(e4m3_magnitude(float_of_bits(bits & 0x7fffffffu) * inverse) | bits >> 31 << 7);
  }
  return exponent;
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

// The plain channels of an FP4 row: BF16 numbers as nibbles, and their scales.
inline void fp4_channels(const uint16_t* x, int32_t plain, uint8_t* data, uint8_t* scales) {
  for (int32_t c = 0; c < plain; c += kNibbleGroup) {
    const int32_t count = plain - c < kNibbleGroup ? plain - c : kNibbleGroup;
    alignas(64) float values[kNibbleGroup] = {};
    alignas(64) uint8_t codes[kNibbleGroup];
    for (int32_t i = 0; i < count; ++i) values[i] = float_of_bits(static_cast<uint32_t>(x[c + i]) << 16);
    *scales++ = static_cast<uint8_t>(e2m1_group(values, codes) + 127);
    for (int32_t i = 0; i < count; i += 2) *data++ = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
  }
  for (int32_t c = (plain + kNibbleGroup - 1) / kNibbleGroup; c % 16 != 0; ++c) *scales++ = 0;
}

template <RowKind kKind>
void encode_row(const float* x, int32_t width, int32_t plain, uint8_t* data, uint8_t* scales) {
  constexpr float kMost = kKind == RowKind::kBF16Exact ? kLargestBf16
                          : kKind == RowKind::kFP4     ? kLargestNibble
                                                       : kLargestScaled;
  uint16_t rounded[kMaxHeadDim];
  row_to_bf16(x, width, kMost, rounded);
  if (kKind == RowKind::kBF16Exact) {
    std::memcpy(data, rounded, 2 * width);
    return;
  }
  if (kKind == RowKind::kFP4) {
    fp4_channels(rounded, plain, data, scales);
    std::memcpy(data + plain / 2, rounded + plain, 2 * (width - plain));
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

// Channels of a tile are met a piece at a time, so that what is expanded of them stays in the L1 cache.
inline int32_t piece_end(int32_t begin, int32_t dim, int32_t plain) {
  const int32_t end = begin < plain ? plain : dim;
  return end - begin < kRowGroup ? end : begin + kRowGroup;
}

alignas(64) inline const uint16_t kAbsentRow[kRowGroup] = {};

// Channels [begin, end) of a tile's rows, a piece. Those before `plain` are codes with scales in some kinds.
template <RowKind kKind> struct Piece {
  using Code = uint8_t;
  static constexpr int kPerByte = kKind == RowKind::kFP4 ? 2 : 1;
  const AttendTile& tile;
  int32_t begin, end, plain;

  bool is_coded() const { return (kKind == RowKind::kFP8 || kKind == RowKind::kFP4) && begin < plain; }
  bool is_present(int r) const { return r >= tile.first && r < tile.last; }
  // The e8m0 byte of an FP8 row's scale here.
  uint8_t scale(int r) const { return is_present(r) && is_coded() ? tile.scales[r][begin / kRowGroup] : 127; }

  // A row's codes, kRowGroup / kPerByte bytes: zeros behind `end`, and for an absent row.
  const uint8_t* codes(int r, uint8_t* padded) const {
    if (!is_present(r)) return reinterpret_cast<const uint8_t*>(kAbsentRow);
    const uint8_t* data = tile.data[r] + begin / kPerByte;
    if (end - begin == kRowGroup) return data;
    std::memset(padded, 0, kRowGroup / kPerByte);
    std::memcpy(padded, data, (end - begin) / kPerByte);
    return padded;
  }

  // A row's numbers as BF16; those of FP8 codes times 2^exponent.
  const uint16_t* numbers(int r, int exponent, uint16_t* expanded) const {
    if (!is_present(r)) return kAbsentRow;
    if (!is_coded()) {  // what is left of a row with codes lies behind them
      constexpr bool kHasCodes = kKind == RowKind::kFP8 || kKind == RowKind::kFP4;
      const int32_t first = kHasCodes ? plain : 0;
      return reinterpret_cast<const uint16_t*>(tile.data[r] + first / kPerByte) + begin - first;
    }
    alignas(64) uint8_t padded[kRowGroup];
    const uint8_t* from = codes(r, padded);
    if constexpr (kKind == RowKind::kFP8) {
      bf16_expand_e4m3(from, exponent, expanded);
    } else {
      for (int32_t i = 0; i < end - begin; i += kNibbleGroup)
        bf16_expand_e2m1(from + i / 2, tile.scales[r][(begin + i) / kNibbleGroup] - 127, expanded + i);
    }
    return expanded;
  }
};

// The values of sixteen e8m0 bytes; 0 stands for the subnormal number 2^-127.
inline f32x16 e8m0_scales(const uint8_t* bytes) {
  return f32_from_bits(i32_max(i32_shl<23>(i32_from_u8(bytes)), i32_splat(1 << 22)));
}

// keys[count/2][64][2] of a piece, of the rows that are there and some neighbours, in units of scales[64].
template <RowKind kKind> inline void piece_keys(const Piece<kKind>& piece, uint16_t* keys, float* scales) {
  const int32_t count = piece.end - piece.begin;
  for (int first = piece.tile.first / 16 * 16; first < piece.tile.last; first += 16) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = kKind == RowKind::kFP8 ? piece.scale(first + i) : 127;
    f32_store(scales + first, e8m0_scales(bytes));
    if constexpr (kKind == RowKind::kFP8 && kHasCodeTiles) {
      if (piece.is_coded()) {
        alignas(64) uint8_t padded[16][kRowGroup];
        const typename Piece<kKind>::Code* codes[16];
        for (int i = 0; i < 16; ++i) codes[i] = piece.codes(first + i, padded[i]);
        bf16_keys_e4m3(codes, keys + 2 * first, 2 * kTileKeys);
        continue;
      }
    }
    alignas(64) uint16_t expanded[16][kRowGroup];
    const uint16_t* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = piece.numbers(first + i, 0, expanded[i]);
    for (int32_t j = 0; j < count; j += 32) {
      const uint32_t* words[16];
      for (int i = 0; i < 16; ++i) words[i] = reinterpret_cast<const uint32_t*>(rows[i] + j);
      uint32_t* out = reinterpret_cast<uint32_t*>(keys) + j / 2 * kTileKeys + first;
      if (count - j >= 32) {
        u32_transpose16(words, out, kTileKeys);
      } else {
        for (int i = 0; i < 8; ++i)
          for (int row = 0; row < 16; ++row) std::memcpy(out + i * kTileKeys + row, words[row] + i, 4);
      }
    }
  }
}

// values[32][kRowGroup][2] of a piece, of the pairs of rows that are there.
template <RowKind kKind> inline void piece_values(const Piece<kKind>& piece, uint16_t* values) {
  const int32_t count = piece.end - piece.begin;
  for (int r = piece.tile.first / 2 * 2; r < piece.tile.last; r += 2) {
    uint16_t* out = values + r * kRowGroup;
    const int exponents[2] = {piece.scale(r) - 127, piece.scale(r + 1) - 127};
    if constexpr (kKind == RowKind::kFP8 && kHasCodeTiles) {
      if (piece.is_coded()) {
        alignas(64) uint8_t padded[2][kRowGroup];
        bf16_values_e4m3(piece.codes(r, padded[0]), piece.codes(r + 1, padded[1]), exponents, out);
        continue;
      }
    }
    alignas(64) uint16_t expanded[2][kRowGroup];
    const uint16_t* even = piece.numbers(r, exponents[0], expanded[0]);
    const uint16_t* odd = piece.numbers(r + 1, exponents[1], expanded[1]);
    uint32_t* words = reinterpret_cast<uint32_t*>(out);
    for (int32_t j = 0; j < count; ++j) words[j] = even[j] | static_cast<uint32_t>(odd[j]) << 16;
  }
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
