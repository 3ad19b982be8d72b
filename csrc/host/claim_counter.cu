#include "host/claim_counter.h"

#include <mutex>
#include <unordered_map>

#include "host/fwd_dispatch.h"

namespace flash_attn3 {
namespace {

constexpr int kCounters = 1 << 15;  // of a device
constexpr int kCounterStride = 8;   // in words: a sector each
constexpr size_t kBytes = size_t(kCounters) * kCounterStride * sizeof(int32_t);

struct DeviceCounters {
  std::mutex mutex;
  int32_t* memory = nullptr;  // kept until the process ends, as captured graphs need it
  bool failed = false;
  int taken = 0;
  std::unordered_map<unsigned long long, int32_t*> of_stream;  // ids are never used again

  // Once, with a synchronisation, so that every stream finds zeros. On a stream of its own and in
  // relaxed mode, since this thread or another may be capturing.
  bool allocate() {
    if (memory != nullptr) return true;
    if (failed) return false;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) return false;
    void* pointer = nullptr;
    cudaStream_t stream = nullptr;
    failed = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
             cudaMalloc(&pointer, kBytes) != cudaSuccess ||
             cudaMemsetAsync(pointer, 0, kBytes, stream) != cudaSuccess ||
             cudaStreamSynchronize(stream) != cudaSuccess;
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (!failed) memory = static_cast<int32_t*>(pointer);
    return !failed;
  }

  int32_t* take() {
    return taken < kCounters ? memory + size_t(taken++) * kCounterStride : nullptr;
  }

  int32_t* get(cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!allocate()) return nullptr;
    if (capture != cudaStreamCaptureStatusNone) return take();
    if (cudaStreamGetId(stream, &id) != cudaSuccess) return nullptr;
    const auto found = of_stream.find(id);
    if (found != of_stream.end()) return found->second;
    int32_t* counter = take();
    if (counter != nullptr) of_stream.emplace(id, counter);
    return counter;
  }
};

}  // namespace

int32_t* claim_counter(int device, cudaStream_t stream) {
  static DeviceCounters counters[kMaxDevices];
  if (device >= kMaxDevices) return nullptr;
  int32_t* counter = counters[device].get(stream);
  if (counter == nullptr) (void)cudaGetLastError();  // a failure here is none of the call
  return counter;
}

}  // namespace flash_attn3
