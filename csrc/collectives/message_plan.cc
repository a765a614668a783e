#include "collectives/message_plan.h"

#include "core/copy.h"

namespace herring::collectives {
namespace {

void send(MessagePlan& plan, const MessageCall& call, std::uint32_t to, std::span<const std::byte> data) {
  plan.sends.push_back({call.group, to, call.tag, data, call.timeout, call.dtype, call.collective});
  if (call.collective) ++call.collective->messages;
}

void receive(MessagePlan& plan, const MessageCall& call, std::uint32_t from, std::span<std::byte> memory) {
  plan.receives.push_back({call.group, from, call.tag, memory, call.timeout, call.dtype, call.collective});
  if (call.collective) ++call.collective->messages;
}

}  // namespace

void MessagePlan::copy_own() const { copy_bytes(own_source, own_target); }

MessagePlan exchange(const MessageCall& call, Blocks outputs, ConstBlocks inputs, bool skips_empty) {
  MessagePlan plan;
  // A member that disagrees with itself still tells the others; its own error comes with theirs.
  const bool agrees = outputs[call.index].size() == inputs[call.index].size();
  if (agrees) plan.own_source = inputs[call.index], plan.own_target = outputs[call.index];
  // Each begins with its neighbour, so that no member hears all others at once.
  for (std::uint32_t distance = agrees ? 1 : 0; distance < call.size; ++distance) {
    const std::uint32_t to = (call.index + distance) % call.size;
    const std::uint32_t from = (call.index + call.size - distance) % call.size;
    if (!skips_empty || !outputs[from].empty()) receive(plan, call, from, outputs[from]);
    if (!skips_empty || !inputs[to].empty()) send(plan, call, to, inputs[to]);
  }
  return plan;
}

MessagePlan gather(const MessageCall& call, std::uint32_t root, Blocks outputs, std::span<const std::byte> input) {
  MessagePlan plan;
  if (call.index != root) send(plan, call, root, input);
  for (std::uint32_t member = 0; member < outputs.size(); ++member) {
    if (member != root) receive(plan, call, member, outputs[member]);
  }
  if (call.index == root) plan.own_source = input, plan.own_target = outputs[root];
  return plan;
}

MessagePlan scatter(const MessageCall& call, std::uint32_t root, std::span<std::byte> output, ConstBlocks inputs) {
  MessagePlan plan;
  if (call.index != root) receive(plan, call, root, output);
  for (std::uint32_t member = 0; member < inputs.size(); ++member) {
    if (member != root) send(plan, call, member, inputs[member]);
  }
  if (call.index == root) plan.own_source = inputs[root], plan.own_target = output;
  return plan;
}

}  // namespace herring::collectives
