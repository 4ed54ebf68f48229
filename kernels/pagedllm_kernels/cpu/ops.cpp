// The operations as torch sees them: shapes are checked here, work is split over torch's own threads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "memory.h"

namespace pagedllm {
namespace {

using at::Tensor;

template <typename T>
T* data(const Tensor& t) {
  return reinterpret_cast<T*>(t.data_ptr());
}

// Calls f with a value of the element type: float32 or bfloat16.
template <typename F>
void by_type(const Tensor& t, F f) {
  if (t.scalar_type() == at::kFloat) f(float{});
  else if (t.scalar_type() == at::kBFloat16) f(bf16{});
  else TORCH_CHECK(false, "pagedllm_cpu: float32 and bfloat16 only, not ", t.scalar_type());
}

// x += delta, if there is one; returns the norm of x in the given type.
Tensor add_rms_norm(Tensor x, const std::optional<Tensor>& delta, const Tensor& weight, double eps,
                    at::ScalarType dtype) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kFloat && x.size(1) % kLanes == 0);
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == at::kFloat && weight.numel() == x.size(1));
  TORCH_CHECK(!delta || (delta->is_contiguous() && delta->sizes() == x.sizes()));
  Tensor out = at::empty_like(x, x.options().dtype(dtype));
  int64_t size = x.size(1);
  by_type(delta ? *delta : x, [&](auto d) {
    by_type(out, [&](auto t) {
      using D = decltype(d);
      using T = decltype(t);
      const D* added = delta ? data<D>(*delta) : nullptr;
      at::parallel_for(0, x.size(0), 16, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
          add_rms_norm_row(data<float>(x) + i * size, added ? added + i * size : nullptr, data<float>(weight),
                           data<T>(out) + i * size, size, float(eps));
      });
    });
  });
  return out;
}

// How many query heads are beside the key and value heads in each row.
int64_t count_heads(const Tensor& qkv, int64_t num_kv, int64_t dim) {
  TORCH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) % dim == 0);
  int64_t num_heads = qkv.size(1) / dim - 2 * num_kv;
  TORCH_CHECK(num_heads > 0 && num_heads % num_kv == 0);
  return num_heads;
}

// Rotates queries and keys of qkv in place and stores keys and values in their slots.
void rope_store(Tensor qkv, const Tensor& positions, const Tensor& table, Tensor key_cache, Tensor value_cache,
                const Tensor& slots) {
  int64_t num_kv = key_cache.size(2), dim = key_cache.size(3), num_slots = key_cache.size(0) * key_cache.size(1);
  int64_t num_heads = count_heads(qkv, num_kv, dim);
  TORCH_CHECK(key_cache.scalar_type() == qkv.scalar_type() && value_cache.scalar_type() == qkv.scalar_type());
  TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous() && table.is_contiguous());
  TORCH_CHECK(positions.scalar_type() == at::kLong && slots.scalar_type() == at::kLong && table.size(1) == dim);
  TORCH_CHECK(positions.size(0) == qkv.size(0) && slots.size(0) == qkv.size(0));
  by_type(qkv, [&](auto t) {
    using T = decltype(t);
    at::parallel_for(0, qkv.size(0), 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        T* row = data<T>(qkv) + i * qkv.size(1);
        int64_t position = data<int64_t>(positions)[i], slot = data<int64_t>(slots)[i];
        TORCH_CHECK(position >= 0 && position < table.size(0) && slot >= 0 && slot < num_slots);
        for (int64_t h = 0; h < num_heads + num_kv; h++) rope_head(row + h * dim, data<float>(table) + position * dim, dim);
        const T* key = row + num_heads * dim;
        std::copy(key, key + num_kv * dim, data<T>(key_cache) + slot * num_kv * dim);
        std::copy(key + num_kv * dim, key + 2 * num_kv * dim, data<T>(value_cache) + slot * num_kv * dim);
      }
    });
  });
}

template <typename T>
void merge_stretches(const AttentionArgs<T>& a, T* target, const Partial* partial, const float* acc, int64_t count,
                     int64_t stride) {
  float best = kMinusInf, total = 0;
  for (int64_t i = 0; i < count; i++) best = std::max(best, partial[i * stride].max);
  for (int64_t i = 0; i < count; i++) total += partial[i * stride].sum * std::exp(partial[i * stride].max - best);
  for (int64_t d = 0; d < a.head_dim; d += kLanes) {
    f32x16 mix = {};
    for (int64_t i = 0; i < count; i++)
      mix += load(acc + i * stride * a.head_dim + d) * (std::exp(partial[i * stride].max - best) / total);
    store(target + d, mix);
  }
}

