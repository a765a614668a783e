#include "staging/collective_watch.h"

#include <algorithm>

namespace herring::staging {

void CollectiveWatch::begin(std::uint64_t key, Instant now, Instant deadline) { under_way_[key] = {now, deadline}; }

void CollectiveWatch::end(std::uint64_t key) { under_way_.erase(key); }

void CollectiveWatch::on_health(const Status& status, Instant now) {
  if (status.is_ok() || !failure_.is_ok()) return;
  failure_ = status;
  failed_at_ = now;
}

void CollectiveWatch::on_answer(const Status& status, Instant now) {
  is_asking_ = false;
  answered_at_ = now;
  if (answer_.is_ok()) answer_ = status;
}

void CollectiveWatch::advance(Instant now, WatchActions& actions) {
  if (under_way_.empty() || has_given_up_) return;
  for (const auto& [key, each] : under_way_) {
    if (now >= each.deadline) {
      has_given_up_ = true;
      actions.push_back(GiveUp{{Code::kTimeout,
                                "a sum on the GPUs has not ended in time: a rank's GPU is busy with something else, or "
                                "its kernel did not start"}});
      return;
    }
  }
  if (!failure_.is_ok()) return advance_after_failure(now, actions);
  const auto oldest = std::ranges::min_element(under_way_, {}, [](const auto& each) { return each.second.begun; });
  const Instant begun = oldest->second.begun;
  if (!answer_.is_ok()) {
    if (now < std::max(begun, answered_at_) + options_.grace) return;
    has_given_up_ = true;
    actions.push_back(GiveUp{answer_});
  } else if (!is_asking_ && now >= std::max(begun, answered_at_) + options_.patience) {
    is_asking_ = true;
    actions.push_back(AskOthers{});
  }
}

void CollectiveWatch::advance_after_failure(Instant now, WatchActions& actions) {
  if (!answer_.is_ok() || now >= failed_at_ + options_.grace) {
    has_given_up_ = true;
    actions.push_back(GiveUp{answer_.is_ok() ? failure_ : answer_});
  } else if (!is_asking_ && answered_at_ < failed_at_) {
    is_asking_ = true;
    actions.push_back(AskOthers{});
  }
}

}  // namespace herring::staging
