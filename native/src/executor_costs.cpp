// How the items of attention over rows, and of choosing them, are dealt to the threads: runs of about equal cost.
//
// Nothing here changes a bit: how a row's sum is formed depends on the row's place alone (executor_rows.cpp).
#include <algorithm>

#include "executor.h"

namespace hotset {

namespace {

// Fewer items than this per thread and heads are dealt out too, in runs of at least kLeastHeads; where that is not
// enough (in a small step: not one run for every thread), a token's spans are, in runs of any number of heads.
// partial_floats in lower.py has both numbers.
constexpr int64_t kItemsPerThread = 4, kLeastHeads = 8;

// A tile costs as much as this many query rows before the first row meets it.
constexpr int64_t kTileCost = 6;

}  // namespace

void Executor::plan_costs() {
  for (CostClass& c : costs_) {
    const int64_t most_parts = std::max<int64_t>(1, c.num_heads / kLeastHeads);
    const int64_t wanted = kItemsPerThread * team_.size();
    const int64_t enough = step_.few ? team_.size() : wanted;
    c.is_split = c.num_heads > 0 && step_.n * most_parts < enough && plan_spans(c, wanted);
    if (c.is_split || step_.few) continue;
    c.parts = std::clamp<int64_t>(wanted / step_.n, 1, most_parts);
    deal(c, step_.n * c.parts, [&](int64_t item) {
      return kWindowCost + (c.ratio > 0 ? num_rows_seen(c.ratio, c.top_k, item / c.parts) : 0);
    });
  }
}

// Items of the step's spans; false if the partials have no room for them.
bool Executor::plan_spans(CostClass& c, int64_t wanted) {
  int64_t spans = 0, floats = 0;
  for (int64_t t = 0; t < step_.n; ++t) {
    const int64_t more = num_row_spans(num_row_tiles(c.ratio, c.top_k, t)) + 1;
    c.base[t] = floats;
    c.first[t] = spans;
    spans += more;
    floats += more * c.num_heads * (c.head_dim + 2);
    if (floats > spec_.partial_floats) return false;
  }
  c.run = kLeastHeads;
  while (c.run > 1 && spans * ((c.num_heads + c.run - 1) / c.run) < wanted) c.run /= 2;
  const int64_t runs = (c.num_heads + c.run - 1) / c.run;
  for (int64_t t = 0; t < step_.n; ++t) c.first[t] *= runs;
  int64_t t = 0;
  deal(c, spans * runs, [&](int64_t item) {
    while (t + 1 < step_.n && c.first[t + 1] <= item) ++t;
    while (c.first[t] > item) --t;
    const int64_t span = (item - c.first[t]) / runs, tiles = num_row_tiles(c.ratio, c.top_k, t);
    const int64_t oldest = std::max<int64_t>(0, positions_[t] - c.window + 1);
    const int64_t count = span < num_row_spans(tiles)
                              ? std::min(tiles, first_tile_of_span(span + 1)) - first_tile_of_span(span)
                              : positions_[t] / kTileKeys - oldest / kTileKeys + 1;
    return count * (kTileCost + c.run);
  });
  return true;
}

// Cuts items into runs of about equal cost, a run per thread. cost(item) is called for rising items, twice.
template <class Cost> void Executor::deal(CostClass& c, int64_t count, Cost cost) {
  int64_t total = 0, before = 0;
  for (int64_t i = 0; i < count; ++i) total += cost(i);
  int thread = 0;
  c.start[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t own = cost(i), middle = before + own / 2;
    while (thread + 1 < team_.size() && middle >= total * (thread + 1) / team_.size()) c.start[++thread] = i;
    before += own;
  }
  while (thread < team_.size()) c.start[++thread] = count;
}

}  // namespace hotset
