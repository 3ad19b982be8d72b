// The lists of compiled kernels: which one runs a call, and what to say where none does.
#pragma once

#include <cstddef>
#include <string>

#include "host/device.h"

namespace flash_attn3 {

// An entry. A list is in order of growing cost, and ends with an entry whose launch is null.
template <class Launch>
struct CompiledKernel {
  DType dtype;
  int head_dim, head_dim_v;
  Launch launch;
};

// The first that holds a call's head dims, or null.
template <class Kernel, size_t kSize>
const Kernel* find_kernel(const Kernel (&kernels)[kSize], DType dtype, int head_dim,
                          int head_dim_v) {
  for (const Kernel& kernel : kernels) {
    if (kernel.launch != nullptr && kernel.dtype == dtype && kernel.head_dim >= head_dim &&
        kernel.head_dim_v >= head_dim_v) {
      return &kernel;
    }
  }
  return nullptr;
}

// " bf16 (64,64) ...", for flash_attn3_build_info().
template <class Kernel, size_t kSize>
std::string list_kernels(const Kernel (&kernels)[kSize]) {
  std::string text;
  for (const Kernel& kernel : kernels) {
    if (kernel.launch == nullptr) break;
    text += std::string(" ") + dtype_name(kernel.dtype) + " (" + std::to_string(kernel.head_dim) +
            "," + std::to_string(kernel.head_dim_v) + ")";
  }
  return text;
}

// direction: forward or backward.
inline Status no_kernel(const char* direction, DType dtype, int head_dim, int head_dim_v) {
  return Status::not_compiled(std::string("This build has no ") + direction + " kernel for " +
                              dtype_name(dtype) + " with head dims (" + std::to_string(head_dim) +
                              ", " + std::to_string(head_dim_v) + "); it has " +
                              flash_attn3_build_info() + ".");
}

}  // namespace flash_attn3
