// The plain C interface between the binding (csrc/api, which knows torch) and the kernel library
// (csrc/host, csrc/kernels, which does not). Only pointers, sizes and strides cross it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace flash_attn3 {

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1, kE4M3 = 2 };

// Strides in elements; the last dimension is contiguous. `batch` is unused for a ragged tensor.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t head;
};

// One forward call. A tensor is ragged (all sequences behind one another, no batch dimension)
// exactly when its cu_seqlens is given. Every pointer is device memory.
struct FwdParams {
  const void* q;                // [B, Sq, H, D]   or [total_q, H, D]
  const void* k;                // [B, Sk, Hk, D]  or [total_k, Hk, D]
  const void* v;                // [B, Sk, Hk, Dv] or [total_k, Hk, Dv]
  void* out;                    // [B, Sq, H, Dv]  or [total_q, H, Dv]
  float* lse;                   // [B, H, Sq]      or [H, total_q]
  const int32_t* cu_seqlens_q;  // [B + 1] or null
  const int32_t* cu_seqlens_k;  // [B + 1] or null
  const int32_t* seqused_q;     // [B] or null: rows in use of each sequence
  const int32_t* seqused_k;     // [B] or null
  void* workspace;  // flash_attn3_fwd_workspace_bytes() bytes, any content; may be null for 0

  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;

  int32_t batch;
  int32_t max_seqlen_q;  // dense: Sq; ragged: no sequence is longer
  int32_t max_seqlen_k;
  int64_t total_q;  // rows of a ragged q; unused when dense
  int64_t total_k;
  int32_t heads;       // of q and out
  int32_t heads_kv;    // divides heads
  int32_t head_dim;    // D: multiple of 8, at most 256
  int32_t head_dim_v;  // Dv
  DType dtype;

  float softmax_scale;
  float softcap;  // 0: off
  // Query i sees key j iff  p - window_left <= j <= p + window_right,  p = i + Sk - Sq;
  // -1 is unlimited. Causal is window_right = 0.
  int32_t window_left;
  int32_t window_right;
  int32_t attention_chunk;  // c > 0: and floor(j / c) = floor(p / c)

  int32_t device;     // CUDA device index of every pointer and of the stream
  int32_t sm_margin;  // leave that many SMs free
};

// What the library would launch for these parameters.
struct FwdPlan {
  int32_t tile_m;
  int32_t tile_n;
  int32_t head_dim;  // compiled dimensions, at least those asked for
  int32_t head_dim_v;
  int32_t stages;  // of V
  int32_t threads;
  int32_t registers;     // per thread at launch
  int32_t shared_bytes;  // dynamic shared memory
  int32_t local_bytes;   // spills; 0
  int32_t grid;
};

// Scales that turn e4m3 values into real ones. One a KV head of a sequence, [B, Hk] with any
// strides; or, with block_rows > 0, one for each block of so many rows of a head,
// [B, heads, blocks], ragged [heads, blocks]: there sequence b's blocks start at
// cu_seqlens[b] / block_rows + b. Scales of neighbouring blocks are neighbours.
struct Fp8Scale {
  const float* data;  // null: all 1
  int64_t batch_stride;
  int64_t head_stride;
  int32_t block_rows;  // 0, or 64 or 128 for Q, 128 for K and V
};

// One forward call on e4m3 Q, K and V; out is bfloat16. D and Dv are multiples of 16.
struct Fp8Params {
  FwdParams fwd;  // dtype: kE4M3
  Fp8Scale q_scale;
  Fp8Scale k_scale;
  Fp8Scale v_scale;
  // V as QuantizeParams::transposed writes it, instead of rows: fwd.v_strides are of no use then.
  int32_t v_transposed;
  // 0: the LSE may be that of rounded probabilities, which is faster. It is off by up to 0.03, and
  // by more where thousands of keys lie below 2^-18 of their row's largest and are rounded to 0.
  int32_t exact_lse;
  // Room of flash_attn3_fp8_room_bytes(), or null: V in rows is then transposed there first, once,
  // instead of by the kernel for every tile of queries.
  void* v_room;
};

// Makes e4m3 and scales of one of Q, K and V, dense or ragged. Strides are multiples of 8 elements,
// pointers of 16 bytes: nobody looks.
struct QuantizeParams {
  const void* in;             // [B, S, H, D] or [total, H, D], bfloat16 or float16
  const float* mean;          // [B, H, D] or null: taken off each row, before the rotation
  const int32_t* cu_seqlens;  // [B + 1] or null
  const int32_t* seqused;     // [B] or null
  void* out;                  // like `in`, contiguous; transposed: [blocks, H, D, 128]
  float* scale;               // [B, H, blocks], ragged [H, blocks] (Fp8Scale)
  Strides in_strides;
  int32_t batch;
  int32_t seqlen;  // dense: S
  int64_t total;   // ragged: rows
  int32_t max_seqlen;
  int32_t heads;
  int32_t head_dim;    // multiple of 16, at most 256
  DType dtype;         // of `in`
  int32_t block_rows;  // 64 or 128
  int32_t rotate;      // 1: Hadamard along D, by the largest power of two that divides it
  int32_t transposed;  // 1: for V, with block_rows 128
  int32_t device;
};

