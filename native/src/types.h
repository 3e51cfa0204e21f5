// Plain structs shared by the executor, the kernels and the binding. No intrinsics here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotset {

constexpr int kTileRows = 16;        // output rows interleaved in one tile of a packed weight
constexpr int kBlockTokens = 256;    // tokens per cache block
constexpr int kKeyGroup = 64;        // cached keys whose channels are interleaved
constexpr int kSpanBlocks = 4;       // blocks whose attention partials are merged before spans are merged
constexpr int kSpanTokens = kBlockTokens * kSpanBlocks;

enum Format : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kQ8_0 = 3, kQ4_0 = 4, kQ4_1 = 5, kQ4_K = 6, kQ6_K = 7, kNumFormats };

// How a product wants its input rows packed. Integer weights are kept unsigned, so an int8 row carries what takes
// their offset (or brings their minimum) back: a term per 32 inputs, or per 16 for kQ8Offset32.
enum class ActKind : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kQ8Offset8 = 2,    // int32 -8 sum(q)
  kQ8Offset128 = 3,  // int32 -128 sum(q)
  kQ8Offset32 = 4,   // int32 -32 sum(q), per 16 inputs
  kQ8Sum = 5,        // float d sum(q)
};
constexpr int kNumActKinds = 6;

struct FormatInfo {
  const char* name;
  int32_t block_weights;
  int32_t block_bytes;
  ActKind act;
};
const FormatInfo& format_info(int32_t format);

// Input rows of a product, packed in groups of 16, 8, 4, 2, 1 tokens (find_group), inside a group with the
// input index outermost, so that a kernel walks one pointer. Int8 rows: value = d q.
struct Act {
  int8_t* q;       // [groups][K/32][tokens][32]
  float* d;        // [groups][K/32][tokens]
  int32_t* terms;  // [groups][K/32 or K/16][tokens]; floats for kQ8Sum
  float* f32;      // [groups][K][tokens]
  uint16_t* bf16;  // [groups][K/2][tokens][2]
};

// Greedy cut of n tokens into groups; the group that starts at token t has group_size(n - t) tokens.
inline int group_size(int64_t remaining) {
  return remaining >= 16 ? 16 : remaining >= 8 ? 8 : remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1;
}
// Group of token t among n: its first token and size.
inline void find_group(int64_t n, int64_t t, int64_t* first, int* size) {
  int64_t start = t / 16 * 16;
  if (n - start < 16) {
    while (t - start >= group_size(n - start)) start += group_size(n - start);
  }
  *first = start;
  *size = group_size(n - start);
}

// Tiles [0, num_tiles) of a packed weight times n packed rows; y points at the first tile's first row.
struct LinearArgs {
  const uint8_t* tiles;
  int64_t tile_bytes;
  int64_t tile_stride;  // 2 tile_bytes where gate and up tiles alternate
  int64_t num_tiles;
  int64_t k;
  int64_t n;
  const Act* act;
  float* y;
  int64_t ld;  // floats between the rows of y
  bool add;
};

enum class CacheKind : int32_t { kF16 = 0, kBF16 = 1 };
constexpr int kNumCacheKinds = 2;

constexpr int kMaxAttendRows = 48;   // query rows of one attention call: tokens x heads of one kv head
constexpr int kMaxHeadDim = 512;

struct AttendScratch {  // per thread; row r of span and total: m, l, o[head_dim]
  float* q;       // [rows][head_dim], packed and scaled
  float* scores;  // [rows][256]
  float* values;  // [rows][head_dim]
  float* span;    // [rows][head_dim + 2]
  float* total;   // [rows][head_dim + 2]
};

struct AttendArgs {
  const float* const* q;   // [rows]
  const int64_t* visible;  // [rows] keys that the row may see, counted from position 0
  int32_t rows, head_dim;
  float scale;
  int32_t span_first, num_spans;
  const uint8_t* cache;
  const int32_t* blocks;   // block ids of the sequence
  int64_t block_stride, key_offset, value_offset;  // bytes; offsets of this layer and kv head inside a block
  const AttendScratch* scratch;
};

}  // namespace hotset
