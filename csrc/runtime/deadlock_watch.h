#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/status.h"
#include "runtime/communicator.h"
#include "runtime/deadlock.h"
#include "runtime/wait_table.h"

namespace herring::runtime {

/// Finds ranks of a job that wait for each other, and ends the job with an error that says for what. Where all threads
/// of this process that wait for others have waited for the same calls for `patience`, it tells rank 0, which asks them
/// all (DeadlockJudge). Before that it does nothing, and has no thread.
class DeadlockWatch final {
 public:
  struct Ports {
    /// The calls behind what is waited for. None where one of them cannot be known by others, or this process may call
    /// something by itself.
    std::function<std::optional<WaitingReport>(const std::vector<Awaited>&)> report;
    /// Bits of those that this rank should have called, and has not, and does not call by itself.
    std::function<std::uint64_t(const DeadlockList&)> not_called;
    std::function<std::shared_ptr<Work>(const Send&)> send;
    std::function<std::shared_ptr<ReceiveWork>(const Receive&)> receive;
    /// Rank 0: ends the job, on all ranks, with this text.
    std::function<void(const std::string& text)> fail;
  };

  /// The group of its messages has all ranks.
  static constexpr GroupId kGroup{0xFFFF'FF01};

  DeadlockWatch(std::uint32_t rank, std::uint32_t size, Duration patience, Ports ports);
  ~DeadlockWatch();  ///< stop()
  DeadlockWatch(const DeadlockWatch&) = delete;
  DeadlockWatch& operator=(const DeadlockWatch&) = delete;

  const std::shared_ptr<WaitTable>& waits() const { return waits_; }
  /// Returns when it sends and receives nothing any more.
  void stop();

 private:
  void run();
  std::optional<WaitingReport> report();
  void tell_rank_0(WaitingReport report);
  void judge();

  const std::uint32_t rank_;
  const std::uint32_t size_;
  const Duration patience_;
  const Duration pause_;  ///< Between two reports.
  const Ports ports_;
  std::shared_ptr<WaitTable> waits_;
  DeadlockList list_;  ///< The latest that rank 0 has asked about.
  /// What threads of this process wait for, all looks since then.
  struct Standing {
    std::vector<std::uint64_t> waits;
    std::vector<AwaitedCall> calls;
    Instant since{};
  };
  Standing standing_;
  std::mutex mutex_;
  std::thread thread_;    // guarded by mutex_
  bool stopped_ = false;  // guarded by mutex_
};

}  // namespace herring::runtime
