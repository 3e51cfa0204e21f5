// Packing: every byte of a tile against a plain description of where each byte of a row goes.
#pragma once

#include "judge.h"

namespace hotset {

// The tile of sixteen rows, those missing being zeros. `write` puts one byte.
class PlainTile {
 public:
  PlainTile(int32_t format, int64_t k) : format_(format), k_(k), bytes_(tile_bytes(format, k), 0) {}
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  void put_row(int r, const uint8_t* row, const uint8_t* scales) {
    const FormatInfo& info = format_info(format_);
    const bool is_apart = format_ == kMXFP4 && scales != nullptr;
    const int64_t block_bytes = is_apart ? 16 : info.block_bytes;
    for (int64_t b = 0; b < k_ / info.block_weights; ++b) {
      uint8_t* out = bytes_.data() + b * info.block_bytes * kTileRows;
      if (is_apart) {
        out[r] = scales[b];
        for (int i = 0; i < 16; ++i) out[at(16, r, i)] = static_cast<uint8_t>(code(row + 16 * b, i) | code(row + 16 * b, i + 16) << 4);
      } else {
        for (int i = 0; i < block_bytes; ++i) put(r, b, i, row[b * block_bytes + i], out);
      }
    }
  }

 private:
  static int code(const uint8_t* nibbles, int i) { return i % 2 == 0 ? nibbles[i / 2] % 16 : nibbles[i / 2] / 16; }
  static int64_t at(int64_t first, int r, int64_t i) { return first + i / 4 * 64 + 4 * r + i % 4; }
  // Byte i of block b.
  void put(int r, int64_t b, int i, uint8_t byte, uint8_t* out) {
    const bool is_second = i >= 2 && i < 4;  // of two halves in front
    switch (format_) {
      case kF32: case kF16: out[r * format_info(format_).block_bytes + i] = byte; break;
      case kBF16: bytes_[(b / 2 * 32 + 2 * r + b % 2) * 2 + i] = byte; break;
      case kFP8: bytes_[fp8_header_bytes(k_) + b / 4 * 64 + r / 4 * 16 + b % 4 / 2 * 8 + r % 4 * 2 + b % 2] = byte; break;
      case kQ8_0: out[i < 2 ? 2 * r + i : at(32, r, i - 2)] = static_cast<uint8_t>(byte ^ (i < 2 ? 0 : 0x80)); break;
      case kQ4_0: out[i < 2 ? 2 * r + i : at(32, r, i - 2)] = byte; break;
      case kQ4_1: out[i < 4 ? 32 * is_second + 2 * r + i % 2 : at(64, r, i - 4)] = byte; break;
      case kQ4_K:
        out[i < 4 ? 32 * is_second + 2 * r + i % 2 : i < 16 ? 64 + 16 * (i - 4) + r : at(256, r, i - 16)] = byte;
        break;
      case kQ6_K: {  // ql [128], qh [64], scales [16], d
        const int half = i < 128 ? i / 64 : (i - 128) / 32;
        const int64_t to = i < 128 ? i % 64 : 64 + i % 32;
        out[i >= 208 ? 2 * r + i - 208 : i >= 192 ? 32 + 16 * (i - 192) + r : at(288 + 1536 * half, r, to)] = byte;
        break;
      }
      default: out[i == 0 ? r : at(16, r, i - 1)] = byte;
    }
  }

  int32_t format_;
  int64_t k_;
  std::vector<uint8_t> bytes_;
};

// `rows` of a tile are there, packed to `shift` bytes behind a line: the tile has every byte, and no more is written.
inline void test_pack(Test& test, const KernelTable& kernels, int32_t format, bool is_apart, int64_t k, int num_rows,
                      int64_t shift) {
  constexpr uint8_t kCanary = 0xa5;
  constexpr int64_t kLine = 64;
  const FormatInfo& info = format_info(format);
  const int64_t row_bytes = is_apart ? k / 2 : k / info.block_weights * info.block_bytes;
  Random random(static_cast<uint64_t>(format * 100000 + k * 16 + num_rows));
  const auto random_bytes = [&](int64_t n) {
    std::vector<uint8_t> out(n);
    for (uint8_t& byte : out) byte = static_cast<uint8_t>(random.bits());
    return out;
  };
  PlainTile plain(format, k);
  std::vector<std::vector<uint8_t>> stored, scales;
  const uint8_t *rows[kTileRows] = {}, *scale_rows[kTileRows] = {};
  const std::vector<uint8_t> zeros(row_bytes, 0), no_scales(k, 0);
  for (int r = 0; r < kTileRows; ++r) {
    if (r < num_rows) {
      stored.push_back(random_bytes(row_bytes)), scales.push_back(random_bytes(k));
      rows[r] = stored.back().data(), scale_rows[r] = scales.back().data();
    }
    plain.put_row(r, r < num_rows ? rows[r] : zeros.data(), !is_apart ? nullptr : r < num_rows ? scale_rows[r] : no_scales.data());
  }
  const int64_t bytes = tile_bytes(format, k), header = format == kFP8 ? fp8_header_bytes(k) : 0;
  std::vector<uint8_t> room(bytes + 3 * kLine, kCanary);
  uint8_t* tile = room.data() + kLine - reinterpret_cast<uintptr_t>(room.data()) % kLine + shift;
  const bool has_scales = is_apart || (format == kFP8 && num_rows % 2 == 0);
  kernels.pack_tile(format, rows, has_scales ? scale_rows : nullptr, k, tile);
  kernels.pack_fence();
  test.hash(tile, bytes);
  for (int64_t i = 0; i < header; ++i) {
    const bool is_scale = i < (k + kScaleInputs - 1) / kScaleInputs;
    const int want = !is_scale ? 0 : has_scales ? scale_rows[0][i] : 127;
    test.expect(tile[i] == want, "k %ld, %d rows: scale %ld is %d, not %d", k, num_rows, i, tile[i], want);
  }
  for (int64_t i = header; i < bytes; ++i) {
    test.expect(tile[i] == plain.bytes()[i], "k %ld, %d rows, %ld bytes behind a line: byte %ld is %d, not %d", k, num_rows,
                shift, i, tile[i], plain.bytes()[i]);
  }
  for (const uint8_t& byte : room) {
    if (&byte < tile || &byte >= tile + bytes) {
      test.expect(byte == kCanary, "k %ld, %d rows: wrote %ld bytes from its tile", k, num_rows, &byte - tile);
    }
  }
}

inline void test_pack(Tests& tests, const KernelTable& kernels) {
  for (int32_t format = 0; format < kNumFormats; ++format) {
    const FormatInfo& info = format_info(format);
    Test test(std::string("bytes of a tile ") + info.name, true);
    // BF16 are packed in pairs, FP8 in fours.
    const int64_t unit = format == kBF16 ? 2 : format == kFP8 ? 4 : info.block_weights;
    for (int64_t units : {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 64, 129}) {
      for (int num_rows : {1, 2, 9, 15, 16}) {
        for (int64_t shift : {0, 16, 32, 48}) {
          test_pack(test, kernels, format, false, units * unit, num_rows, shift);
          if (format == kMXFP4) test_pack(test, kernels, format, true, units * unit, num_rows, shift);
        }
      }
    }
    tests.push_back(test);
  }
}

}  // namespace hotset
