// monitored_barrier: which ranks did not come. Every rank tells rank 0 that it is there, and waits for its word.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <utility>

#include "backend.h"

namespace herring::torch_binding {
namespace {

/// Beside the tags of other collectives, so that a rank that missed a monitored barrier is in step with those.
constexpr std::uint64_t kMonitoredBits = std::uint64_t{3} << 62;
/// Rank 0 gives up after the time-out and says so: a member waits for its word a little longer than that.
constexpr std::chrono::seconds kVerdictMargin{2};
constexpr std::uint8_t kAllCame = 1;
constexpr std::uint8_t kSomebodyMissing = 0;

/// What a person reads; c10's what() has the addresses of the call chain as well.
std::string text_of(const std::exception& error) {
  const auto* const known = dynamic_cast<const c10::Error*>(&error);
  return known == nullptr ? error.what() : known->what_without_backtrace();
}

}  // namespace

Backend::WorkPtr Backend::post_word(const WorkInfo& call, int member, std::uint64_t tag, const at::Tensor& word,
                                    bool is_send) {
  WorkInfo info = call;
  Step step;
  if (is_send) {
    add_send(info, member, tag, word, step);
  } else {
    add_receive(info, member, tag, word, step);
  }
  append(step, [word] {});
  return start(std::move(info), std::move(step));
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  WorkInfo info = open_message(c10d::OpType::BARRIER, "herring:monitored_barrier");
  if (options.timeout != c10d::kUnsetTimeout) info.timeout = options.timeout;
  const std::uint64_t tag = kMonitoredBits | monitored_barriers_.fetch_add(1);
  if (rank_ == 0) {
    TORCH_CHECK(info.timeout.count() > 0, "Rank 0 timed out in monitoredBarrier after ", info.timeout.count(), " ms.");
    await_members(info, tag, wait_all_ranks);
  } else if (info.timeout.count() > 0) {
    report_to_first(info, tag);
  } else {
    TORCH_CHECK(false, "Rank ", rank_, " timed out in monitoredBarrier after ", info.timeout.count(), " ms.");
  }
}

void Backend::await_members(const WorkInfo& info, std::uint64_t tag, bool wait_all_ranks) {
  std::vector<WorkPtr> words;
  for (int member = 1; member < size_; ++member) {
    words.push_back(post_word(info, member, tag, at::empty({1}, at::kByte), false));
  }
  std::vector<int> came, missing;
  std::string reason;
  for (int member = 1; member < size_; ++member) {
    try {
      words[static_cast<std::size_t>(member - 1)]->wait(kNoTimeout);
      came.push_back(member);
    } catch (const std::exception& error) {
      missing.push_back(member);
      if (reason.empty()) reason = text_of(error);
    }
  }
  const std::uint8_t verdict = missing.empty() ? kAllCame : kSomebodyMissing;
  std::vector<WorkPtr> answers;
  for (const int member : came) {
    answers.push_back(post_word(info, member, tag, at::full({1}, verdict, at::kByte), true));
  }
  for (const WorkPtr& answer : answers) {
    try {
      answer->wait(kNoTimeout);
    } catch (const std::exception&) {
      if (missing.empty()) throw;  // Else who is missing is the news; this rank will find out by itself.
    }
  }
  if (missing.empty()) return;
  if (!wait_all_ranks) missing.resize(1);
  TORCH_CHECK(false, missing.size() == 1 ? "Rank " : "Ranks ", c10::Join(", ", missing),
              " failed to pass monitoredBarrier in ", info.timeout.count(), " ms (process group '", options_.name,
              "'): ", reason);
}

void Backend::report_to_first(const WorkInfo& info, std::uint64_t tag) {
  const at::Tensor verdict = at::full({1}, kSomebodyMissing, at::kByte);
  std::string reason = "rank 0 says that a rank did not reach the barrier";
  try {
    WorkInfo patient = info;
    patient.timeout += kVerdictMargin;
    const WorkPtr answer = post_word(patient, 0, tag, verdict, false);
    post_word(info, 0, tag, at::full({1}, kAllCame, at::kByte), true)->wait(kNoTimeout);
    answer->wait(kNoTimeout);
  } catch (const std::exception& error) {
    reason = text_of(error);
  }
  TORCH_CHECK(verdict.item<std::uint8_t>() == kAllCame, "Rank ", rank_,
              " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
              "Please check rank 0 logs for faulty rank.\n Original exception: ",
              reason);
}

}  // namespace herring::torch_binding
