// Collectives made of messages: all members' plans together, carried out in memory, give what the collective promises.
#include "collectives/message_plan.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "seeds.h"

namespace herring::collectives {
namespace {

using Bytes = std::vector<std::byte>;
using Sizes = std::vector<std::vector<std::size_t>>;  // [from][to]

MessageCall call_of(std::uint32_t size, std::uint32_t index) {
  MessageCall call;
  call.group = GroupId{3};
  call.size = size;
  call.index = index;
  call.tag = 77;
  call.dtype = DataType::kInt16;
  call.collective = std::make_shared<runtime::Composed>();
  return call;
}

std::byte content(std::size_t from, std::size_t to, std::size_t at) {
  return static_cast<std::byte>(from * 31 + to * 7 + at);
}

Bytes block(std::size_t from, std::size_t to, std::size_t bytes) {
  Bytes made(bytes);
  for (std::size_t at = 0; at < bytes; ++at) made[at] = content(from, to, at);
  return made;
}

/// Every message meets a receive of its size, in order, and none is left; what members keep is copied.
void carry_out(const std::vector<MessagePlan>& plans) {
  std::map<std::pair<std::size_t, std::size_t>, std::deque<std::span<const std::byte>>> sent;
  for (std::size_t from = 0; from < plans.size(); ++from) {
    for (const runtime::Send& each : plans[from].sends) sent[{from, each.to}].push_back(each.data);
  }
  for (std::size_t to = 0; to < plans.size(); ++to) {
    for (const runtime::Receive& each : plans[to].receives) {
      auto& messages = sent[{*each.from, to}];
      ASSERT_FALSE(messages.empty()) << "member " << to << " waits for a message of member " << *each.from;
      ASSERT_EQ(messages.front().size(), each.memory.size());
      std::ranges::copy(messages.front(), each.memory.begin());
      messages.pop_front();
    }
    plans[to].copy_own();
  }
  for (const auto& [way, messages] : sent) EXPECT_TRUE(messages.empty()) << way.first << " to " << way.second;
}

struct Exchanged {
  std::vector<std::vector<Bytes>> inputs, outputs;  // [member][other]
  std::vector<MessagePlan> plans;
};

Exchanged exchange_all(const Sizes& sizes, bool skips_empty) {
  const auto size = static_cast<std::uint32_t>(sizes.size());
  Exchanged made{std::vector<std::vector<Bytes>>(size), std::vector<std::vector<Bytes>>(size), {}};
  for (std::uint32_t member = 0; member < size; ++member) {
    std::vector<std::span<const std::byte>> inputs;
    std::vector<std::span<std::byte>> outputs;
    for (std::uint32_t other = 0; other < size; ++other) {
      made.inputs[member].push_back(block(member, other, sizes[member][other]));
      made.outputs[member].emplace_back(sizes[other][member]);
    }
    for (std::uint32_t other = 0; other < size; ++other) {
      inputs.emplace_back(made.inputs[member][other]);
      outputs.emplace_back(made.outputs[member][other]);
    }
    made.plans.push_back(exchange(call_of(size, member), outputs, inputs, skips_empty));
  }
  return made;
}

TEST(MessagePlan, AnExchangeBringsEachMemberWhatIsForIt) {
  const herring::testing::SeedRange seeds = herring::testing::seeds(20);
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const std::size_t size = 1 + random() % 6;
    Sizes sizes(size, std::vector<std::size_t>(size));
    for (auto& row : sizes) {
      for (std::size_t& bytes : row) bytes = random() % 3 == 0 ? 0 : random() % 50;
    }
    for (const bool skips_empty : {false, true}) {
      const Exchanged all = exchange_all(sizes, skips_empty);
      carry_out(all.plans);
      for (std::size_t member = 0; member < size; ++member) {
        for (std::size_t other = 0; other < size; ++other) {
          EXPECT_EQ(all.outputs[member][other], block(other, member, sizes[other][member]));
        }
        for (const runtime::Send& each : all.plans[member].sends) EXPECT_FALSE(skips_empty && each.data.empty());
      }
    }
  }
}

TEST(MessagePlan, WhereSizesAreNotAgreedEveryPairMeets) {
  const Exchanged all = exchange_all(Sizes(4, std::vector<std::size_t>(4, 0)), false);
  for (const MessagePlan& plan : all.plans) {
    EXPECT_EQ(plan.sends.size(), 3U);
    EXPECT_EQ(plan.receives.size(), 3U);
  }
}

TEST(MessagePlan, AnExchangeBeginsWithTheNeighbour) {
  const Exchanged all = exchange_all(Sizes(4, std::vector<std::size_t>(4, 1)), false);
  std::map<std::uint32_t, int> first;
  for (const MessagePlan& plan : all.plans) ++first[plan.sends.front().to];
  EXPECT_EQ(first.size(), 4U) << "members that hear two at once";
  EXPECT_EQ(all.plans[2].sends[0].to, 3U);
  EXPECT_EQ(all.plans[2].receives[0].from, 1U);
}

TEST(MessagePlan, AMemberThatDisagreesWithItselfIsToldByAMessage) {
  Bytes input(3), output(4);
  const std::vector<std::span<const std::byte>> inputs = {input};
  const std::vector<std::span<std::byte>> outputs = {output};
  const MessagePlan plan = exchange(call_of(1, 0), outputs, inputs, false);
  ASSERT_EQ(plan.sends.size(), 1U);
  EXPECT_EQ(plan.sends[0].data.size(), 3U);
  EXPECT_EQ(plan.receives[0].memory.size(), 4U);
  EXPECT_NO_THROW(plan.copy_own());
}

TEST(MessagePlan, MessagesSayTheirCall) {
  Bytes input(3), output(3);
  const std::vector<std::span<std::byte>> outputs = {output, output};
  const MessageCall call = call_of(2, 0);
  const MessagePlan plan = gather(call, 0, outputs, input);
  ASSERT_EQ(plan.receives.size(), 1U);
  EXPECT_EQ(plan.receives[0].group, call.group);
  EXPECT_EQ(plan.receives[0].tag, call.tag);
  EXPECT_EQ(plan.receives[0].dtype, call.dtype);
  EXPECT_EQ(plan.receives[0].collective, call.collective);
  EXPECT_EQ(call.collective->messages, 1U);
}

TEST(MessagePlan, TheRootGathersFromAll) {
  constexpr std::uint32_t kSize = 3, kRoot = 1;
  std::vector<Bytes> inputs, outputs(kSize, Bytes(5));
  const std::vector<std::span<std::byte>> targets(outputs.begin(), outputs.end());
  std::vector<MessagePlan> plans;
  for (std::uint32_t member = 0; member < kSize; ++member) inputs.push_back(block(member, kRoot, 5));
  for (std::uint32_t member = 0; member < kSize; ++member) {
    plans.push_back(
        gather(call_of(kSize, member), kRoot, member == kRoot ? Blocks(targets) : Blocks(), inputs[member]));
  }
  carry_out(plans);
  EXPECT_EQ(outputs, inputs);
}

TEST(MessagePlan, TheRootScattersToAll) {
  constexpr std::uint32_t kSize = 3, kRoot = 2;
  std::vector<Bytes> inputs, outputs(kSize, Bytes(5));
  for (std::uint32_t member = 0; member < kSize; ++member) inputs.push_back(block(kRoot, member, 5));
  const std::vector<std::span<const std::byte>> sources(inputs.begin(), inputs.end());
  std::vector<MessagePlan> plans;
  for (std::uint32_t member = 0; member < kSize; ++member) {
    plans.push_back(scatter(call_of(kSize, member), kRoot, outputs[member],
                            member == kRoot ? ConstBlocks(sources) : ConstBlocks()));
  }
  carry_out(plans);
  EXPECT_EQ(outputs, inputs);
}

}  // namespace
}  // namespace herring::collectives
