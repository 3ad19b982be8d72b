// Asynchronous warpgroup matrix products on plain register arrays. The instructions themselves are
// CuTe's; shared-memory descriptors are made here, since tiles are plain swizzled panels.
//
// A panel is `rows` x 128 bytes (or 64 bytes, for head dims that are no multiple of 64), stored
// with the swizzle of that width; a tile of more columns is several panels, one after the other.
#pragma once

#include <cstdint>
#include <utility>

#include <cute/arch/mma_sm90_gmma.hpp>
#if defined(CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#endif

#include "kernels/common/ptx.h"

namespace flash_attn3 {

template <int kColumns, int kElementBytes = 2>
struct Panel {
  static constexpr int kRowBytes = kColumns * kElementBytes;
  static_assert(kRowBytes % 64 == 0);
  static constexpr int kBytes = kRowBytes % 128 == 0 ? 128 : 64;  // of one row of a panel
  static constexpr int kWidth = kBytes / kElementBytes;
  static constexpr int kCount = kColumns / kWidth;
  static constexpr uint32_t kLayoutType = kBytes == 128 ? 1 : 2;

  // The 16-byte chunk at which the swizzle stores chunk `chunk` of row `row`.
  static __device__ __forceinline__ int swizzle(int row, int chunk) {
    return kBytes == 128 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  }
};

// The low word of a descriptor holds the address (in 16 bytes) and the stride between panels; the
// high word is constant, and moving through a tile is one 32-bit addition.
template <class P>
constexpr uint32_t descriptor_high() {
  return uint32_t(8 * P::kBytes >> 4) | uint32_t(P::kLayoutType << 30);
}

// Operand whose k runs along the panel's columns (Q and K in S = Q K^T).
__device__ __forceinline__ uint32_t k_major_low(uint32_t address) {
  return (address & 0x3ffff) >> 4 | 1u << 16;
}

// Operand whose k runs along the rows (V in O = P V); rows is the panel's height.
template <class P>
__device__ __forceinline__ uint32_t mn_major_low(uint32_t address, int rows) {
  return (address & 0x3ffff) >> 4 | uint32_t(rows * P::kBytes >> 4) << 16;
}

template <class P>
__device__ __forceinline__ uint64_t descriptor(uint32_t low, int bytes_further) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(d)
      : "r"(low + uint32_t(bytes_further >> 4)), "r"(descriptor_high<P>()));
  return d;
}

namespace gmma = cute::SM90::GMMA;

// The instruction for 64 x N x 32 bytes with A from shared memory (kShared) and registers
// (kRegister).
template <class Element, int N, gmma::Major kMajorB>
struct WgmmaOp;

#define FLASH_ATTN3_WGMMA(N)                                                        \
  template <gmma::Major kMajorB>                                                    \
  struct WgmmaOp<__nv_bfloat16, N, kMajorB> {                                       \
    using Shared = gmma::MMA_64x##N##x16_F32BF16BF16_SS<gmma::Major::K, kMajorB>;   \
    using Register = gmma::MMA_64x##N##x16_F32BF16BF16_RS<gmma::Major::K, kMajorB>; \
  };                                                                                \
  template <gmma::Major kMajorB>                                                    \
  struct WgmmaOp<__half, N, kMajorB> {                                              \
    using Shared = gmma::MMA_64x##N##x16_F32F16F16_SS<gmma::Major::K, kMajorB>;     \
    using Register = gmma::MMA_64x##N##x16_F32F16F16_RS<gmma::Major::K, kMajorB>;   \
  };                                                                                \
  template <>                                                                       \
  struct WgmmaOp<__nv_fp8_e4m3, N, gmma::Major::K> {                                \
    using Shared = gmma::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>;                       \
    using Register = gmma::MMA_64x##N##x32_F32E4M3E4M3_RS_TN<>;                     \
  };
FLASH_ATTN3_WGMMA(8)
FLASH_ATTN3_WGMMA(32)
FLASH_ATTN3_WGMMA(64)
FLASH_ATTN3_WGMMA(96)
FLASH_ATTN3_WGMMA(128)
FLASH_ATTN3_WGMMA(192)
FLASH_ATTN3_WGMMA(256)
#if defined(CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
FLASH_ATTN3_WGMMA(72)
FLASH_ATTN3_WGMMA(136)
FLASH_ATTN3_WGMMA(80)
FLASH_ATTN3_WGMMA(112)
FLASH_ATTN3_WGMMA(144)
FLASH_ATTN3_WGMMA(160)
FLASH_ATTN3_WGMMA(176)
#endif
#undef FLASH_ATTN3_WGMMA

namespace detail {
template <class Op, size_t... I>
__device__ __forceinline__ void wgmma_ss(uint64_t a, uint64_t b, float* d, gmma::ScaleOut scale,
                                         std::index_sequence<I...>) {
  Op::fma(a, b, d[I]..., scale);
}
template <class Op, size_t... I>
__device__ __forceinline__ void wgmma_rs(const uint32_t* a, uint64_t b, float* d,
                                         gmma::ScaleOut scale, std::index_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, d[I]..., scale);
}
}  // namespace detail

