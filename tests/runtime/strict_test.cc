#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "runtime/job.h"

/// Whole jobs on network cards that read and write memory by themselves: what a machine with such a card would lose is
/// a crash long after the fact.
namespace herring::runtime::testing {
namespace {

void reduce_all_sizes(Runtime& runtime) {
  for (const std::size_t elements : {std::size_t{1}, std::size_t{1000}, std::size_t{100'000}, std::size_t{3'000'000}}) {
    std::vector<float> values(elements, static_cast<float>(runtime.rank() + 1));
    finish(runtime.submit(all_reduce(values)));
    const auto expected = static_cast<float>(runtime.size() * (runtime.size() + 1) / 2);
    EXPECT_EQ(values.front(), expected);
    EXPECT_EQ(values.back(), expected);
  }
}

TEST(StrictJobs, EverySizeIsReducedAndEveryRegistrationGoesInTime) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  JobShape shape{.workers = 2, .hosts = 2};
  shape.strict = true;
  expect_clean(run_job(shape, reduce_all_sizes));
  shape.workers = 4;  // Two ranks a host.
  expect_clean(run_job(shape, reduce_all_sizes));
  shape.config.checksum = Toggle::kOn;
  expect_clean(run_job(shape, reduce_all_sizes));
}

TEST(StrictJobs, AJobThatEndsWithMuchUnderWayReleasesNothingTooEarly) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (const bool aborts : {false, true}) {
    JobShape shape{.workers = 2, .hosts = 2};
    shape.strict = true;
    run_job(shape, [aborts](Runtime& runtime) {
      std::vector<std::vector<float>> memory(8, std::vector<float>(500'000, 1));
      std::vector<std::shared_ptr<Work>> works;
      if (runtime.rank() == 0) memory.pop_back();  // The other waits for one that never comes.
      for (auto& values : memory) works.push_back(runtime.submit(all_reduce(values)));
      if (aborts && runtime.rank() == 0) runtime.abort("enough");
      if (!aborts && runtime.rank() == 1) runtime.give_up(Status(Code::kCancelled, "enough"));
      for (const auto& work : works) work->wait(in_seconds(20));
    });
  }
}

/// With kFewEager no pool of buffers for headers and small messages grows by that much.
constexpr std::uint32_t kFewEager = 1 << 10;
constexpr std::size_t kLarge = 400'000;

/// Pinning memory for every part of every step is what the network's time went into.
TEST(StrictJobs, NothingIsRegisteredInAStepWhoseMemoryTheRuntimeGaveOut) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (const std::uint32_t workers : {2u, 4u}) {  // With four, two ranks a host reduce in the arena first.
    std::atomic<int> registered{0};
    std::atomic<bool> is_warm{false};
    JobShape shape{.workers = workers, .hosts = 2};
    shape.strict = true;
    shape.config.part_bytes = 1 << 20;
    shape.config.eager_bytes = kFewEager;
    shape.on_register = [&](std::uint32_t, std::size_t bytes) { registered += is_warm && bytes >= kLarge ? 1 : 0; };
    expect_clean(run_job(shape, [&](Runtime& runtime) {
      constexpr std::size_t kElements = 1'000'000;  // Several parts.
      const std::shared_ptr<std::byte> memory = runtime.allocate(kElements * sizeof(float));
      const std::span<float> values(reinterpret_cast<float*>(memory.get()), kElements);
      std::vector<float> barrier(1, 1);
      const auto step = [&] {
        std::fill(values.begin(), values.end(), 1.0F);
        finish(runtime.submit(all_reduce(values)));
        EXPECT_EQ(values[kElements - 1], static_cast<float>(runtime.size()));
      };
      step();
      finish(runtime.submit(all_reduce(barrier)));
      is_warm = true;
      for (int i = 0; i < 5; ++i) step();
      is_warm = false;
    }));
    EXPECT_EQ(registered, 0) << workers << " workers";
  }
}

TEST(StrictJobs, ATensorOfTheUsersOwnIsRegisteredOnceForAllItsParts) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  constexpr std::size_t kElements = 1'000'000;
  constexpr int kSteps = 3;
  std::atomic<int> whole{0};
  std::atomic<int> parts{0};
  JobShape shape{.workers = 2, .hosts = 2};
  shape.strict = true;
  shape.config.part_bytes = 1 << 20;
  shape.config.eager_bytes = kFewEager;
  std::atomic<bool> is_up{false};
  shape.on_register = [&](std::uint32_t, std::size_t bytes) {
    if (!is_up || bytes < kLarge) return;
    ++(bytes == kElements * sizeof(float) ? whole : parts);
  };
  expect_clean(run_job(shape, [&is_up](Runtime& runtime) {
    std::vector<float> first(1, 1);
    finish(runtime.submit(all_reduce(first)));
    is_up = true;
    std::vector<float> values(kElements, 1);
    for (int i = 0; i < kSteps; ++i) finish(runtime.submit(all_reduce(values)));
  }));
  EXPECT_EQ(whole, 2 * kSteps);
  EXPECT_EQ(parts, 0);
}

/// A rank may be one operation ahead of the other of its host: of memory there is as much as two operations need,
/// whatever the number of operations.
TEST(StrictJobs, StagingMemoryIsRegisteredOnceAndUsedAgain) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  constexpr int kAtOnce = 2;
  std::atomic<int> registered{0};
  std::atomic<bool> is_up{false};
  JobShape shape{.workers = 4, .hosts = 2};
  shape.strict = true;
  shape.config.eager_bytes = kFewEager;
  shape.on_register = [&](std::uint32_t, std::size_t bytes) { registered += is_up && bytes >= kLarge ? 1 : 0; };
  expect_clean(run_job(shape, [&](Runtime& runtime) {
    std::vector<float> barrier(1, 1);
    finish(runtime.submit(all_reduce(barrier)));
    is_up = true;
    std::vector<float> values(300'000, 1);
    for (int i = 0; i < 40; ++i) finish(runtime.submit(all_reduce(values)));
  }));
  EXPECT_LE(registered, static_cast<int>(shape.workers) * kAtOnce);
}

/// One tensor too many for `ulimit -l` fails its own operation, on all ranks, with the reason; the job goes on.
TEST(StrictJobs, ARegistrationThatFailsFailsItsOperationOnAllRanksAndNothingElse) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (const std::uint32_t workers : {2u, 4u}) {
    JobShape shape{.workers = workers, .hosts = 2};
    shape.strict = true;
    constexpr std::size_t kTooLarge = 300'000 * sizeof(float);
    shape.on_register = [](std::uint32_t rank, std::size_t bytes) {
      if (rank == 1 && bytes == kTooLarge) throw Error(Code::kTransport, "fi_mr_reg: Cannot allocate memory");
    };
    expect_clean(run_job(shape, [](Runtime& runtime) {
      std::vector<float> values(100'000, 1);
      finish(runtime.submit(all_reduce(values)));
      std::vector<float> large(300'000, 1);
      const auto work = runtime.submit(all_reduce(large));
      ASSERT_TRUE(work->wait(in_seconds(10))) << "rank " << runtime.rank() << " waits for the one that failed";
      EXPECT_FALSE(work->status().is_ok());
      const std::string& text = work->status().message();
      EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
      EXPECT_NE(text.find("1200000 bytes"), std::string::npos) << text;
      EXPECT_NE(text.find("Cannot allocate memory"), std::string::npos) << text;
      finish(runtime.submit(all_reduce(values)));
      EXPECT_EQ(values.front(), static_cast<float>(runtime.size() * runtime.size()));
    }));
  }
}

/// A host that lets no more memory be pinned, in the middle of a job: messages wait for a buffer, and where receives
/// need one the job ends, with the reason on all ranks; nobody waits, and no network is blamed.
TEST(StrictJobs, WhereThereAreNoBuffersForMoreReceivesAllRanksHearWhy) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (const Toggle checksum : {Toggle::kOff, Toggle::kOn}) {
    std::atomic<bool> is_short{false};
    JobShape shape{.workers = 2, .hosts = 2};
    shape.strict = true;
    shape.config.checksum = checksum;
    shape.on_register = [&](std::uint32_t rank, std::size_t bytes) {
      if (!is_short || rank != 1 || bytes < 10'000) return;  // A tensor, which is small here.
      throw Error(Code::kTransport, "fi_mr_reg: Cannot allocate memory");
    };
    run_job(shape, [&is_short](Runtime& runtime) {
      std::vector<float> warm(50, 1);
      finish(runtime.submit(all_reduce(warm)));
      if (runtime.rank() == 1) is_short = true;
      std::vector<std::vector<float>> memory(600, std::vector<float>(50, 1));
      std::vector<std::shared_ptr<Work>> works;
      for (auto& values : memory) works.push_back(runtime.submit(all_reduce(values)));
      for (std::size_t i = 0; i < works.size(); ++i) {
        ASSERT_TRUE(works[i]->wait(in_seconds(5))) << "rank " << runtime.rank() << ", operation " << i;
        const std::string text = works[i]->status().to_string();
        EXPECT_EQ(text.find("nothing came back"), std::string::npos) << text;
      }
      // Some may have heard of a closed connection first.
      const auto after = runtime.submit(all_reduce(warm));
      ASSERT_TRUE(after->wait(in_seconds(5)));
      const std::string text = after->status().to_string();
      EXPECT_NE(text.find("Cannot allocate memory"), std::string::npos) << text;
    });
  }
}

/// From rank 0 to rank 1.
std::shared_ptr<Work> pass_on(Runtime& runtime, std::span<std::byte> memory) {
  if (runtime.rank() == 0) {
    Send send;
    send.to = 1;
    send.tag = 7;
    send.data = memory;
    return runtime.send(send);
  }
  Receive receive;
  receive.from = 0;
  receive.tag = 7;
  receive.memory = memory;
  return runtime.receive(receive);
}

/// The other side of a message need not wait for its time-out, whichever of the two could not register its memory.
TEST(StrictJobs, AMessageWhoseRegistrationFailsFailsOnBothSides) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (const std::uint32_t refused : {0u, 1u}) {
    for (const std::uint32_t late : {0u, 1u}) {
      JobShape shape{.workers = 2, .hosts = 2};
      shape.strict = true;
      constexpr std::size_t kTooLarge = 300'000 * sizeof(float);
      shape.on_register = [refused](std::uint32_t rank, std::size_t bytes) {
        if (rank == refused && bytes == kTooLarge) throw Error(Code::kTransport, "fi_mr_reg: Cannot allocate memory");
      };
      expect_clean(run_job(shape, [late](Runtime& runtime) {
        std::vector<float> values(300'000, static_cast<float>(runtime.rank()));
        const std::span<std::byte> memory = std::as_writable_bytes(std::span(values));
        if (runtime.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        const auto work = pass_on(runtime, memory);
        ASSERT_TRUE(work->wait(in_seconds(10))) << "rank " << runtime.rank() << " waits for the one that failed";
        const std::string text = work->status().to_string();
        EXPECT_NE(text.find("1200000 bytes"), std::string::npos) << text;
        EXPECT_NE(text.find("Cannot allocate memory"), std::string::npos) << text;
        // The next one, of a size that the card takes, meets its own counterpart.
        const std::span<std::byte> next = memory.first(400'000);
        finish(pass_on(runtime, next));
        EXPECT_EQ(values[50'000], 0.0F);
      }));
    }
  }
}

}  // namespace
}  // namespace herring::runtime::testing
