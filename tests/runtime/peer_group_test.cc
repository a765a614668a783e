// Ranks of one host that reduce in their devices' memory: real runtimes, fake devices that share memory by descriptor.
#include "runtime/peer_group.h"

#include <gtest/gtest.h>

#include <array>
#include <span>
#include <tuple>

#include "runtime/peer_member.h"

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;
using testing::expect_no_errors;
using testing::JobShape;
using testing::on_host;
using testing::run_job;
using Member = testing::PeerMember;

/// Of all-reduces of these types, operators and sizes, all under way at once. The largest size is for float32 alone.
void expect_the_bits_of_the_host(Runtime& runtime, std::span<const DataType> types, std::span<const ReduceOp> ops,
                                 std::span<const std::size_t> sizes, bool has_network) {
  Member member(runtime);
  member.open();
  std::vector<std::vector<std::byte>> expected;
  std::uint64_t number = 0;
  for (const DataType type : types) {
    for (const ReduceOp op : ops) {
      for (const std::size_t elements : sizes) {
        if (type != DataType::kFloat32 && elements > 100'000) continue;
        const OpDescriptor descriptor = member.descriptor(type, op, elements);
        ASSERT_TRUE(PeerGroup::takes(descriptor, has_network));
        const std::vector<std::byte> values = member.values(descriptor, ++number);
        expected.push_back(on_host(runtime, descriptor, values));
        member.submit(descriptor, values);
      }
    }
  }
  member.finish();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(member.end(i).is_ok()) << member.end(i).to_string();
    ASSERT_EQ(member.result(i), expected[i]) << "operation " << i;
  }
  EXPECT_TRUE(member.gpu().faults().empty());
  member.close();
}

TEST(PeerGroup, GivesTheBitsOfTheHostWhateverTypeAndSize) {
  constexpr std::array kTypes{DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16, DataType::kInt64};
  constexpr std::array kOps{ReduceOp::kSum, ReduceOp::kAverage};
  constexpr std::array kSizes{1ul, 7ul, 20'000ul, 700'001ul};
  for (const std::uint32_t workers : {2u, 3u, 8u}) {
    SCOPED_TRACE(workers);
    expect_no_errors(run_job({.workers = workers}, [&](Runtime& runtime) {
      expect_the_bits_of_the_host(runtime, kTypes, kOps, kSizes, false);
    }));
  }
}

TEST(PeerGroup, SeveralHostsGiveTheBitsOfTheHostToo) {
  constexpr std::array kTypes{DataType::kFloat32, DataType::kBFloat16, DataType::kInt64};
  constexpr std::array kOps{ReduceOp::kSum};
  constexpr std::array kSizes{1ul, 77ul, 20'000ul, 400'001ul};
  for (const auto& [workers, hosts, is_cyclic] : {std::tuple{4u, 2u, false}, {6u, 3u, true}, {6u, 2u, false}}) {
    SCOPED_TRACE(std::to_string(workers) + " on " + std::to_string(hosts));
    JobShape shape{.workers = workers, .hosts = hosts};
    shape.is_cyclic = is_cyclic;
    expect_no_errors(
        run_job(shape, [&](Runtime& runtime) { expect_the_bits_of_the_host(runtime, kTypes, kOps, kSizes, true); }));
  }
}

TEST(PeerGroup, WhatFailsOnOneHostIsAnErrorOnAll) {
  expect_no_errors(run_job({.workers = 4, .hosts = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 500'000);
    member.submit(descriptor, member.values(descriptor, 1));
    if (runtime.rank() == 3) member.gpu().fail();
    member.finish(false);
    EXPECT_FALSE(member.end(0).is_ok());
    EXPECT_NE(member.end(0).message().find("the device failed"), std::string::npos) << member.end(0).message();
    member.close();
  }));
}

