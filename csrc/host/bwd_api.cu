// The backward half of the C interface: checks, choice of the instantiation, run-time parameters.
#include <cmath>
#include <cstdint>
#include <string>

#include "host/bwd_config.h"
#include "host/bwd_dispatch.h"
#include "host/call_fields.h"
#include "host/compiled.h"

namespace flash_attn3 {
namespace {

int64_t q_tiles_of(const BwdParams& in, int tile_m) {
  if (is_ragged_q(in)) return in.total_q / tile_m + in.batch;
  return int64_t(blocks_for(in.max_seqlen_q, tile_m)) * in.batch;
}

// 16-byte accesses and TMA both want this; a dimension of size 1 has no stride that counts.
Status check_tensor(const char* name, const void* data, const Strides& strides, bool ragged) {
  if (data == nullptr) return Status::invalid(std::string(name) + " must not be null.");
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return Status::invalid(std::string(name) + " must start at a multiple of 16 bytes.");
  }
  if (strides.row % 8 != 0 || strides.head % 8 != 0 || (!ragged && strides.batch % 8 != 0)) {
    return Status::invalid(std::string(name) + " must have strides that are multiples of 8.");
  }
  return {};
}

Status check_tensors(const BwdParams& in) {
  const bool q = is_ragged_q(in), k = is_ragged_k(in);
  Status status = check_tensor("q", in.q, in.q_strides, q);
  if (status.ok()) status = check_tensor("k", in.k, in.k_strides, k);
  if (status.ok()) status = check_tensor("v", in.v, in.v_strides, k);
  if (status.ok()) status = check_tensor("out", in.out, in.out_strides, q);
  if (status.ok()) status = check_tensor("dout", in.dout, in.dout_strides, q);
  if (status.ok()) status = check_tensor("dq", in.dq, in.dq_strides, q);
  if (status.ok()) status = check_tensor("dk", in.dk, in.dk_strides, k);
  if (status.ok()) status = check_tensor("dv", in.dv, in.dv_strides, k);
  return status;
}

Status check_sizes(const BwdParams& in) {
  const Status status = check_shape(in);
  if (!status.ok()) return status;
  // Tiles of 64 rows are counted in 32 bits.
  const double tiles_q =
      (double(rows_of_q(in)) / 64 + 1) * (is_ragged_q(in) ? 1.0 : in.batch) + in.batch;
  const double tiles_k =
      (double(rows_of_k(in)) / 64 + 1) * (is_ragged_k(in) ? 1.0 : in.batch) + in.batch;
  if (tiles_q * in.heads >= double(1 << 30) || tiles_k * in.heads_kv >= double(1 << 30)) {
    return Status::invalid("there are too many rows times heads for one call.");
  }
  if (in.device < 0) return Status::invalid("device must not be negative.");
  return {};
}

using Launch = Status (*)(const BwdParams&, const DeviceInfo&, cudaStream_t, BwdPlan*);

struct CompiledBwd : CompiledKernel<Launch> {
  int tile_m;
};

template <int kHeadDim, int kHeadDimV>
constexpr CompiledBwd compiled(DType dtype, Launch launch) {
  return {{dtype, kHeadDim, kHeadDimV, launch}, BwdScheduleOf<kHeadDim, kHeadDimV>::Type::kBlockM};
}

const CompiledBwd kCompiled[] = {
#if FLASH_ATTN3_HAS_BWD_BF16_D64
    compiled<64, 64>(DType::kBFloat16, launch_bwd_bf16_d64),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D96
    compiled<96, 96>(DType::kBFloat16, launch_bwd_bf16_d96),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D128
    compiled<128, 128>(DType::kBFloat16, launch_bwd_bf16_d128),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D192_128
    compiled<192, 128>(DType::kBFloat16, launch_bwd_bf16_d192_128),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D192
    compiled<192, 192>(DType::kBFloat16, launch_bwd_bf16_d192),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D256
    compiled<256, 256>(DType::kBFloat16, launch_bwd_bf16_d256),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D64
    compiled<64, 64>(DType::kFloat16, launch_bwd_fp16_d64),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D96
    compiled<96, 96>(DType::kFloat16, launch_bwd_fp16_d96),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D128
    compiled<128, 128>(DType::kFloat16, launch_bwd_fp16_d128),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D192_128
    compiled<192, 128>(DType::kFloat16, launch_bwd_fp16_d192_128),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D192
    compiled<192, 192>(DType::kFloat16, launch_bwd_fp16_d192),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D256
    compiled<256, 256>(DType::kFloat16, launch_bwd_fp16_d256),
#endif
    {{DType::kFloat16, 0, 0, nullptr}, 0}};

const CompiledBwd* kernel_of(const BwdParams& in) {
  return find_kernel(kCompiled, in.dtype, in.head_dim, in.head_dim_v);
}

Status run(const BwdParams* in, cudaStream_t stream, BwdPlan* plan) {
  if (in == nullptr) return Status::invalid("params must not be null.");
  Status status = check_sizes(*in);
  if (status.ok()) status = check_tensors(*in);
  if (!status.ok()) return status;
  if (in->lse == nullptr || in->workspace == nullptr) {
    return Status::invalid("lse and workspace must not be null.");
  }
  return on_device(in->device, [&](const DeviceInfo& device) {
    const CompiledBwd* kernel = kernel_of(*in);
    return kernel != nullptr ? kernel->launch(*in, device, stream, plan)
                             : no_kernel("backward", in->dtype, in->head_dim, in->head_dim_v);
  });
}

// Pairs of batch and KV head whose tiles take turns.
int32_t section_pairs(const BwdParams& in, const DeviceInfo& device, int tile_m,
                      const BwdKernelParams& params) {
  if (is_ragged_k(in)) return 1;
  const bool causal_edge = in.window_right >= 0;
  const double pairs = double(in.batch) * in.heads_kv;
  const double rows = is_ragged_q(in) ? double(in.total_q) / in.batch + 1 : in.max_seqlen_q;
  const double read_bytes = 2.0 * rows * (in.head_dim + in.head_dim_v) * params.group;
  double wanted = 1;
  if (in.deterministic != 0) {
    // A KV tile adds to each query tile about 1.2 steps after the one before it of its pair. So a
    // pair's tiles are best claimed 2.5 steps apart, if Q, dO and the sums of dQ of all that run
    // then fit two thirds of L2. Without that they want 1.75, but under a causal edge (last_first)
    // nothing: there a tile begins a step or two ahead of the one that it follows.
    const double steps = rows / tile_m * params.group * (causal_edge ? 0.5 : 1.0);
    const double sum_bytes = 4.0 * rows * in.head_dim * params.group;
    const double fitting = 0.67 * device.l2_bytes / (read_bytes + sum_bytes);
    const double least = causal_edge ? 1.0 : std::ceil(1.75 * device.sms / steps);
    wanted = std::fmax(least, std::floor(std::fmin(2.5 * device.sms / steps, fitting)));
  } else if (causal_edge) {
    // The longest tiles come first, so that the last to be handed out are short: in sections whose
    // Q and dO fit half of L2, as long as a section is work for three rounds.
    const double by_cache = std::ceil(pairs * read_bytes / (device.l2_bytes / 2.0));
    const double by_rounds = std::floor(params.tiles / (3.0 * device.sms));
    const double sections = std::fmax(1.0, std::fmin(by_cache, by_rounds));
    wanted = std::ceil(pairs / sections);
  }
  return int32_t(std::fmin(pairs, std::fmax(1.0, wanted)));
}

int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

BwdWorkspace bwd_workspace(const BwdParams& in, int tile_m, int compiled_head_dim) {
  const int64_t tiles = q_tiles_of(in, tile_m) * in.heads;
  const int64_t words = is_ragged_k(in) ? BwdTileOrder::words(in.batch) : BwdTileOrder::kHeader;
  return {padded(words * 4), padded(tiles * 2 * tile_m * 4),
          padded(tiles * tile_m * compiled_head_dim * 4),
          in.deterministic != 0 ? padded(tiles * kMostTurnChains * 4) : 0};
}

// Pairs are taken whole where all CTAs are busy to the end, and Q, dO and the sums of dQ of the
// pairs that run stay in L2: they are read once for each KV tile. Under a causal edge later KV
// tiles need ever fewer of them.
bool takes_whole_pairs(const BwdParams& in, const DeviceInfo& device) {
  if (is_ragged_q(in) || is_ragged_k(in) || in.seqused_q != nullptr || in.seqused_k != nullptr) {
    return false;
  }
  // Every query sees a key, or its dQ would not be written.
  if (in.max_seqlen_q > in.max_seqlen_k || in.softcap > 0.0f) return false;
  const double pairs = double(in.batch) * in.heads_kv;
  const double ctas = std::fmax(1.0, double(device.sms) - std::fmax(0, in.sm_margin));
  const double busy = pairs / (ctas * std::ceil(pairs / ctas));
  const double row_bytes = 6.0 * in.head_dim + 2.0 * in.head_dim_v;
  const double open_bytes = ctas * in.max_seqlen_q * (double(in.heads) / in.heads_kv) * row_bytes *
                            (in.window_right >= 0 ? 0.5 : 1.0);
  return busy >= 0.9 && open_bytes <= 0.67 * device.l2_bytes;
}

void fill_bwd_params(const BwdParams& in, const DeviceInfo& device, int tile_m, int tile_n,
                     int compiled_head_dim, bool whole_pairs, BwdKernelParams* out) {
  fill_call_fields(in, out);
  out->group = in.heads / in.heads_kv;
  out->dout_data = in.dout;
  out->dlse = in.dlse;
  out->dq = in.dq;
  out->dk = in.dk;
  out->dv = in.dv;

  const BwdWorkspace parts = bwd_workspace(in, tile_m, compiled_head_dim);
  char* at = static_cast<char*>(in.workspace);
  out->plan = reinterpret_cast<int32_t*>(at);
  out->rows = reinterpret_cast<float*>(at + parts.plan);
  out->dq_sum = reinterpret_cast<float*>(at + parts.plan + parts.rows);
  // A pair's parts of dQ are made in order anyhow where one CTA makes them all.
  out->turns = parts.turns == 0 || whole_pairs
                   ? nullptr
                   : reinterpret_cast<int32_t*>(at + parts.plan + parts.rows + parts.dq_sum);

  out->dout_strides = in.dout_strides;
  out->dq_strides = in.dq_strides;
  out->dk_strides = in.dk_strides;
  out->dv_strides = in.dv_strides;
  out->heads_kv = in.heads_kv;
  out->head_dim = in.head_dim;

  out->scale = in.softmax_scale;
  out->scale_log2 = in.softmax_scale * kLog2E;
  out->tanh_factor = 0.0f;
  out->tanh_from_log2 = 0.0f;
  if (in.softcap > 0.0f) {
    out->tanh_factor = in.softmax_scale / in.softcap;
    // A factor of 0 means no soft cap to the kernel, and makes all scores 0.
    out->scale_log2 = out->tanh_factor == 0.0f ? 0.0f : in.softcap * kLog2E;
    out->tanh_from_log2 = out->tanh_factor == 0.0f ? 0.0f : 1.0f / out->scale_log2;
  }

  out->q_tiles = is_ragged_q(in) ? 0 : blocks_for(in.max_seqlen_q, tile_m);
  out->q_tiles_all = int32_t(q_tiles_of(in, tile_m));
  out->k_tiles = is_ragged_k(in) ? 0 : blocks_for(in.max_seqlen_k, tile_n);
  const int64_t pairs = int64_t(in.batch) * in.heads_kv;
  out->tiles = int32_t(whole_pairs ? pairs : out->k_tiles * pairs);
  out->whole_pairs = whole_pairs;

  out->dense =
      dense_order(out->k_tiles, section_pairs(in, device, tile_m, *out), in.batch, in.heads_kv);
  // Under a causal edge the last KV tile meets the fewest query tiles, and each tile begins at the
  // edge: if all start at once, a query tile gets the last KV tile's part first. So the sums of the
  // deterministic mode run in that order, and nobody waits long for a turn.
  out->last_first = in.deterministic != 0 && in.window_right >= 0 && !whole_pairs;
}

int bwd_grid(const BwdParams& in, const DeviceInfo& device, const BwdKernelParams& params) {
  return persistent_grid(in, device, is_ragged_k(in), params.tiles);
}

std::string bwd_kernel_list() { return list_kernels(kCompiled); }

}  // namespace flash_attn3

using namespace flash_attn3;

int flash_attn3_bwd(const BwdParams* params, cudaStream_t stream, char* message,
                    size_t message_size) {
  return report(run(params, stream, nullptr), message, message_size);
}

int flash_attn3_bwd_plan(const BwdParams* params, BwdPlan* plan, char* message,
                         size_t message_size) {
  if (plan == nullptr) {
    return report(Status::invalid("plan must not be null."), message, message_size);
  }
  return report(run(params, nullptr, plan), message, message_size);
}

int64_t flash_attn3_bwd_workspace_bytes(const BwdParams* params) {
  if (params == nullptr || !check_sizes(*params).ok()) return 0;
  const CompiledBwd* kernel = kernel_of(*params);
  if (kernel == nullptr) return 0;
  return bwd_workspace(*params, kernel->tile_m, kernel->head_dim).total();
}
