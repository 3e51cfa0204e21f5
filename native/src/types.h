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

enum Format : int32_t {
  kF32 = 0, kF16 = 1, kBF16 = 2, kQ8_0 = 3, kQ4_0 = 4, kQ4_1 = 5, kQ4_K = 6, kQ6_K = 7, kFP8 = 8, kMXFP4 = 9,
  kNumFormats
};

// How a product wants its input rows packed. Integer weights are kept unsigned, so an int8 row carries what takes
// their offset (or brings their minimum) back: a term per 32 inputs, or per 16 for kQ8Offset32.
enum class ActKind : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kQ8Offset8 = 2,    // int32 -8 sum(q)
  kQ8Offset128 = 3,  // int32 -128 sum(q)
  kQ8Offset32 = 4,   // int32 -32 sum(q), per 16 inputs
  kQ8Sum = 5,        // float d sum(q)
  kQ8Offset12 = 6,   // int32 -12 sum(q)
};
constexpr int kNumActKinds = 7;

struct FormatInfo {
  const char* name;
  int32_t block_weights;
  int32_t block_bytes;
  ActKind act;
};
const FormatInfo& format_info(int32_t format);

// FP8 weights: one e8m0 scale per kScaleInputs inputs and 128 rows, so a tile has one row of them.
constexpr int kScaleInputs = 128;

// Bytes of one packed tile: the only formula. A block of MXFP4 is 16 scale bytes, then nibbles as in Q4_0. A tile of
// FP8 is a header of scale bytes, a multiple of 64 of them, then one byte per weight.
int64_t tile_bytes(int32_t format, int64_t in_width);
inline int64_t fp8_header_bytes(int64_t in_width) {
  return ((in_width + kScaleInputs - 1) / kScaleInputs + 63) / 64 * 64;
}

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
  const int32_t* rows = nullptr;  // the row of y of each token, where that is not the token's own index
  float limit = 0.0f;             // gated: silu(min(gate, limit)) * clamp(up, -limit, limit); 0 for none
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

// ---- rows that are key and value in one -------------------------------------------------------------------

// How a row of `width` channels lies in the cache. FP8: `plain` bytes e4m3, then width - plain BF16, and apart from
// them one e8m0 scale per kRowGroup plain channels and a zero byte. BF16: the same values as BF16. BF16Exact: rounded to
// BF16 only. FP4: plain / 2 bytes of e2m1 nibbles (the even channel low), then width - plain BF16, and apart from them
// one e8m0 scale per kNibbleGroup plain channels, with zeros up to a multiple of 16. Every value is clamped to the
// finite.
enum class RowKind : int32_t { kFP8 = 0, kBF16 = 1, kBF16Exact = 2, kFP4 = 3 };
constexpr int kNumRowKinds = 4;
constexpr int kRowGroup = 64;
constexpr int kNibbleGroup = 32;

constexpr int kTileKeys = 64;         // rows of one attention tile

struct AttendTile {
  const uint8_t* data[kTileKeys];
  const uint8_t* scales[kTileKeys];  // FP8 and FP4 only
  int32_t first, last;               // rows [first, last) are there, the others are not read
};

struct TileAttendArgs {
  const AttendTile* tile;
  const AttendTile* next;  // what comes after it, or null
  int32_t row_lines;       // cache lines of a row
  const uint16_t* q;       // packed by pack_tile_queries
  int32_t num_rows, dim, plain;
  int32_t rows_per_token;  // query rows in a run that see the same rows
  const int32_t* first;    // [num_rows / rows_per_token] the rows of the tile that each run sees: [first, last)
  const int32_t* last;
  float* acc;              // [num_rows][dim + 2]: m, l, o; l == 0 means empty
  float* scratch;          // tile_attend_scratch(num_rows) floats
};
// Scores, and how each row enters its accumulator.
inline int64_t tile_attend_scratch(int64_t num_rows) { return num_rows * (kTileKeys + 4); }

// How index rows lie in the cache, in tiles of sixteen, and what a token's query heads are packed as. MXFP4: an MXFP4
// weight tile; int8. FP8: e4m3 as in an FP8 weight tile, then a float scale per row, a power of two; BF16, the head's
// scale in its values. BF16Exact: a BF16 weight tile; BF16. Rows and queries of the first two are transformed before.
enum class IndexKind : int32_t { kMXFP4 = 0, kFP8 = 1, kBF16Exact = 2 };
constexpr int kNumIndexKinds = 3;
inline ActKind index_act(IndexKind kind) {
  return kind == IndexKind::kMXFP4 ? ActKind::kQ8Offset12 : ActKind::kBF16;
}
// Bytes of sixteen rows.
inline int64_t index_tile_bytes(IndexKind kind, int64_t width) {
  if (kind == IndexKind::kFP8) return kTileRows * (width + 4);
  return tile_bytes(kind == IndexKind::kMXFP4 ? kMXFP4 : kBF16, width);
}

// Sixteen query heads whose scales are common (index.h): the sums of their products start at `terms`, those of paired
// channels at `pair_terms`, a head's weight times its scale is in `weights`.
struct CommonHeads {
  alignas(64) int32_t terms[16];
  alignas(64) int32_t pair_terms[16];
  alignas(64) float weights[16];
};
constexpr int64_t kMostCommonHeads = 128;

// A token's query heads with what index_scores wants to know of them.
struct IndexHeads {
  Act act;
  const float* weights;  // [num_heads]
  int64_t width, num_heads;
  bool is_common = false, is_paired = false;
  CommonHeads common[kMostCommonHeads / 16] = {};
};

// Scores of one token and tiles of index rows.
struct IndexArgs {
  const IndexHeads* heads;
  const uint8_t* tiles;
  int64_t num_tiles;
  const uint8_t* next;  // as many that are read after these, or null
  float* scores;        // [16 num_tiles]: sums over heads, in order, of weights[h] max(0, dot)
};

struct CompressArgs {  // [num_tokens] rows of `width` floats; a token that does not exist is left out
  const float* const* k;
  const float* const* g;
  const float* const* ape;
  int32_t num_tokens, width;
  float* out;
};

// ---- streams of hyper-connections -------------------------------------------------------------------------

constexpr int kMaxStreams = 8;

struct HyperArgs {
  const float* x;      // [num_streams][width]
  const float* mix;    // [num_streams (2 + num_streams)], or [num_streams] in the head
  const float* base;   // as many
  const float* scale;  // [3], or [1] in the head
  int64_t width;
  int32_t num_streams, iterations;
  float eps, norm_eps;
  float* out;           // [width]
  float* coefficients;  // post, then C by rows; null in the head
};

}  // namespace hotset