TEST(PeerGroup, WhereOneHostCannotNobodyOpens) {
  const std::vector<std::string> errors = run_job({.workers = 4, .hosts = 2}, [](Runtime& runtime) {
    Member member(runtime, runtime.rank() == 1 ? 1 << 16 : 256 << 20);
    member.open();
  });
  EXPECT_NE(errors[0].find("rank 1 cannot share memory of its GPU"), std::string::npos) << errors[0];
  EXPECT_NE(errors[2].find("rank 0 cannot reduce on its GPU"), std::string::npos) << errors[2];
  EXPECT_NE(errors[3].find("rank 1 cannot reduce on its GPU"), std::string::npos) << errors[3];
}

TEST(PeerGroup, PlacesAreTheSameOnAllRanks) {
  const std::vector<std::uint32_t> hosts{0, 1, 0, 1, 2, 2};
  std::string obstacle;
  const std::vector<std::uint32_t> members{5, 0, 2, 4, 3, 1};
  const PeerPlaces places = peer_places(members, hosts, 3, obstacle);
  EXPECT_EQ(obstacle, "");
  EXPECT_EQ(places.neighbors, (std::vector<std::uint32_t>{3, 1}));
  EXPECT_EQ(places.index, 0u);
  EXPECT_EQ(places.host, 2u);
  EXPECT_EQ(places.others, (std::vector<std::uint32_t>{5, 0, 3}));
  const auto why = [&](const std::vector<std::uint32_t>& some, const std::vector<std::uint32_t>& where) {
    std::string text;
    peer_places(some, where, some.front(), text);
    return text;
  };
  EXPECT_EQ(why({0, 1, 2}, hosts), "its hosts have different numbers of its ranks");
  EXPECT_EQ(why({0, 1}, hosts), "no host has two of its ranks");
  EXPECT_EQ(why({0, 1}, {}), "the job is elastic");
  EXPECT_NE(why({0, 1, 2, 3, 4, 5, 6, 7, 8}, std::vector<std::uint32_t>(9)), "");
}

TEST(PeerGroup, TakesWhatTheDevicesSum) {
  OpDescriptor descriptor;
  descriptor.op_bytes = 8;
  EXPECT_TRUE(PeerGroup::takes(descriptor, false));
  descriptor.reduce = ReduceOp::kAverage;
  EXPECT_TRUE(PeerGroup::takes(descriptor, false));
  EXPECT_FALSE(PeerGroup::takes(descriptor, true)) << "the servers divide";
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    descriptor.reduce = op;
    EXPECT_FALSE(PeerGroup::takes(descriptor, false));
  }
  descriptor.reduce = ReduceOp::kSum;
  for (const DataType type : {DataType::kInt8, DataType::kUInt8, DataType::kBool, DataType::kInt16}) {
    descriptor.dtype = type;
    EXPECT_FALSE(PeerGroup::takes(descriptor, false));
  }
  descriptor.dtype = DataType::kFloat32;
  descriptor.op_bytes = 0;
  EXPECT_FALSE(PeerGroup::takes(descriptor, false));
}

TEST(PeerGroup, RanksThatDisagreeAllHearWhoSaidWhat) {
  expect_no_errors(run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime);
    member.open();
    const OpDescriptor descriptor =
        member.descriptor(DataType::kFloat32, ReduceOp::kSum, runtime.rank() == 1 ? 100 : 50);
    member.submit(descriptor, member.values(descriptor, 1));
    member.finish();
    EXPECT_EQ(member.end(0).code(), Code::kMismatch) << member.end(0).to_string();
    EXPECT_NE(member.end(0).message().find("rank 1: all_reduce(float32[100], sum)"), std::string::npos)
        << member.end(0).message();
    EXPECT_NE(member.end(0).message().find("rank 2: all_reduce(float32[50], sum)"), std::string::npos);
    EXPECT_NE(member.end(0).message().find("process group 3"), std::string::npos) << member.end(0).message();
    // Nothing goes on here.
    EXPECT_EQ(member.group().status().code(), Code::kMismatch);
    member.close();
  }));
}

