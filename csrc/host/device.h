// What both directions share on the host: the device, error reports, bounds of options.
#pragma once

#include <cstdint>
#include <string>

#include <cuda_runtime.h>

#include "host/params.h"
#include "host/status.h"

namespace flash_attn3 {

constexpr int kMaxDevices = 64;
constexpr int32_t kMostRows = 1 << 30;
constexpr int32_t kLongestWindow = kMostRows - 1024;  // added to a row's position it does not wrap

// Once per device, what a launch wants to know.
struct DeviceInfo {
  int major = 0, minor = 0;
  int sms = 0;
  int64_t l2_bytes = 0;
};

// The device's size, or why these kernels do not run on it.
Status hopper_device(int device, DeviceInfo* info);

Status cuda_status(const char* doing, cudaError_t error);

// The caller may have another device current; ours is until the end of the call.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

// work(DeviceInfo) with the device current, or why that can't be.
template <class Work>
Status on_device(int device, const Work& work) {
  DeviceInfo info;
  const Status status = hopper_device(device, &info);
  if (!status.ok()) return status;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return cuda_status("choosing the device", scope.error());
  return work(info);
}

const char* dtype_name(DType dtype);

// -1 (unlimited) or what can be added to a position.
int32_t bounded_window(int32_t window);

// Hands a status out through the C interface.
int report(const Status& status, char* message, size_t message_size);

}  // namespace flash_attn3
