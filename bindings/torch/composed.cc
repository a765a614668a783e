// Collectives made of all_reduce, broadcast and all_gather. Correct, not yet fast: they move up to group-size times the
// bytes that they need to. Paths of their own will replace them one by one.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend.h"

namespace herring::torch_binding {
namespace {

at::Tensor flat_bytes(const at::Tensor& contiguous) { return contiguous.detach().view({-1}).view(at::kByte); }

/// The inputs one after the other, as flat bytes.
at::Tensor joined_bytes(const std::vector<at::Tensor>& tensors, const char* title) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(flat_bytes(dense_for_move(tensor, title).memory));
  return at::cat(parts);
}

std::vector<std::int64_t> byte_counts(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(static_cast<std::int64_t>(tensor.nbytes()));
  return counts;
}

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

/// target = bytes, which hold target's elements in row-major order.
void copy_from_bytes(const at::Tensor& target, const at::Tensor& bytes) {
  // clone(): a slice of bytes need not be aligned for the target's dtype.
  target.detach().copy_(bytes.clone().view(target.scalar_type()).view(target.sizes()));
}

/// all_to_all_single's splits of dimension 0, in bytes; none given: equal.
std::vector<std::int64_t> split_bytes(const at::Tensor& tensor, const std::vector<std::int64_t>& splits, int size,
                                      const char* title, const char* which) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::int64_t row_bytes = rows == 0 ? 0 : static_cast<std::int64_t>(tensor.nbytes()) / rows;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, title, ": dimension 0 of the ", which, " (", rows,
                      ") is not divisible by the group's size ", size, "; give split sizes");
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), rows / size * row_bytes);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size), title, ": needs ", size, " ", which,
                    " split sizes, got ", splits.size());
  TORCH_CHECK_VALUE(sum(splits) == rows && *std::min_element(splits.begin(), splits.end()) >= 0, title, ": the ", which,
                    " split sizes ", at::IntArrayRef(splits), " do not add up to its dimension 0, ", rows);
  std::vector<std::int64_t> bytes;
  for (const std::int64_t split : splits) bytes.push_back(split * row_bytes);
  return bytes;
}

}  // namespace

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
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
  step.requests.push_back(all_reduce_request(info, dense.memory, options.reduceOp));
  append(step, [dense = std::move(dense), is_root] {
    if (is_root) dense.copy_back();
  });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  WorkInfo info = open(c10d::OpType::GATHER, "herring:gather", options);
  check_tensors(inputs, 1, info.title);
  check_root(options.rootRank, info.title);
  const bool is_root = options.rootRank == rank_;
  TORCH_CHECK_VALUE(outputs.size() == (is_root ? 1U : 0U), info.title,
                    is_root ? ": the root needs one list of outputs, got " : ": only the root takes outputs, got ",
                    outputs.size());
  info.inputs = inputs;
  Step step;
  if (is_root) {
    info.outputs = outputs[0];
    add_all_gather(info, outputs[0], inputs[0], step);
  } else {
    Dense dense = dense_for_move(inputs[0], info.title);
    std::vector<std::int64_t> shape{size_};
    shape.insert(shape.end(), dense.memory.sizes().begin(), dense.memory.sizes().end());
    at::Tensor unused = at::empty(shape, dense.memory.options());
    step.requests.push_back(all_gather_request(info, unused, dense.memory));
    append(step, [dense = std::move(dense), unused = std::move(unused)] {});
  }
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  WorkInfo info = open(c10d::OpType::SCATTER, "herring:scatter", options);
  check_tensors(outputs, 1, info.title);
  check_root(options.rootRank, info.title);
  const at::Tensor output = outputs[0];
  const bool is_root = options.rootRank == rank_;
  TORCH_CHECK_VALUE(inputs.size() == (is_root ? 1U : 0U), info.title,
                    is_root ? ": the root needs one list of inputs, got " : ": only the root takes inputs, got ",
                    inputs.size());
  const auto block = static_cast<std::int64_t>(output.nbytes());
  at::Tensor all;
  if (is_root) {
    check_tensors(inputs[0], static_cast<std::size_t>(size_), info.title);
    for (const at::Tensor& input : inputs[0]) {
      TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type() && input.sizes() == output.sizes(), info.title,
                        ": every input must match the output ", output.scalar_type(), output.sizes(), ", got ",
                        input.scalar_type(), input.sizes());
    }
    all = joined_bytes(inputs[0], info.title);
    info.inputs = inputs[0];
  } else {
    all = at::empty({block * size_}, output.options().dtype(at::kByte));
  }
  info.outputs = outputs;
  Step step;
  step.requests.push_back(broadcast_request(info, all, options.rootRank));
  append(step, [all = std::move(all), output, block, rank = rank_] {
    copy_from_bytes(output, all.narrow(0, rank * block, block));
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
  step.requests.push_back(all_reduce_request(info, dense.memory, op));
  append(step, [dense = std::move(dense), copy = std::move(copy), output, rank = rank_] {
    const at::Tensor mine = copy.view({-1}).narrow(0, rank * output.numel(), output.numel());
    output.detach().copy_(mine.view(output.sizes()));
  });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
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
  step.requests.push_back(all_reduce_request(info, dense.memory, options.reduceOp));
  append(step, [dense = std::move(dense), joined = std::move(joined), output, offset] {
    output.detach().copy_(joined.narrow(0, offset, output.numel()).view(output.sizes()));
  });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  WorkInfo info = open(c10d::OpType::_REDUCE_SCATTER_BASE, "herring:_reduce_scatter_base", options);
  info.inputs = {input};
  info.outputs = {output};
  Step step;
  add_reduce_scatter(info, output, input, options.reduceOp, step);
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  WorkInfo info =
      open(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, "herring:reduce_scatter_tensor_coalesced", options);
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

Backend::WorkPtr Backend::exchange(WorkInfo info, const at::Tensor& output, const at::Tensor& input,
                                   std::vector<std::int64_t> output_bytes, std::vector<std::int64_t> input_bytes,
                                   at::ScalarType dtype, std::function<void()> finish) {
  // First everybody learns what everybody sends and expects (so that all ranks find the same disagreement), then one
  // all_gather moves all data, padded to the rank that sends most.
  const std::int64_t size = size_;
  std::vector<std::int64_t> row = input_bytes;
  row.insert(row.end(), output_bytes.begin(), output_bytes.end());
  row.push_back(static_cast<std::int64_t>(dtype));
  const auto columns = static_cast<std::int64_t>(row.size());
  at::Tensor mine = at::tensor(row, at::kLong);
  at::Tensor table = at::empty({size, columns}, at::kLong);
  Step step;
  step.requests.push_back(all_gather_request(info, table, mine));
  auto self = c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this);
  WorkInfo copy_of_info = info;
  step.then = [self, info = std::move(copy_of_info), mine, table, output, input, size, columns,
               finish = std::move(finish)]() -> Step {
    const std::int64_t* cells = table.const_data_ptr<std::int64_t>();
    const auto sends = [&](std::int64_t from, std::int64_t to) { return cells[from * columns + to]; };
    std::int64_t block = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      std::int64_t total = 0;
      for (std::int64_t j = 0; j < size; ++j) {
        total += sends(i, j);
        const std::int64_t expected = cells[j * columns + size + i];
        TORCH_CHECK_WITH(DistBackendError, sends(i, j) == expected, info.title,
                         ": mismatch: ", self->describe_rank(static_cast<int>(i)), " sends ", sends(i, j), " bytes to ",
                         self->describe_rank(static_cast<int>(j)), ", which expects ", expected);
      }
      TORCH_CHECK_WITH(DistBackendError, cells[i * columns + 2 * size] == cells[2 * size], info.title,
                       ": mismatch: ", self->describe_rank(0), " has ", static_cast<at::ScalarType>(cells[2 * size]),
                       ", ", self->describe_rank(static_cast<int>(i)), " has ",
                       static_cast<at::ScalarType>(cells[i * columns + 2 * size]));
      block = std::max(block, total);
    }
    Step next;
    if (block == 0) {
      finish();
      return next;
    }
    at::Tensor padded = at::empty({block}, input.options());
    padded.narrow(0, 0, input.numel()).copy_(input);
    padded.narrow(0, input.numel(), block - input.numel()).zero_();
    at::Tensor gathered = at::empty({size, block}, input.options());
    // By name: this runs when the sizes are there, so it has no place in the group's call order.
    next.requests.push_back(self->all_gather_request(info, gathered, padded));
    next.requests.back().name = c10::str("torch/all_to_all/", info.sequence);
    append(next, [self, table, padded, gathered, output, size, columns, finish] {
      const std::int64_t* const counts = table.const_data_ptr<std::int64_t>();
      std::int64_t at = 0;
      for (std::int64_t from = 0; from < size; ++from) {
        std::int64_t begin = 0;
        for (std::int64_t j = 0; j < self->rank_; ++j) begin += counts[from * columns + j];
        const std::int64_t bytes = counts[from * columns + self->rank_];
        output.narrow(0, at, bytes).copy_(gathered[from].narrow(0, begin, bytes));
        at += bytes;
      }
      finish();
    });
    return next;
  };
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  WorkInfo info = open(c10d::OpType::ALLTOALL_BASE, "herring:all_to_all", options);
  check_tensor(output, info.title);
  check_tensor(input, info.title);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), info.title, ": input of ", input.scalar_type(),
                    " and output of ", output.scalar_type());
  std::vector<std::int64_t> sends = split_bytes(input, input_splits, size_, info.title, "input");
  std::vector<std::int64_t> receives = split_bytes(output, output_splits, size_, info.title, "output");
  const at::Tensor bytes = flat_bytes(dense_for_move(input, info.title).memory);
  const at::Tensor received = at::empty({sum(receives)}, bytes.options());
  info.inputs = {input};
  info.outputs = {output};
  return exchange(std::move(info), received, bytes, std::move(receives), std::move(sends), input.scalar_type(),
                  [received, target = output] { copy_from_bytes(target, received); });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  WorkInfo info = open(c10d::OpType::ALLTOALL, "herring:all_to_all", options);
  check_tensors(inputs, static_cast<std::size_t>(size_), info.title);
  check_tensors(outputs, static_cast<std::size_t>(size_), info.title);
  const at::ScalarType dtype = inputs[0].scalar_type();
  for (const Tensors* list : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *list) {
      TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, info.title, ": tensors of ", dtype, " and ",
                        tensor.scalar_type(), " in one call");
    }
  }
  const at::Tensor bytes = joined_bytes(inputs, info.title);
  std::vector<std::int64_t> receives = byte_counts(outputs);
  const at::Tensor received = at::empty({sum(receives)}, bytes.options());
  info.inputs = inputs;
  info.outputs = outputs;
  return exchange(std::move(info), received, bytes, std::move(receives), byte_counts(inputs), dtype,
                  [received, targets = outputs] {
                    std::int64_t at = 0;
                    for (const at::Tensor& target : targets) {
                      const auto count = static_cast<std::int64_t>(target.nbytes());
                      copy_from_bytes(target, received.narrow(0, at, count));
                      at += count;
                    }
                  });
}

Backend::WorkPtr Backend::send(Tensors&, int, int) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "herring: send is not supported yet; use broadcast, or a second group on gloo");
}

Backend::WorkPtr Backend::recv(Tensors&, int, int) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "herring: recv is not supported yet; use broadcast, or a second group on gloo");
}

Backend::WorkPtr Backend::recvAnysource(Tensors&, int) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "herring: recv from any source is not supported yet; use a second group on gloo");
}

}  // namespace herring::torch_binding
