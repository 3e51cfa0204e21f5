// One instruction set's kernels: compiled once per entry of HOTSET_ISAS with its own flags, in its own namespace.
#include "table.h"

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(HOTSET_ISA_avx512) || defined(HOTSET_ISA_avx2)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

// gcc 12 otherwise makes calls of functions that pass accumulators by reference, and those then live in memory.
#define HOTSET_INLINE inline __attribute__((always_inline))

namespace hotset {
namespace HOTSET_ISA {
namespace {

#include "numbers.h"

#if defined(HOTSET_ISA_avx512)
#include "simd_avx512.h"
#elif defined(HOTSET_ISA_avx2)
#include "simd_avx2.h"
#else
#include "simd_neon.h"
#endif

#include "elementwise.h"
#include "linear.h"
#include "attend.h"
#include "pack.h"
#include "rows.h"
#include "rowattend.h"
#include "index.h"
#include "hyper.h"
#include "probe_kernels.h"

}  // namespace

#define HOTSET_STRING_(x) #x
#define HOTSET_STRING(x) HOTSET_STRING_(x)

extern const KernelTable table;
const KernelTable table = {
    HOTSET_STRING(HOTSET_ISA),
    {linear<kF32, false>, linear<kF16, false>, linear<kBF16, false>, linear<kQ8_0, false>, linear<kQ4_0, false>,
     linear<kQ4_1, false>, linear<kQ4_K, false>, linear<kQ6_K, false>, linear<kFP8, false>, linear<kMXFP4, false>},
    {linear<kF32, true>, linear<kF16, true>, linear<kBF16, true>, linear<kQ8_0, true>, linear<kQ4_0, true>,
     linear<kQ4_1, true>, linear<kQ4_K, true>, linear<kQ6_K, true>, linear<kFP8, true>, linear<kMXFP4, true>},
    pack_tile,
    stream_fence,
    unpack_row,
    {pack_act_f32, pack_act_bf16, pack_act_q8<ActKind::kQ8Offset8>, pack_act_q8<ActKind::kQ8Offset128>,
     pack_act_q8<ActKind::kQ8Offset32>, pack_act_q8<ActKind::kQ8Sum>, pack_act_q8<ActKind::kQ8Offset12>},
    rms_norm,
    silu_mul,
    rope_head,
    {store_kv<false>, store_kv<true>},
    {attend_rows<false>, attend_rows<true>},
    attend_merge,
    attend_finish,
    kProbeKernels,
    {encode_row<RowKind::kFP8>, encode_row<RowKind::kBF16>, encode_row<RowKind::kBF16Exact>, encode_row<RowKind::kFP4>},
    pack_tile_queries,
    {attend_tile<RowKind::kFP8>, attend_tile<RowKind::kBF16>, attend_tile<RowKind::kBF16Exact>,
     attend_tile<RowKind::kFP4>},
    attend_finish_sink,
    compress_pool,
    head_norm,
    hadamard,
    {store_index_row<IndexKind::kMXFP4>, store_index_row<IndexKind::kFP8>, store_index_row<IndexKind::kBF16Exact>},
    {pack_index_query<IndexKind::kMXFP4>, pack_index_query<IndexKind::kFP8>, pack_index_query<IndexKind::kBF16Exact>},
    {prepare_index_heads<IndexKind::kMXFP4>, prepare_index_heads<IndexKind::kFP8>,
     prepare_index_heads<IndexKind::kBF16Exact>},
    {index_scores<IndexKind::kMXFP4>, index_scores<IndexKind::kFP8>, index_scores<IndexKind::kBF16Exact>},
    select_above,
    hyper_mix,
    hyper_merge,
};

}  // namespace HOTSET_ISA
}  // namespace hotset
