// The one dispatch table: what a kernel set offers, filled once per instruction set in kernels.cpp.
#pragma once

#include "probe.h"
#include "types.h"

namespace hotset {

struct KernelTable {
  const char* isa;
  void (*linear[kNumFormats])(const LinearArgs&);
  void (*gated[kNumFormats])(const LinearArgs&);
  void (*pack_tile)(int32_t format, const uint8_t* const* rows, int64_t k, uint8_t* tile);
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
};

// Names of the sets this machine can run, best first; and the set of that name (null if it cannot).
int available_isas(const char** names, int capacity);
const KernelTable* kernel_table(const char* name);

}  // namespace hotset
