// What goes straight from rank to rank: send and recv, and the collectives that are made of them.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "backend.h"

namespace herring::torch_binding {
namespace {

/// Tags of collectives: receives of any tag do not meet them.
constexpr std::uint64_t kCollectiveBit = std::uint64_t{1} << 63;
constexpr int kCollectiveShift = 56;

/// all_to_all_single's splits of dimension 0, in rows; none given: equal.
std::vector<std::int64_t> split_rows(const at::Tensor& tensor, const std::vector<std::int64_t>& splits, int size,
                                     const char* title, const char* which) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, title, ": dimension 0 of the ", which, " (", rows,
                      ") is not divisible by the group's size ", size, "; give split sizes");
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), rows / size);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size), title, ": needs ", size, " ", which,
                    " split sizes, got ", splits.size());
  const std::int64_t sum = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  TORCH_CHECK_VALUE(sum == rows && *std::min_element(splits.begin(), splits.end()) >= 0, title, ": the ", which,
                    " split sizes ", at::IntArrayRef(splits), " do not add up to its dimension 0, ", rows);
  return splits;
}

/// Slices of dimension 0 of `tensor`, flat, in `memory`, which is `tensor` as the wire moves it.
std::vector<at::Tensor> slices(const at::Tensor& memory, const at::Tensor& tensor,
                               const std::vector<std::int64_t>& rows) {
  const std::int64_t all_rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::int64_t row = all_rows == 0 ? 0 : memory.numel() / all_rows;
  const at::Tensor flat = memory.view({-1});
  std::vector<at::Tensor> parts;
  std::int64_t at = 0;
  for (const std::int64_t count : rows) {
    parts.push_back(flat.narrow(0, at * row, count * row));
    at += count;
  }
  return parts;
}

/// All of them as the wire moves them; `flat` gets their memory, flat.
std::vector<Dense> dense_list(const std::vector<at::Tensor>& tensors, const char* title,
                              std::vector<at::Tensor>& flat) {
  std::vector<Dense> list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(dense_for_move(tensor, title));
    flat.push_back(list.back().memory.view({-1}));
  }
  return list;
}

/// The memory of each, as plans of messages have it.
std::vector<std::span<std::byte>> blocks_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::span<std::byte>> blocks;
  for (const at::Tensor& tensor : tensors) blocks.push_back(bytes_of(tensor));
  return blocks;
}

std::vector<std::span<const std::byte>> const_blocks_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::span<const std::byte>> blocks;
  for (const at::Tensor& tensor : tensors) blocks.emplace_back(bytes_of(tensor));
  return blocks;
}

}  // namespace

WorkInfo Backend::open_message(c10d::OpType type, const char* title) const {
  check_open(title);
  process_->stager->wait_until_started();
  WorkInfo info;
  info.rank = rank_;
  info.op_type = type;
  info.title = title;
  info.sequence = sequence_.load();
  info.is_async = false;  // Most callers only wait; a future that is asked for watches it from then on.
  info.timeout = Millis(timeout_ms_.load());
  return info;
}

collectives::MessageCall Backend::next_collective(const WorkInfo& info, Collective kind, const at::Tensor& memory,
                                                  std::int64_t root) {
  // Collectives of two kinds must not take each other's messages.
  const std::uint64_t bits = kCollectiveBit | static_cast<std::uint64_t>(kind) << kCollectiveShift;
  collectives::MessageCall call{options_.id, static_cast<std::uint32_t>(size_), static_cast<std::uint32_t>(rank_)};
  call.timeout = info.timeout;
  // Ranks call a collective alike, types too; what a message holds is its two users' affair.
  call.dtype = describe(Collective::kAllGather, memory, info.title).dtype;
  const std::optional<std::uint64_t> number = process_->runtime->take_number(options_.id);
  call.tag = bits | (number ? *number : collective_tag_.fetch_add(1));
  if (!number) return call;
  call.collective = std::make_shared<runtime::Composed>();
  call.collective->number = *number;
  call.collective->descriptor.collective = kind;
  call.collective->descriptor.dtype = *call.dtype;
  call.collective->descriptor.root = static_cast<std::uint32_t>(root);
  return call;
}

void Backend::add_send(const WorkInfo& info, int member, std::uint64_t tag, const at::Tensor& memory,
                       Step& step) const {
  step.sends.push_back({options_.id, static_cast<std::uint32_t>(member), tag, bytes_of(memory), info.timeout});
}

