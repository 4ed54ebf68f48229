// bfloat16 products by AMX (Intel, Architectures Software Developer's Manual, volume 1, "Programming with Intel Advanced
// Matrix Extensions"): one instruction multiplies 16 rows of 32 inputs with 32 inputs of 16 outputs. Two such tiles of
// rows and the two halves of a panel are what eight tile registers hold with their four tiles of sums.
#pragma once

#include <type_traits>

#include "panel.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagedllm {

#if defined(__AMX_BF16__)

constexpr int64_t kTileHeight = 16, kTileDepth = 32;
constexpr int64_t kRowUnit = 2 * kTileHeight;

// Linux saves tile registers for those only who have asked for it; a sandbox may refuse.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_allowed;
}

// While it lives, this thread's tile registers are ours, and afterwards nobody's: other libraries set them up as they
// need.
class TileScope {
 public:
  TileScope() { current() = 0; }
  ~TileScope() {
    if (current() != 0) _tile_release();
    current() = 0;
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  // For products of so many rows: registers 0 and 1 for sums of the first, 2 and 3 of the second, 4 and 5 for rows, 6
  // and 7 for weights.
  static void set_up_products(int64_t first, int64_t second) {
    int64_t wanted = 1 + 32 * first + second;
    if (current() == wanted) return;
    const int64_t rows[8] = {first, first, second, second, first, second, kTileHeight, kTileHeight};
    Shapes shapes;
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = uint8_t(rows[i]);
    load(shapes, wanted);
  }

  // For scores of 16 keys with 4 queries: registers 0 for sums, 1 for keys, 2 for queries.
  static void set_up_scores() {
    constexpr int64_t kWanted = 1;
    if (current() == kWanted) return;
    const uint16_t row_bytes[3] = {16, 64, 16};
    Shapes shapes;
    for (int i = 0; i < 3; i++) shapes.row_bytes[i] = row_bytes[i], shapes.rows[i] = kTileHeight;
    load(shapes, kWanted);
  }

 private:
  // As the CPU reads it.
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  static void load(const Shapes& shapes, int64_t name) {
    _tile_loadconfig(&shapes);
    current() = name;
  }

  // The name of what is set up in this thread; 0 for nothing.
  static int64_t& current() {
    static thread_local int64_t name = 0;
    return name;
  }
};

// What a walk down a panel asks the second level of cache for: some lines of the next panel with each tile of inputs.
struct Ahead {
  const bf16* line;
  int64_t lines_each;
};

// Where the sums of a row go without a detour: whole lines of floats, of a panel without a bias. Else null.
template <typename O>
float* sums_of_row(const PanelArgs<bf16, O>& a, int64_t row) {
  if (a.count < kPanel || a.bias) return nullptr;
  if constexpr (std::is_same_v<O, Sum>) return a.out.values + row * a.stride;
  else if constexpr (std::is_same_v<O, float*>) return a.out + row * a.stride;
  else return nullptr;
}

// The detour's end.
template <typename O>
void store_sums(const PanelArgs<bf16, O>& a, int64_t row, int64_t num_rows, const float (*sums)[kPanel]) {
  for (int64_t i = 0; i < kPanel; i += 16) {
    __mmask16 lanes = __mmask16((1u << std::clamp<int64_t>(a.count - i, 0, 16)) - 1);
    __m512 start = a.bias ? _mm512_maskz_loadu_ps(lanes, a.bias + i) : _mm512_setzero_ps();
    for (int64_t r = 0; r < num_rows; r++)
      store_first(a.out + ((row + r) * a.stride + i), _mm512_add_ps(_mm512_load_ps(sums[r] + i), start), lanes);
  }
}

// Rows [row, row + first + second) of a panel; second is 0 if there is but one tile of rows.
template <bool kTwo, typename O>
void multiply_tiles(const PanelArgs<bf16, O>& a, int64_t row, int64_t first, int64_t second, Ahead ahead) {
  TileScope::set_up_products(first, kTwo ? second : first);
  alignas(64) float sums[2 * kTileHeight][kPanel];
  float *direct = sums_of_row(a, row), *target = direct ? direct : sums[0];
  int64_t width = direct ? a.stride : kPanel, stride = width * sizeof(float);
  float* lower = target + first * width;
  if (std::is_same_v<O, Sum> && direct) {
    _tile_loadd(0, target, stride);
    _tile_loadd(1, target + 16, stride);
    if constexpr (kTwo) {
      _tile_loadd(2, lower, stride);
      _tile_loadd(3, lower + 16, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  const bf16 *x = a.x + row * a.depth, *x_lower = x + first * a.depth, *panel = a.panel;
  int64_t x_stride = a.depth * sizeof(bf16), panel_stride = 2 * kPanel * sizeof(bf16);
  for (int64_t k = 0; k < a.depth; k += kTileDepth, panel += kTileDepth * kPanel) {
    for (int64_t i = 0; i < ahead.lines_each; i++, ahead.line += kPanel) _mm_prefetch(ahead.line, _MM_HINT_T1);
    _tile_loadd(6, panel, panel_stride);
    _tile_loadd(4, x + k, x_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kPanel, panel_stride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, x_lower + k, x_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, target, stride);
  _tile_stored(1, target + 16, stride);
  if constexpr (kTwo) {
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + 16, stride);
  }
  if (!direct) store_sums(a, row, first + second, sums);
}

// Rows [begin, end) of a panel whose depth is a multiple of kTileDepth. The walks share the next panel among them, which
// has as many lines as the panel has inputs: memory is read while there is something to multiply.
template <typename O>
void multiply_panel_by_tiles(const PanelArgs<bf16, O>& a, int64_t begin, int64_t end) {
  int64_t walks = (end - begin + kRowUnit - 1) / kRowUnit, lines_each = a.next ? (kTileDepth + walks - 1) / walks : 0;
  const bf16* line = a.next;
  for (int64_t row = begin; row < end; row += kRowUnit, line += lines_each * a.depth) {
    int64_t height = std::min(end - row, kRowUnit);
    if (height <= kTileHeight) multiply_tiles<false>(a, row, height, 0, {line, lines_each});
    else multiply_tiles<true>(a, row, (height + 1) / 2, height / 2, {line, lines_each});
  }
}

#else

constexpr int64_t kRowUnit = 1;

// There are no tiles to be set up.
struct TileScope {
  ~TileScope() {}
};

#endif

}  // namespace pagedllm
