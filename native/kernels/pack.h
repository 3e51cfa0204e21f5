// Between the checkpoint's rows and tiles. pack_tile reads sixteen rows as they lie in the file and writes one
// tile of the same number of bytes; unpack_row reads one row back as floats (embeddings). Missing rows of a
// last tile are given as null and packed as zeros.

inline void put32(uint8_t* out, const uint8_t* in) { std::memcpy(out, in, 4); }

struct RowPointers {
  const uint8_t* rows[kTileRows];
};

// dwords [i] of every row's block, interleaved: out[i][row].
inline void interleave(const RowPointers& in, int64_t offset, int dwords, uint8_t* out) {
  for (int r = 0; r < kTileRows; ++r) {
    const uint8_t* p = in.rows[r] + offset;
    for (int i = 0; i < dwords; ++i) put32(out + i * 64 + r * 4, p + 4 * i);
  }
}
inline void interleave_half(const RowPointers& in, int64_t offset, uint8_t* out) {
  for (int r = 0; r < kTileRows; ++r) std::memcpy(out + 2 * r, in.rows[r] + offset, 2);
}

inline void pack_block(int32_t format, const RowPointers& in, int64_t at, uint8_t* out) {
  switch (format) {
    case kQ4_0:
      interleave_half(in, at, out);
      interleave(in, at + 2, 4, out + 32);
      break;
    case kQ4_1:
      interleave_half(in, at, out);
      interleave_half(in, at + 2, out + 32);
      interleave(in, at + 4, 4, out + 64);
      break;
    case kQ8_0:
      interleave_half(in, at, out);
      interleave(in, at + 2, 8, out + 32);
      for (int i = 0; i < 512; ++i) out[32 + i] ^= 0x80;
      break;
    case kQ4_K:
      interleave_half(in, at, out);
      interleave_half(in, at + 2, out + 32);
      for (int r = 0; r < kTileRows; ++r)
        for (int i = 0; i < 12; ++i) out[64 + 16 * i + r] = in.rows[r][at + 4 + i];
      for (int c = 0; c < 4; ++c) interleave(in, at + 16 + 32 * c, 8, out + 256 + 512 * c);
      break;
    case kQ6_K:
      interleave_half(in, at + 208, out);
      for (int r = 0; r < kTileRows; ++r)
        for (int i = 0; i < 16; ++i) out[32 + 16 * i + r] = in.rows[r][at + 192 + i];
      for (int n = 0; n < 2; ++n) {
        interleave(in, at + 64 * n, 16, out + 288 + 1536 * n);
        interleave(in, at + 128 + 32 * n, 8, out + 288 + 1536 * n + 1024);
      }
      break;
    default: break;
  }
}

void pack_tile(int32_t format, const uint8_t* const* rows, const uint8_t* const* scales, int64_t k, uint8_t* tile) {
  if (format == kFP8) return pack_fp8(rows, scales, k, tile);
  if (format == kMXFP4) return pack_mxfp4(rows, scales, k, tile);
  static const uint8_t kZeros[1 << 12] = {};
  const FormatInfo& info = format_info(format);
  RowPointers in;
  bool complete = true;
  for (int r = 0; r < kTileRows; ++r) in.rows[r] = rows[r], complete &= rows[r] != nullptr;
  if (format == kF32 || format == kF16 || format == kBF16) {
    int64_t width = info.block_bytes;
    int64_t unit = format == kBF16 ? 2 : 1;
    for (int64_t j = 0; j < k; ++j)
      for (int r = 0; r < kTileRows; ++r) {
        uint8_t* out = tile + ((j / unit * kTileRows + r) * unit + j % unit) * width;
        if (rows[r]) std::memcpy(out, rows[r] + j * width, width); else std::memset(out, 0, width);
      }
    return;
  }
  for (int64_t b = 0; b < k / info.block_weights; ++b) {
    if (complete) {
      pack_block(format, in, b * info.block_bytes, tile + b * info.block_bytes * kTileRows);
    } else {
      RowPointers part;
      for (int r = 0; r < kTileRows; ++r) part.rows[r] = rows[r] ? rows[r] + b * info.block_bytes : kZeros;
      pack_block(format, part, 0, tile + b * info.block_bytes * kTileRows);
    }
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
