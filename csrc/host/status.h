// How a failure travels inside the library: a kind and one sentence. The C interface hands out
// both.
#pragma once

#include <string>

namespace flash_attn3 {

enum class StatusKind : int { kOk = 0, kInvalid = 1, kNotCompiled = 2, kCuda = 3 };

struct Status {
  StatusKind kind = StatusKind::kOk;
  std::string message;

  bool ok() const { return kind == StatusKind::kOk; }
  static Status invalid(std::string message) { return {StatusKind::kInvalid, std::move(message)}; }
  static Status not_compiled(std::string message) {
    return {StatusKind::kNotCompiled, std::move(message)};
  }
  static Status cuda(std::string message) { return {StatusKind::kCuda, std::move(message)}; }
};

}  // namespace flash_attn3