// Decode rows, in stretches of positions; see decode_stretch. A stretch with few others beside it is split by KV head.
template <typename T>
void decode(const AttentionArgs<T>& a, const std::vector<std::pair<Span, int64_t>>& rows) {
  constexpr int64_t kStretch = 512;
  int64_t group = a.num_heads / a.num_kv_heads;
  std::vector<int64_t> first(rows.size() + 1, 0);  // first stretch of each row
  for (size_t i = 0; i < rows.size(); i++) {
    int64_t length = rows[i].second + 1 - (a.window > 0 ? std::max<int64_t>(0, rows[i].second + 1 - a.window) : 0);
    first[i + 1] = first[i] + (length + kStretch - 1) / kStretch;
  }
  int64_t num_stretches = first.back();
  int64_t parts = num_stretches < 2 * at::get_num_threads() ? a.num_kv_heads : 1, kv_heads = a.num_kv_heads / parts;
  std::vector<Partial> partial(num_stretches * a.num_heads);
  std::vector<float> acc(num_stretches * a.num_heads * a.head_dim);
  at::parallel_for(0, num_stretches * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      int64_t stretch = item / parts, kv_first = item % parts * kv_heads;
      size_t i = std::upper_bound(first.begin(), first.end(), stretch) - first.begin() - 1;
      const auto& [span, position] = rows[i];
      int64_t low = a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
      int64_t from = low + (stretch - first[i]) * kStretch, to = std::min(position + 1, from + kStretch);
      int64_t row = span.first_row + position - (span.seq_len - span.query_len);
      int64_t head = stretch * a.num_heads + kv_first * group;
      decode_stretch(a, span, row, kv_first, kv_first + kv_heads, from, to, &partial[head], &acc[head * a.head_dim]);
    }
  });
  for (size_t i = 0; i < rows.size(); i++) {
    const Span& span = rows[i].first;
    int64_t row = span.first_row + rows[i].second - (span.seq_len - span.query_len);
    for (int64_t h = 0; h < a.num_heads; h++) {
      int64_t head = first[i] * a.num_heads + h;
      merge_stretches(a, a.output + (row * a.num_heads + h) * a.head_dim, &partial[head], &acc[head * a.head_dim],
                      first[i + 1] - first[i], a.num_heads);
    }
  }
}

template <typename T>
void attend(const AttentionArgs<T>& a, const int32_t* bounds, const int32_t* lens, int64_t num_seqs) {
  constexpr int64_t kDecodeQueries = 4;  // up to here unpacking tiles does not pay
  std::vector<std::pair<Span, int64_t>> rows;
  struct Tile {
    Span span;
    int64_t kv_head, q0, q1;
  };
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < num_seqs; i++) {
    Span span{bounds[i], bounds[i + 1] - bounds[i], lens[i], a.tables + i * a.table_stride};
    if (span.query_len <= kDecodeQueries) {
      for (int64_t q = 0; q < span.query_len; q++) rows.push_back({span, span.seq_len - span.query_len + q});
      continue;
    }
    for (int64_t q = 0; q < span.query_len; q += kTileQueries)
      for (int64_t h = 0; h < a.num_kv_heads; h++)
        tiles.push_back({span, h, q, std::min(q + kTileQueries, span.query_len)});
  }
  if (!rows.empty()) decode(a, rows);
  // Later tiles of a prompt see more positions. Interleaving gives each thread its share of long and short ones.
  int64_t num_tiles = tiles.size(), num_threads = at::get_num_threads();
  at::parallel_for(0, std::min(num_tiles, num_threads), 1, [&](int64_t begin, int64_t end) {
    for (int64_t lane = begin; lane < end; lane++)
      for (int64_t i = lane; i < num_tiles; i += std::min(num_tiles, num_threads))
        prefill_tile(a, tiles[i].span, tiles[i].kv_head, tiles[i].q0, tiles[i].q1);
  });
}

Tensor paged_attention(const Tensor& qkv, const Tensor& key_cache, const Tensor& value_cache, const Tensor& tables,
                       const Tensor& bounds, const Tensor& lens, double scale, int64_t window, double soft_cap) {
  int64_t num_kv = key_cache.size(2), dim = key_cache.size(3), num_heads = count_heads(qkv, num_kv, dim);
  TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous() && dim % kLanes == 0);
  TORCH_CHECK(qkv.scalar_type() == key_cache.scalar_type() && qkv.scalar_type() == value_cache.scalar_type());
  for (const Tensor& t : {tables, bounds, lens}) TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous());
  Tensor out = at::empty({qkv.size(0), num_heads * dim}, qkv.options());
  by_type(qkv, [&](auto t) {
    using T = decltype(t);
    AttentionArgs<T> a{data<T>(qkv), data<T>(key_cache), data<T>(value_cache), data<T>(out), data<int32_t>(tables),
                       qkv.size(1), tables.size(1), num_heads, num_kv, dim, key_cache.size(1), float(scale),
                       float(soft_cap), window};
    attend(a, data<int32_t>(bounds), data<int32_t>(lens), lens.size(0));
  });
  return out;
}

Tensor gated_activation(const Tensor& gate_up, bool gelu) {
  int64_t size = gate_up.size(1) / 2;
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous() && size % kLanes == 0);
  Tensor out = at::empty({gate_up.size(0), size}, gate_up.options());
  by_type(gate_up, [&](auto t) {
    using T = decltype(t);
    at::parallel_for(0, gate_up.size(0), 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const T* gate = data<T>(gate_up) + i * 2 * size;
        (gelu ? gelu_tanh_mul_row<T> : silu_mul_row<T>)(gate, gate + size, data<T>(out) + i * size, size);
      }
    });
  });
  return out;
}

