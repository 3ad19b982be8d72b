// Device properties as ATen caches them.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Export.h>

#include <cuda_runtime_api.h>

// Declared here and not by ATen/cuda/CUDAContextLight.h: that header also wants those of cuSPARSE,
// cuBLAS and cuSOLVER, which a toolkit with nvcc alone does not have.
namespace at::cuda {
TORCH_CUDA_CPP_API cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device);
}  // namespace at::cuda
