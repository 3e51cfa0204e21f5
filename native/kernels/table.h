// The one dispatch table: what a kernel set offers, filled once per instruction set in kernels.cpp.
#pragma once

#include "probe.h"
#include "types.h"

namespace hotset {

struct KernelTable {
  const char* isa;
  void (*linear[kNumFormats])(const LinearArgs&);
  void (*gated[kNumFormats])(const LinearArgs&);
  // scales: FP8: scales[0] = the scale row of these sixteen rows, or null for scales of 1; MXFP4: scales[r] = row r's
  // k/32 bytes, or null where `rows` are GGUF blocks, which have them inside; null for other formats.
  void (*pack_tile)(int32_t format, const uint8_t* const* rows, const uint8_t* const* scales, int64_t k, uint8_t* tile);
  void (*pack_fence)();  // after a thread's last pack_tile, before others read its tiles
  void (*unpack_row)(int32_t format, const uint8_t* tile, int row, int64_t k, float* y);
  void (*pack_act[kNumActKinds])(const float* x, int64_t k, int64_t n, int64_t t, const Act& act);
  void (*rms_norm)(const float* x, const float* w, float eps, int64_t width, float* y);
  void (*silu_mul)(const float* gate, const float* up, int64_t width, float* y);
  void (*rope_head)(float* x, const float* angles, int32_t rotary, bool adjacent);
  void (*store_kv[kNumCacheKinds])(const float* k, const float* v, int32_t dim, int64_t r, uint8_t* keys, uint8_t* values);
  void (*attend_rows[kNumCacheKinds])(const AttendArgs&);
  void (*attend_merge)(float* acc, const float* part, int32_t dim);
  void (*attend_finish)(const float* acc, int32_t dim, float* out);
  ProbeKernels probe;

  // Rows that are key and value in one; width and plain are multiples of 16.
  void (*encode_row[kNumRowKinds])(const float* x, int32_t width, int32_t plain, uint8_t* data, uint8_t* scales);
  void (*pack_tile_queries)(const float* const* q, int32_t num_rows, int32_t dim, float scale, uint16_t* out);
  void (*attend_tile[kNumRowKinds])(const TileAttendArgs&);  // merges the tile's partial result into acc
  void (*attend_finish_sink)(const float* acc, int32_t dim, float sink, float* out);
  void (*compress_pool)(const CompressArgs&);
  void (*head_norm)(float* x, int32_t dim, float eps);

  // Index rows, in tiles of sixteen. The caller has Hadamard-transformed the rows and queries of kinds that want it.
  void (*hadamard)(float* x, int32_t width);  // width a power of two from 16 on
  void (*store_index_row[kNumIndexKinds])(const float* x, int32_t width, uint8_t* tile, int32_t lane);
  // Row t (a head) of n, packed as index_act of the kind says.
  void (*pack_index_query[kNumIndexKinds])(const float* x, int64_t k, int64_t n, int64_t t, const Act& act);
  // Completes `heads`, whose first four members are set.
  void (*prepare_index_heads[kNumIndexKinds])(IndexHeads& heads);
  void (*index_scores[kNumIndexKinds])(const IndexArgs&);
  // Writes the scores from `threshold` up, in order, with first_index + their place; returns how many.
  int64_t (*select_above)(const float* scores, int64_t n, float threshold, int32_t first_index, float* out_scores,
                          int32_t* out_index);

  void (*hyper_mix)(const HyperArgs&);
  // Columns [first, first + count) of every stream, both multiples of 16; y and x begin at column 0.
  void (*hyper_merge)(float* x, int64_t width, int64_t first, int64_t count, const float* y, const float* coefficients,
                      int32_t num_streams);
};

// Names of the sets this machine can run, best first; and the set of that name (null if it cannot).
int available_isas(const char** names, int capacity);
const KernelTable* kernel_table(const char* name);

}  // namespace hotset
