#include "tensors.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace herring::torch_binding {
namespace {

std::optional<DataType> wire_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DataType::kFloat32;
    case at::kDouble:
      return DataType::kFloat64;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kChar:
      return DataType::kInt8;
    case at::kShort:
      return DataType::kInt16;
    case at::kInt:
      return DataType::kInt32;
    case at::kLong:
      return DataType::kInt64;
    case at::kByte:
      return DataType::kUInt8;
    case at::kBool:
      return DataType::kBool;
    default:
      return std::nullopt;
  }
}

const char* op_name(const c10d::ReduceOp& op) {
  constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  const auto index = static_cast<std::size_t>(op.op_);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#endif

const PreMulSumSupplement* premul_supplement(const c10d::ReduceOp& op) {
  return dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
}

bool is_bitwise(const c10d::ReduceOp& op) {
  return op.op_ == c10d::ReduceOp::BAND || op.op_ == c10d::ReduceOp::BOR || op.op_ == c10d::ReduceOp::BXOR;
}

/// Contiguous memory with the tensor's values as they read (lazy conjugate and negative bits resolved).
Dense contiguous_memory(const at::Tensor& tensor, const char* call) {
  check_tensor(tensor, call);
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return {tensor, tensor.detach(), false};
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, call,
                    ": several elements of the tensor of shape ", tensor.sizes(), " and strides ", tensor.strides(),
                    " share one place in memory (expand()?); pass tensor.contiguous()");
  const at::Tensor copy = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  copy.detach().copy_(tensor.detach());
  return {tensor, copy, true};
}

}  // namespace

void check_tensor(const at::Tensor& tensor, const char* call) {
  TORCH_CHECK_VALUE(tensor.defined(), call, ": got an undefined tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, call, ": takes dense tensors, got layout ",
                              tensor.layout(), "; pass tensor.to_dense()");
  TORCH_CHECK_VALUE(!tensor.device().is_cuda(), call, ": all tensors of a call must be on one device, got one on ",
                    tensor.device(), " beside one on the CPU");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), call, ": takes CPU and CUDA tensors, got one on ", tensor.device(),
                    "; pass tensor.cpu()");
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_quantized(), call, ": quantized tensors are not supported; pass int_repr()");
}

void check_tensors(const std::vector<at::Tensor>& tensors, std::size_t count, const char* call) {
  if (count == 0) {
    TORCH_CHECK_VALUE(!tensors.empty(), call, ": needs at least one tensor, got an empty list");
  } else {
    TORCH_CHECK_VALUE(tensors.size() == count, call, ": needs a list of ", count, " tensor(s), got ", tensors.size());
  }
  for (const at::Tensor& tensor : tensors) check_tensor(tensor, call);
}

void Dense::copy_back() const {
  if (!copied) return;
  const at::Tensor target = user.detach();
  // `memory` may be a view of the copy as pairs of reals or as bytes.
  if (memory.scalar_type() == target.scalar_type()) {
    target.copy_(memory);
  } else if (target.is_complex() && memory.is_floating_point()) {
    target.copy_(at::view_as_complex(memory));
  } else {
    target.copy_(memory.view(target.scalar_type()).view(target.sizes()));
  }
}

Dense dense_for_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* call) {
  check_tensor(tensor, call);
  if (tensor.is_complex()) {
    TORCH_CHECK_VALUE(c10d::isComplexViewAsRealAllowed(op), call, ": ReduceOp.", op_name(op),
                      " has no meaning for complex tensors (", tensor.scalar_type(), ")");
  } else {
    TORCH_CHECK_TYPE(wire_type(tensor.scalar_type()).has_value(), call, ": cannot reduce ", tensor.scalar_type(),
                     "; supported: float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, bool");
  }
  TORCH_CHECK_VALUE(!is_bitwise(op) || !(tensor.is_floating_point() || tensor.is_complex()), call, ": ReduceOp.",
                    op_name(op), " takes integers or bool, got ", tensor.scalar_type());
  static_cast<void>(reduce_op(op));
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    TORCH_CHECK_VALUE(premul_supplement(op) != nullptr, call,
                      ": ReduceOp.PREMUL_SUM without its factor; make it with "
                      "torch.distributed._make_nccl_premul_sum()");
    TORCH_CHECK_VALUE(tensor.is_floating_point() || tensor.is_complex(), call,
                      ": ReduceOp.PREMUL_SUM takes floating point, got ", tensor.scalar_type());
  }
  Dense dense = contiguous_memory(tensor, call);
  if (tensor.is_complex()) dense.memory = at::view_as_real(dense.memory);
  return dense;
}

bool is_reduced_as_it_is(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_neg() &&
         wire_type(tensor.scalar_type()).has_value() && op.op_ != c10d::ReduceOp::PREMUL_SUM;
}

at::Tensor wire_view(const at::Tensor& contiguous, const char* call) {
  if (wire_type(contiguous.scalar_type())) return contiguous;
  if (contiguous.is_complex()) return at::view_as_real(contiguous);
  const at::Tensor flat = contiguous.view({-1});
  TORCH_CHECK_TYPE(c10::elementSize(contiguous.scalar_type()) > 0, call, ": cannot move ", contiguous.scalar_type());
  return flat.view(at::kByte);
}

