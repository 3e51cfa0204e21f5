// The lightning indexer's rows, in tiles of sixteen that are weights of a format: a token's query heads are the inputs
// of a product with them.

// Sums and differences of numbers kHalf apart. A constant distance lets the compiler use vectors.
template <int kHalf> inline void butterflies(float* x, int32_t width) {
  for (int32_t i = 0; i < width; i += 2 * kHalf) {
    for (int32_t j = 0; j < kHalf; ++j) {
      const float a = x[i + j], b = x[i + j + kHalf];
      x[i + j] = a + b, x[i + j + kHalf] = a - b;
    }
  }
}

// Normalised Walsh-Hadamard transform, natural order, in place.
void hadamard(float* x, int32_t width) {
  butterflies<1>(x, width);
  butterflies<2>(x, width);
  butterflies<4>(x, width);
  butterflies<8>(x, width);
  for (int32_t half = 16; half < width; half *= 2) {
    for (int32_t i = 0; i < width; i += 2 * half) {
      for (int32_t j = i; j < i + half; j += 16) {
        const f32x16 a = f32_load(x + j), b = f32_load(x + j + half);
        f32_store(x + j, f32_add(a, b));
        f32_store(x + j + half, f32_sub(a, b));
      }
    }
  }
  const f32x16 scale = f32_splat(static_cast<float>(1 / std::sqrt(static_cast<double>(width))));
  for (int32_t i = 0; i < width; i += 16) f32_store(x + i, f32_mul(f32_load(x + i), scale));
}

// Finite numbers, as rows that are key and value in one have.
inline void clamp_row(const float* x, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i += 16)
    f32_store(out + i, f32_min(f32_max(f32_load(x + i), f32_splat(-kLargestScaled)), f32_splat(kLargestScaled)));
}

// e4m3 codes of a row and the exponent of its one scale.
inline int e4m3_row(const float* x, int64_t width, uint8_t* codes) {
  alignas(64) float values[kMaxHeadDim];
  alignas(64) uint32_t bits[kMaxHeadDim];
  clamp_row(x, width, values);
  std::memcpy(bits, values, width * sizeof(float));
  return e4m3_group(bits, static_cast<int>(width), codes);
}

// Row `lane` of a tile.
template <IndexKind kKind> void store_index_row(const float* x, int32_t width, uint8_t* tile, int32_t lane) {
  if constexpr (kKind == IndexKind::kMXFP4) {
    uint8_t codes[32];
    for (int32_t b = 0; b < width / 32; ++b, tile += kMxBlockBytes) {
      tile[lane] = static_cast<uint8_t>(e2m1_group(x + 32 * b, codes) + 127);
      for (int i = 0; i < 16; ++i)
        tile[16 + i / 4 * 64 + 4 * lane + i % 4] = static_cast<uint8_t>(codes[i] | codes[16 + i] << 4);
    }
  } else if constexpr (kKind == IndexKind::kFP8) {
    alignas(64) uint8_t codes[kMaxHeadDim];
    const float scale = power_of_two(e4m3_row(x, width, codes));
    for (int32_t i = 0; i < width; ++i) tile[fp8_at(lane, i)] = codes[i];
    std::memcpy(tile + kTileRows * width + 4 * lane, &scale, 4);
  } else {
    uint16_t values[kMaxHeadDim];
    row_to_bf16(x, width, kLargestBf16, values);
    for (int32_t i = 0; i < width; i += 2) std::memcpy(tile + 32 * i + 4 * lane, values + i, 4);
  }
}

// A query head as int8 with a scale per 32, from its e2m1 numbers; `lane` of a group of `size`.
inline void pack_e2m1_head(const float* x, int64_t k, int64_t first, int64_t lane, int size, const Act& act) {
  int8_t* q = act.q + first * k + lane * 32;
  float* d = act.d + first * (k / 32) + lane;
  int32_t* terms = act.terms + first * (k / 32) + lane;
  // Scales that are close together become the smallest of them.
  uint8_t codes[kMaxHeadDim];
  int exponents[kMaxHeadDim / 32], low = INT_MAX, high = INT_MIN;
  for (int64_t b = 0; b < k / 32; ++b) {
    exponents[b] = e2m1_group(x + 32 * b, codes + 32 * b);
    low = exponents[b] < low ? exponents[b] : low;
    high = exponents[b] > high ? exponents[b] : high;
  }
  const bool is_common = high - low <= kE2m1Spread;
  for (int64_t b = 0; b < k / 32; ++b, q += 32 * size, d += size, terms += size) {
    const int shift = is_common ? exponents[b] - low : 0;
    *d = power_of_two(exponents[b] - shift - 1);
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
      q[i] = static_cast<int8_t>(kTwiceE2m1[codes[32 * b + i]] * (1 << shift));
      sum += q[i];
    }
    *terms = -kE2m1Offset * sum;
  }
}

