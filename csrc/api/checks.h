// Checks that make a launch safe. Each message names the argument, what it was and what is
// accepted. The Python layer checks more (values, combinations); these hold for a direct call of
// the operator.
#pragma once

#include <cstdint>
#include <limits>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "ops.h"

namespace flash_attn3::api {

inline void check_cuda_tensor(const Tensor& t, const char* name, c10::Device device) {
  TORCH_CHECK_VALUE(t.defined(), name, " is an undefined tensor");
  TORCH_CHECK_VALUE(t.device() == device, name, " is on ", t.device(), "; expected ", device,
                    ", where q is");
  TORCH_CHECK_TYPE(t.layout() == c10::kStrided, name, " has layout ", t.layout(),
                   "; expected a strided tensor");
}

inline void check_same_dtype(const Tensor& t, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, " has dtype ", t.scalar_type(), "; expected ",
                   dtype, ", the dtype of q");
}

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

inline void check_shape(const Tensor& t, const char* name, at::IntArrayRef expected) {
  TORCH_CHECK_VALUE(t.sizes() == expected, name, " has shape ", t.sizes(), "; expected ", expected);
}

inline bool fits_head_dim(int64_t dim, int64_t step) {
  return dim >= step && dim <= 256 && dim % step == 0;
}

inline void check_head_dim(int64_t dim, const char* name, int64_t step) {
  TORCH_CHECK_VALUE(fits_head_dim(dim, step), name, " has head dim ", dim,
                    "; expected a multiple of ", step, " from ", step, " to 256");
}

// cu_seqlens_* and seqused_*: the kernel reads `length` of them with unit stride.
inline void check_int_vector(const Tensor& t, const char* name, int64_t length,
                             c10::Device device) {
  check_cuda_tensor(t, name, device);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, name, " has dtype ", t.scalar_type(),
                   "; expected torch.int32");
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == length, name, " has shape ", t.sizes(),
                    "; expected (", length, ",)");
  TORCH_CHECK_VALUE(length <= 1 || t.stride(0) == 1, name, " has stride ", t.stride(0),
                    "; expected a contiguous tensor");
}

inline int32_t check_int32(int64_t value, const char* name, int64_t least) {
  TORCH_CHECK_VALUE(value >= least && value <= std::numeric_limits<int32_t>::max(), name, " is ",
                    value, "; expected an integer from ", least, " to 2147483647");
  return static_cast<int32_t>(value);
}

}  // namespace flash_attn3::api
