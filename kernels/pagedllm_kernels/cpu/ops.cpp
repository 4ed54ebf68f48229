// The operations as torch sees them: shapes are checked here, work is split over torch's own threads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <map>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "elementwise.h"
#include "linear.h"
#include "memory.h"
#include "plan.h"
#include "sampling.h"
#include "stack.h"

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
        rope_store_row(row, data<float>(table) + position * dim, data<T>(key_cache), data<T>(value_cache), slot,
                       num_heads, num_kv, dim);
      }
    });
  });
}

// Calls f(member) in every thread that torch would use here. No exception may leave f.
template <typename F>
void run_team(F f) {
  at::internal::lazy_init_num_threads();
  std::optional<Team> team;
#pragma omp parallel
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    Member member(*team, omp_get_thread_num());
    TileScope tiles;
    f(member);
  }
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
    AttentionPlan plan(a, data<int32_t>(bounds), data<int32_t>(lens), lens.size(0), at::get_num_threads());
    run_team([&](Member& me) {
      me.share(plan.num_items(), [&](int64_t i) { plan.run(a, i); });
      me.share(plan.num_merges(), [&](int64_t i) { plan.merge(a, i); });
    });
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
        (gelu ? gelu_tanh_mul_row<T, T> : silu_mul_row<T, T>)(gate, gate + size, data<T>(out) + i * size, size);
      }
    });
  });
  return out;
}

// A weight [num_out, depth] in panels, [num_panels, depth, 32], in memory of its own with large pages where the system
// has them: streaming through weights is half as fast if every 4 KiB ends in a look-up of the page table.
Tensor pack_linear(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous());
  int64_t num_out = weight.size(0), depth = weight.size(1);
  TORCH_CHECK(depth % 2 == 0);
  Tensor packed = at::empty({num_panels(num_out), depth, kPanel}, weight.options());
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  uintptr_t begin = uintptr_t(packed.data_ptr()), end = begin + packed.nbytes();
  begin = (begin + kPage - 1) / kPage * kPage, end = end / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish; failing is no fault
#endif
  by_type(weight, [&](auto t) {
    using T = decltype(t);
    at::parallel_for(0, num_panels(num_out), 1, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p++) pack_panel(data<T>(weight), data<T>(packed), num_out, depth, p);
    });
  });
  return packed;
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t num_out,
                     at::ScalarType dtype) {
  int64_t rows = x.size(0), depth = x.size(1);
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == packed.scalar_type());
  TORCH_CHECK(packed.size(0) == num_panels(num_out) && packed.size(1) == depth && packed.size(2) == kPanel);
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->scalar_type() == at::kFloat && bias->numel() == num_out));
  Tensor out = at::empty({rows, num_out}, x.options().dtype(dtype));
  constexpr int64_t kBlockRows = kRowUnit > 1 ? 192 : 48;  // what has to stay in cache while the panels pass by
  int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  by_type(x, [&](auto w) {
    by_type(out, [&](auto t) {
      using T = decltype(w);
      using O = decltype(t);
      at::parallel_for(0, packed.size(0), 1, [&](int64_t first, int64_t last) {
        TileScope tiles;
        for (int64_t i = 0; i < blocks; i++)
          for (int64_t p = first; p < last; p++) {
            const T* panel = data<T>(packed) + p * kPanel * depth;
            PanelArgs<T, O*> a{data<T>(x), panel, bias ? data<float>(*bias) + p * kPanel : nullptr,
                               data<O>(out) + p * kPanel, depth, num_out, std::min(kPanel, num_out - p * kPanel),
                               p + 1 < last ? panel + kPanel * depth : nullptr};
            multiply_rows_of_panel(a, block_begin(rows, i, blocks), block_begin(rows, i + 1, blocks));
          }
      });
    });
  });
  return out;
}

