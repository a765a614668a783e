#include "collectives/row_exchange.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "collectives/message_plan.h"
#include "core/operation.h"

namespace herring::collectives {
namespace {

/// Between a call's name and a step of it; not in anybody's names.
constexpr char kMark = '\x1f';

template <class Byte>
std::vector<std::span<Byte>> blocks_of(std::span<Byte> memory, std::span<const std::int64_t> counts, std::size_t row) {
  std::vector<std::span<Byte>> blocks;
  std::size_t start = 0;
  for (const std::int64_t count : counts) {
    blocks.push_back(memory.subspan(start, static_cast<std::size_t>(count) * row));
    start += blocks.back().size();
  }
  return blocks;
}

}  // namespace

std::uint64_t message_tag(std::string_view name, std::uint64_t use) {
  return std::uint64_t{1} << 63 | runtime::name_key(std::string(name) + "#" + std::to_string(use)) >> 2;
}

RowExchange::RowExchange(NamedCall call, std::vector<RowsSpec> tensors,
                         const std::optional<std::vector<std::int64_t>>& splits)
    : call_(std::move(call)),
      tensors_(std::move(tensors)),
      is_all_to_all_(splits.has_value()),
      table_(tensors_, splits ? *splits : std::vector<std::int64_t>(), static_cast<std::uint32_t>(call_.ranks.size())) {
}

runtime::Request RowExchange::request(Collective collective, DataType dtype, std::span<const std::int64_t> shape,
                                      const std::string& step) const {
  runtime::Request request;
  request.group = call_.group;
  request.name = call_.name + step;
  request.timeout = call_.timeout;
  request.descriptor.collective = collective;
  request.descriptor.dtype = dtype;
  set_shape(request.descriptor, shape);
  return request;
}

std::shared_ptr<runtime::Work> RowExchange::tell(runtime::Communicator& runtime) {
  const std::array shape = {static_cast<std::int64_t>(tensors_.size()), static_cast<std::int64_t>(table_.width())};
  runtime::Request request = this->request(Collective::kAllGather, DataType::kInt64, shape, "");
  request.input = std::as_bytes(table_.mine());
  request.output = std::as_writable_bytes(table_.all());
  return runtime.submit(request);
}

std::vector<std::int64_t> RowExchange::counts(std::size_t tensor) const {
  const Status status = table_.check(call_.ranks);
  if (!status.is_ok()) throw Error(status.code(), status.message());
  std::vector<std::int64_t> counts(call_.ranks.size());
  for (std::size_t member = 0; member < counts.size(); ++member) {
    counts[member] = is_all_to_all_ ? table_.rows_to(member, call_.index) : table_.rows(tensor, member);
  }
  return counts;
}

RowExchange::Works RowExchange::move(runtime::Communicator& runtime, std::size_t tensor,
                                     std::span<const std::byte> input, std::span<std::byte> output) const {
  return is_all_to_all_ ? all_to_all(runtime, input, output) : gather(runtime, tensor, input, output);
}

RowExchange::Works RowExchange::gather(runtime::Communicator& runtime, std::size_t tensor,
                                       std::span<const std::byte> input, std::span<std::byte> output) const {
  if (output.empty()) return {};
  const RowsSpec& spec = tensors_[tensor];
  const std::vector<std::int64_t> counts = this->counts(tensor);
  const std::string step = tensor == 0 ? "" : kMark + std::to_string(tensor);
  if (std::ranges::adjacent_find(counts, std::not_equal_to()) == counts.end()) {
    runtime::Request all = request(Collective::kAllGather, spec.dtype, spec.shape, step + kMark + "all");
    all.input = input;
    all.output = output;
    return {runtime.submit(all)};
  }
  const std::vector<std::span<std::byte>> blocks = blocks_of(output, counts, spec.row_bytes());
  Works works;
  for (std::uint32_t member = 0; member < blocks.size(); ++member) {
    if (blocks[member].empty()) continue;
    std::vector<std::int64_t> shape = spec.shape;
    shape[0] = counts[member];
    runtime::Request from =
        request(Collective::kBroadcast, spec.dtype, shape, step + kMark + "from" + std::to_string(member));
    from.descriptor.root = member;
    from.output = blocks[member];
    from.input = member == call_.index ? input : from.output;
    works.push_back(runtime.submit(from));
  }
  return works;
}

RowExchange::Works RowExchange::all_to_all(runtime::Communicator& runtime, std::span<const std::byte> input,
                                           std::span<std::byte> output) const {
  const std::size_t row = tensors_[0].row_bytes();
  std::vector<std::int64_t> sent(call_.ranks.size());
  for (std::size_t member = 0; member < sent.size(); ++member) sent[member] = table_.rows_to(call_.index, member);
  MessageCall messages{call_.group,   static_cast<std::uint32_t>(sent.size()),
                       call_.index,   message_tag(call_.name, call_.use),
                       call_.timeout, tensors_[0].dtype};
  const MessagePlan plan = exchange(messages, blocks_of(output, counts(0), row), blocks_of(input, sent, row), true);
  plan.copy_own();
  Works works;
  for (const runtime::Receive& each : plan.receives) works.push_back(runtime.receive(each));
  for (const runtime::Send& each : plan.sends) works.push_back(runtime.send(each));
  return works;
}

}  // namespace herring::collectives
