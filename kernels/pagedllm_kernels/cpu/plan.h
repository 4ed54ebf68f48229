// How the attention of a batch is cut into pieces of work. A plan holds for every layer with the same window.
#pragma once

#include "decode.h"
#include "prefill.h"

namespace pagedllm {

class AttentionPlan {
 public:
  // bounds and lens as in paged_attention; sizes are those of a.
  template <typename T>
  AttentionPlan(const AttentionArgs<T>& a, const int32_t* bounds, const int32_t* lens, int64_t num_seqs,
                int64_t num_threads) {
    constexpr int64_t kDecodeQueries = 4;  // up to here unpacking tiles does not pay
    std::vector<Span> prompts;
    for (int64_t i = 0; i < num_seqs; i++) {
      Span span{bounds[i], bounds[i + 1] - bounds[i], lens[i], a.tables + i * a.table_stride};
      if (span.query_len <= kDecodeQueries)
        for (int64_t q = 0; q < span.query_len; q++) add_row(span, q, a.window);
      else
        prompts.push_back(span);
    }
    add_tiles(prompts, a.num_kv_heads, num_threads);
    // All KV heads of a position lie side by side; they are taken apart only if there is not work enough otherwise.
    parts_ = num_stretches_ < 2 * num_threads ? a.num_kv_heads : 1;
    partial_.resize(num_stretches_ * a.num_heads);
    mixed_.resize(num_stretches_ * a.num_heads * a.head_dim);
  }

  int64_t num_items() const { return int64_t(tiles_.size()) + num_stretches_ * parts_; }
  // Rows whose stretches are to be merged when all items are done.
  int64_t num_merges() const { return int64_t(split_rows_.size()); }

  template <typename T>
  void run(const AttentionArgs<T>& a, int64_t item) {
    if (item < int64_t(tiles_.size())) {
      const Tile& tile = tiles_[item];
      prefill_tile(a, tile.span, tile.kv_head, tile.q0, tile.q1);
      return;
    }
    item -= int64_t(tiles_.size());
    int64_t stretch = item / parts_, kv_heads = a.num_kv_heads / parts_, kv_first = item % parts_ * kv_heads;
    const Row& row = rows_[owners_[stretch]];
    int64_t head = stretch * a.num_heads + kv_first * (a.num_heads / a.num_kv_heads);
    int64_t next = std::min(stretch + (parts_ == 1), num_stretches_ - 1);
    decode_stretch(a, stretch_at(stretch), stretch_at(next), row.index, kv_first, kv_first + kv_heads, &partial_[head],
                   &mixed_[head * a.head_dim]);
    if (row.count == 1)
      for (int64_t i = 0; i < kv_heads * (a.num_heads / a.num_kv_heads); i++) merge_head(a, row, head + i);
  }

  template <typename T>
  void merge(const AttentionArgs<T>& a, int64_t i) {
    const Row& row = rows_[split_rows_[i]];
    for (int64_t h = 0; h < a.num_heads; h++) merge_head(a, row, row.first * a.num_heads + h);
  }

 private:
  struct Row {
    Span span;
    int64_t index, low, end;  // of the query among all, and the positions it sees
    int64_t first, count;     // stretches
  };
  struct Tile {
    Span span;
    int64_t kv_head, q0, q1;
  };

  // Tiles of 64 queries, or of 32 or 16 where there would be too few for the threads to get equal shares.
  void add_tiles(const std::vector<Span>& prompts, int64_t num_kv_heads, int64_t num_threads) {
    int64_t num_queries = 0, size = kTileQueries;
    for (const Span& span : prompts) num_queries += span.query_len;
    while (size > 16 && num_queries * num_kv_heads < 4 * size * num_threads) size /= 2;
    for (const Span& span : prompts)
      for (int64_t q = 0; q < span.query_len; q += size)
        for (int64_t h = 0; h < num_kv_heads; h++) tiles_.push_back({span, h, q, std::min(q + size, span.query_len)});
    // Later tiles of a prompt see more positions: the long ones come first, so that nobody waits for one at the end.
    std::reverse(tiles_.begin(), tiles_.end());
  }

  void add_row(const Span& span, int64_t q, int64_t window) {
    constexpr int64_t kStretch = 512;
    int64_t end = span.seq_len - span.query_len + q + 1, low = window > 0 ? std::max<int64_t>(0, end - window) : 0;
    int64_t count = (end - low + kStretch - 1) / kStretch;
    if (count > 1) split_rows_.push_back(int64_t(rows_.size()));
    owners_.insert(owners_.end(), count, int64_t(rows_.size()));
    rows_.push_back({span, span.first_row + q, low, end, num_stretches_, count});
    num_stretches_ += count;
  }

  Stretch stretch_at(int64_t stretch) const {
    const Row& row = rows_[owners_[stretch]];
    int64_t nth = stretch - row.first, length = row.end - row.low;
    auto bound = [&](int64_t i) { return i == row.count ? row.end : row.low + length * i / row.count / kLanes * kLanes; };
    return {row.span, bound(nth), bound(nth + 1)};
  }

  // head counts the heads of the row's first stretch among those of all stretches.
  template <typename T>
  void merge_head(const AttentionArgs<T>& a, const Row& row, int64_t head) {
    float best = kMinusInf, total = 0;
    for (int64_t i = 0; i < row.count; i++) best = std::max(best, partial_[head + i * a.num_heads].max);
    for (int64_t i = 0; i < row.count; i++) {
      const Partial& part = partial_[head + i * a.num_heads];
      total += part.sum * std::exp(part.max - best);
    }
    T* target = a.output + (row.index * a.num_heads + head % a.num_heads) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
      f32x16 mix = {};
      for (int64_t i = 0; i < row.count; i++) {
        int64_t part = head + i * a.num_heads;
        mix += load(&mixed_[part * a.head_dim + d]) * (std::exp(partial_[part].max - best) / total);
      }
      store(target + d, mix);
    }
  }

  std::vector<Row> rows_;
  std::vector<int64_t> split_rows_, owners_;  // rows of several stretches; the row of each stretch
  std::vector<Tile> tiles_;
  std::vector<Partial> partial_;  // [num_stretches, num_heads]
  std::vector<float> mixed_;      // [num_stretches, num_heads, head_dim]
  int64_t num_stretches_ = 0, parts_ = 1;
};

}  // namespace pagedllm
