// Operations by name as impatient users make them: from several threads, one name used often, large and small, handles
// dropped, waited for in any order, asked about, or left with a callback, up to the end of the job.
#include "collectives/operations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <numeric>
#include <random>
#include <thread>

#include "runtime/job.h"
#include "seeds.h"

namespace herring::collectives {
namespace {

using runtime::Runtime;
using runtime::Work;
using runtime::testing::JobShape;
using runtime::testing::run_job;
using namespace std::chrono_literals;

constexpr int kThreads = 2;
constexpr int kNames = 5;
constexpr int kUses = 8;  // of each name

std::shared_ptr<runtime::Communicator> borrow(Runtime& runtime) {
  return {&runtime, [](runtime::Communicator*) {}};
}

/// The same on all ranks.
std::size_t elements(std::uint64_t seed, int name, int use) {
  std::mt19937_64 random(seed * 7919 + static_cast<std::uint64_t>(name) * 101 + static_cast<std::uint64_t>(use));
  return random() % 4 == 0 ? 300'000 : 1 + random() % 2000;
}

runtime::Request request_of(std::string name, std::vector<float>& tensor) {
  runtime::Request made;
  made.name = std::move(name);
  made.descriptor.dims = 1;
  made.descriptor.shape[0] = tensor.size();
  made.descriptor.op_bytes = tensor.size() * sizeof(float);
  made.input = made.output = std::as_writable_bytes(std::span(tensor));
  return made;
}

/// One thread's calls: names of its own, whose uses are in order; everything else is as the rank's dice say.
class Caller {
 public:
  Caller(Operations& operations, std::uint64_t seed, int thread)
      : operations_(operations),
        rank_(operations.runtime()->rank()),
        size_(operations.runtime()->size()),
        seed_(seed),
        thread_(thread),
        random_(seed * 1000 + rank_ * 10 + static_cast<std::uint64_t>(thread)) {}

  void call_everything() {
    for (int use = 0; use < kUses; ++use) {
      std::vector<int> names(kNames);
      std::iota(names.begin(), names.end(), 0);
      std::ranges::shuffle(names, random_);
      for (const int name : names) {
        call(name, use);
        // Not for long: what it waits for is perhaps what another rank calls next.
        if (pick(3) == 0 && !kept_.empty()) kept_[pick(kept_.size())]->wait(runtime::testing::in_seconds(0.002));
        if (pick(16) == 0) std::this_thread::sleep_for(3ms);
      }
      if (use % 3 == 0) run(use % kNames, kUses + use);
    }
  }

  void wait_for_kept() {
    std::ranges::shuffle(kept_, random_);
    for (const std::shared_ptr<Work>& work : kept_) wait_for(*work);
    kept_.clear();
    const Instant limit = runtime::testing::in_seconds(30);
    while (callbacks_ > 0 && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(callbacks_, 0) << "callbacks that never came";
  }

  /// After the job.
  void check_sums() const {
    const float sum = static_cast<float>(size_ * (size_ + 1)) / 2;
    for (const std::vector<float>& tensor : tensors_) EXPECT_EQ(tensor.front() + tensor.back(), 2 * sum);
  }

 private:
  std::size_t pick(std::size_t count) { return random_() % count; }

  runtime::Request request(int name, int use) {
    std::vector<float>& tensor = tensors_.emplace_back(elements(seed_, name, use), static_cast<float>(rank_ + 1));
    return request_of(std::to_string(thread_) + "." + std::to_string(name), tensor);
  }

  void call(int name, int use) {
    const runtime::Request made = request(name, use);
    const std::shared_ptr<Work> work = pick(8) == 0 ? operations_.submit_alone(made) : operations_.submit(made);
    const std::size_t what = pick(3);
    if (what == 0) kept_.push_back(work);
    if (what != 1) return;
    ++callbacks_;
    work->on_done([this](const Status& status) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      --callbacks_;
    });
  }

  void run(int name, int use) {
    runtime::Request made = request(name, use);
    made.is_waited_for = true;
    Status status;
    const std::shared_ptr<Work> work = operations_.run(made, status);
    if (work) wait_for(*work);
    EXPECT_TRUE(status.is_ok()) << status.message();
  }

  static void wait_for(Work& work) {
    runtime::testing::wait_to_the_end(work);
    EXPECT_TRUE(work.status().is_ok()) << work.status().message();
  }

