// What every call through the C interface needs: its device, and how it reports.
#pragma once

#include "host/fwd_dispatch.h"

namespace flash_attn3 {

// The device's size, or why these kernels do not run on it. Asked once per device.
Status hopper_context(int device, FwdContext* context);

// The caller may have another device current; ours is until the end of the call.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

// The code that the C interface returns; one sentence goes to `message`.
int report(const Status& status, char* message, size_t message_size);

}  // namespace flash_attn3
