#include "runtime/deadlock_watch.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "core/thread.h"

namespace herring::runtime {
namespace {

constexpr std::uint64_t kReportTag = std::uint64_t{1} << 63 | 1;
constexpr std::uint64_t kListTag = std::uint64_t{1} << 63 | 2;
constexpr Duration kLongestPause = std::chrono::seconds(1);
// A report from each rank in one pause is no load for rank 0.
constexpr Duration kPausePerRank = std::chrono::milliseconds(2);
// Rank 0 may not wait, and listen, itself. In pauses: so long its answer takes at most, and so long a rank is thought
// to wait still after its report.
constexpr int kAnswerPauses = 3;
constexpr int kSilentPauses = 6;

Instant now() { return std::chrono::steady_clock::now(); }

template <class Message>
std::span<std::byte> bytes_of(Message& message) {
  return std::as_writable_bytes(std::span(&message, 1));
}

}  // namespace

DeadlockWatch::DeadlockWatch(std::uint32_t rank, std::uint32_t size, Duration patience, Ports ports)
    : rank_(rank),
      size_(size),
      patience_(patience),
      pause_(std::max(std::min(patience / 4, kLongestPause), size * kPausePerRank)),
      ports_(std::move(ports)) {
  waits_ = std::make_shared<WaitTable>([this] {
    const std::scoped_lock lock(mutex_);
    if (stopped_) return;
    try {
      thread_ = start_thread("herring-deadlk", [this] { run(); });
    } catch (const Error&) {
      // No thread to be had: then the time-out alone ends what waits in vain.
    }
  });
}

DeadlockWatch::~DeadlockWatch() { stop(); }

void DeadlockWatch::stop() {
  std::thread thread;
  {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
    thread = std::move(thread_);
  }
  waits_->stop();
  if (thread.joinable()) thread.join();
}

std::optional<WaitingReport> DeadlockWatch::report() {
  const WaitTable::Waits waits = waits_->all_wait();
  std::vector<Awaited> awaited;
  for (const auto& ask : waits.asks) awaited.push_back(ask());
  std::optional<WaitingReport> found;
  if (!awaited.empty()) found = ports_.report(awaited);
  if (found) {
    found->list = list_.list;
    found->not_called = ports_.not_called(list_);
    // What was looked up meanwhile belongs to one moment where the same threads have waited all the time.
    if (waits_->all_wait().numbers != waits.numbers) found.reset();
  }
  if (!found) {
    standing_ = {};
    return std::nullopt;
  }
  const std::span calls(found->calls.data(), found->count);
  if (waits.numbers != standing_.waits || !std::ranges::equal(calls, standing_.calls)) {
    standing_ = {waits.numbers, {calls.begin(), calls.end()}, now()};
  }
  if (now() - standing_.since < patience_) return std::nullopt;
  return found;
}

void DeadlockWatch::run() {
  while (waits_->wait_for_somebody()) {
    if (!waits_->sleep(pause_)) return;
    std::optional<WaitingReport> mine = report();
    if (!mine) continue;
    if (rank_ == 0) {
      judge();
    } else {
      tell_rank_0(std::move(*mine));
    }
  }
}

void DeadlockWatch::tell_rank_0(WaitingReport report) {
  const Duration limit = kAnswerPauses * pause_;
  DeadlockList answer;
  Receive receive{.group = kGroup, .from = 0, .tag = kListTag, .memory = bytes_of(answer), .timeout = limit};
  const auto received = ports_.receive(receive);
  Send send{.group = kGroup, .to = 0, .tag = kReportTag, .data = bytes_of(report), .timeout = limit};
  const auto sent = ports_.send(send);
  // Both end by themselves, at their time-outs at the latest; only then is their memory free.
  sent->wait(Instant::max());
  received->wait(Instant::max());
  if (!sent->status().is_ok() || !received->status().is_ok()) return;
  if (answer.count > DeadlockList::kMostCalls) return;
  list_ = answer;
}

/// Rank 0, while it waits itself: takes reports, and answers each.
void DeadlockWatch::judge() {
  struct Answer {
    DeadlockList list;
    std::shared_ptr<Work> work;
  };
  DeadlockJudge judge(size_, list_.list);
  std::vector<std::unique_ptr<Answer>> answers;
  Instant next_look = now();
  std::size_t stuck = 0;
  bool is_certain = false;
  while (!is_certain) {
    WaitingReport report;
    Receive receive{.group = kGroup, .from = {}, .tag = kReportTag, .memory = bytes_of(report), .timeout = pause_ / 2};
    const auto received = ports_.receive(receive);
    received->wait(Instant::max());
    if (received->status().is_ok()) {
      const std::uint32_t source = received->received().source;
      if (judge.take(source, report, now())) {
        auto& answer = *answers.emplace_back(std::make_unique<Answer>());
        answer.list = judge.list();
        answer.work = ports_.send({.group = kGroup,
                                   .to = source,
                                   .tag = kListTag,
                                   .data = bytes_of(answer.list),
                                   .timeout = kAnswerPauses * pause_});
      }
    } else if (received->status().code() != Code::kTimeout) {
      break;  // The job has ended.
    }
    std::erase_if(answers, [](const auto& answer) { return answer->work->is_done(); });
    if (now() < next_look) continue;
    next_look = now() + pause_;
    list_ = judge.list();
    const std::optional<WaitingReport> mine = this->report();
    if (!mine) break;
    judge.take(0, *mine, now());
    judge.look(now(), kSilentPauses * pause_);
    // Not at the first that are found: others that wait with them are heard in the same pause.
    is_certain = stuck > 0 && judge.stuck().size() == stuck;
    stuck = judge.stuck().size();
  }
  list_ = judge.list();
  if (is_certain) ports_.fail(judge.text());
  for (const auto& answer : answers) answer->work->wait(Instant::max());
}

}  // namespace herring::runtime
