// Leaf wrappers of single PTX instructions: no attention words here.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace flash_attn3 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier -----------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes freshly initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// compute-sanitizer's racecheck counts an arrival for the arriving thread's own accesses, not for
// those of the lanes that __syncwarp() joined to it: for its builds every lane arrives
// (NVCC_APPEND_FLAGS=-DFLASH_ATTN3_RACECHECK).
#ifdef FLASH_ATTN3_RACECHECK
constexpr uint32_t kArrivalsPerWarp = 32;
#else
constexpr uint32_t kArrivalsPerWarp = 1;
#endif

// The whole warp has finished with what the barrier stands for; it counts kArrivalsPerWarp.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier, int lane) {
  __syncwarp();
  if (kArrivalsPerWarp == 32 || lane == 0) mbarrier_arrive(barrier);
}

__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Returns once the phase with this parity has completed. The loop also keeps the assembler from
// moving a wgmma wait that follows above the arithmetic that precedes.
__device__ __forceinline__ void mbarrier_wait_at(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait_at(shared_address(barrier), parity);
}

// Whether that phase has completed, without waiting.
__device__ __forceinline__ bool mbarrier_test(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// --- pairs of CTAs (clusters) --------------------------------------------------------------------

// This CTA's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Of all threads of the cluster; what they wrote before is seen after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// Arrives at this barrier of the cluster's CTA `rank`, after reads: it publishes no writes, which
// would take a fence of the whole GPU (.release.cluster).
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// The whole warp has finished with what the barriers of both CTAs stand for.
__device__ __forceinline__ void warp_arrive_at_both(uint64_t* barrier, int lane) {
  __syncwarp();
  if (kArrivalsPerWarp == 32) {
    mbarrier_arrive_at(barrier, 0);
    mbarrier_arrive_at(barrier, 1);
  } else if (lane < 2) {
    mbarrier_arrive_at(barrier, lane);
  }
}

// Writes a word of CTA `rank`; its barrier there, which expects 4 bytes, tells of it.
__device__ __forceinline__ void store_word_at(int32_t* word, int32_t value, uint64_t* barrier,
                                              uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, told;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 told, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [told];\n"
      "}\n" ::"r"(shared_address(word)),
      "r"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

// --- launches that overlap ----------------------------------------------------------------------

// Until every kernel that this one was launched after has ended, where the launch allowed an early
// start: before any global memory is touched.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// This CTA does not mind if the next kernel's set-up begins.
__device__ __forceinline__ void grid_dependents_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- named barriers, registers, proxies ---------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_give_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders this thread's ordinary shared-memory writes before later reads by wgmma and TMA.
__device__ __forceinline__ void fence_shared_to_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// threadIdx.x, read where it is needed: what is computed from it is then not kept in registers from
// the kernel's start on.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// blockIdx.x and gridDim.x in the same way.
__device__ __forceinline__ int cta_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ int cta_count() {
  int count;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
  return count;
}

// --- bulk copies to global memory ---------------------------------------------------------------

__device__ __forceinline__ void bulk_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all committed copies of this thread have read their shared memory.
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// --- arithmetic ---------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x where `nonzero` is not 0, and x otherwise.
__device__ __forceinline__ float exp2_approx_if(float x, uint32_t nonzero) {
  asm("{\n"
      ".reg .pred yes;\n"
      "setp.ne.u32 yes, %1, 0;\n"
      "@yes ex2.approx.ftz.f32 %0, %0;\n"
      "}\n"
      : "+f"(x)
      : "r"(nonzero));
  return x;
}

// 0 where the shift is 32 or more, which C++ leaves open.
__device__ __forceinline__ uint32_t shift_left(uint32_t x, uint32_t bits) {
  uint32_t y;
  asm("shl.b32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(bits));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh through exp2 and a reciprocal: absolute error near 1e-7, where tanh.approx has 5e-4, which a
// soft cap of 50 would turn into a score error of 0.02.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  const float e = exp2_approx(x * 2.885390081777927f);  // e^(2x)
  return 1.0f - __fdividef(2.0f, e + 1.0f);
}

// Two floats rounded to nearest even into one 32-bit register; `low` is the lower column.
template <class Element>
__device__ __forceinline__ uint32_t pack_two(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_two<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack_two<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two products of bf16, each rounded to nearest even.
__device__ __forceinline__ uint32_t multiply_two_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// What all lanes of a warp have, as a number that the assembler knows to be the same in all of
// them: addresses and descriptors made from it are kept and added to in uniform registers, where
// the copy engine and the matrix unit want them, instead of moved there one by one.
__device__ __forceinline__ uint32_t warp_uniform(uint32_t x) {
  return __reduce_or_sync(0xffffffffu, x);
}

// Four floats rounded to nearest even into e4m3, the first in the lowest byte. Too large ones
// become 448, NaN stays NaN.
__device__ __forceinline__ uint32_t pack_four_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// Four 8x8 matrices of 16-bit elements from shared memory, each lane giving one row's address.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory, each lane giving one row's address.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// C[16 x 8] += A[16 x k] B[k x 8] by one warp alone; a row of A is 32 bytes.
template <class Element>
__device__ __forceinline__ void mma_16x8(float* c, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1);

template <>
__device__ __forceinline__ void mma_16x8<__nv_bfloat16>(float* c, const uint32_t (&a)[4],
                                                        uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8<__half>(float* c, const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8<__nv_fp8_e4m3>(float* c, const uint32_t (&a)[4],
                                                        uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flash_attn3