void Backend::add_receive(const WorkInfo& info, std::optional<int> member, std::uint64_t tag, const at::Tensor& memory,
                          Step& step) const {
  step.receives.push_back({options_.id, member, tag, bytes_of(memory), info.timeout});
}

void Backend::check_message(const Tensors& tensors, int peer, int tag, const char* title) const {
  check_tensors(tensors, 1, title);
  TORCH_CHECK_VALUE(tag >= 0, title, ": Tag must be nonnegative, got ", tag);
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_, title, ": rank ", peer, " is not in the group '", options_.name, "' of ",
                    size_, " rank(s)");
}

Backend::WorkPtr Backend::send(Tensors& tensors, int destination, int tag) {
  if (const auto device = accelerator_of(tensors)) return staged_send(*device, tensors, destination, tag);
  WorkInfo info = open_message(c10d::OpType::SEND, "herring:send");
  check_message(tensors, destination, tag, info.title);
  Dense dense = dense_for_move(tensors[0], info.title);
  info.inputs = tensors;
  info.outputs = tensors;
  Step step;
  add_send(info, destination, static_cast<std::uint64_t>(tag), dense.memory, step);
  append(step, [dense = std::move(dense)] {});
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  if (const auto device = accelerator_of(tensors)) return staged_receive(*device, tensors, source, tag);
  return receive(open_message(c10d::OpType::RECV, "herring:recv"), tensors, source, tag);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  if (const auto device = accelerator_of(tensors)) return staged_receive(*device, tensors, std::nullopt, tag);
  return receive(open_message(c10d::OpType::RECVANYSOURCE, "herring:recvAnySource"), tensors, std::nullopt, tag);
}

Backend::WorkPtr Backend::receive(WorkInfo info, const Tensors& tensors, std::optional<int> source, int tag) {
  check_message(tensors, source.value_or(0), tag, info.title);
  Dense dense = dense_for_move(tensors[0], info.title);
  info.inputs = tensors;
  info.outputs = tensors;
  Step step;
  add_receive(info, source, static_cast<std::uint64_t>(tag), dense.memory, step);
  append(step, [dense = std::move(dense)] { dense.copy_back(); });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  if (const auto device = accelerator_of(inputs)) return staged_gather(*device, outputs, inputs, options);
  WorkInfo info = open(c10d::OpType::GATHER, "herring:gather", options);
  check_tensors(inputs, 1, info.title);
  check_root(options.rootRank, info.title);
  const at::Tensor& input = inputs[0];
  const bool is_root = options.rootRank == rank_;
  TORCH_CHECK_VALUE(outputs.size() == (is_root ? 1U : 0U), info.title,
                    is_root ? ": the root needs one list of outputs, got " : ": only the root takes outputs, got ",
                    outputs.size());
  if (is_root) check_tensors(outputs[0], static_cast<std::size_t>(size_), info.title);
  Dense source = dense_for_move(input, info.title);
  info.inputs = inputs;
  std::vector<Dense> targets;
  Tensors memory;
  if (is_root) {
    for (const at::Tensor& output : outputs[0]) {
      TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && output.numel() == input.numel(), info.title,
                        ": every output must match the input ", input.scalar_type(), input.sizes(), ", got ",
                        output.scalar_type(), output.sizes());
    }
    targets = dense_list(outputs[0], info.title, memory);
    info.outputs = outputs[0];
  }
  Step step;
  const collectives::MessageCall call = next_collective(info, Collective::kGather, source.memory, options.rootRank);
  const auto root = static_cast<std::uint32_t>(options.rootRank);
  add_messages(collectives::gather(call, root, blocks_of(memory), bytes_of(source.memory)), step);
  append(step, [targets = std::move(targets), source = std::move(source)] {
    for (const Dense& each : targets) each.copy_back();
  });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  if (const auto device = accelerator_of(outputs)) return staged_scatter(*device, outputs, inputs, options);
  WorkInfo info = open(c10d::OpType::SCATTER, "herring:scatter", options);
  check_tensors(outputs, 1, info.title);
  check_root(options.rootRank, info.title);
  const at::Tensor& output = outputs[0];
  const bool is_root = options.rootRank == rank_;
  TORCH_CHECK_VALUE(inputs.size() == (is_root ? 1U : 0U), info.title,
                    is_root ? ": the root needs one list of inputs, got " : ": only the root takes inputs, got ",
                    inputs.size());
  if (is_root) check_tensors(inputs[0], static_cast<std::size_t>(size_), info.title);
  Dense target = dense_for_move(output, info.title);
  std::vector<Dense> sources;
  Tensors memory;
  if (is_root) {
    for (const at::Tensor& input : inputs[0]) {
      TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type() && input.sizes() == output.sizes(), info.title,
                        ": every input must match the output ", output.scalar_type(), output.sizes(), ", got ",
                        input.scalar_type(), input.sizes());
    }
    sources = dense_list(inputs[0], info.title, memory);
    info.inputs = inputs[0];
  }
  info.outputs = outputs;
  Step step;
  const collectives::MessageCall call = next_collective(info, Collective::kScatter, target.memory, options.rootRank);
  const auto root = static_cast<std::uint32_t>(options.rootRank);
  add_messages(collectives::scatter(call, root, bytes_of(target.memory), const_blocks_of(memory)), step);
  append(step, [target = std::move(target), sources = std::move(sources)] { target.copy_back(); });
  return start(std::move(info), std::move(step));
}

