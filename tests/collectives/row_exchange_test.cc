// Rows between ranks that have different numbers of them, in real jobs: several calls at once, begun in another order
// on each rank.
#include "collectives/row_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "runtime/job.h"
#include "seeds.h"

namespace herring::collectives {
namespace {

using runtime::Runtime;
using runtime::Work;
using runtime::testing::JobShape;
using runtime::testing::run_job;
using runtime::testing::wait_to_the_end;

constexpr int kCalls = 8;
constexpr std::size_t kWide = 3;  // Elements of a row.

NamedCall call_of(const Runtime& runtime, int number) {
  NamedCall call;
  call.ranks.resize(runtime.size());
  std::iota(call.ranks.begin(), call.ranks.end(), 0U);
  call.index = runtime.rank();
  call.name = "call" + std::to_string(number);
  return call;
}

/// One call of a rank, with the memory that it uses. Odd ones are all-to-all.
class Call {
 public:
  Call(Runtime& runtime, std::uint64_t seed, int number) : runtime_(runtime), is_all_to_all_(number % 2 == 1) {
    std::mt19937_64 random(seed * 1000 + static_cast<std::uint64_t>(number));
    // Some of the calls are large, some have as many rows on all ranks.
    const std::uint64_t most = random() % 3 == 0 ? 20'000 : 5;
    const bool is_even = random() % 3 == 0;
    const std::uint64_t each = random() % most;
    rows_.resize(runtime.size(), std::vector<std::int64_t>(runtime.size()));
    for (auto& row : rows_) {
      for (std::int64_t& count : row) count = static_cast<std::int64_t>(is_even ? each : random() % most);
    }
    const std::vector<std::int64_t>& splits = rows_[runtime.rank()];
    std::int64_t mine = is_all_to_all_ ? std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) : splits[0];
    for (std::int64_t row = 0; row < mine; ++row) {
      for (std::size_t i = 0; i < kWide; ++i) input_.push_back(value(runtime.rank(), row));
    }
    const RowsSpec spec{DataType::kFloat64, {mine, kWide}};
    exchange_ = std::make_unique<RowExchange>(call_of(runtime, number), std::vector{spec},
                                              is_all_to_all_ ? std::optional(splits) : std::nullopt);
  }

  void begin() { works_ = {exchange_->tell(runtime_)}; }

  void go_on() {
    for (const std::shared_ptr<Work>& work : works_) wait_to_the_end(*work);
    ASSERT_TRUE(works_[0]->status().is_ok()) << works_[0]->status().message();
    counts_ = exchange_->counts(0);
    const auto total = std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0});
    output_.resize(static_cast<std::size_t>(total) * kWide);
    works_ = exchange_->move(runtime_, 0, std::as_bytes(std::span(input_)), std::as_writable_bytes(std::span(output_)));
    exchange_.reset();  // Nothing needs it any more.
  }

  void end() {
    for (const std::shared_ptr<Work>& work : works_) {
      wait_to_the_end(*work);
      EXPECT_TRUE(work->status().is_ok()) << work->status().message();
    }
    std::vector<double> expected;
    for (std::uint32_t from = 0; from < runtime_.size(); ++from) {
      const std::vector<std::int64_t>& row = rows_[from];
      const std::int64_t count = is_all_to_all_ ? row[runtime_.rank()] : row[0];
      EXPECT_EQ(counts_[from], count);
      const std::int64_t start =
          is_all_to_all_ ? std::accumulate(row.begin(), row.begin() + runtime_.rank(), std::int64_t{0}) : 0;
      for (std::int64_t at = start; at < start + count; ++at) expected.insert(expected.end(), kWide, value(from, at));
    }
    EXPECT_EQ(output_, expected);
  }

 private:
  static double value(std::uint32_t rank, std::int64_t row) { return rank * 1e6 + static_cast<double>(row); }

  Runtime& runtime_;
  const bool is_all_to_all_;
  std::vector<std::vector<std::int64_t>> rows_;  // The same on all ranks.
  std::vector<double> input_, output_;
  std::vector<std::int64_t> counts_;
  std::unique_ptr<RowExchange> exchange_;
  RowExchange::Works works_;
};

class RowExchanges : public ::testing::TestWithParam<JobShape> {};

TEST_P(RowExchanges, RowsComeInWhateverOrderTheCallsAreMade) {
  if (GetParam().hosts > 1 && !runtime::testing::has_fabric()) GTEST_SKIP() << "no libfabric";
  const herring::testing::SeedRange seeds = herring::testing::seeds(3);
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const auto errors = run_job(GetParam(), [&](Runtime& runtime) {
      std::vector<Call> calls;
      for (int number = 0; number < kCalls; ++number) calls.emplace_back(runtime, seed, number);
      std::mt19937_64 random(seed * 100 + runtime.rank());
      std::vector<std::size_t> order(kCalls);
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (const auto step : {&Call::begin, &Call::go_on, &Call::end}) {
        // A step is waited for where the next one begins, so all ranks begin all of one before.
        std::ranges::shuffle(order, random);
        for (const std::size_t number : order) (calls[number].*step)();
      }
    });
    runtime::testing::expect_clean(errors);
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, RowExchanges,
                         ::testing::Values(JobShape{.workers = 1}, JobShape{.workers = 3},
                                           JobShape{.workers = 2, .servers = 1}, JobShape{.workers = 4, .hosts = 2}));

/// What all hear names the odd ones; the ranks go on with other calls.
TEST(RowExchange, RanksWhoseTensorsDifferHearOfItAll) {
  const auto errors = run_job({.workers = 3}, [](Runtime& runtime) {
    const std::int64_t width = runtime.rank() == 1 ? 5 : 2;
    RowExchange odd(call_of(runtime, 0), {{DataType::kInt32, {runtime.rank(), width}}});
    wait_to_the_end(*odd.tell(runtime));
    try {
      static_cast<void>(odd.counts(0));
      ADD_FAILURE() << "rank " << runtime.rank() << " has not heard of it";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), Code::kMismatch);
      EXPECT_EQ(error.status().message(),
                "ranks disagree, and only the first dimension may differ: rank 0: int32[0, 2], rank 1: int32[1, 5]");
    }
    RowExchange next(call_of(runtime, 1), {{DataType::kInt32, {runtime.rank(), 2}}});
    wait_to_the_end(*next.tell(runtime));
    EXPECT_EQ(next.counts(0), (std::vector<std::int64_t>{0, 1, 2}));
  });
  runtime::testing::expect_clean(errors);
}

TEST(RowExchange, EachUseOfANameHasATagOfItsOwn) {
  EXPECT_NE(message_tag("a", 1), message_tag("a", 2));
  EXPECT_NE(message_tag("a", 1), message_tag("b", 1));
  EXPECT_EQ(message_tag("a", 1) >> 62, 2U) << "met by receives of any tag, or by a numbered collective's";
}

}  // namespace
}  // namespace herring::collectives