Dense dense_for_move(const at::Tensor& tensor, const char* call) {
  Dense dense = contiguous_memory(tensor, call);
  dense.memory = wire_view(dense.memory, call);
  return dense;
}

OpDescriptor describe(Collective collective, const at::Tensor& memory, const char* call) {
  const std::optional<DataType> type = wire_type(memory.scalar_type());
  TORCH_INTERNAL_ASSERT(type.has_value(), call, ": ", memory.scalar_type(), " reached the wire");
  OpDescriptor descriptor;
  descriptor.collective = collective;
  descriptor.dtype = *type;
  descriptor.op_bytes = memory.nbytes();
  if (memory.dim() <= kMaxDims) {
    descriptor.dims = static_cast<std::uint8_t>(memory.dim());
    for (std::uint8_t i = 0; i < descriptor.dims; ++i) {
      descriptor.shape[i] = static_cast<std::uint64_t>(memory.size(i));
    }
  } else {
    descriptor.dims = 1;
    descriptor.shape[0] = static_cast<std::uint64_t>(memory.numel());
  }
  return descriptor;
}

std::optional<OpDescriptor> describe_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::SUM && op.op_ != c10d::ReduceOp::AVG) return std::nullopt;
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_neg() || tensor.is_conj() ||
      !wire_type(tensor.scalar_type())) {
    return std::nullopt;
  }
  OpDescriptor descriptor = describe(Collective::kAllReduce, tensor, "all_reduce");
  descriptor.reduce = reduce_op(op);
  return descriptor;
}

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:  // Scaled already.
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    default:
      TORCH_CHECK_VALUE(false, "herring: unknown ReduceOp number ", static_cast<int>(op.op_));
  }
}

void prescale(const at::Tensor& memory, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  const PreMulSumSupplement* const supplement = premul_supplement(op);
  TORCH_INTERNAL_ASSERT(supplement != nullptr, "herring: PREMUL_SUM was not checked");
  if (supplement->tensor_factor.defined()) {
    memory.mul_(supplement->tensor_factor.to(memory.options()).reshape({}));
  } else {
    memory.mul_(supplement->double_factor);
  }
}

void combine_locally(const at::Tensor& accumulated, const at::Tensor& other, const c10d::ReduceOp& op,
                     const char* call) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      accumulated.add_(other);
      return;
    case c10d::ReduceOp::PRODUCT:
      accumulated.mul_(other);
      return;
    case c10d::ReduceOp::MIN:
      accumulated.copy_(at::minimum(accumulated, other));
      return;
    case c10d::ReduceOp::MAX:
      accumulated.copy_(at::maximum(accumulated, other));
      return;
    case c10d::ReduceOp::BAND:
      accumulated.bitwise_and_(other);
      return;
    case c10d::ReduceOp::BOR:
      accumulated.bitwise_or_(other);
      return;
    case c10d::ReduceOp::BXOR:
      accumulated.bitwise_xor_(other);
      return;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, call, ": ReduceOp.", op_name(op), " takes one tensor a call, got several");
  }
}

std::span<std::byte> bytes_of(const at::Tensor& contiguous) {
  if (contiguous.numel() == 0) return {};
  return {static_cast<std::byte*>(contiguous.data_ptr()), contiguous.nbytes()};
}

namespace {

using Range = std::pair<const std::byte*, const std::byte*>;

/// The memory of `tensors`, by address; without empty ones.
std::vector<Range> ranges_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Range> ranges;
  for (const at::Tensor& tensor : tensors) {
    const std::span<std::byte> bytes = bytes_of(tensor);
    if (!bytes.empty()) ranges.emplace_back(bytes.data(), bytes.data() + bytes.size());
  }
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

bool meets(const std::vector<Range>& sorted, const Range& range) {
  return std::any_of(sorted.begin(), sorted.end(),
                     [&range](const Range& other) { return other.first < range.second && range.first < other.second; });
}

}  // namespace

void part_overlaps(std::vector<Dense>& list) {
  std::vector<at::Tensor> memory;
  for (const Dense& each : list) memory.push_back(each.memory);
  const std::vector<Range> sorted = ranges_of(memory);
  const bool are_apart = std::adjacent_find(sorted.begin(), sorted.end(), [](const Range& a, const Range& b) {
                           return b.first < a.second;
                         }) == sorted.end();
  if (are_apart) return;
  std::vector<Range> before;
  for (Dense& each : list) {
    const std::span<std::byte> bytes = bytes_of(each.memory);
    const Range range{bytes.data(), bytes.data() + bytes.size()};
    if (!bytes.empty() && meets(before, range)) {
      each.memory = each.memory.clone();
      each.copied = true;
    } else {
      before.push_back(range);
    }
  }
}

bool share_memory(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  const std::vector<Range> first = ranges_of(a);
  const std::vector<Range> second = ranges_of(b);
  // Both by address: whatever ends first can meet nothing further on.
  for (auto i = first.begin(), j = second.begin(); i != first.end() && j != second.end();) {
    if (i->first < j->second && j->first < i->second) return true;
    if (i->second <= j->second) {
      ++i;
    } else {
      ++j;
    }
  }
  return false;
}

}  // namespace herring::torch_binding
