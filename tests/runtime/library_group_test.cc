// Ranks of one host that reduce by a library of collectives: real runtimes, fake devices, a fake of NCCL whose kernels
// wait for the other ranks', whose calls are in progress until all have made theirs, and whose order is its own.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <tuple>

#include "runtime/peer_group.h"
#include "runtime/peer_member.h"

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;
using testing::expect_no_errors;
using testing::JobShape;
using testing::on_host;
using testing::run_job;
using Member = testing::PeerMember;

/// All ranks have these bytes.
void expect_the_same_everywhere(Runtime& runtime, const OpDescriptor& descriptor, std::vector<std::byte> bytes) {
  OpDescriptor raw = descriptor;
  raw.dtype = DataType::kUInt8;
  const auto count = static_cast<std::int64_t>(bytes.size());
  set_shape(raw, std::span(&count, 1));
  raw.reduce = ReduceOp::kMax;
  const std::vector<std::byte> largest = on_host(runtime, raw, bytes);
  raw.reduce = ReduceOp::kMin;
  EXPECT_EQ(on_host(runtime, raw, bytes), largest);
}

void expect_close(std::span<const std::byte> got, std::span<const std::byte> wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t at = 0; at < got.size(); at += sizeof(float)) {
    float one = 0, other = 0;
    std::memcpy(&one, got.data() + at, sizeof(one));
    std::memcpy(&other, wanted.data() + at, sizeof(other));
    ASSERT_NEAR(one, other, std::abs(other) * 1e-5F) << "element " << at / sizeof(float);
  }
}

void meet(Runtime& runtime) {
  Request barrier;
  barrier.descriptor.collective = Collective::kBarrier;
  runtime.submit(barrier)->wait(testing::in_seconds(30));
}

/// Of all-reduces of these operators and sizes, all under way at once. With two ranks on a host there is one order.
void expect_the_sums_of_the_host(Runtime& runtime, std::span<const ReduceOp> ops, std::span<const std::size_t> sizes,
                                 bool has_the_bits) {
  Member member(runtime);
  member.use_library();
  member.open();
  std::vector<OpDescriptor> descriptors;
  std::vector<std::vector<std::byte>> expected;
  for (const DataType type : {DataType::kFloat32, DataType::kInt64, DataType::kBFloat16}) {
    for (const ReduceOp op : ops) {
      for (const std::size_t elements : sizes) {
        if (type == DataType::kInt64 && op == ReduceOp::kAverage) continue;
        if (type == DataType::kBFloat16 && !has_the_bits) continue;
        const OpDescriptor& descriptor = descriptors.emplace_back(member.descriptor(type, op, elements));
        const std::vector<std::byte> values = member.values(descriptor, descriptors.size());
        expected.push_back(on_host(runtime, descriptor, values));
        member.submit(descriptor, values);
      }
    }
  }
  member.finish();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE("operation " + std::to_string(i) + ", " + to_string(descriptors[i]));
    ASSERT_TRUE(member.end(i).is_ok()) << member.end(i).to_string();
    if (has_the_bits || descriptors[i].dtype == DataType::kInt64) {
      ASSERT_EQ(member.result(i), expected[i]);
    } else {
      expect_close(member.result(i), expected[i]);
      expect_the_same_everywhere(runtime, descriptors[i], member.result(i));
    }
  }
  EXPECT_TRUE(member.faults().empty()) << member.faults().front();
  member.close();
}

TEST(LibraryGroup, SumsWhatTheHostSums) {
  constexpr std::array kOps{ReduceOp::kSum, ReduceOp::kAverage};
  constexpr std::array kSizes{1ul, 7ul, 20'000ul, 300'001ul};
  for (const std::uint32_t workers : {2u, 3u, 8u}) {
    SCOPED_TRACE(workers);
    expect_no_errors(run_job({.workers = workers}, [&](Runtime& runtime) {
      expect_the_sums_of_the_host(runtime, kOps, kSizes, workers == 2);
    }));
  }
}

TEST(LibraryGroup, SeveralHostsToo) {
  constexpr std::array kOps{ReduceOp::kSum};
  constexpr std::array kSizes{1ul, 77ul, 20'000ul, 200'001ul};
  for (const auto& [workers, hosts, is_cyclic] : {std::tuple{4u, 2u, false}, {6u, 3u, true}, {6u, 2u, false}}) {
    SCOPED_TRACE(std::to_string(workers) + " on " + std::to_string(hosts));
    JobShape shape{.workers = workers, .hosts = hosts};
    shape.is_cyclic = is_cyclic;
    expect_no_errors(run_job(
        shape, [&](Runtime& runtime) { expect_the_sums_of_the_host(runtime, kOps, kSizes, workers / hosts == 2); }));
  }
}

TEST(LibraryGroup, RanksThatDisagreeAreAnErrorAndNotAKernelThatWaits) {
  expect_no_errors(run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor =
        member.descriptor(DataType::kFloat32, ReduceOp::kSum, runtime.rank() == 1 ? 100 : 50);
    member.submit(descriptor, member.values(descriptor, 1));
    member.finish();
    EXPECT_EQ(member.end(0).code(), Code::kMismatch) << member.end(0).to_string();
    EXPECT_NE(member.end(0).message().find("rank 1: all_reduce(float32[100], sum)"), std::string::npos)
        << member.end(0).message();
    EXPECT_TRUE(member.faults().empty()) << member.faults().front();
    member.close();
  }));
}

