// The Python module flash_attn3._C: what is no operator (build information, plans, the device
// check), and three entries to the forward that skip Python's operator calling convention.
#include <cmath>
#include <cstdlib>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include "call.h"
#include "device.h"
#include "host/params.h"
#include "ops.h"
#include "plan.h"

namespace flash_attn3::api {
namespace {

namespace py = pybind11;

// flash_attn3/ops.py looks for this text in the file before loading it: a module built against
// another torch may fail to load, or load and crash.
__attribute__((used)) constexpr char kTorchMarker[] =
    "FLASH_ATTN3_BUILT_AGAINST_TORCH=" TORCH_VERSION ";";

at::ScalarType compiled_dtype(const std::string& name) {
  if (name == "bf16") return at::kBFloat16;
  if (name == "fp16") return at::kHalf;
  if (name == "e4m3") return at::kFloat8_e4m3fn;
  throw py::value_error("dtype is '" + name + "'; expected 'bf16', 'fp16' or 'e4m3'");
}

py::dict fwd_plan(int64_t head_dim, int64_t head_dim_v, const std::string& dtype, int64_t batch,
                  int64_t seqlen_q, int64_t seqlen_k, int64_t heads, int64_t heads_kv, bool causal,
                  int64_t window_left, int64_t window_right, int64_t device, int64_t sm_margin) {
  PlanRequest r;
  r.dtype = dtype_of(compiled_dtype(dtype));
  r.head_dim = head_dim;
  r.head_dim_v = head_dim_v;
  r.batch = batch;
  r.seqlen_q = seqlen_q;
  r.seqlen_k = seqlen_k;
  r.heads = heads;
  r.heads_kv = heads_kv;
  r.window_left = window_left;
  r.window_right = causal ? 0 : window_right;
  r.device = device;
  r.sm_margin = sm_margin;
  FwdPlan plan{};
  char message[kMessageSize] = "";
  const int status = ask_plan(r, &plan, message, sizeof(message));
  if (status != 0) {
    PyObject* type = status == 1   ? PyExc_ValueError
                     : status == 2 ? PyExc_NotImplementedError
                                   : PyExc_RuntimeError;
    PyErr_SetString(type, message);
    throw py::error_already_set();
  }
  py::dict d;
  d["tile_m"] = plan.tile_m;
  d["tile_n"] = plan.tile_n;
  d["head_dim"] = plan.head_dim;
  d["head_dim_v"] = plan.head_dim_v;
  d["stages"] = plan.stages;
  d["threads"] = plan.threads;
  d["registers"] = plan.registers;
  d["shared_bytes"] = plan.shared_bytes;
  d["local_bytes"] = plan.local_bytes;
  d["grid"] = plan.grid;
  const FwdParams p = plan_params(r);
  d["workspace_bytes"] = flash_attn3_fwd_workspace_bytes(&p);
  return d;
}

// Reads the positional arguments of a fast entry. Whatever isn't of the plainest type clears `ok`:
// the caller then takes the checked path, which accepts it or says what is wrong.
class Reader {
 public:
  explicit Reader(PyObject* const* args) : args_(args) {}
  bool ok = true;

  const Tensor& tensor() {
    static const Tensor undefined;
    PyObject* o = *args_++;
    if (ok && THPVariable_CheckExact(o)) return THPVariable_Unpack(o);
    ok = false;
    return undefined;
  }

  OptionalTensor optional_tensor() {
    if (skip_none()) return std::nullopt;
    return tensor();
  }

  int64_t integer() {
    PyObject* o = *args_++;
    if (!PyLong_CheckExact(o)) {
      ok = false;
      return 0;
    }
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(o, &overflow);
    ok = ok && overflow == 0 && value >= -1 && value <= INT32_MAX;
    return value;
  }

  bool skip_none() {
    if (*args_ != Py_None) return false;
    ++args_;
    return true;
  }

  double number() {
    if (!PyFloat_CheckExact(*args_)) return static_cast<double>(integer());
    const double value = PyFloat_AS_DOUBLE(*args_++);
    ok = ok && std::isfinite(value);
    return value;
  }

  bool boolean() {
    PyObject* o = *args_++;
    ok = ok && PyBool_Check(o);
    return o == Py_True;
  }

