// Chooses the kernel set by what the processor reports.
#include <cstring>

#include "table.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hotset {

namespace avx512 { extern const KernelTable table; }
namespace avx2 { extern const KernelTable table; }
namespace neon { extern const KernelTable table; }

const FormatInfo& format_info(int32_t format) {
  static const FormatInfo kInfo[kNumFormats] = {
      {"F32", 1, 4, ActKind::kF32},
      {"F16", 1, 2, ActKind::kF32},
      {"BF16", 1, 2, ActKind::kBF16},
      {"Q8_0", 32, 34, ActKind::kQ8Offset128},
      {"Q4_0", 32, 18, ActKind::kQ8Offset8},
      {"Q4_1", 32, 20, ActKind::kQ8Sum},
      {"Q4_K", 256, 144, ActKind::kQ8Sum},
      {"Q6_K", 256, 210, ActKind::kQ8Offset32},
      {"FP8", 1, 1, ActKind::kBF16},
      {"MXFP4", 32, 17, ActKind::kQ8Offset12},
  };
  return kInfo[format];
}

int64_t tile_bytes(int32_t format, int64_t in_width) {
  const FormatInfo& info = format_info(format);
  const int64_t header = format == kFP8 ? fp8_header_bytes(in_width) : 0;
  return header + in_width / info.block_weights * info.block_bytes * kTileRows;
}

namespace {

struct Candidate {
  const KernelTable* table;
  bool usable;
};

#if defined(__x86_64__)
constexpr int kNumCandidates = 2;
void candidates(Candidate* out) {
  __builtin_cpu_init();
  out[0] = {&avx512::table, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                                __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                                __builtin_cpu_supports("avx512vbmi")};
  out[1] = {&avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")};
}
#else
constexpr int kNumCandidates = 1;
void candidates(Candidate* out) {
  unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
  out[0] = {&neon::table, (caps & HWCAP_ASIMDDP) && (caps & HWCAP_FPHP) && (caps2 & HWCAP2_I8MM)};
}
#endif

}  // namespace

int available_isas(const char** names, int capacity) {
  Candidate all[kNumCandidates];
  candidates(all);
  int count = 0;
  for (const Candidate& c : all)
    if (c.usable && count < capacity) names[count++] = c.table->isa;
  return count;
}

const KernelTable* kernel_table(const char* name) {
  Candidate all[kNumCandidates];
  candidates(all);
  for (const Candidate& c : all)
    if (c.usable && std::strcmp(c.table->isa, name) == 0) return c.table;
  return nullptr;
}

}  // namespace hotset
