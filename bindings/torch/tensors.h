#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "core/operation.h"

/// Between torch's tensors and the runtime's (bytes, descriptor). Every refusal is a ValueError, TypeError or
/// NotImplementedError that names the call and the value; raised before anything is sent.
namespace herring::torch_binding {

/// Refuses what has no dense CPU memory: other devices, sparse and quantized layouts, undefined tensors.
void check_tensor(const at::Tensor& tensor, const char* call);
/// `tensors` has `count` elements (0: at least one), and check_tensor() for each.
void check_tensors(const std::vector<at::Tensor>& tensors, std::size_t count, const char* call);

/// The tensor whose memory the runtime works on for an argument, and how the result gets back.
struct Dense {
  at::Tensor user;
  at::Tensor memory;  ///< `user` itself, a view of it, or a contiguous copy.
  bool copied = false;
  /// After the operation: writes the result back where a copy was used.
  void copy_back() const;
};
/// Of several tensors in one call: each that shares memory with an earlier one gets a copy, as gloo's flattening gives
/// it. All read what was there before the call; the last is written back last.
void part_overlaps(std::vector<Dense>& list);
/// Whether the memory of two lists (contiguous tensors) has a byte in common.
bool share_memory(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);
/// Contiguous memory for reductions: complex as pairs of reals, where `op` allows it. Refuses what `op` cannot reduce.
Dense dense_for_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* call);
/// Whether the runtime works on the tensor's own elements and nothing is computed before: its bytes may come late.
bool is_reduced_as_it_is(const at::Tensor& tensor, const c10d::ReduceOp& op);
/// Contiguous memory for moves; dtypes that the wire has no name for go as bytes.
Dense dense_for_move(const at::Tensor& tensor, const char* call);
/// A contiguous tensor as the wire moves it (same memory).
at::Tensor wire_view(const at::Tensor& contiguous, const char* call);

/// Descriptor of an operation on `memory` (contiguous, of a wire dtype).
OpDescriptor describe(Collective collective, const at::Tensor& memory, const char* call);
/// Of a sum or an average of a dense tensor of a wire type as it is; nothing for what else there is, or is refused.
std::optional<OpDescriptor> describe_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op);
/// PREMUL_SUM is a sum, once prescale() was there.
ReduceOp reduce_op(const c10d::ReduceOp& op);
/// PREMUL_SUM: multiplies `memory` by the operator's factor.
void prescale(const at::Tensor& memory, const c10d::ReduceOp& op);
/// accumulated = accumulated (op) other, elementwise on this rank.
void combine_locally(const at::Tensor& accumulated, const at::Tensor& other, const c10d::ReduceOp& op,
                     const char* call);

std::span<std::byte> bytes_of(const at::Tensor& contiguous);

}  // namespace herring::torch_binding
