// Reductions to one rank or to slices, made of all_reduce: they go through the servers, and move up to twice the bytes
// that they need to.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <utility>

#include "backend.h"

namespace herring::torch_binding {
namespace {

/// Some releases (2.9) have no name for this call; the Work's title tells it there.
template <class Type>
constexpr Type coalesced_reduce_scatter() {
  if constexpr (requires { Type::REDUCE_SCATTER_TENSOR_COALESCED; }) {
    return Type::REDUCE_SCATTER_TENSOR_COALESCED;
  } else {
    return Type::_REDUCE_SCATTER_BASE;
  }
}

}  // namespace

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (const auto device = accelerator_of(tensors)) return staged_reduce(*device, tensors, options);
  WorkInfo info = open(c10d::OpType::REDUCE, "herring:reduce", options);
  check_tensors(tensors, 1, info.title);
  check_root(options.rootRank, info.title);
  Dense dense = dense_for_reduction(tensors[0], options.reduceOp, info.title);
  const bool is_root = options.rootRank == rank_;
  // Only the root's tensor may change.
  if (!is_root && !dense.copied) dense.memory = dense.memory.clone();
  info.inputs = tensors;
  info.outputs = tensors;
  Step step;
  step.requests.push_back(
      all_reduce_request(info, dense.memory, options.reduceOp, Collective::kReduce, options.rootRank));
  append(step, [dense = std::move(dense), is_root] {
    if (is_root) dense.copy_back();
  });
  return start(std::move(info), std::move(step));
}

void Backend::add_reduce_scatter(const WorkInfo& info, const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceOp& op, Step& step) const {
  check_tensor(output, info.title);
  check_tensor(input, info.title);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && output.numel() * size_ == input.numel(), info.title,
                    ": the input must hold ", size_, " times the output ", output.scalar_type(), output.sizes(),
                    ", got ", input.scalar_type(), input.sizes());
  // The input stays as it is: the sum is made in a copy.
  at::Tensor copy = input.detach().clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg();
  Dense dense = dense_for_reduction(copy, op, info.title);
  step.requests.push_back(all_reduce_request(info, dense.memory, op, Collective::kReduceScatter));
  append(step, [dense = std::move(dense), copy = std::move(copy), output, rank = rank_] {
    const at::Tensor mine = copy.view({-1}).narrow(0, rank * output.numel(), output.numel());
    output.detach().copy_(mine.view(output.sizes()));
  });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  if (const auto device = accelerator_of(outputs)) return staged_reduce_scatter(*device, outputs, inputs, options);
  WorkInfo info = open(c10d::OpType::REDUCE_SCATTER, "herring:reduce_scatter", options);
  check_tensors(outputs, 1, info.title);
  TORCH_CHECK_VALUE(inputs.size() == 1, info.title, ": needs one list of inputs, got ", inputs.size());
  check_tensors(inputs[0], static_cast<std::size_t>(size_), info.title);
  const at::Tensor output = outputs[0];
  const at::Tensor& mine = inputs[0][static_cast<std::size_t>(rank_)];
  TORCH_CHECK_VALUE(mine.numel() == output.numel() && mine.scalar_type() == output.scalar_type(), info.title,
                    ": input ", rank_, " ", mine.scalar_type(), mine.sizes(), " must match the output ",
                    output.scalar_type(), output.sizes());
  std::vector<at::Tensor> flat;
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < inputs[0].size(); ++i) {
    const at::Tensor& input = inputs[0][i];
    TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type(), info.title, ": inputs of ", input.scalar_type(),
                      " and an output of ", output.scalar_type());
    flat.push_back(input.detach().contiguous().view({-1}));
    if (i < static_cast<std::size_t>(rank_)) offset += input.numel();
  }
  at::Tensor joined = at::cat(flat).resolve_conj().resolve_neg();
  Dense dense = dense_for_reduction(joined, options.reduceOp, info.title);
  info.inputs = inputs[0];
  info.outputs = outputs;
  Step step;
  step.requests.push_back(all_reduce_request(info, dense.memory, options.reduceOp, Collective::kReduceScatter));
  append(step, [dense = std::move(dense), joined = std::move(joined), output, offset] {
    output.detach().copy_(joined.narrow(0, offset, output.numel()).view(output.sizes()));
  });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  if (const auto device = accelerator_of(output)) {
    return staged_reduce_scatter_tensor(*device, {output}, {input}, options, false);
  }
  WorkInfo info = open(c10d::OpType::_REDUCE_SCATTER_BASE, "herring:_reduce_scatter_base", options);
  info.inputs = {input};
  info.outputs = {output};
  Step step;
  add_reduce_scatter(info, output, input, options.reduceOp, step);
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  if (const auto device = accelerator_of(outputs)) {
    return staged_reduce_scatter_tensor(*device, outputs, inputs, options, true);
  }
  WorkInfo info = open(coalesced_reduce_scatter<c10d::OpType>(), "herring:reduce_scatter_tensor_coalesced", options);
  check_tensors(inputs, 0, info.title);
  check_tensors(outputs, inputs.size(), info.title);
  info.inputs = inputs;
  info.outputs = outputs;
  Step step;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    add_reduce_scatter(info, outputs[i], inputs[i], options.reduceOp, step);
  }
  return start(std::move(info), std::move(step));
}

}  // namespace herring::torch_binding