void add_messages(collectives::MessagePlan plan, Step& step) {
  step.receives.insert(step.receives.end(), plan.receives.begin(), plan.receives.end());
  step.sends.insert(step.sends.end(), plan.sends.begin(), plan.sends.end());
  append(step, [plan = std::move(plan)] { plan.copy_own(); });
}

void add_exchange(const collectives::MessageCall& call, const std::vector<at::Tensor>& outputs,
                  const std::vector<at::Tensor>& inputs, Step& step) {
  add_messages(collectives::exchange(call, blocks_of(outputs), const_blocks_of(inputs), false), step);
}

void Backend::add_uneven_all_gather(const WorkInfo& info, const Tensors& outputs, const at::Tensor& input, Step& step) {
  const at::Tensor& own = outputs[static_cast<std::size_t>(rank_)];
  TORCH_CHECK_VALUE(own.scalar_type() == input.scalar_type() && own.numel() == input.numel(), info.title, ": output ",
                    rank_, " must match the input ", input.scalar_type(), input.sizes(), ", got ", own.scalar_type(),
                    own.sizes());
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), info.title, ": outputs of ", output.scalar_type(),
                      " for an input of ", input.scalar_type());
  }
  const Dense source = dense_for_move(input, info.title);
  Tensors memory;
  std::vector<Dense> targets = dense_list(outputs, info.title, memory);
  add_exchange(next_collective(info, Collective::kUnevenAllGather, source.memory), memory,
               Tensors(outputs.size(), source.memory.view({-1})), step);
  append(step, [targets = std::move(targets), source] {
    for (const Dense& each : targets) each.copy_back();
  });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  if (const auto device = accelerator_of(input)) {
    return staged_alltoall_base(*device, output, input, output_splits, input_splits, options);
  }
  WorkInfo info = open(c10d::OpType::ALLTOALL_BASE, "herring:all_to_all", options);
  check_tensor(output, info.title);
  check_tensor(input, info.title);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), info.title, ": input of ", input.scalar_type(),
                    " and output of ", output.scalar_type());
  const std::vector<std::int64_t> sends = split_rows(input, input_splits, size_, info.title, "input");
  const std::vector<std::int64_t> receives = split_rows(output, output_splits, size_, info.title, "output");
  Dense source = dense_for_move(input, info.title);
  const Dense target = dense_for_move(output, info.title);
  // In place: what comes must not write over what is still to go.
  if (share_memory({target.memory}, {source.memory})) source.memory = source.memory.clone();
  info.inputs = {input};
  info.outputs = {output};
  Step step;
  add_exchange(next_collective(info, Collective::kAllToAll, source.memory), slices(target.memory, output, receives),
               slices(source.memory, input, sends), step);
  append(step, [source, target] { target.copy_back(); });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  if (const auto device = accelerator_of(inputs)) return staged_alltoall(*device, outputs, inputs, options);
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
  Tensors input_memory, output_memory;
  std::vector<Dense> sources = dense_list(inputs, info.title, input_memory);
  std::vector<Dense> targets = dense_list(outputs, info.title, output_memory);
  if (share_memory(output_memory, input_memory)) {
    for (at::Tensor& memory : input_memory) memory = memory.clone();
  }
  info.inputs = inputs;
  info.outputs = outputs;
  Step step;
  add_exchange(next_collective(info, Collective::kAllToAll, input_memory.front()), output_memory, input_memory, step);
  append(step, [sources = std::move(sources), targets = std::move(targets), input_memory] {
    for (const Dense& each : targets) each.copy_back();
  });
  return start(std::move(info), std::move(step));
}

}  // namespace herring::torch_binding