// All layers of a decoder over hidden [num_rows, hidden_size], which they change. weights holds for each layer the input
// norm, packed qkv, bias of qkv or nothing, packed attention output, norm before the MLP, packed gate-up and packed down.
void decoder_layers(Tensor hidden, const c10::List<std::optional<Tensor>>& weights, at::TensorList key_caches,
                    at::TensorList value_caches, at::IntArrayRef windows, const Tensor& positions, const Tensor& table,
                    const Tensor& slots, const Tensor& tables, const Tensor& bounds, const Tensor& lens,
                    int64_t num_heads, int64_t intermediate_size, double eps, double scale, double soft_cap, bool gelu,
                    Tensor seconds) {
  constexpr size_t kEach = 7;
  size_t num_layers = key_caches.size();
  int64_t rows = hidden.size(0), num_kv = key_caches[0].size(2), dim = key_caches[0].size(3);
  int64_t num_slots = key_caches[0].size(0) * key_caches[0].size(1), width = (num_heads + 2 * num_kv) * dim;
  TORCH_CHECK(hidden.is_contiguous() && hidden.scalar_type() == at::kFloat && hidden.size(1) % kLanes == 0);
  TORCH_CHECK(weights.size() == kEach * num_layers && value_caches.size() == num_layers && windows.size() == num_layers);
  TORCH_CHECK(num_heads % num_kv == 0 && dim % kLanes == 0 && intermediate_size % kPanel == 0);
  TORCH_CHECK(positions.scalar_type() == at::kLong && slots.scalar_type() == at::kLong && table.size(1) == dim);
  TORCH_CHECK(positions.numel() == rows && slots.numel() == rows && table.is_contiguous());
  for (const Tensor& t : {tables, bounds, lens}) TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous());
  TORCH_CHECK(seconds.scalar_type() == at::kDouble && seconds.numel() == kNumTimed);
  for (int64_t i = 0; i < rows; i++) {
    int64_t position = data<int64_t>(positions)[i], slot = data<int64_t>(slots)[i];
    TORCH_CHECK(position >= 0 && position < table.size(0) && slot >= 0 && slot < num_slots);
  }
  auto options = hidden.options().dtype(key_caches[0].scalar_type());
  Tensor normed = at::empty({rows, hidden.size(1)}, options), qkv = at::empty({rows, width}, options);
  Tensor attended = at::empty({rows, num_heads * dim}, options), activated = at::empty({rows, intermediate_size}, options);
  by_type(qkv, [&](auto t) {
    using T = decltype(t);
    StackArgs<T> args{{data<T>(qkv), nullptr, nullptr, data<T>(attended), data<int32_t>(tables), width, tables.size(1),
                    num_heads, num_kv, dim, key_caches[0].size(1), float(scale), float(soft_cap), 0},
                   rows, hidden.size(1), intermediate_size, float(eps), gelu, data<float>(hidden), data<T>(normed),
                   data<T>(qkv), data<T>(activated), data<float>(table), data<int64_t>(positions),
                   data<int64_t>(slots), data<double>(seconds)};
    std::map<int64_t, AttentionPlan> plans;  // by window
    std::vector<StackLayer<T>> layers;
    for (size_t i = 0; i < num_layers; i++) {
      AttentionArgs<T> a = args.attention;
      a.window = windows[i];
      auto [plan, is_new] = plans.try_emplace(windows[i], a, data<int32_t>(bounds), data<int32_t>(lens), lens.size(0),
                                              at::get_num_threads());
      auto weight = [&](size_t k) {
        std::optional<Tensor> t = weights.get(i * kEach + k);
        TORCH_CHECK(!t || t->is_contiguous());
        return t ? t->data_ptr() : nullptr;
      };
      TORCH_CHECK(key_caches[i].is_contiguous() && value_caches[i].is_contiguous());
      layers.push_back({(float*)weight(0), (float*)weight(4), (T*)weight(1), (T*)weight(3), (T*)weight(5),
                        (T*)weight(6), (float*)weight(2), data<T>(key_caches[i]), data<T>(value_caches[i]),
                        &plan->second, windows[i]});
    }
    run_team([&](Member& me) {
      StackMember<T> member(args, me);
      for (const StackLayer<T>& layer : layers) member.run(layer);
    });
  });
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

// The index of the largest value of each row.
Tensor greedy(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kFloat && logits.size(1) > 0);
  Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      data<int64_t>(out)[i] = first_largest(data<float>(logits) + i * logits.size(1), logits.size(1));
  });
  return out;
}

// One token for each row of scaled [num_rows, vocab_size], with noise of keys [num_rows, 2].
Tensor draw(const Tensor& scaled, const Tensor& keys) {
  TORCH_CHECK(scaled.dim() == 2 && scaled.is_contiguous() && scaled.scalar_type() == at::kFloat);
  TORCH_CHECK(keys.is_contiguous() && keys.scalar_type() == at::kLong && keys.numel() == 2 * scaled.size(0));
  Tensor out = at::empty({scaled.size(0)}, keys.options());
  at::parallel_for(0, scaled.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t* key = data<int64_t>(keys) + 2 * i;
      data<int64_t>(out)[i] = draw_token(data<float>(scaled) + i * scaled.size(1), scaled.size(1), key[0], key[1]);
    }
  });
  return out;
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
  m.def("pack_linear(Tensor weight) -> Tensor", pack_linear);
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int num_out, ScalarType dtype) -> Tensor",
        packed_linear);
  m.def(
      "decoder_layers(Tensor(a!) hidden, Tensor?[] weights, Tensor(b!)[] key_caches, Tensor(c!)[] value_caches, "
      "int[] windows, Tensor positions, Tensor table, Tensor slots, Tensor tables, Tensor bounds, Tensor lens, "
      "int num_heads, int intermediate_size, float eps, float scale, float soft_cap, bool gelu, "
      "Tensor(d!) seconds) -> ()",
      decoder_layers);
  m.def("greedy(Tensor logits) -> Tensor", greedy);
  m.def("draw(Tensor scaled, Tensor keys) -> Tensor", draw);
  m.def("sum_words(Tensor t) -> int", sum_tensor_words);
}

}  // namespace pagedllm