// As pack_act: row t, a head, of n.
template <IndexKind kKind> void pack_index_query(const float* x, int64_t k, int64_t n, int64_t t, const Act& act) {
  int64_t first;
  int size;
  find_group(n, t, &first, &size);
  if constexpr (kKind == IndexKind::kMXFP4) {
    pack_e2m1_head(x, k, first, t - first, size, act);
  } else {
    alignas(64) uint16_t values[kMaxHeadDim];
    if constexpr (kKind == IndexKind::kFP8) {
      alignas(64) uint8_t codes[kMaxHeadDim] = {};
      const int exponent = e4m3_row(x, k, codes);  // e4m3 times a power of two is exact in BF16
      for (int64_t i = 0; i < k; i += 64) bf16_expand_e4m3(codes + i, exponent, values + i);
    } else {
      row_to_bf16(x, static_cast<int32_t>(k), kLargestBf16, values);
    }
    uint16_t* out = act.bf16 + first * k + (t - first) * 2;
    for (int64_t i = 0; i < k; i += 2) std::memcpy(out + i * size, values + i, 4);
  }
}

// Products of rows and heads in units of the rows' scales, where those are one per row.
template <IndexKind kKind, int NT, int S>
HOTSET_INLINE void index_product(const uint8_t* tile, int64_t k, const Act& act, int64_t first, int slice,
                                 f32x16 (&acc)[NT]) {
  static constexpr uint8_t kNoScales[kMaxHeadDim / kScaleInputs] = {127, 127, 127, 127};
  if constexpr (kKind == IndexKind::kMXFP4) tile_q8<FormatMXFP4, NT, S>(tile, k, act, first, slice, acc);
  if constexpr (kKind == IndexKind::kFP8) fp8_run<NT, S>(kNoScales, tile, act.bf16 + first * k + 2 * slice, k, acc);
  if constexpr (kKind == IndexKind::kBF16Exact) tile_bf16<NT, S>(tile, k, act, first, slice, acc);
}

// scores += sum over the S heads from `first` on of weight times the product, where positive.
template <IndexKind kKind, int S>
HOTSET_INLINE f32x16 index_heads(const uint8_t* tile, int64_t k, const Act& act, int64_t first, const float* weights,
                                 f32x16 scores) {
  constexpr int kMost = kKind == IndexKind::kMXFP4 ? kMaxTokens : kMaxTokensFloat;
  constexpr int NT = S < kMost ? S : kMost;
  for (int slice = 0; slice < S; slice += NT) {
    f32x16 acc[NT];
    index_product<kKind, NT, S>(tile, k, act, first, slice, acc);
#pragma GCC unroll 16
    for (int h = 0; h < NT; ++h)
      scores = f32_fma(f32_splat(weights[first + slice + h]), f32_max(acc[h], f32_zero()), scores);
  }
  return scores;
}

// ---- common scales --------------------------------------------------------------------------------------
//
// Numbers whose scales are close together are whole numbers of the smallest: heads are packed so, and of rows a lookup
// of 64 entries makes it so. A product is then one sum of integers. It has the bits of the sum by groups of 32, in which
// nothing is rounded either: a product is less than 2^24 units.
//
// Where scales lie closer still, half of the products is saved: of channels e, o of a row and e', o' of a head
//
//     e e' + o o' = (e + o') (o + e') - e o - e' o'
//
// (Winograd 1968), where the last two are of the row or the head alone. The sums fit bytes.

constexpr int64_t kMostIndexGroups = 8;
constexpr int kPairSpread = kE2m1Spread - 1;  // of scales, so that a number of a row and one of a head can be added

