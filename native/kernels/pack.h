// Between the checkpoint's rows and tiles. pack_tile reads sixteen rows as they lie in the file and writes one
// tile of the same number of bytes; unpack_row reads one row back as floats (embeddings). Missing rows of a
// last tile are given as null and packed as zeros.

struct RowPointers {
  const uint8_t* rows[kTileRows];
  const uint8_t* scales[kTileRows];  // of MXFP4 rows that have them apart
};

// Four words at `at` of every row: v[i] has word i of each.
HOTSET_INLINE void load_words(const RowPointers& in, int64_t at, u8x64 (&v)[4]) {
  const auto from = [&](int r) { return in.rows[r] + at; };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = u8_quarters(from(i), from(4 + i), from(8 + i), from(12 + i));
  u32_transpose_quarters(v);
}
// `words` of every row (a multiple of four) interleaved, the sixteen of a kind through f: out[i][row].
template <class F> HOTSET_INLINE void interleave(const RowPointers& in, int64_t at, int words, uint8_t* out, F f) {
#pragma GCC unroll 8
  for (int i = 0; i < words; i += 4) {
    u8x64 v[4];
    load_words(in, at + 4 * i, v);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) u8_store(out + 64 * (i + j), f(v[j]));
  }
}
HOTSET_INLINE void interleave(const RowPointers& in, int64_t at, int words, uint8_t* out) {
  interleave(in, at, words, out, [](u8x64 v) { return v; });
}
// The halves of a word of every row, the first ones first; where only those are wanted, the next to be packed goes over
// the others. The word and the three behind it are read.
HOTSET_INLINE void put_halves(const RowPointers& in, int64_t at, uint8_t* out) {
  u8x64 v[4];
  load_words(in, at, v);
  u8_store(out, u16_unzip(v[0]));
}

// 32 nibbles of every row in the order of safetensors (the low nibble is the even input) to that of GGUF (low nibbles
// are the first sixteen inputs). Of vectors i and i + 2, bytes b of a row make bytes 2 b and 2 b + 1 of the new words.
HOTSET_INLINE void interleave_nibbles(const RowPointers& in, int64_t at, uint8_t* out) {
  u8x64 v[4];
  load_words(in, at, v);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const u8x64 a = u16_unzip_quarters(v[i]), b = u16_unzip_quarters(v[i + 2]);
    const u8x64 even = u8_or(u8_and(a, 0x0f), u8_and(u8_shl<4>(b), 0xf0));
    const u8x64 odd = u8_or(u8_and(u8_shr<4>(a), 0x0f), u8_and(b, 0xf0));
    u8_store_quarters(out + 128 * i, u8_zip_low(even, odd));
    u8_store_quarters(out + 128 * i + 64, u8_zip_high(even, odd));
  }
}

// What is packed at a time: a block, or sixteen bytes of plain numbers.
constexpr int kMxApart = kNumFormats;  // MXFP4 rows with scales apart
template <int kFormat> constexpr int kUnitBytes = 16;
template <> constexpr int kUnitBytes<kQ4_0> = 18;
template <> constexpr int kUnitBytes<kQ4_1> = 20;
template <> constexpr int kUnitBytes<kQ8_0> = 34;
template <> constexpr int kUnitBytes<kQ4_K> = 144;
template <> constexpr int kUnitBytes<kQ6_K> = 210;
template <> constexpr int kUnitBytes<kMXFP4> = 17;