TEST(LibraryGroup, AKernelThatDoesNotEndInTimeIsAnErrorOnAllRanks) {
  for (const std::size_t elements : {50ul, 300'000ul}) {
    expect_no_errors(run_job({.workers = 2}, [elements](Runtime& runtime) {
      Member member(runtime);
      member.use_library();
      member.open();
      const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, elements);
      if (runtime.rank() == 1) member.gpu().stall(member.sums_stream());
      member.submit(descriptor, member.values(descriptor, 1), runtime.rank() == 0 ? Duration(2s) : Duration(20s));
      member.finish(false);
      EXPECT_FALSE(member.end(0).is_ok());
      EXPECT_NE(member.end(0).message().find("a sum on the GPUs has not ended in time"), std::string::npos)
          << member.end(0).message();
      if (runtime.rank() == 1) {
        EXPECT_NE(member.end(0).message().find("rank 0"), std::string::npos) << member.end(0).message();
      }
      member.gpu().unstall(member.sums_stream());
      member.close();
    }));
  }
}

TEST(LibraryGroup, ARankThatGoesWhileKernelsWaitForItIsNamedLongBeforeTheTimeIsUp) {
  expect_no_errors(run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    if (runtime.rank() == 2) member.gpu().stall(member.sums_stream());
    member.submit(descriptor, member.values(descriptor, 1), 1h);
    if (runtime.rank() == 2) {
      // Until the others' kernels wait, and have been asked about.
      for (const Instant until = testing::in_seconds(1); std::chrono::steady_clock::now() < until;) {
        member.group().run(std::chrono::steady_clock::now());
      }
      member.group().leave();
    }
    if (runtime.rank() != 2) {
      const Instant begun = std::chrono::steady_clock::now();
      member.finish(false);
      EXPECT_LT(std::chrono::steady_clock::now() - begun, 15s);
      EXPECT_FALSE(member.end(0).is_ok());
      if (member.end(0).code() == Code::kPeerLost) {
        EXPECT_NE(member.end(0).message().find("worker 2"), std::string::npos) << member.end(0).message();
      } else {
        EXPECT_EQ(member.end(0).code(), Code::kCancelled) << member.end(0).to_string();
      }
    }
    meet(runtime);
    member.gpu().unstall(member.sums_stream());
    member.close();
  }));
}

TEST(LibraryGroup, ASlowRankIsWaitedForWhateverIsAsked) {
  expect_no_errors(run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    for (std::uint64_t i = 0; i < 3; ++i) {
      const std::vector<std::byte> values = member.values(descriptor, i);
      const std::vector<std::byte> expected = on_host(runtime, descriptor, values);
      if (runtime.rank() == i % 2) member.gpu().stall(member.sums_stream());
      member.submit(descriptor, values);
      for (const Instant until = std::chrono::steady_clock::now() + 600ms; std::chrono::steady_clock::now() < until;) {
        member.group().run(std::chrono::steady_clock::now());
      }
      member.gpu().unstall(member.sums_stream());
      member.finish();
      ASSERT_TRUE(member.end(i).is_ok()) << member.end(i).to_string();
      EXPECT_EQ(member.result(i), expected);
    }
    member.close();
  }));
}

TEST(LibraryGroup, ADeviceThatFailsIsAnErrorOnAllRanks) {
  expect_no_errors(run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 300'000);
    for (int i = 0; i < 3; ++i) member.submit(descriptor, member.values(descriptor, 1));
    if (runtime.rank() == 2) member.gpu().fail();
    member.finish(false);
    EXPECT_FALSE(member.end(2).is_ok());
    EXPECT_NE(member.end(2).message().find("the device failed"), std::string::npos) << member.end(2).message();
    member.close();
  }));
}

TEST(LibraryGroup, WhereOneRankCannotConnectNobodyOpens) {
  const std::vector<std::string> errors = run_job({.workers = 3}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library([&runtime] {
      if (runtime.rank() == 1) throw Error(Code::kUnavailable, "no room for it");
    });
    member.open();
  });
  EXPECT_NE(errors[1].find("no room for it"), std::string::npos) << errors[1];
  for (const std::size_t rank : {0, 2}) {
    EXPECT_NE(errors[rank].find("rank 1 cannot connect to the other ranks of its host with NCCL"), std::string::npos)
        << errors[rank];
  }
}

TEST(LibraryGroup, RanksThatDoNotComeTogetherAreATimeout) {
  const std::vector<std::string> errors = run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    // A rank of another communicator: the library waits for ever.
    member.use_library({}, runtime.rank() == 1);
    member.set_timeout(3s);
    member.open();
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("a fake NCCL did not connect the ranks of this host in time"), std::string::npos) << error;
  }
}