 private:
  PyObject* const* args_;
};

struct Options {
  double scale;
  bool causal;
  int64_t window_left, window_right, chunk;
  double softcap;
  bool deterministic;
  int64_t sm_margin;
};

Options read_options(Reader& r, const Tensor& q) {
  Options o;
  o.scale = r.skip_none() ? 1.0 / std::sqrt(static_cast<double>(q.size(-1))) : r.number();
  o.causal = r.boolean();
  o.window_left = r.integer();
  o.window_right = r.integer();
  o.chunk = r.integer();
  o.softcap = r.number();
  o.deterministic = r.boolean();
  o.sm_margin = r.integer();
  r.ok = r.ok && o.scale > 0.0 && o.chunk >= 0 && o.softcap >= 0.0 && o.sm_margin >= 0;
  return o;
}

// Read at each call, as flash_attn3/env.py does.
bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

// Somebody watches or transforms the calls of this thread, or asked for a backend or for checks.
bool is_observed() {
  return at::impl::torch_function_mode_enabled() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set() || is_set("FLASH_ATTN3_BACKEND") ||
         is_set("FLASH_ATTN3_CHECK");
}

bool is_plain_cuda(const Tensor& t) {
  constexpr auto unusual = c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
       c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});
  return t.is_cuda() && t.layout() == c10::kStrided && !t.key_set().has_any(unusual);
}

bool has_kernel_for(const Tensor& t, int64_t head_dim, int64_t head_dim_v) {
  if (!fits_head_dim(head_dim, 8) || !fits_head_dim(head_dim_v, 8)) return false;
  const auto device = t.device().index();
  const auto* properties = at::cuda::getDeviceProperties(device);
  return properties->major == 9 && properties->minor == 0 &&
         compiled_for(t.scalar_type(), head_dim, head_dim_v, device);
}

// Same device and dtype, ranks and shapes as the operator wants them, dimensions with a kernel.
bool has_kernel(const Tensor& q, const Tensor& k, const Tensor& v, bool ragged) {
  const int64_t rank = ragged ? 3 : 4;
  if (q.dim() != rank || k.dim() != rank || v.dim() != rank) return false;
  if (!is_plain_cuda(q) || !is_plain_cuda(k) || !is_plain_cuda(v)) return false;
  const auto dtype = q.scalar_type();
  if (!is_half(dtype)) return false;
  if (k.scalar_type() != dtype || v.scalar_type() != dtype) return false;
  if (k.device() != q.device() || v.device() != q.device()) return false;
  const int64_t heads_kv = k.size(-2);
  if (heads_kv < 1 || q.size(-2) < 1 || q.size(-2) % heads_kv != 0) return false;
  if (k.size(-1) != q.size(-1) || v.size(-2) != heads_kv || v.size(-3) != k.size(-3)) return false;
  if (!ragged && (k.size(0) != q.size(0) || v.size(0) != q.size(0))) return false;
  return has_kernel_for(q, q.size(-1), v.size(-1));
}

// The heads of q in a packed tensor that the operator takes; 0 if it does not. `given`: what the
// caller said of them, 0 for nothing.
int64_t packed_heads_q(const Tensor& qkv, int64_t given) {
  const int64_t rank = qkv.dim();
  if ((rank != 4 && rank != 5) || !is_plain_cuda(qkv) || !is_half(qkv.scalar_type())) return 0;
  if (!has_kernel_for(qkv, qkv.size(-1), qkv.size(-1))) return 0;
  if (rank == 5) {
    const int64_t heads = qkv.size(3);
    return qkv.size(2) == 3 && (given == 0 || given == heads) ? heads : 0;
  }
  const int64_t rest = qkv.size(2) - given;
  const bool fits = given >= 1 && rest >= 2 && rest % 2 == 0 && given % (rest / 2) == 0;
  return fits ? given : 0;
}

bool is_int_vector(const OptionalTensor& t, int64_t length, const Tensor& q) {
  return !t.has_value() ||
         (t->device() == q.device() && is_plain_cuda(*t) && t->scalar_type() == at::kInt &&
          t->dim() == 1 && t->size(0) == length && (length <= 1 || t->stride(0) == 1));
}

