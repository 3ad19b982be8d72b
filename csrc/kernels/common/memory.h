// Leaf wrappers for memory: bulk copies, reductions, and accesses that order others.
#pragma once

#include <cstdint>

#include "kernels/common/ptx.h"

namespace flash_attn3 {

// `bytes` (a multiple of 16) from global to shared memory by the copy engine, counted at `barrier`.
__device__ __forceinline__ void bulk_copy_to_shared(void* destination, const void* source,
                                                    uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Adds four floats to global memory; nothing comes back. A warp's 512 bytes are best contiguous.
__device__ __forceinline__ void reduce_add_4(float* destination, float a, float b, float c,
                                             float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(destination),
               "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Four floats to and from L2. One thread's accesses to the same address are seen in the order of
// the program.
__device__ __forceinline__ void store_relaxed_4(float* destination, float a, float b, float c,
                                                float d) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// The load only if `wanted`; no branch.
__device__ __forceinline__ void load_relaxed_4_if(bool wanted, const float* source, float* four) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "@wanted ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])
      : "l"(source), "r"(uint32_t(wanted))
      : "memory");
}

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Everything that this thread has seen or done comes before the addition, for all who acquire it.
__device__ __forceinline__ void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// 4 or 16 bytes to shared memory, without a register between; zeros where they are not wanted. The
// thread itself may read them after wait_for_async_copies().
template <int kBytes>
__device__ __forceinline__ void copy_async(void* destination, const void* source, bool wanted) {
  static_assert(kBytes == 4 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
                 "l"(source), "r"(wanted ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(destination)),
                 "l"(source), "r"(wanted ? 4 : 0)
                 : "memory");
  }
}

__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Those since the last call are a group; then all but so many groups have come.
__device__ __forceinline__ void commit_async_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kGroups>
__device__ __forceinline__ void wait_for_async_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// 16 bytes that nobody reads again soon. kPassing: what is in L2 rather stays than they.
template <bool kPassing>
__device__ __forceinline__ void store_16_bytes(void* destination, const uint32_t (&r)[4]) {
  if constexpr (kPassing) {
    __stcs(static_cast<uint4*>(destination), make_uint4(r[0], r[1], r[2], r[3]));
  } else {
    *static_cast<uint4*>(destination) = make_uint4(r[0], r[1], r[2], r[3]);
  }
}

// Four 8x8 matrices of 16-bit elements to shared memory, each transposed: lane l gives the address
// of row l % 8 (a column of the fragment) of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address,
                                                           const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// The two elements of a packed register, the lower column first.
template <class Element>
__device__ __forceinline__ float2 unpack_two(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack_two<__nv_bfloat16>(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack_two<__half>(uint32_t packed) {
  __half2 two;
  *reinterpret_cast<uint32_t*>(&two) = packed;
  return __half22float2(two);
}

}  // namespace flash_attn3
