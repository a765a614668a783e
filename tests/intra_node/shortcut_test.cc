#include "intra_node/shortcut.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "intra_node/local_cluster.h"

namespace herring::intra_node {
namespace {

using testing::LocalCluster;

struct Call {
  std::vector<std::byte> memory;
  LocalOperation operation;

  Call(Collective collective, ReduceOp reduce, std::size_t floats) : memory(floats * 4, std::byte{0x3F}) {
    operation.key = {GroupId{7}, 12345, 0};
    OpDescriptor& descriptor = operation.descriptor;
    descriptor.collective = collective;
    descriptor.reduce = reduce;
    descriptor.op_bytes = descriptor.part_bytes = memory.size();
    descriptor.dims = 1;
    descriptor.shape[0] = floats;
    operation.members = {2, 0, 1};
    operation.world_ranks = {12, 10, 11};
    operation.owned = {{{0, memory.size()}}, {}, {}};
    operation.memory = memory;
    operation.average_over = reduce == ReduceOp::kAverage ? 3 : 1;
    operation.timeout = std::chrono::seconds(10);
  }
  Shortcut shortcut() const { return {operation.key, operation.descriptor, operation.members, operation.average_over}; }
};

/// What the engine of rank 0 tells rank 1 of it.
std::vector<std::byte> said_by_engine(Call call) {
  LocalCluster cluster(3, 64 << 10, 256);
  call.operation.memory = call.memory;  // This copy's own.
  cluster.submit(0, call.operation);
  while (cluster.act(0)) {
  }
  return (cluster.link_of_all(0, 1).empty() ? cluster.link(0, 1) : cluster.link_of_all(0, 1)).front();
}

const std::vector<Call> kCalls = {{Collective::kAllReduce, ReduceOp::kSum, 5},
                                  {Collective::kAllReduce, ReduceOp::kAverage, 64},
                                  {Collective::kBarrier, ReduceOp::kSum, 0}};

TEST(Shortcut, SaysToTheByteWhatTheEngineSays) {
  for (const Call& call : kCalls) {
    const Shortcut shortcut = call.shortcut();
    std::vector<std::byte> message(shortcut.head().begin(), shortcut.head().end());
    message.insert(message.end(), call.memory.begin(), call.memory.end());
    message.insert(message.end(), shortcut.tail().begin(), shortcut.tail().end());
    EXPECT_EQ(message, said_by_engine(call)) << to_string(call.operation.descriptor);
  }
}

TEST(Shortcut, TakesTheDataOfAMemberThatAgrees) {
  for (const Call& call : kCalls) {
    const std::vector<std::byte> message = said_by_engine(call);
    const auto data = call.shortcut().data_in(message);
    ASSERT_TRUE(data.has_value());
    EXPECT_TRUE(std::ranges::equal(*data, call.memory));
  }
}

TEST(Shortcut, LeavesWhateverDiffersToTheEngine) {
  for (const Call& call : kCalls) {
    const std::vector<std::byte> message = said_by_engine(call);
    for (std::size_t at = 0; at < call.shortcut().head().size(); ++at) {
      std::vector<std::byte> other = message;
      other[at] ^= std::byte{1};
      EXPECT_FALSE(call.shortcut().data_in(other)) << "byte " << at;
    }
    std::vector<std::byte> longer = message;
    longer.emplace_back();
    EXPECT_FALSE(call.shortcut().data_in(longer));
    EXPECT_FALSE(call.shortcut().data_in(std::span(message).first(message.size() - 1)));
    EXPECT_FALSE(call.shortcut().data_in({}));
  }
}

TEST(Shortcut, TellsACallThatDiffersInAnythingByTheBeginningOfItsMessage) {
  using Change = std::function<void(LocalOperation&)>;
  const std::vector<Change> changes = {
      [](LocalOperation& o) { o.key.op += 1; },
      [](LocalOperation& o) { o.key.op ^= std::uint64_t{1} << 62; },
      [](LocalOperation& o) { o.key.group.value += 1; },
      [](LocalOperation& o) { o.descriptor.dtype = DataType::kInt32; },
      [](LocalOperation& o) { o.descriptor.reduce = ReduceOp::kMax; },
      [](LocalOperation& o) { o.descriptor.collective = Collective::kBroadcast; },
      [](LocalOperation& o) { o.descriptor.root = 1; },
      [](LocalOperation& o) { o.descriptor.op_bytes += 4; },
      [](LocalOperation& o) { o.descriptor.dims = 2; },
      [](LocalOperation& o) { std::swap(o.descriptor.shape[0], o.descriptor.shape[1]); },
      [](LocalOperation& o) {
        o.members = {0, 2, 1};
      },
      [](LocalOperation& o) { o.average_over += 1; },
  };
  const Call call(Collective::kAllReduce, ReduceOp::kSum, 5);
  std::set<std::vector<std::byte>> heads;
  for (const Change& change : changes) {
    Call other = call;
    change(other.operation);
    const Shortcut shortcut = other.shortcut();
    std::vector<std::byte> message(shortcut.head().begin(), shortcut.head().end());
    heads.insert(message);
    message.insert(message.end(), call.memory.begin(), call.memory.end());
    message.insert(message.end(), shortcut.tail().begin(), shortcut.tail().end());
    EXPECT_FALSE(call.shortcut().data_in(message));
  }
  EXPECT_EQ(heads.size(), changes.size());
}

TEST(Shortcut, IsNotBegunWhileTheEngineKnowsOfAnything) {
  const Call call(Collective::kAllReduce, ReduceOp::kSum, 5);
  LocalCluster cluster(3, 64 << 10, 256);
  EXPECT_TRUE(cluster.rank(0).engine->is_untroubled());
  // Another rank's word came first: the engine has it, and the shortcut would wait for it in vain.
  cluster.rank(0).engine->on_message(cluster.now(), 2, said_by_engine(call));
  EXPECT_FALSE(cluster.rank(0).engine->is_untroubled());
  cluster.lose(1, 2);
  EXPECT_FALSE(cluster.rank(1).engine->is_untroubled()) << "a rank is lost";
}

}  // namespace
}  // namespace herring::intra_node
