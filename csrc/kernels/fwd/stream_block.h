// A KV block of a consumer's stream and what is known of it before its scores are.
#pragma once

#include <cstdint>

namespace flash_attn3 {

// One KV block of the stream, as this warpgroup sees it. Two of them are alive at a time, so the
// flags share a register.
struct StreamBlock {
  static constexpr uint32_t kFirst = 16;         // of its tile: softmax and O start anew
  static constexpr uint32_t kLast = 32;          // of its tile
  static constexpr uint32_t kMasked = 64;        // some row does not see some key
  static constexpr uint32_t kNone = 128;         // the stream has ended (kEndInFlags)
  static constexpr uint32_t kTransformed = 256;  // scores are, before the mask (ScoreTransform)

  int n;
  uint32_t flags;

  __device__ __forceinline__ int slot() const { return flags & 15; }  // of its tile
  __device__ __forceinline__ bool first() const { return flags & kFirst; }
  __device__ __forceinline__ bool last() const { return flags & kLast; }
  __device__ __forceinline__ bool masked() const { return flags & kMasked; }
  __device__ __forceinline__ bool plain() const {
    return (flags & (kFirst | kMasked | kTransformed)) == 0;
  }
};

}  // namespace flash_attn3