// Heads [first, first + 16): whether their scales are common, and, in `largest`, the largest of what `largest` was and
// their numbers.
inline bool common_heads(const IndexHeads& heads, int64_t first, CommonHeads* out, int* largest) {
  const int64_t k = heads.width, groups = k / 32;
  const float* d = heads.act.d + first * groups;
  const int32_t* terms = heads.act.terms + first * groups;
  const int8_t* q = heads.act.q + first * k;
  bool is_common = true;
  *out = {};
  for (int64_t b = 0; b < groups; ++b, terms += 16) {
    is_common &= std::memcmp(d, d + 16 * b, 16 * sizeof(float)) == 0;
    for (int h = 0; h < 16; ++h, q += 32) {
      out->terms[h] += terms[h] * (kE2m1ScaledOffset / kE2m1Offset);
      int32_t product = 0, most = *largest;
      for (int i = 0; i < 16; ++i) product += q[i] * (q[16 + i] + kE2m1ScaledOffset);
      for (int i = 0; i < 32; ++i) most = std::abs(q[i]) > most ? std::abs(q[i]) : most;
      out->pair_terms[h] -= product;
      *largest = most;
    }
  }
  for (int h = 0; h < 16; ++h) {
    out->weights[h] = heads.weights[first + h] * d[h];
    is_common &= d[h] > 0x1p-60f && d[h] < 0x1p60f;  // far from where a product leaves the range of floats
  }
  return is_common;
}

template <IndexKind kKind> void prepare_index_heads(IndexHeads& heads) {
  heads.is_common = kKind == IndexKind::kMXFP4 && kHasScaledLookup && heads.num_heads % 16 == 0 &&
                    heads.num_heads <= kMostCommonHeads && heads.width <= 32 * kMostIndexGroups;
  int largest = 0;
  for (int64_t h = 0; heads.is_common && h < heads.num_heads; h += 16)
    heads.is_common = common_heads(heads, h, &heads.common[h / 16], &largest);
  heads.is_paired = heads.is_common && largest <= kE2m1Offset << kPairSpread;
}

// A tile whose rows' scales are close together, expanded, and the smallest scale of each row. In pairs: the numbers of
// second channels without the offset, and what sums of products have too much.
struct CommonTile {
  alignas(64) uint8_t w[kMostIndexGroups][8][64];
  alignas(64) uint8_t scales[16];
  i32x16 pair_terms;
  bool is_paired;
};

// A template, so that the lookup need not exist in every instruction set.
template <class Byte> inline bool common_tile(const Byte* tile, int64_t groups, bool is_paired, CommonTile* out) {
  if constexpr (!kHasScaledLookup) {
    return false;
  } else {
    out->is_paired = is_paired && row_scales(tile, kMxBlockBytes, groups, kPairSpread, out->scales);
    if (!out->is_paired && !row_scales(tile, kMxBlockBytes, groups, kE2m1Spread, out->scales)) return false;
    static constexpr int8_t kNone[4] = {};
    i32x16 products = i32_splat(0);
    for (int64_t b = 0; b < groups; ++b, tile += kMxBlockBytes) {
      const auto shifts = row_shifts(tile, out->scales);
      for (int i = 0; i < 4; ++i) {
        const u8x64 v = u8_load(tile + 16 + 64 * i);
        const auto first = u8_e2m1_scaled(u8_and(v, 15), shifts);
        auto second = u8_e2m1_scaled(u8_and(u8_shr<4>(v), 15), shifts);
        if (out->is_paired) {
          second = u8_sub(second, kE2m1ScaledOffset);
          products = i32_dot_of_sums(products, first, kNone, second, kNone);
        }
        u8_store(out->w[b][i], first);
        u8_store(out->w[b][4 + i], second);
      }
    }
    out->pair_terms = products;
    return true;
  }
}

// As index_heads of sixteen, in units of the rows' scales.
HOTSET_INLINE f32x16 common_scores(const CommonTile& tile, int64_t groups, const int8_t* q, const CommonHeads& heads,
                                   f32x16 scores) {
  constexpr int kHeads = 16;
  i32x16 acc[kHeads];
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h) acc[h] = i32_splat(heads.terms[h]);
  for (int64_t b = 0; b < groups; ++b, q += 32 * kHeads) {
    u8x64 w[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) w[g] = u8_load(tile.w[b][g]);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) acc[h] = i32_dot<2 * kE2m1ScaledOffset>(acc[h], w[g], q + 32 * h + 4 * g);
  }
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h)
    scores = f32_fma(f32_splat(heads.weights[h]), f32_max(f32_from_i32(acc[h]), f32_zero()), scores);
  return scores;
}