template <int kFormat> HOTSET_INLINE void pack_unit(const RowPointers& in, int64_t at, uint8_t* out) {
  if constexpr (kFormat == kQ4_0) {
    put_halves(in, at, out);
    interleave(in, at + 2, 4, out + 32);
  } else if constexpr (kFormat == kQ4_1) {
    put_halves(in, at, out);
    interleave(in, at + 4, 4, out + 64);
  } else if constexpr (kFormat == kQ8_0) {
    put_halves(in, at, out);
    interleave(in, at + 2, 8, out + 32, [](u8x64 v) { return u8_xor(v, 0x80); });
  } else if constexpr (kFormat == kQ4_K) {
    u8x64 v[4];
    load_words(in, at, v);
    u8_store(out, u16_unzip(v[0]));
    for (int i = 1; i < 4; ++i) u8_store(out + 64 * i, u8_unzip(v[i]));
    for (int c = 0; c < 4; ++c) interleave(in, at + 16 + 32 * c, 8, out + 256 + 512 * c);
  } else if constexpr (kFormat == kQ6_K) {
    for (int r = 0; r < kTileRows; ++r) std::memcpy(out + 2 * r, in.rows[r] + at + 208, 2);
    interleave(in, at + 192, 4, out + 32, [](u8x64 v) { return u8_unzip(v); });
    for (int n = 0; n < 2; ++n) {
      interleave(in, at + 64 * n, 16, out + 288 + 1536 * n);
      interleave(in, at + 128 + 32 * n, 8, out + 288 + 1536 * n + 1024);
    }
  } else if constexpr (kFormat == kMXFP4) {
    u8x64 v[4];
    load_words(in, at, v);
    u8_store_quarters(out, u8_unzip(v[0]));
    load_words(in, at + 1, v);
    for (int i = 0; i < 4; ++i) u8_store_quarters(out + 16 + 64 * i, v[i]);
  } else if constexpr (kFormat == kMxApart) {
    for (int r = 0; r < kTileRows; ++r) out[r] = in.scales[r][at / 16];
    interleave_nibbles(in, at, out + 16);
  } else if constexpr (kFormat == kF16) {
    interleave(in, at, 4, out, [](u8x64 v) { return u16_unzip(v); });
  } else if constexpr (kFormat == kFP8) {
    interleave(in, at, 4, out, [](u8x64 v) { return u16_unzip_quarters(v); });
  } else {
    interleave(in, at, 4, out);
  }
}
constexpr int64_t kPieceBytes = 4096;
template <int kFormat> constexpr int kUnitTile = (kUnitBytes<kFormat> + (kFormat == kMxApart)) * kTileRows;

// A unit with rows missing or short.
template <int kFormat>
void pack_part(const uint8_t* const* rows, const uint8_t* const* scales, int64_t at, int64_t bytes, uint8_t* out) {
  static const uint8_t kZero = 0;
  uint8_t copies[kTileRows][kUnitBytes<kFormat>] = {};
  RowPointers in;
  for (int r = 0; r < kTileRows; ++r) {
    in.rows[r] = copies[r], in.scales[r] = &kZero;
    if (rows[r] == nullptr) continue;
    std::memcpy(copies[r], rows[r] + at, bytes);
    if (kFormat == kMxApart) in.scales[r] = scales[r] + at / 16;
  }
  pack_unit<kFormat>(in, 0, out);
}

// Units are packed into lines that stay in the L1 cache and leave it only as whole lines of the tile.
template <int kFormat>
void pack_units(const uint8_t* const* rows, const uint8_t* const* scales, int64_t row_bytes, uint8_t* tile) {
  constexpr int64_t kRow = kUnitBytes<kFormat>, kTile = kUnitTile<kFormat>;
  constexpr int64_t kMost = kTile < kPieceBytes ? kPieceBytes / kTile : 1;
  RowPointers in;
  bool is_complete = true;
  for (int r = 0; r < kTileRows; ++r) {
    in.rows[r] = rows[r], in.scales[r] = scales != nullptr ? scales[r] : nullptr;
    is_complete &= rows[r] != nullptr;
  }
  alignas(64) uint8_t lines[kMost * kTile + 128];
  // lines[used] goes to to[used]; in the first line, what lies before `begin` belongs to others.
  int64_t begin = reinterpret_cast<uintptr_t>(tile) % 64, used = begin;
  uint8_t* to = tile - begin;
  for (int64_t at = 0; at < row_bytes;) {
    const int64_t units = (row_bytes - at) / kRow < kMost ? (row_bytes - at) / kRow : kMost;
    if (is_complete && units > 0) {
      for (int64_t i = 0; i < units; ++i, at += kRow, used += kTile) pack_unit<kFormat>(in, at, lines + used);
    } else {
      const int64_t bytes = units > 0 ? kRow : row_bytes - at;
      pack_part<kFormat>(rows, scales, at, bytes, lines + used);
      at += bytes, used += units > 0 ? kTile : bytes * kTileRows;
    }
    int64_t done = 0;
    if (begin > 0 && used >= 64) {
      std::memcpy(to + begin, lines + begin, 64 - begin);
      begin = 0, done = 64;
    }
    for (; done + 64 <= used; done += 64) u8_stream(to + done, u8_load(lines + done));
    u8_store(lines, u8_load(lines + done));
    to += done, used -= done;
  }
  if (used > begin) std::memcpy(to + begin, lines + begin, used - begin);
}

