// All layers of a decoder in one parallel region. Each operation is split over the team as it is when it
// stands alone; what is between two of them is a barrier instead of a return to Python and a new parallel region.
#pragma once

#include <chrono>

#include "elementwise.h"
#include "linear.h"
#include "plan.h"
#include "team.h"

namespace pagedllm {

template <typename T>
struct StackLayer {
  const float *input_norm, *mlp_norm;
  const T *qkv, *output, *gate_up, *down;  // in panels
  const float* qkv_bias;                   // or null
  T *keys, *values;
  AttentionPlan* plan;
  int64_t window;
};

template <typename T>
struct StackArgs {
  AttentionArgs<T> attention;  // all but what differs between layers
  int64_t num_rows, hidden_size, intermediate_size;
  float eps;
  bool gelu;
  float* hidden;         // [num_rows, hidden_size], changed
  T* normed;             // [num_rows, hidden_size]
  T* qkv;                // [num_rows, attention.query_stride]
  T* activated;          // [num_rows, intermediate_size]
  const float* table;    // [num_positions, head_dim]
  const int64_t *positions, *slots;
  double* seconds;       // [kNumTimed], added to
};

enum Timed { kNorm, kLinear, kRope, kAttention, kNumTimed };

template <typename T>
class StackMember {
 public:
  StackMember(const StackArgs<T>& args, Member& member) : a_(args), me_(member), last_(now()) {}

  void run(const StackLayer<T>& layer) {
    const AttentionArgs<T>& sizes = a_.attention;
    int64_t attended = sizes.num_heads * sizes.head_dim;
    normalise(layer.input_norm);
    multiply(a_.normed, layer.qkv, layer.qkv_bias, a_.qkv, a_.hidden_size, sizes.query_stride);
    rotate(layer);
    attend(layer);
    multiply(sizes.output, layer.output, nullptr, Sum{a_.hidden}, attended, a_.hidden_size);
    normalise(layer.mlp_norm);
    multiply_gated(layer);
    multiply(a_.activated, layer.down, nullptr, Sum{a_.hidden}, a_.intermediate_size, a_.hidden_size);
  }

 private:
  static constexpr int64_t kGroupRows = 192;  // rows that stay in cache while all panels pass by

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void done(Timed what) {
    if (me_.id() != 0) return;
    double time = now();
    a_.seconds[what] += time - last_;
    last_ = time;
  }

  void normalise(const float* weight) {
    int64_t size = a_.hidden_size;
    me_.share(a_.num_rows, [&](int64_t i) {
      add_rms_norm_row<float>(a_.hidden + i * size, nullptr, weight, a_.normed + i * size, size, a_.eps);
    });
    done(kNorm);
  }

  // f(panel, first row, last row) for each panel of each group of rows.
  template <typename F>
  void share_panels(int64_t num_panels, F f) {
    int64_t groups = (a_.num_rows + kGroupRows - 1) / kGroupRows;
    me_.share(groups * num_panels, [&](int64_t item) {
      int64_t group = item / num_panels;
      f(item % num_panels, block_begin(a_.num_rows, group, groups), block_begin(a_.num_rows, group + 1, groups));
    });
    done(kLinear);
  }

  template <typename O>
  void multiply(const T* x, const T* packed, const float* bias, O out, int64_t depth, int64_t num_out) {
    share_panels(num_panels(num_out), [&](int64_t p, int64_t begin, int64_t end) {
      const T *here = packed + p * kPanel * depth, *next = (p + 1) * kPanel < num_out ? here + kPanel * depth : nullptr;
      PanelArgs<T, O> panel{x, here, bias ? bias + p * kPanel : nullptr, out + p * kPanel, depth, num_out,
                            std::min(kPanel, num_out - p * kPanel), next};
      multiply_rows_of_panel(panel, begin, end);
    });
  }

  // A panel of gates and the panel of what they let through, activated before either leaves the cache.
  void multiply_gated(const StackLayer<T>& layer) {
    int64_t size = a_.intermediate_size, depth = a_.hidden_size;
    share_panels(size / kPanel, [&](int64_t p, int64_t begin, int64_t end) {
      static thread_local float products[2][kGroupRows * kPanel];
      const T *gates = layer.gate_up + p * kPanel * depth, *ups = gates + size * depth;
      const T* next = (p + 1) * kPanel < size ? gates + kPanel * depth : nullptr;
      PanelArgs<T, float*> gate{a_.normed + begin * depth, gates, nullptr, products[0], depth, kPanel, kPanel, ups};
      PanelArgs<T, float*> up{a_.normed + begin * depth, ups, nullptr, products[1], depth, kPanel, kPanel, next};
      multiply_rows_of_panel(gate, 0, end - begin);
      multiply_rows_of_panel(up, 0, end - begin);
      for (int64_t i = begin; i < end; i++) {
        const float *gate_row = products[0] + (i - begin) * kPanel, *up_row = products[1] + (i - begin) * kPanel;
        T* target = a_.activated + i * size + p * kPanel;
        (a_.gelu ? gelu_tanh_mul_row<float, T> : silu_mul_row<float, T>)(gate_row, up_row, target, kPanel);
      }
    });
  }

  void rotate(const StackLayer<T>& layer) {
    const AttentionArgs<T>& sizes = a_.attention;
    me_.share(a_.num_rows, [&](int64_t i) {
      rope_store_row(a_.qkv + i * sizes.query_stride, a_.table + a_.positions[i] * sizes.head_dim, layer.keys,
                     layer.values, a_.slots[i], sizes.num_heads, sizes.num_kv_heads, sizes.head_dim);
    });
    done(kRope);
  }

  void attend(const StackLayer<T>& layer) {
    AttentionArgs<T> args = a_.attention;
    args.keys = layer.keys, args.values = layer.values, args.window = layer.window;
    me_.share(layer.plan->num_items(), [&](int64_t i) { layer.plan->run(args, i); });
    if (layer.plan->num_merges() > 0)
      me_.share(layer.plan->num_merges(), [&](int64_t i) { layer.plan->merge(args, i); });
    done(kAttention);
  }

  const StackArgs<T>& a_;
  Member& me_;
  double last_;
};

}  // namespace pagedllm
