// The ceilings that kernels are judged against: the fastest plain read and the fastest arithmetic known here.
//
// Included by kernels.cpp inside its namespace, after <immintrin.h> or <arm_neon.h> and probe.h.
// The one entry point is kProbeKernels.
//
// Arithmetic loops keep more independent chains than latency times issue width, and hide the operands
// from the compiler with an empty asm, so nothing is computed at compile time or hoisted.

// Reads 16 lines per turn, in the order of their addresses: the empty asm after each load holds the compiler
// to it. Left free, gcc 12 starts with the line in the middle, the hardware prefetcher loses the stream and a
// Zen 4 core reads 12 GB/s instead of 30. A software prefetch into L2 runs ahead of the hardware's, which
// stops at 4 KiB borders (+2 to 4 %).
constexpr size_t kProbeReadStep = 1024;

inline void probe_prefetch_step(const char* address) {
#pragma GCC unroll 16
  for (size_t line = 0; line < kProbeReadStep; line += 64) __builtin_prefetch(address + line, 0, 2);
}

#if defined(HOTSET_ISA_avx512)

template <bool kPrefetch>
inline void probe_read_once(const char* data, size_t bytes, size_t prefetch_bytes, __m512i (&sums)[8]) {
  for (size_t at = 0; at < bytes; at += kProbeReadStep) {
    if (kPrefetch) probe_prefetch_step(data + at + prefetch_bytes);
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) {
      sums[line & 7] = _mm512_add_epi64(sums[line & 7], _mm512_load_si512(data + at + 64 * line));
      asm volatile("" : "+v"(sums[line & 7]) : : "memory");
    }
  }
}

inline uint64_t probe_read(const void* data, size_t bytes, uint64_t repeats, size_t prefetch_bytes) {
  __m512i sums[8];
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) sums[k] = _mm512_setzero_si512();
  for (uint64_t pass = 0; pass < repeats; ++pass) {
    asm volatile("" ::: "memory");  // every pass reads again
    if (prefetch_bytes != 0) {
      probe_read_once<true>(static_cast<const char*>(data), bytes, prefetch_bytes, sums);
    } else {
      probe_read_once<false>(static_cast<const char*>(data), bytes, 0, sums);
    }
  }
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) sums[0] = _mm512_add_epi64(sums[0], sums[i]);
  alignas(64) uint64_t words[8];
  _mm512_store_si512(words, sums[0]);
  uint64_t total = 0;
  for (uint64_t word : words) total += word;
  return total;
}

inline void probe_write(void* data, size_t bytes) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (size_t at = 0; at < bytes; at += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(data) + at), ones);
  _mm_sfence();
}

inline void probe_copy(void* to, const void* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    const __m512i line = _mm512_load_si512(static_cast<const char*>(from) + at);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + at), line);
  }
  _mm_sfence();
}

inline void probe_int8(uint64_t iterations) {
  __m512i sums[12];
  __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
#pragma GCC unroll 12
  for (int k = 0; k < 12; ++k) sums[k] = _mm512_setzero_si512();
  asm volatile("" : "+v"(a), "+v"(b));
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) sums[k] = _mm512_dpbusd_epi32(sums[k], a, b);
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) asm volatile("" : "+v"(sums[k]));
  }
}

inline void probe_bf16(uint64_t iterations) {
  __m512 sums[12];
  __m512i bits = _mm512_set1_epi16(0x3f80);  // 1.0
  asm volatile("" : "+v"(bits));
  const __m512bh a = (__m512bh)bits;
#pragma GCC unroll 12
  for (int k = 0; k < 12; ++k) sums[k] = _mm512_setzero_ps();
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) sums[k] = _mm512_dpbf16_ps(sums[k], a, a);
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) asm volatile("" : "+v"(sums[k]));
  }
}

inline void probe_f32(uint64_t iterations) {
  __m512 sums[12];
  __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
#pragma GCC unroll 12
  for (int k = 0; k < 12; ++k) sums[k] = _mm512_setzero_ps();
  asm volatile("" : "+v"(a), "+v"(b));
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) sums[k] = _mm512_fmadd_ps(a, b, sums[k]);
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) asm volatile("" : "+v"(sums[k]));
  }
}

constexpr ProbeKernels kProbeKernels = {
    probe_read,
    probe_write,
    probe_copy,
    "vmovntdq zmm",
    {{"int8", "vpdpbusd zmm", probe_int8, 12 * 64 * 2.0, false},
     {"bf16", "vdpbf16ps zmm", probe_bf16, 12 * 32 * 2.0, false},
     {"f32", "vfmadd zmm", probe_f32, 12 * 16 * 2.0, false}},
    3,
};