void pack_tile(int32_t format, const uint8_t* const* rows, const uint8_t* const* scales, int64_t k, uint8_t* tile) {
  const int64_t row_bytes = k / format_info(format).block_weights * format_info(format).block_bytes;
  switch (format) {
    case kF32: return pack_units<kF32>(rows, scales, row_bytes, tile);
    case kF16: return pack_units<kF16>(rows, scales, row_bytes, tile);
    case kBF16: return pack_units<kBF16>(rows, scales, row_bytes, tile);
    case kQ8_0: return pack_units<kQ8_0>(rows, scales, row_bytes, tile);
    case kQ4_0: return pack_units<kQ4_0>(rows, scales, row_bytes, tile);
    case kQ4_1: return pack_units<kQ4_1>(rows, scales, row_bytes, tile);
    case kQ4_K: return pack_units<kQ4_K>(rows, scales, row_bytes, tile);
    case kQ6_K: return pack_units<kQ6_K>(rows, scales, row_bytes, tile);
    case kFP8:
      pack_fp8_scales(scales, k, tile);
      return pack_units<kFP8>(rows, nullptr, row_bytes, tile + fp8_header_bytes(k));
    case kMXFP4:
      if (scales == nullptr) return pack_units<kMXFP4>(rows, scales, row_bytes, tile);
      return pack_units<kMxApart>(rows, scales, k / 2, tile);
    default: return;
  }
}

inline float half_at(const uint8_t* p) {
  alignas(64) uint16_t h[16] = {};
  std::memcpy(h, p, 2);
  float out[16];
  f32_store(out, f32_from_f16(h));
  return out[0];
}

inline void unpack_q4_k(const uint8_t* p, int row, float* y) {
  float d = half_at(p + 2 * row), dmin = half_at(p + 32 + 2 * row);
  uint8_t s[12];
  for (int i = 0; i < 12; ++i) s[i] = p[64 + 16 * i + row];
  for (int j = 0; j < 8; ++j) {
    int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
    for (int i = 0; i < 32; ++i) {
      uint8_t q = p[256 + 512 * (j / 2) + (i / 4) * 64 + row * 4 + i % 4];
      y[32 * j + i] = d * scale * static_cast<float>(j & 1 ? q >> 4 : q & 15) - dmin * min;
    }
  }
}

inline void unpack_q6_k(const uint8_t* p, int row, float* y) {
  float d = half_at(p + 2 * row);
  for (int n = 0; n < 2; ++n)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 32; ++i) {
        const uint8_t* low = p + 288 + 1536 * n;
        uint8_t l = low[(quarter & 1) * 512 + (i / 4) * 64 + row * 4 + i % 4];
        uint8_t h = low[1024 + (i / 4) * 64 + row * 4 + i % 4];
        int q = (quarter < 2 ? l & 15 : l >> 4) | ((h >> (2 * quarter)) & 3) << 4;
        int8_t scale = static_cast<int8_t>(p[32 + 16 * (8 * n + 2 * quarter + i / 16) + row]);
        y[128 * n + 32 * quarter + i] = d * scale * static_cast<float>(q - 32);
      }
}

// Row `row` of a tile as k floats.
void unpack_row(int32_t format, const uint8_t* tile, int row, int64_t k, float* y) {
  if (format == kFP8) return unpack_fp8_row(tile, row, k, y);
  if (format == kMXFP4) return unpack_mxfp4_row(tile, row, k, y);
  const FormatInfo& info = format_info(format);
  if (format == kF32 || format == kF16 || format == kBF16) {
    for (int64_t j = 0; j < k; ++j) {
      if (format == kF32) {
        std::memcpy(y + j, tile + (j * kTileRows + row) * 4, 4);
      } else if (format == kF16) {
        y[j] = half_at(tile + (j * kTileRows + row) * 2);
      } else {
        uint16_t h;
        std::memcpy(&h, tile + ((j / 2 * kTileRows + row) * 2 + j % 2) * 2, 2);
        uint32_t bits = static_cast<uint32_t>(h) << 16;
        std::memcpy(y + j, &bits, 4);
      }
    }
    return;
  }
  for (int64_t b = 0; b < k / info.block_weights; ++b, y += info.block_weights) {
    const uint8_t* p = tile + b * info.block_bytes * kTileRows;
    if (format == kQ4_K) { unpack_q4_k(p, row, y); continue; }
    if (format == kQ6_K) { unpack_q6_k(p, row, y); continue; }
    float d = half_at(p + 2 * row), m = format == kQ4_1 ? half_at(p + 32 + 2 * row) : 0.0f;
    const uint8_t* q = p + (format == kQ4_1 ? 64 : 32);
    for (int i = 0; i < 32; ++i) {
      if (format == kQ8_0) {
        y[i] = d * static_cast<float>(static_cast<int>(q[(i / 4) * 64 + row * 4 + i % 4]) - 128);
      } else {
        uint8_t v = q[(i % 16 / 4) * 64 + row * 4 + i % 4];
        int code = i < 16 ? v & 15 : v >> 4;
        y[i] = format == kQ4_1 ? d * static_cast<float>(code) + m : d * static_cast<float>(code - 8);
      }
    }
  }
}