bool has_packed_linear() {
#if defined(__AVX512BF16__)
  return true;
#else
  return false;
#endif
}

// A weight [num_out, depth] in panels, [num_panels, depth, 32], in memory of its own with large pages where the system
// has them: streaming through weights is half as fast if every 4 KiB ends in a look-up of the page table.
Tensor pack_linear(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.scalar_type() == at::kBFloat16);
  int64_t num_out = weight.size(0), depth = weight.size(1);
  TORCH_CHECK(depth % 2 == 0);
  Tensor packed = at::empty({num_panels(num_out), depth, kPanel}, weight.options());
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  uintptr_t begin = uintptr_t(packed.data_ptr()), end = begin + packed.nbytes();
  begin = (begin + kPage - 1) / kPage * kPage, end = end / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish; failing is no fault
#endif
  at::parallel_for(0, num_panels(num_out), 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) pack_panel(data<bf16>(weight), data<bf16>(packed), num_out, depth, p);
  });
  return packed;
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t num_out,
                     at::ScalarType dtype) {
#if defined(__AVX512BF16__)
  int64_t rows = x.size(0), depth = x.size(1);
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kBFloat16);
  TORCH_CHECK(packed.size(0) == num_panels(num_out) && packed.size(1) == depth && packed.size(2) == kPanel);
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->scalar_type() == at::kFloat && bias->numel() == num_out));
  Tensor out = at::empty({rows, num_out}, x.options().dtype(dtype));
  int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  by_type(out, [&](auto t) {
    using O = decltype(t);
    at::parallel_for(0, packed.size(0), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = 0; i < blocks; i++)
        for (int64_t p = first; p < last; p++) {
          PanelArgs<O> a{data<bf16>(x), data<bf16>(packed) + p * kPanel * depth,
                         bias ? data<float>(*bias) + p * kPanel : nullptr, data<O>(out) + p * kPanel, depth, num_out,
                         std::min(kPanel, num_out - p * kPanel)};
          multiply_rows_of_panel(a, rows * i / blocks, rows * (i + 1) / blocks);
        }
    });
  });
  return out;
#else
  TORCH_CHECK(false, "pagedllm_cpu: compiled without AVX-512 BF16");
#endif
}

// x [up to 4 rows, depth] times weight [num_out, depth], in float32 so that whoever adds a bias rounds once.
Tensor gemv(const Tensor& x, const Tensor& weight) {
  int64_t rows = x.size(0), depth = x.size(1), num_out = weight.size(0);
  TORCH_CHECK(x.dim() == 2 && rows <= kMaxGemvRows && x.is_contiguous() && weight.is_contiguous());
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) == depth && weight.scalar_type() == x.scalar_type());
  Tensor out = at::empty({rows, num_out}, x.options().dtype(at::kFloat));
  if (rows == 0) return out;  // a step in which no sequence reaches its end
  by_type(x, [&](auto t) {
    using T = decltype(t);
    auto run = rows == 4 ? gemv_rows<T, 4> : rows == 3 ? gemv_rows<T, 3> : rows == 2 ? gemv_rows<T, 2> : gemv_rows<T, 1>;
    at::parallel_for(0, num_out, std::max<int64_t>(1, 32768 / depth), [&](int64_t begin, int64_t end) {
      run(data<T>(x), data<T>(weight), data<float>(out), depth, num_out, begin, end);
    });
  });
  return out;
}

// The sum, modulo 2^32, of a tensor's 32-bit words: what it takes to read memory and do next to nothing with it.
int64_t sum_tensor_words(const Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.element_size() == 4);
  std::atomic<uint32_t> total{0};
  at::parallel_for(0, t.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    total += sum_words(data<uint32_t>(t) + begin, end - begin);
  });
  return total;
}

}  // namespace

TORCH_LIBRARY(pagedllm_cpu, m) {
  m.def("add_rms_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps, ScalarType dtype) -> Tensor",
        add_rms_norm);
  m.def(
      "rope_store(Tensor(a!) qkv, Tensor positions, Tensor table, Tensor(b!) key_cache, Tensor(c!) value_cache, "
      "Tensor slots) -> ()",
      rope_store);
  m.def(
      "paged_attention(Tensor qkv, Tensor key_cache, Tensor value_cache, Tensor tables, Tensor bounds, Tensor lens, "
      "float scale, int window, float soft_cap) -> Tensor",
      paged_attention);
  m.def("gated_activation(Tensor gate_up, bool gelu) -> Tensor", gated_activation);
  m.def("has_packed_linear() -> bool", has_packed_linear);
  m.def("pack_linear(Tensor weight) -> Tensor", pack_linear);
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int num_out, ScalarType dtype) -> Tensor",
        packed_linear);
  m.def("gemv(Tensor x, Tensor weight) -> Tensor", gemv);
  m.def("sum_words(Tensor t) -> int", sum_tensor_words);
}

}  // namespace pagedllm
