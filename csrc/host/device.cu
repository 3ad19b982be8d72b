#include "host/device.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>

namespace flash_attn3 {

Status cuda_status(const char* doing, cudaError_t error) {
  (void)cudaGetLastError();  // reported here, not by the next good call
  return Status::cuda(std::string("CUDA error while ") + doing + ": " + cudaGetErrorString(error));
}

namespace {

// Asked once per device; several threads may ask at a time.
Status device_info(int device, DeviceInfo* info) {
  static DeviceInfo cache[kMaxDevices];
  static std::atomic<bool> known[kMaxDevices];
  static std::mutex writing;
  if (device < kMaxDevices && known[device].load(std::memory_order_acquire)) {
    *info = cache[device];
    return {};
  }
  int l2 = 0;
  cudaError_t error = cudaDeviceGetAttribute(&info->sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info->major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info->minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error != cudaSuccess) return cuda_status("asking for the device's properties", error);
  info->l2_bytes = l2;
  if (device < kMaxDevices) {
    const std::lock_guard<std::mutex> lock(writing);
    cache[device] = *info;
    known[device].store(true, std::memory_order_release);
  }
  return {};
}

}  // namespace

Status hopper_device(int device, DeviceInfo* info) {
  const Status status = device_info(device, info);
  if (!status.ok() || (info->major == 9 && info->minor == 0)) return status;
  return Status::not_compiled("These kernels need compute capability 9.0 (H100, H200); device " +
                              std::to_string(device) + " has " + std::to_string(info->major) + "." +
                              std::to_string(info->minor) + ".");
}

DeviceScope::DeviceScope(int device) {
  error_ = cudaGetDevice(&before_);
  if (error_ == cudaSuccess && before_ != device) {
    error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess;
  }
}

DeviceScope::~DeviceScope() {
  if (changed_) cudaSetDevice(before_);
}

const char* dtype_name(DType dtype) {
  return dtype == DType::kBFloat16 ? "bf16" : dtype == DType::kFloat16 ? "fp16" : "e4m3";
}

int32_t bounded_window(int32_t window) {
  return window < 0 ? -1 : window > kLongestWindow ? kLongestWindow : window;
}

int report(const Status& status, char* message, size_t message_size) {
  if (message != nullptr && message_size > 0) {
    std::snprintf(message, message_size, "%s", status.message.c_str());
  }
  return int(status.kind);
}

}  // namespace flash_attn3