#elif defined(HOTSET_ISA_avx2)

template <bool kPrefetch>
inline void probe_read_once(const char* data, size_t bytes, size_t prefetch_bytes, __m256i (&sums)[8]) {
  for (size_t at = 0; at < bytes; at += kProbeReadStep) {
    if (kPrefetch) probe_prefetch_step(data + at + prefetch_bytes);
#pragma GCC unroll 32
    for (int half = 0; half < 32; ++half) {
      const auto* address = reinterpret_cast<const __m256i*>(data + at + 32 * half);
      sums[half & 7] = _mm256_add_epi64(sums[half & 7], _mm256_load_si256(address));
      asm volatile("" : "+x"(sums[half & 7]) : : "memory");
    }
  }
}

inline uint64_t probe_read(const void* data, size_t bytes, uint64_t repeats, size_t prefetch_bytes) {
  __m256i sums[8];
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) sums[k] = _mm256_setzero_si256();
  for (uint64_t pass = 0; pass < repeats; ++pass) {
    asm volatile("" ::: "memory");  // every pass reads again
    if (prefetch_bytes != 0) {
      probe_read_once<true>(static_cast<const char*>(data), bytes, prefetch_bytes, sums);
    } else {
      probe_read_once<false>(static_cast<const char*>(data), bytes, 0, sums);
    }
  }
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) sums[0] = _mm256_add_epi64(sums[0], sums[i]);
  uint64_t words[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), sums[0]);
  return words[0] + words[1] + words[2] + words[3];
}

inline void probe_write(void* data, size_t bytes) {
  const __m256i ones = _mm256_set1_epi8(1);
  for (size_t at = 0; at < bytes; at += 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(data) + at), ones);
  _mm_sfence();
}

inline void probe_copy(void* to, const void* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 32) {
    const __m256i half = _mm256_load_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + at));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(to) + at), half);
  }
  _mm_sfence();
}

// Without VNNI a dot product of bytes is three instructions; the rate counts only its multiplies and adds.
inline void probe_int8(uint64_t iterations) {
  __m256i sums[10];
  __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 10
  for (int k = 0; k < 10; ++k) sums[k] = _mm256_setzero_si256();
  asm volatile("" : "+x"(ones));
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 10
    for (int k = 0; k < 10; ++k) {
      asm volatile("" : "+x"(a), "+x"(b));  // or the product would be computed once for all chains
      sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
#pragma GCC unroll 10
    for (int k = 0; k < 10; ++k) asm volatile("" : "+x"(sums[k]));
  }
}

inline void probe_f32(uint64_t iterations) {
  __m256 sums[12];
  __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
#pragma GCC unroll 12
  for (int k = 0; k < 12; ++k) sums[k] = _mm256_setzero_ps();
  asm volatile("" : "+x"(a), "+x"(b));
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) sums[k] = _mm256_fmadd_ps(a, b, sums[k]);
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) asm volatile("" : "+x"(sums[k]));
  }
}

constexpr ProbeKernels kProbeKernels = {
    probe_read,
    probe_write,
    probe_copy,
    "vmovntdq ymm",
    {{"int8", "vpmaddubsw + vpmaddwd + vpaddd ymm", probe_int8, 10 * 32 * 2.0, false},
     {"f32", "vfmadd ymm", probe_f32, 12 * 8 * 2.0, false}},
    2,
};

#elif defined(HOTSET_ISA_neon)

template <bool kPrefetch>
inline void probe_read_once(const char* data, size_t bytes, size_t prefetch_bytes, uint64x2_t (&sums)[16]) {
  for (size_t at = 0; at < bytes; at += kProbeReadStep) {
    if (kPrefetch) probe_prefetch_step(data + at + prefetch_bytes);
#pragma GCC unroll 64
    for (int quarter = 0; quarter < 64; ++quarter) {
      const auto* address = reinterpret_cast<const uint64_t*>(data + at + 16 * quarter);
      sums[quarter & 15] = vaddq_u64(sums[quarter & 15], vld1q_u64(address));
      asm volatile("" : "+w"(sums[quarter & 15]) : : "memory");
    }
  }
}

