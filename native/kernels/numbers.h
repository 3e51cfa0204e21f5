// Small number formats: e4m3 (FP8), e2m1 (FP4) and e8m0 (power-of-two scales). Single values, and tables for vectors.

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// 2^n for n in [-149, 127].
inline float power_of_two(int n) {
  return float_of_bits(n >= -126 ? static_cast<uint32_t>(n + 127) << 23 : 1u << (n + 149));
}
// The value of an e8m0 byte.
inline float e8m0_value(uint8_t b) { return power_of_two(b - 127); }

// BF16 bits of an e4m3 number, exactly: its subnormals are normal numbers in BF16. 0x7f is the only NaN.
constexpr uint16_t bf16_of_e4m3(int code) {
  const int sign = (code & 0x80) << 8, exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return static_cast<uint16_t>(sign | 0x7fc0);
  if (exponent != 0) return static_cast<uint16_t>(sign | (exponent + 120) << 7 | mantissa << 4);
  if (mantissa == 0) return static_cast<uint16_t>(sign);
  const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // the value is mantissa 2^-9
  return static_cast<uint16_t>(sign | (top - 9 + 127) << 7 | (mantissa << (7 - top) & 0x7f));
}
inline float e4m3_value(uint8_t code) { return float_of_bits(static_cast<uint32_t>(bf16_of_e4m3(code)) << 16); }

// High and low bytes of the BF16 numbers of the 128 e4m3 magnitudes.
struct E4m3Bytes {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};
constexpr E4m3Bytes make_e4m3_bytes() {
  E4m3Bytes out{};
  for (int i = 0; i < 128; ++i) {
    out.high[i] = static_cast<uint8_t>(bf16_of_e4m3(i) >> 8);
    out.low[i] = static_cast<uint8_t>(bf16_of_e4m3(i) & 255);
  }
  return out;
}
alignas(64) constexpr E4m3Bytes kE4m3Bytes = make_e4m3_bytes();

// The same bytes from lookups of sixteen entries. Low byte: code << 4. High byte: `high` of the top four bits, the sign
// among them. Both get a correction for the eight subnormals, at entries 0 to 7 and again at 8 to 15.
struct E4m3Lookups {
  alignas(16) uint8_t high[16];
  alignas(16) uint8_t high_fix[16];
  alignas(16) uint8_t low_fix[16];
};
constexpr E4m3Lookups make_e4m3_lookups() {
  E4m3Lookups out{};
  for (int i = 0; i < 16; ++i) {
    out.high[i] = static_cast<uint8_t>((i >> 3) << 7 | (0x3c + (i & 7)));
    out.high_fix[i] = static_cast<uint8_t>((bf16_of_e4m3(i & 7) >> 8) - 0x3c);
    out.low_fix[i] = static_cast<uint8_t>((bf16_of_e4m3(i & 7) & 255) - ((i & 7) << 4));
  }
  return out;
}
constexpr E4m3Lookups kE4m3Lookups = make_e4m3_lookups();

// Twice an e2m1 number: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, for the codes 0 to 7 and 8 to 15.
alignas(16) constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// The same made unsigned, four times over for lookups of 64 entries.
constexpr int kE2m1Offset = 12;
struct E2m1Table {
  alignas(64) uint8_t entries[64];
};
constexpr E2m1Table make_e2m1_table() {
  E2m1Table out{};
  for (int i = 0; i < 64; ++i) out.entries[i] = static_cast<uint8_t>(kTwiceE2m1[i % 16] + kE2m1Offset);
  return out;
}
constexpr E2m1Table kE2m1Unsigned = make_e2m1_table();

// Twice the numbers times 1, 2, 4 and 8, as unsigned bytes: what scales that differ by up to kE2m1Spread come to.
constexpr int kE2m1Spread = 3, kE2m1ScaledOffset = kE2m1Offset << kE2m1Spread;
constexpr E2m1Table make_e2m1_scaled_table() {
  E2m1Table out{};
  for (int i = 0; i < 64; ++i) out.entries[i] = static_cast<uint8_t>(kTwiceE2m1[i % 16] * (1 << i / 16) + kE2m1ScaledOffset);
  return out;
}
constexpr E2m1Table kE2m1Scaled = make_e2m1_scaled_table();

// The sixteen as BF16 numbers, twice over for lookups of 32 entries, and the bytes of these.
struct E2m1Words {
  alignas(64) uint16_t words[32];
  alignas(16) uint8_t high[16];
  alignas(16) uint8_t low[16];
};
constexpr E2m1Words make_e2m1_words() {
  constexpr uint16_t kMagnitudes[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
  E2m1Words out{};
  for (int i = 0; i < 32; ++i) out.words[i] = static_cast<uint16_t>(kMagnitudes[i & 7] | (i & 8) << 12);
  for (int i = 0; i < 16; ++i) {
    out.high[i] = static_cast<uint8_t>(out.words[i] >> 8);
    out.low[i] = static_cast<uint8_t>(out.words[i] & 255);
  }
  return out;
}
constexpr E2m1Words kE2m1Words = make_e2m1_words();

// Code of the nearest number, ties to even, of a format with kMantissa bits and this bias; 0 <= x, up to its largest.
// Subnormals are whole numbers of 2^(1 - kBias - kMantissa), which is the last place of floats near `magic`. Without
// branches, so that the compiler makes vectors of a loop.
template <int kMantissa, int kBias> inline uint32_t minifloat_code(float x) {
  constexpr int kShift = 23 - kMantissa;
  const uint32_t bits = bits_of_float(x);
  const uint32_t half = (1u << (kShift - 1)) - 1 + (bits >> kShift & 1);
  const uint32_t normal = ((bits + half) >> kShift) - ((127u - kBias) << kMantissa);
  constexpr float magic = static_cast<float>(1 << (24 - kBias - kMantissa));
  const uint32_t subnormal = bits_of_float(x + magic) - bits_of_float(magic);
  return x < (kBias == 1 ? 1.0f : 0x1p-6f) ? subnormal : normal;
}
inline uint32_t e4m3_magnitude(float x) { return minifloat_code<3, 7>(x); }
inline uint32_t e2m1_magnitude(float x) { return minifloat_code<1, 1>(x); }

// The smallest n with top <= 2^n largest, for a normal top > 0; `largest` has the significand `mantissa` / 2^23 and the
// exponent `exponent`.
inline int scale_exponent(float top, int exponent, uint32_t mantissa) {
  const uint32_t bits = bits_of_float(top);
  return static_cast<int>(bits >> 23) - 127 - exponent + ((bits & 0x7fffff) > mantissa ? 1 : 0);
}
inline int e4m3_scale_exponent(float top) { return scale_exponent(top, 8, 0x600000); }  // largest 448 = 1.75 2^8
inline int e2m1_scale_exponent(float top) { return scale_exponent(top, 2, 0x400000); }  // largest 6 = 1.5 2^2