  Operations& operations_;  // Only during the job.
  const std::uint32_t rank_;
  const std::uint32_t size_;
  const std::uint64_t seed_;
  const int thread_;
  std::mt19937_64 random_;
  std::deque<std::vector<float>> tensors_;  // None moves.
  std::vector<std::shared_ptr<Work>> kept_;
  std::atomic<int> callbacks_{0};
};

class OperationsOnJobs : public ::testing::TestWithParam<JobShape> {};

TEST_P(OperationsOnJobs, EverySumComesWhateverIsDoneWithTheHandles) {
  if (GetParam().hosts > 1 && !runtime::testing::has_fabric()) GTEST_SKIP() << "no libfabric";
  const herring::testing::SeedRange seeds = herring::testing::seeds(2);
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    std::vector<std::deque<Caller>> callers(GetParam().workers);
    const auto errors = run_job(GetParam(), [&](Runtime& runtime) {
      Operations operations(borrow(runtime), Config{});
      std::vector<std::thread> threads;
      for (int thread = 0; thread < kThreads; ++thread) {
        Caller& caller = callers[runtime.rank()].emplace_back(operations, seed, thread);
        threads.emplace_back([&caller] {
          caller.call_everything();
          caller.wait_for_kept();
        });
      }
      for (std::thread& thread : threads) thread.join();
      // What was dropped ends first.
      const Instant limit = runtime::testing::in_seconds(30);
      if (seed % 2 == 0) operations.close(GroupId{0}, limit);
      operations.close(limit);
    });
    runtime::testing::expect_clean(errors);
    for (const std::deque<Caller>& of_rank : callers) {
      for (const Caller& caller : of_rank) caller.check_sums();
    }
  }
}

/// Nobody else has the operations: the last to hold one is who has begun it in its turn.
TEST(Operations, WhoStartsByNameNeedsNotKeepTheWork) {
  const auto errors = run_job({.workers = 2}, [](Runtime& runtime) {
    Operations operations(borrow(runtime), Config{});
    std::vector<std::vector<float>> tensors;
    for (int use = 0; use < 20; ++use) tensors.emplace_back(use % 2 == 0 ? 10 : 400'000, 1.0f);
    for (std::vector<float>& tensor : tensors) operations.submit(request_of("one name", tensor));
    std::vector<float> last(10, 1);
    const std::shared_ptr<Work> work = operations.submit(request_of("one name", last));
    ASSERT_TRUE(work->wait(runtime::testing::in_seconds(20)));
    EXPECT_TRUE(work->status().is_ok()) << work->status().message();
    for (const std::vector<float>& tensor : tensors) EXPECT_EQ(tensor.back(), 2.0f);
  });
  runtime::testing::expect_clean(errors);
}

/// One rank's is in a bucket's round, the other's by itself, with nobody who waits for it: who closes has called it.
TEST(Operations, WhoClosesTellsOthersFirstWhatIsUnderWayByItself) {
  std::vector<std::vector<float>> tensors(2, std::vector<float>(10, 1));
  const auto errors = run_job({.workers = 2}, [&](Runtime& runtime) {
    Operations operations(borrow(runtime), Config{});
    std::vector<float>& tensor = tensors[runtime.rank()];
    const runtime::Request request = request_of("t", tensor);
    ASSERT_TRUE(operations.submit(request)->wait(runtime::testing::in_seconds(20)));
    if (runtime.rank() == 0) {
      const std::shared_ptr<Work> work = operations.submit(request);
      ASSERT_TRUE(work->wait(runtime::testing::in_seconds(20)));
      EXPECT_TRUE(work->status().is_ok()) << work->status().message();
    } else {
      operations.submit_alone(request);
    }
    operations.close(runtime::testing::in_seconds(20));
  });
  runtime::testing::expect_clean(errors);
  for (const std::vector<float>& tensor : tensors) EXPECT_EQ(tensor.back(), 4);
}

INSTANTIATE_TEST_SUITE_P(Jobs, OperationsOnJobs,
                         ::testing::Values(JobShape{.workers = 2}, JobShape{.workers = 3},
                                           JobShape{.workers = 2, .servers = 1}, JobShape{.workers = 4, .hosts = 2}),
                         [](const auto& job) {
                           return std::to_string(job.param.workers) + "On" + std::to_string(job.param.hosts) + "With" +
                                  std::to_string(job.param.servers);
                         });

}  // namespace
}  // namespace herring::collectives