TEST(PeerGroup, ARankThatDoesNotCallIsNamedWhenTheTimeIsUp) {
  expect_no_errors(run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime);
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    if (runtime.rank() != 1) {
      member.submit(descriptor, member.values(descriptor, 1), 500ms);
      member.finish(false);
      EXPECT_FALSE(member.end(0).is_ok());
      EXPECT_NE(member.end(0).message().find("all_reduce(float32[50], sum)"), std::string::npos)
          << member.end(0).message();
      if (member.end(0).code() == Code::kTimeout) {
        EXPECT_NE(member.end(0).message().find("rank 1"), std::string::npos) << member.end(0).message();
      }
    }
    Request barrier;
    barrier.descriptor.collective = Collective::kBarrier;
    runtime.submit(barrier)->wait(testing::in_seconds(30));
    member.close();
  }));
}

TEST(PeerGroup, AKernelThatDoesNotEndIsAnErrorOnAllRanks) {
  expect_no_errors(run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.open();
    const StreamHandle in = member.in();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    if (runtime.rank() == 1) member.gpu().stall(in.value);
    member.submit(descriptor, member.values(descriptor, 1), runtime.rank() == 1 ? Duration(300ms) : Duration(20s));
    member.finish(false);
    EXPECT_FALSE(member.end(0).is_ok());
    EXPECT_NE(member.end(0).message().find("a kernel that writes it has not ended"), std::string::npos)
        << member.end(0).message();
    if (runtime.rank() == 0) {
      EXPECT_NE(member.end(0).message().find("rank 1"), std::string::npos) << member.end(0).message();
    }
    member.gpu().unstall(in.value);
    member.close();
  }));
}

TEST(PeerGroup, ADeviceThatFailsIsAnErrorOnAllRanks) {
  expect_no_errors(run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime);
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 500'000);
    for (int i = 0; i < 3; ++i) member.submit(descriptor, member.values(descriptor, 1));
    if (runtime.rank() == 2) member.gpu().fail();
    member.finish(false);
    EXPECT_FALSE(member.end(2).is_ok());
    EXPECT_NE(member.end(2).message().find("the device failed"), std::string::npos) << member.end(2).message();
    member.close();
  }));
}

TEST(PeerGroup, ARankThatLeavesIsNoRankToWaitFor) {
  expect_no_errors(run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.open();
    if (runtime.rank() == 1) return member.close();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    member.submit(descriptor, member.values(descriptor, 1));
    member.finish(false);
    EXPECT_EQ(member.end(0).code(), Code::kPeerLost) << member.end(0).to_string();
    EXPECT_NE(member.end(0).message().find("worker 1"), std::string::npos) << member.end(0).message();
    member.close();
  }));
}

TEST(PeerGroup, WhereOneRankHasNoMemoryToShareNobodyOpens) {
  const std::vector<std::string> errors = run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime, runtime.rank() == 1 ? 1 << 16 : 256 << 20);
    member.open();
  });
  EXPECT_NE(errors[1].find("bytes of device memory"), std::string::npos) << errors[1];
  for (const std::size_t rank : {0, 2}) {
    EXPECT_NE(errors[rank].find("rank 1 cannot share memory of its GPU"), std::string::npos) << errors[rank];
  }
}

TEST(PeerGroup, ManyOperationsUnderWayAtOnce) {
  expect_no_errors(run_job({.workers = 4}, [](Runtime& runtime) {
    Member member(runtime);
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 10'000);
    std::vector<std::vector<std::byte>> expected;
    for (std::uint64_t i = 0; i < 100; ++i) {
      const std::vector<std::byte> values = member.values(descriptor, i);
      expected.push_back(on_host(runtime, descriptor, values));
      member.submit(descriptor, values);
      if (i % 7 == runtime.rank()) member.group().run(std::chrono::steady_clock::now());
    }
    member.finish();
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(member.result(i), expected[i]) << "operation " << i;
    member.close();
  }));
}

}  // namespace
}  // namespace herring::runtime
