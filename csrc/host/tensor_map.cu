#include "host/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace flash_attn3 {
namespace {

// The driver's encoder, found at run time so that the library does not link libcuda.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();  // or the next launch would report it
    return nullptr;
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

Status encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) {
    return Status::cuda(
        "The CUDA driver offers no cuTensorMapEncodeTiled; it must be 12.0 or newer.");
  }
  const cuuint64_t sizes[4] = {cuuint64_t(shape.columns), cuuint64_t(shape.rows),
                               cuuint64_t(shape.heads), cuuint64_t(shape.batch)};
  const int bytes = shape.element == MapElement::kByte ? 1 : 2;
  const CUtensorMapDataType type =
      shape.element == MapElement::kByte       ? CU_TENSOR_MAP_DATA_TYPE_UINT8
      : shape.element == MapElement::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t strides[3] = {cuuint64_t(shape.row_stride * bytes),
                                 cuuint64_t(shape.head_stride * bytes),
                                 cuuint64_t(shape.batch_stride * bytes)};
  const cuuint32_t box[4] = {cuuint32_t(shape.box_columns), cuuint32_t(shape.box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto encode_map = [&] {
    return encode(
        map, type, 4, const_cast<void*>(shape.data), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        shape.box_columns * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode_map();
  if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_NOT_INITIALIZED) {
    // A thread that has made no runtime call yet has no context: bind the device's own.
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) {
      result = encode_map();
    }
  }
  if (result == CUDA_SUCCESS) return {};
  return Status::cuda(std::string("The CUDA driver refused the tensor map of ") + shape.name +
                      " (error " + std::to_string(int(result)) + "): rows " +
                      std::to_string(shape.rows) + ", strides in elements (batch, row, head) = (" +
                      std::to_string(shape.batch_stride) + ", " + std::to_string(shape.row_stride) +
                      ", " + std::to_string(shape.head_stride) + ").");
}

}  // namespace flash_attn3