PyObject* wrapped(const FwdResult& result) {
  py::object out = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::get<0>(result)));
  py::object lse = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::get<1>(result)));
  if (!out || !lse) return nullptr;
  return PyTuple_Pack(2, out.ptr(), lse.ptr());
}

PyObject* call(const Tensor& q, const Tensor& k, const Tensor& v,
               const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
               const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
               int64_t max_seqlen_q, int64_t max_seqlen_k, const Options& o) {
  FwdResult result;
  {
    // A launch waits when the queue of the device is full: other threads of Python go on meanwhile.
    py::gil_scoped_release release;
    result = fwd_op().call(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
                           max_seqlen_k, o.scale, o.causal, o.window_left, o.window_right, o.chunk,
                           o.softcap, o.deterministic, o.sm_margin);
  }
  return wrapped(result);
}

PyObject* fwd_dense_fast(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 11) {
    PyErr_Format(PyExc_TypeError, "fwd_dense_fast takes 11 positional arguments; got %zd", count);
    return nullptr;
  }
  Reader r(args);
  const Tensor& q = r.tensor();
  const Tensor& k = r.tensor();
  const Tensor& v = r.tensor();
  if (!r.ok || is_observed() || !has_kernel(q, k, v, /*ragged=*/false)) Py_RETURN_NONE;
  const Options o = read_options(r, q);
  if (!r.ok) Py_RETURN_NONE;
  return call(q, k, v, std::nullopt, std::nullopt, std::nullopt, std::nullopt, q.size(1), k.size(1),
              o);
  END_HANDLE_TH_ERRORS
}

PyObject* fwd_qkvpacked_fast(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 10) {
    PyErr_Format(PyExc_TypeError, "fwd_qkvpacked_fast takes 10 positional arguments; got %zd",
                 count);
    return nullptr;
  }
  Reader r(args);
  const Tensor& qkv = r.tensor();
  const bool is_given = !r.skip_none();
  const int64_t given = is_given ? r.integer() : 0;
  if (!r.ok || (is_given && given < 1) || is_observed()) Py_RETURN_NONE;
  const int64_t heads_q = packed_heads_q(qkv, given);
  if (heads_q == 0) Py_RETURN_NONE;
  const Options o = read_options(r, qkv);
  if (!r.ok) Py_RETURN_NONE;
  FwdResult result;
  {
    py::gil_scoped_release release;  // as in call()
    result = fwd_qkvpacked_op().call(qkv, heads_q, o.scale, o.causal, o.window_left, o.window_right,
                                     o.chunk, o.softcap, o.deterministic, o.sm_margin);
  }
  return wrapped(result);
  END_HANDLE_TH_ERRORS
}

PyObject* fwd_varlen_fast(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 17) {
    PyErr_Format(PyExc_TypeError, "fwd_varlen_fast takes 17 positional arguments; got %zd", count);
    return nullptr;
  }
  Reader r(args);
  const Tensor& q = r.tensor();
  const Tensor& k = r.tensor();
  const Tensor& v = r.tensor();
  const OptionalTensor cu_seqlens_q = r.tensor();
  const OptionalTensor cu_seqlens_k = r.tensor();
  const int64_t max_seqlen_q = r.integer();
  const int64_t max_seqlen_k = r.integer();
  const OptionalTensor seqused_q = r.optional_tensor();
  const OptionalTensor seqused_k = r.optional_tensor();
  if (!r.ok || max_seqlen_q < 0 || max_seqlen_k < 0 || is_observed() || cu_seqlens_q->dim() != 1 ||
      cu_seqlens_q->size(0) < 1 || !has_kernel(q, k, v, /*ragged=*/true)) {
    Py_RETURN_NONE;
  }
  const int64_t batch = cu_seqlens_q->size(0) - 1;
  const Options o = read_options(r, q);
  if (!r.ok || !is_int_vector(cu_seqlens_q, batch + 1, q) ||
      !is_int_vector(cu_seqlens_k, batch + 1, q) || !is_int_vector(seqused_q, batch, q) ||
      !is_int_vector(seqused_k, batch, q)) {
    Py_RETURN_NONE;
  }
  return call(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
              o);
  END_HANDLE_TH_ERRORS
}