// The same of paired channels.
template <class Tile>
HOTSET_INLINE f32x16 pair_scores(const Tile& tile, int64_t groups, const int8_t* q, const CommonHeads& heads,
                                 f32x16 scores) {
  if constexpr (kHasScaledLookup) {
    constexpr int kHeads = 8;  // at a time: what is added takes registers
    for (int first = 0; first < 16; first += kHeads) {
      i32x16 acc[kHeads];
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) acc[h] = i32_sub(i32_splat(heads.pair_terms[first + h]), tile.pair_terms);
      for (int64_t b = 0; b < groups; ++b) {
        const int8_t* at = q + 32 * (16 * b + first);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const auto even = u8_load(tile.w[b][i]), odd = u8_load(tile.w[b][4 + i]);
#pragma GCC unroll 16
          for (int h = 0; h < kHeads; ++h)
            acc[h] = i32_dot_of_sums(acc[h], even, at + 32 * h + 16 + 4 * i, odd, at + 32 * h + 4 * i);
        }
      }
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h)
        scores = f32_fma(f32_splat(heads.weights[first + h]), f32_max(f32_from_i32(acc[h]), f32_zero()), scores);
    }
  }
  return scores;
}

template <IndexKind kKind> void index_scores(const IndexArgs& a) {
  const IndexHeads& heads = *a.heads;
  const int64_t k = heads.width, num_heads = heads.num_heads, bytes = index_tile_bytes(kKind, k), groups = k / 32;
  CommonTile common;
  for (int64_t i = 0; i < a.num_tiles; ++i) {
    const uint8_t* tile = a.tiles + i * bytes;
    float* scores = a.scores + 16 * i;
    // A few lines at a time: hardware prefetchers start anew in each block, and all at once would stall.
    for (int64_t at = 0; a.next != nullptr && at < bytes; at += 64) __builtin_prefetch(a.next + i * bytes + at);
    f32x16 sum = f32_zero();
    if (heads.is_common && common_tile(tile, groups, heads.is_paired, &common)) {
      for (int64_t h = 0; h < num_heads; h += 16) {
        const int8_t* q = heads.act.q + h * k;
        sum = common.is_paired ? pair_scores(common, groups, q, heads.common[h / 16], sum)
                               : common_scores(common, groups, q, heads.common[h / 16], sum);
      }
      f32_store(scores, f32_mul(sum, mx_scales(common.scales)));
      continue;
    }
    for (int64_t h = 0; h < num_heads;) {
      const int size = group_size(num_heads - h);
      switch (size) {
        case 16: sum = index_heads<kKind, 16>(tile, k, heads.act, h, heads.weights, sum); break;
        case 8: sum = index_heads<kKind, 8>(tile, k, heads.act, h, heads.weights, sum); break;
        case 4: sum = index_heads<kKind, 4>(tile, k, heads.act, h, heads.weights, sum); break;
        case 2: sum = index_heads<kKind, 2>(tile, k, heads.act, h, heads.weights, sum); break;
        default: sum = index_heads<kKind, 1>(tile, k, heads.act, h, heads.weights, sum);
      }
      h += size;
    }
    // A power of two: the same bits as with every product scaled.
    if constexpr (kKind == IndexKind::kFP8)
      sum = f32_mul(sum, f32_load(reinterpret_cast<const float*>(tile + kTileRows * k)));
    f32_store(scores, sum);
  }
}

int64_t select_above(const float* scores, int64_t n, float threshold, int32_t first_index, float* out_scores,
                     int32_t* out_index) {
  int64_t count = 0;
  const auto append = [&](int64_t i) {
    out_scores[count] = scores[i];
    out_index[count] = first_index + static_cast<int32_t>(i);
    ++count;
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (uint32_t lanes = f32_lanes_from(f32_load(scores + i), f32_splat(threshold)); lanes != 0; lanes &= lanes - 1)
      append(i + __builtin_ctz(lanes));
  }
  for (; i < n; ++i)
    if (scores[i] >= threshold) append(i);
  return count;
}
