#include "collectives/message_plan.h"

#include <utility>

#include "core/copy.h"

namespace herring::collectives {
namespace {

class Planner {
 public:
  explicit Planner(const MessageCall& call) : call_(call) {}

  void send(std::uint32_t to, std::span<const std::byte> data) {
    plan.sends.push_back({call_.group, to, call_.tag, data, call_.timeout, call_.dtype, call_.collective});
    if (call_.collective) ++call_.collective->messages;
  }
  void receive(std::uint32_t from, std::span<std::byte> memory) {
    plan.receives.push_back({call_.group, from, call_.tag, memory, call_.timeout, call_.dtype, call_.collective});
    if (call_.collective) ++call_.collective->messages;
  }
  void keep(std::span<const std::byte> source, std::span<std::byte> target) {
    plan.own_source = source;
    plan.own_target = target;
  }

  MessagePlan plan;

 private:
  const MessageCall& call_;
};

}  // namespace

void MessagePlan::copy_own() const { copy_bytes(own_source, own_target); }

MessagePlan exchange(const MessageCall& call, Blocks outputs, ConstBlocks inputs, bool skips_empty) {
  Planner planner(call);
  // A member that disagrees with itself still tells the others; its own error comes with theirs.
  const bool agrees = outputs[call.index].size() == inputs[call.index].size();
  if (agrees) planner.keep(inputs[call.index], outputs[call.index]);
  // Each begins with its neighbour, so that no member hears all others at once.
  for (std::uint32_t distance = agrees ? 1 : 0; distance < call.size; ++distance) {
    const std::uint32_t to = (call.index + distance) % call.size;
    const std::uint32_t from = (call.index + call.size - distance) % call.size;
    if (!skips_empty || !outputs[from].empty()) planner.receive(from, outputs[from]);
    if (!skips_empty || !inputs[to].empty()) planner.send(to, inputs[to]);
  }
  return std::move(planner.plan);
}

MessagePlan gather(const MessageCall& call, std::uint32_t root, Blocks outputs, std::span<const std::byte> input) {
  Planner planner(call);
  if (call.index != root) {
    planner.send(root, input);
    return std::move(planner.plan);
  }
  planner.keep(input, outputs[root]);
  for (std::uint32_t member = 0; member < call.size; ++member) {
    if (member != root) planner.receive(member, outputs[member]);
  }
  return std::move(planner.plan);
}

MessagePlan scatter(const MessageCall& call, std::uint32_t root, std::span<std::byte> output, ConstBlocks inputs) {
  Planner planner(call);
  if (call.index != root) {
    planner.receive(root, output);
    return std::move(planner.plan);
  }
  planner.keep(inputs[root], output);
  for (std::uint32_t member = 0; member < call.size; ++member) {
    if (member != root) planner.send(member, inputs[member]);
  }
  return std::move(planner.plan);
}

}  // namespace herring::collectives