// The gradients of one forward call, whose tensors and options these are. A tensor is ragged
// exactly when its cu_seqlens is given. Strides are multiples of 8 elements, pointers of 16 bytes.
struct BwdParams {
  const void* q;                // [B, Sq, H, D]   or [total_q, H, D]
  const void* k;                // [B, Sk, Hk, D]  or [total_k, Hk, D]
  const void* v;                // [B, Sk, Hk, Dv] or [total_k, Hk, Dv]
  const void* out;              // [B, Sq, H, Dv]  or [total_q, H, Dv]
  const void* dout;             // like out
  const float* lse;             // [B, H, Sq]      or [H, total_q]
  const float* dlse;            // like lse, or null: the loss does not depend on the LSE
  void* dq;                     // like q; rows that no sequence uses get 0
  void* dk;                     // like k
  void* dv;                     // like v
  const int32_t* cu_seqlens_q;  // [B + 1] or null
  const int32_t* cu_seqlens_k;  // [B + 1] or null
  const int32_t* seqused_q;     // [B] or null
  const int32_t* seqused_k;     // [B] or null
  void* workspace;              // flash_attn3_bwd_workspace_bytes() bytes, any content

  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;
  Strides dout_strides;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;

  int32_t batch;
  int32_t max_seqlen_q;
  int32_t max_seqlen_k;
  int64_t total_q;
  int64_t total_k;
  int32_t heads;
  int32_t heads_kv;
  int32_t head_dim;
  int32_t head_dim_v;
  DType dtype;

  float softmax_scale;
  float softcap;
  int32_t window_left;
  int32_t window_right;
  int32_t attention_chunk;
  int32_t deterministic;  // not 0: dq is equal bit by bit from call to call (dk and dv always are)

  int32_t device;
  int32_t sm_margin;
};

struct BwdPlan {
  int32_t tile_m;  // query rows a step
  int32_t tile_n;  // keys a tile
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t stages;  // of Q
  int32_t threads;
  int32_t registers;
  int32_t shared_bytes;
  int32_t local_bytes;
  int32_t grid;
};

}  // namespace flash_attn3

#define FLASH_ATTN3_API extern "C" __attribute__((visibility("default")))

// All return 0, or 1 for invalid arguments (ValueError), 2 for a configuration that this build
// lacks (NotImplementedError), 3 for a CUDA error (RuntimeError); then `message` holds one
// sentence.
FLASH_ATTN3_API int flash_attn3_fwd(const flash_attn3::FwdParams* params, cudaStream_t stream,
                                    char* message, size_t message_size);
FLASH_ATTN3_API int flash_attn3_fwd_plan(const flash_attn3::FwdParams* params,
                                         flash_attn3::FwdPlan* plan, char* message,
                                         size_t message_size);
FLASH_ATTN3_API int64_t flash_attn3_fwd_workspace_bytes(const flash_attn3::FwdParams* params);

// The same for e4m3. A workspace as for params->fwd.
FLASH_ATTN3_API int flash_attn3_fp8_fwd(const flash_attn3::Fp8Params* params, cudaStream_t stream,
                                        char* message, size_t message_size);
FLASH_ATTN3_API int flash_attn3_fp8_fwd_plan(const flash_attn3::Fp8Params* params,
                                             flash_attn3::FwdPlan* plan, char* message,
                                             size_t message_size);
// 0 where V need not be transposed ahead: it is already, or too few queries meet it.
FLASH_ATTN3_API int64_t flash_attn3_fp8_room_bytes(const flash_attn3::Fp8Params* params);
FLASH_ATTN3_API int flash_attn3_quantize(const flash_attn3::QuantizeParams* params,
                                         cudaStream_t stream, char* message, size_t message_size);
// The mean over the rows of each head, [B, H, D], which softmax does not see in K. `mean` has room
// for 33 times as much: partial sums lie behind it.
FLASH_ATTN3_API int flash_attn3_mean(const flash_attn3::QuantizeParams* params, float* mean,
                                     cudaStream_t stream, char* message, size_t message_size);
// The same for the backward.
FLASH_ATTN3_API int flash_attn3_bwd(const flash_attn3::BwdParams* params, cudaStream_t stream,
                                    char* message, size_t message_size);
FLASH_ATTN3_API int flash_attn3_bwd_plan(const flash_attn3::BwdParams* params,
                                         flash_attn3::BwdPlan* plan, char* message,
                                         size_t message_size);
// 0 where flash_attn3_bwd would refuse the parameters.
FLASH_ATTN3_API int64_t flash_attn3_bwd_workspace_bytes(const flash_attn3::BwdParams* params);

// "nvcc 13.0.88; cutlass 4.2.0; fwd: bf16 (64,64) (128,128)...": what was compiled, one line.
FLASH_ATTN3_API const char* flash_attn3_build_info();