inline uint64_t probe_read(const void* data, size_t bytes, uint64_t repeats, size_t prefetch_bytes) {
  uint64x2_t sums[16];
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) sums[k] = vdupq_n_u64(0);
  for (uint64_t pass = 0; pass < repeats; ++pass) {
    asm volatile("" ::: "memory");  // every pass reads again
    if (prefetch_bytes != 0) {
      probe_read_once<true>(static_cast<const char*>(data), bytes, prefetch_bytes, sums);
    } else {
      probe_read_once<false>(static_cast<const char*>(data), bytes, 0, sums);
    }
  }
#pragma GCC unroll 16
  for (int i = 1; i < 16; ++i) sums[0] = vaddq_u64(sums[0], sums[i]);
  return vaddvq_u64(sums[0]);
}

// Intrinsics have no non-temporal pair.
inline void probe_store_pair(char* to, uint8x16_t a, uint8x16_t b) {
  asm volatile("stnp %q1, %q2, [%0]" : : "r"(to), "w"(a), "w"(b) : "memory");
}

inline void probe_write(void* data, size_t bytes) {
  const uint8x16_t ones = vdupq_n_u8(1);
  for (size_t at = 0; at < bytes; at += 32) probe_store_pair(static_cast<char*>(data) + at, ones, ones);
}

inline void probe_copy(void* to, const void* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 32) {
    const auto* address = static_cast<const uint8_t*>(from) + at;
    probe_store_pair(static_cast<char*>(to) + at, vld1q_u8(address), vld1q_u8(address + 16));
  }
}

// Four pipes of latency 3 or 4 on the widest cores (Neoverse V2), so 20 chains.
inline void probe_int8(uint64_t iterations) {
  int32x4_t sums[20];
  int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
#pragma GCC unroll 20
  for (int k = 0; k < 20; ++k) sums[k] = vdupq_n_s32(0);
  asm volatile("" : "+w"(a), "+w"(b));
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 20
    for (int k = 0; k < 20; ++k) sums[k] = vdotq_s32(sums[k], a, b);
#pragma GCC unroll 20
    for (int k = 0; k < 20; ++k) asm volatile("" : "+w"(sums[k]));
  }
}

inline void probe_int8_matrix(uint64_t iterations) {
  int32x4_t sums[20];
  int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
#pragma GCC unroll 20
  for (int k = 0; k < 20; ++k) sums[k] = vdupq_n_s32(0);
  asm volatile("" : "+w"(a), "+w"(b));
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 20
    for (int k = 0; k < 20; ++k) sums[k] = vmmlaq_s32(sums[k], a, b);
#pragma GCC unroll 20
    for (int k = 0; k < 20; ++k) asm volatile("" : "+w"(sums[k]));
  }
}

inline void probe_f32(uint64_t iterations) {
  float32x4_t sums[20];
  float32x4_t a = vdupq_n_f32(0.5f), b = vdupq_n_f32(0.25f);
#pragma GCC unroll 20
  for (int k = 0; k < 20; ++k) sums[k] = vdupq_n_f32(0);
  asm volatile("" : "+w"(a), "+w"(b));
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 20
    for (int k = 0; k < 20; ++k) sums[k] = vfmaq_f32(sums[k], a, b);
#pragma GCC unroll 20
    for (int k = 0; k < 20; ++k) asm volatile("" : "+w"(sums[k]));
  }
}

// The NEON kernel set is compiled without BF16, which not every i8mm processor has, so the instruction is
// written as asm and run only where the kernel reports it.
inline void probe_bf16(uint64_t iterations) {
  float32x4_t sums[20];
  uint16x8_t a = vdupq_n_u16(0x3f80);  // 1.0
#pragma GCC unroll 20
  for (int k = 0; k < 20; ++k) sums[k] = vdupq_n_f32(0);
  for (uint64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 20
    for (int k = 0; k < 20; ++k) {
      asm volatile(".arch_extension bf16\n\tbfdot %0.4s, %1.8h, %1.8h" : "+w"(sums[k]) : "w"(a));
    }
  }
}

constexpr ProbeKernels kProbeKernels = {
    probe_read,
    probe_write,
    probe_copy,
    "stnp q",
    {{"int8", "sdot", probe_int8, 20 * 16 * 2.0, false},
     {"int8_matrix", "smmla", probe_int8_matrix, 20 * 32 * 2.0, false},
     {"bf16", "bfdot", probe_bf16, 20 * 8 * 2.0, true},
     {"f32", "fmla", probe_f32, 20 * 4 * 2.0, false}},
    4,
};

#else
#error "probe_kernels.h knows HOTSET_ISA_avx512, HOTSET_ISA_avx2 and HOTSET_ISA_neon"
#endif
