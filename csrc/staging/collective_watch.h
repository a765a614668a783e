#pragma once

#include <cstdint>
#include <map>
#include <variant>
#include <vector>

#include "core/status.h"
#include "core/types.h"

/// Whether collectives that are under way on devices will still end: a kernel waits for the other ranks' kernels, and
/// nobody tells it that one of them has died. Pure: (event, now) -> actions.
///
/// What takes longer than `patience` is asked about: the ranks meet in an operation of the host's that only a rank's
/// end, or its leaving, makes fail. A rank may leave as soon as its own part has ended, so `grace` later the others'
/// should have too.
namespace herring::staging {

struct WatchOptions {
  Duration patience = std::chrono::seconds(1);
  Duration grace = std::chrono::seconds(2);
};

/// Are all the others still there? A rank's questions come one after the other, the same on all. Answer: on_answer,
/// whenever there is one.
struct AskOthers {};
/// What is under way does not end any more. Once.
struct GiveUp {
  Status why;
};
using WatchAction = std::variant<AskOthers, GiveUp>;
using WatchActions = std::vector<WatchAction>;

class CollectiveWatch final {
 public:
  explicit CollectiveWatch(WatchOptions options = {}) : options_(options) {}

  /// `key`: of those under way, each has another.
  void begin(std::uint64_t key, Instant now, Instant deadline);
  void end(std::uint64_t key);
  bool has_any() const { return !under_way_.empty(); }
  /// What the library says of itself. Not ok: nothing ends any more. A rank that has died is the better reason: the
  /// others are asked, and have `grace` to answer.
  void on_health(const Status& status, Instant now);
  /// Ok: all others asked the same.
  void on_answer(const Status& status, Instant now);
  void advance(Instant now, WatchActions& actions);

 private:
  void advance_after_failure(Instant now, WatchActions& actions);

  struct UnderWay {
    Instant begun;
    Instant deadline;
  };

  const WatchOptions options_;
  std::map<std::uint64_t, UnderWay> under_way_;
  bool is_asking_ = false;
  Instant answered_at_{};
  Status answer_;   ///< Not ok: somebody is gone.
  Status failure_;  ///< The library's.
  Instant failed_at_{};
  bool has_given_up_ = false;
};

}  // namespace herring::staging