// METH_FASTCALL: pybind11's own conversion of eleven arguments would cost more than the operator.
PyMethodDef kFastMethods[] = {
    {"fwd_dense_fast", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&fwd_dense_fast)),
     METH_FASTCALL,
     "fwd_dense_fast(q, k, v, softmax_scale or None, causal, window_left, window_right, "
     "attention_chunk, softcap, deterministic, sm_margin) -> (out, lse), or None where the call "
     "must take the checked path. Positional only."},
    {"fwd_qkvpacked_fast",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&fwd_qkvpacked_fast)),
     METH_FASTCALL,
     "fwd_qkvpacked_fast(qkv, num_heads_q or None, softmax_scale or None, causal, window_left, "
     "window_right, attention_chunk, softcap, deterministic, sm_margin) -> (out, lse), or None "
     "where the call must take the checked path. Positional only."},
    {"fwd_varlen_fast",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&fwd_varlen_fast)), METH_FASTCALL,
     "fwd_varlen_fast(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, "
     "seqused_k, softmax_scale or None, causal, window_left, window_right, attention_chunk, "
     "softcap, deterministic, sm_margin) -> (out, lse), or None where the call must take the "
     "checked path. Positional only."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("torch_version") = py::str(TORCH_VERSION);
  m.def(
      "build_info", [] { return std::string(flash_attn3_build_info()); },
      "What the kernel library was compiled from and for, in one line.");
  m.def("fwd_plan", &fwd_plan,
        "Tile, resource use and grid of the kernel that a dense forward call would launch.",
        py::arg("head_dim"), py::arg("head_dim_v"), py::arg("dtype") = "bf16", py::arg("batch") = 1,
        py::arg("seqlen_q") = 4096, py::arg("seqlen_k") = 4096, py::arg("heads") = 16,
        py::arg("heads_kv") = 16, py::arg("causal") = false, py::arg("window_left") = -1,
        py::arg("window_right") = -1, py::arg("device") = 0, py::arg("sm_margin") = 0);
  m.def(
      "device_refusal",
      [](int64_t device) { return device_refusal(static_cast<c10::DeviceIndex>(device)); },
      "Why the kernels can't run on this CUDA device; empty if they can.", py::arg("device"));
  m.def(
      "compiled_for",
      [](const std::string& dtype, int64_t head_dim, int64_t head_dim_v, int64_t device) {
        const at::ScalarType type = compiled_dtype(dtype);
        const int64_t step = type == at::kFloat8_e4m3fn ? 16 : 8;
        return fits_head_dim(head_dim, step) && fits_head_dim(head_dim_v, step) &&
               compiled_for(type, head_dim, head_dim_v, static_cast<c10::DeviceIndex>(device));
      },
      "Whether this build holds a forward kernel for these; asked of a Hopper device.",
      py::arg("dtype"), py::arg("head_dim"), py::arg("head_dim_v"), py::arg("device") = 0);
  m.def(
      "use_backward_kernels", &use_backward_kernels,
      "Whether the backward operators may take this project's kernels; returns what it was before.",
      py::arg("on"));
  m.def(
      "backward_refusal",
      [](const std::string& dtype, int64_t head_dim, int64_t head_dim_v,
         std::optional<int64_t> device) {
        at::ScalarType type = at::kFloat;
        if (dtype != "fp32") {
          if (dtype != "bf16" && dtype != "fp16") {
            throw py::value_error("dtype is '" + dtype + "'; expected 'bf16', 'fp16' or 'fp32'");
          }
          type = dtype == "fp16" ? at::kHalf : at::kBFloat16;
        }
        std::optional<c10::DeviceIndex> index;
        if (device.has_value()) index = static_cast<c10::DeviceIndex>(*device);
        return backward_refusal(type, head_dim, head_dim_v, index);
      },
      "Why the backward of a call does not take this project's kernels; empty if it does. Without "
      "a device, a Hopper GPU is assumed.",
      py::arg("dtype"), py::arg("head_dim"), py::arg("head_dim_v"), py::arg("device") = py::none());
  if (PyModule_AddFunctions(m.ptr(), kFastMethods) != 0) throw py::error_already_set();
}

}  // namespace flash_attn3::api