TEST(LibraryGroup, WhatEndsOneCommunicatorDoesNotWaitForTheOthersKernel) {
  expect_no_errors(run_job({.workers = 4, .hosts = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 5'000);
    const bool is_slow = runtime.rank() == 1;
    if (is_slow) member.gpu().stall(member.gathers_stream());
    member.submit(descriptor, member.values(descriptor, 1), is_slow ? Duration(20s) : Duration(1500ms));
    const auto run_for = [&](Duration time) {
      for (const Instant until = std::chrono::steady_clock::now() + time; std::chrono::steady_clock::now() < until;) {
        member.group().run(std::chrono::steady_clock::now());
      }
    };
    run_for(500ms);  // Until rank 0's gather waits.
    if (is_slow) member.gpu().stall(member.sums_stream());
    member.submit(descriptor, member.values(descriptor, 2), 20s);
    member.finish(false);
    // On the other host nobody waits for the first one's gather.
    EXPECT_TRUE(runtime.rank() >= 2 || !member.end(0).is_ok());
    EXPECT_FALSE(member.end(1).is_ok());
    member.gpu().unstall(member.sums_stream());
    member.gpu().unstall(member.gathers_stream());
    member.close();
    EXPECT_TRUE(member.faults().empty()) << member.faults().front();
  }));
}

TEST(LibraryGroup, WhatTheLibrarySaysWhileItsKernelWaitsIsHeard) {
  expect_no_errors(run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    member.submit(descriptor, member.values(descriptor, 1), 1h);
    member.finish();
    if (runtime.rank() == 0) member.break_library();
    member.submit(descriptor, member.values(descriptor, 2), 1h);
    member.finish(false);
    EXPECT_NE(member.end(1).message().find("a link is broken"), std::string::npos) << member.end(1).message();
    member.close();
  }));
}

TEST(LibraryGroup, ATensorIsGivenBackOnlyWhenACallInProgressCannotComeToTheDeviceAnyMore) {
  expect_no_errors(run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    const auto run_until = [&member](Instant until, const auto& is_over) {
      while (!is_over() && std::chrono::steady_clock::now() < until) {
        member.group().run(std::chrono::steady_clock::now());
      }
    };
    const auto never = [] { return false; };
    // This rank meets the other one, and then does not make its call: the other's is in progress.
    if (runtime.rank() == 1) {
      member.submit(descriptor, member.values(descriptor, 1));
      run_until(std::chrono::steady_clock::now() + 300ms, never);
    }
    meet(runtime);
    if (runtime.rank() == 0) {
      member.hold_abort(true);
      member.submit(descriptor, member.values(descriptor, 1), 1s);
      run_until(testing::in_seconds(2), never);
      EXPECT_FALSE(member.group().status().is_ok());
      EXPECT_FALSE(member.is_released(0));
      member.hold_abort(false);
      run_until(testing::in_seconds(20), [&member] { return member.is_released(0); });
      EXPECT_TRUE(member.is_released(0));
    }
    meet(runtime);
    member.close();
  }));
}

TEST(LibraryGroup, TheMemoryIsThereUntilTheOthersHaveComeToTheirEnd) {
  expect_no_errors(run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    member.submit(descriptor, member.values(descriptor, 1));
    member.finish();
    const Instant begun = std::chrono::steady_clock::now();
    if (runtime.rank() == 1) std::this_thread::sleep_for(300ms);
    member.close();
    EXPECT_GT(std::chrono::steady_clock::now() - begun, 200ms);
  }));
}

TEST(LibraryGroup, ALibraryThatDoesNotComeToItsEndHoldsNobodyUp) {
  expect_no_errors(run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kFloat32, ReduceOp::kSum, 50);
    member.submit(descriptor, member.values(descriptor, 1));
    member.finish();
    member.set_stuck(true);
    member.close();
    member.set_stuck(false);
  }));
}

TEST(LibraryGroup, ARankThatGoesWhileOthersConnectIsNamed) {
  const Instant begun = std::chrono::steady_clock::now();
  const std::vector<std::string> errors = run_job({.workers = 2}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library({}, true);  // No rank ever connects.
    if (runtime.rank() == 1) member.set_timeout(500ms);
    member.open();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 15s);
  EXPECT_NE(errors[0].find("worker 1"), std::string::npos) << errors[0];
}

TEST(LibraryGroup, ManyOperationsUnderWayAtOnce) {
  expect_no_errors(run_job({.workers = 4}, [](Runtime& runtime) {
    Member member(runtime);
    member.use_library();
    member.open();
    const OpDescriptor descriptor = member.descriptor(DataType::kInt32, ReduceOp::kSum, 10'000);
    std::vector<std::vector<std::byte>> expected;
    for (std::uint64_t i = 0; i < 60; ++i) {
      const std::vector<std::byte> values = member.values(descriptor, i);
      expected.push_back(on_host(runtime, descriptor, values));
      member.submit(descriptor, values);
      if (i % 7 == runtime.rank()) member.group().run(std::chrono::steady_clock::now());
    }
    member.finish();
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(member.result(i), expected[i]) << "operation " << i;
    EXPECT_TRUE(member.faults().empty()) << member.faults().front();
    member.close();
  }));
}

}  // namespace
}  // namespace herring::runtime