// S[64 x N] = A[64 x K] B[N x K]^T, both from shared memory, given by the low words of their
// descriptors. Issues only; rows_a is the height of A's panels.
template <class Element, int N, int K>
__device__ __forceinline__ void issue_qk_shared_at(uint32_t a, int rows_a, uint32_t b,
                                                   float (&s)[N / 2]) {
  using P = Panel<K, sizeof(Element)>;
  using Op = typename WgmmaOp<Element, N, gmma::Major::K>::Shared;
#pragma unroll
  for (int k = 0; k < P::kRowBytes / 32; ++k) {
    const int panel = k / (P::kBytes / 32);
    const int within = k % (P::kBytes / 32) * 32;
    detail::wgmma_ss<Op>(descriptor<P>(a, panel * rows_a * P::kBytes + within),
                         descriptor<P>(b, panel * N * P::kBytes + within), s,
                         k == 0 ? gmma::ScaleOut::Zero : gmma::ScaleOut::One,
                         std::make_index_sequence<N / 2>{});
  }
}

template <class Element, int N, int K>
__device__ __forceinline__ void issue_qk_shared(uint32_t a_address, int rows_a, uint32_t b_address,
                                                float (&s)[N / 2]) {
  issue_qk_shared_at<Element, N, K>(k_major_low(a_address), rows_a, k_major_low(b_address), s);
}

// The same with A's fragments in registers, a[4 * k .. 4 * k + 3] for the k-th 32 bytes, and B by
// its address.
template <class Element, int N, int K>
__device__ __forceinline__ void issue_qk_register(const uint32_t (&a)[K * sizeof(Element) / 8],
                                                  uint32_t b_address, float (&s)[N / 2]) {
  using P = Panel<K, sizeof(Element)>;
  using Op = typename WgmmaOp<Element, N, gmma::Major::K>::Register;
  const uint32_t b = k_major_low(b_address);
#pragma unroll
  for (int k = 0; k < P::kRowBytes / 32; ++k) {
    const int panel = k / (P::kBytes / 32);
    const int within = k % (P::kBytes / 32) * 32;
    detail::wgmma_rs<Op>(a + 4 * k, descriptor<P>(b, panel * N * P::kBytes + within), s,
                         k == 0 ? gmma::ScaleOut::Zero : gmma::ScaleOut::One,
                         std::make_index_sequence<N / 2>{});
  }
}

// O[64 x Dv] (+)= P[64 x K] V[K x Dv], P's fragments in registers, V row-major in shared memory.
template <class Element, int Dv, int K>
__device__ __forceinline__ void issue_pv(const uint32_t (&p)[K / 4], uint32_t v_address,
                                         float (&o)[Dv / 2], bool accumulate) {
  using Pv = Panel<Dv>;
  using Op = typename WgmmaOp<Element, Dv, gmma::Major::MN>::Register;
  const uint32_t v = mn_major_low<Pv>(v_address, K);
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    detail::wgmma_rs<Op>(
        p + 4 * k, descriptor<Pv>(v, k * 16 * Pv::kBytes), o,
        k == 0 ? (accumulate ? gmma::ScaleOut::One : gmma::ScaleOut::Zero) : gmma::ScaleOut::One,
        std::make_index_sequence<Dv / 2>{});
  }
}

// O[64 x kOutputs] (+)= P[64 x K] V[K x kOutputs] in e4m3: V lies transposed, a panel of K bytes a
// row, of which kOutputs rows from v_address on are read.
template <int kOutputs, int K>
__device__ __forceinline__ void issue_pv_transposed_at(const uint32_t (&p)[K / 8], uint32_t v,
                                                       float* o, bool accumulate) {
  using P = Panel<K, 1>;
  static_assert(P::kCount == 1);
  using Op = typename WgmmaOp<__nv_fp8_e4m3, kOutputs, gmma::Major::K>::Register;
#pragma unroll
  for (int k = 0; k < K / 32; ++k) {
    detail::wgmma_rs<Op>(
        p + 4 * k, descriptor<P>(v, k * 32), o,
        k == 0 ? (accumulate ? gmma::ScaleOut::One : gmma::ScaleOut::Zero) : gmma::ScaleOut::One,
        std::make_index_sequence<kOutputs / 2>{});
  }
}

template <int kOutputs, int K>
__device__ __forceinline__ void issue_pv_transposed(const uint32_t (&p)[K / 8], uint32_t v_address,
                                                    float* o, bool accumulate) {
  issue_pv_transposed_at<kOutputs, K>(p, k_major_low(v_address), o, accumulate);
}

// C[64 x N] = A[64 x K] B[K x N], both from shared memory: A's k runs along its columns (panels of
// rows_a rows), B's along its rows (panels of type P, K rows high).
template <class Element, class P, int N, int K>
__device__ __forceinline__ void issue_shared_row_major(uint32_t a_address, int rows_a,
                                                       uint32_t b_address, float (&c)[N / 2]) {
  using Pa = Panel<K>;
  using Op = typename WgmmaOp<Element, N, gmma::Major::MN>::Shared;
  const uint32_t a = k_major_low(a_address);
  const uint32_t b = mn_major_low<P>(b_address, K);
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    const int panel = k / (Pa::kWidth / 16);
    const int within = k % (Pa::kWidth / 16) * 32;
    detail::wgmma_ss<Op>(descriptor<Pa>(a, panel * rows_a * Pa::kBytes + within),
                         descriptor<P>(b, k * 16 * P::kBytes), c,
                         k == 0 ? gmma::ScaleOut::Zero : gmma::ScaleOut::One,
                         std::make_index_sequence<N / 2>{});
  }
}

// Before the first product that reads registers written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that these registers change here (the products write them behind its back), so
// that it moves no read above a wait and no write below an issue.
template <int kSize>
__device__ __forceinline__ void pin_registers(float (&r)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int kSize>
__device__ __forceinline__ void pin_registers(uint32_t (&r)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

}  // namespace flash_attn3
