#include "host/call.h"

#include <atomic>
#include <cstdio>
#include <mutex>

namespace flash_attn3 {

Status cuda_status(const char* doing, cudaError_t error) {
  (void)cudaGetLastError();  // reported here, not by the next good call
  return Status::cuda(std::string("CUDA error while ") + doing + ": " + cudaGetErrorString(error));
}

namespace {

struct DeviceInfo {
  int major = 0, minor = 0;
  FwdContext context{};
};

// Asked once per device; several threads may ask at a time.
Status device_info(int device, DeviceInfo* info) {
  static DeviceInfo cache[kMaxDevices];
  static std::atomic<bool> known[kMaxDevices];
  static std::mutex writing;
  if (device < kMaxDevices && known[device].load(std::memory_order_acquire)) {
    *info = cache[device];
    return {};
  }
  int sms = 0, l2 = 0;
  cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info->major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info->minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error != cudaSuccess) return cuda_status("asking for the device's properties", error);
  info->context = {sms, l2};
  if (device < kMaxDevices) {
    const std::lock_guard<std::mutex> lock(writing);
    cache[device] = *info;
    known[device].store(true, std::memory_order_release);
  }
  return {};
}

}  // namespace

Status hopper_context(int device, FwdContext* context) {
  DeviceInfo info;
  const Status status = device_info(device, &info);
  if (!status.ok()) return status;
  if (info.major != 9 || info.minor != 0) {
    return Status::not_compiled("These kernels need compute capability 9.0 (H100, H200); device " +
                                std::to_string(device) + " has " + std::to_string(info.major) +
                                "." + std::to_string(info.minor) + ".");
  }
  *context = info.context;
  return {};
}

int report(const Status& status, char* message, size_t message_size) {
  if (message != nullptr && message_size > 0) {
    std::snprintf(message, message_size, "%s", status.message.c_str());
  }
  return int(status.kind);
}

}  // namespace flash_attn3
