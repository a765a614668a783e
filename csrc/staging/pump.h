#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/device.h"
#include "staging/engine.h"

/// Carries the staging engine's actions out on a Device. No thread and no clock: whoever drives it says when.
namespace herring::staging {

/// Who reduces what is in a slot, and is told the end. Called from Pump's calls, never from within each other.
class Owner {
 public:
  virtual ~Owner() = default;
  /// `memory` is the part's slot, the result's too. Answer with Pump::reduced(), now or later.
  virtual void reduce(const Part& part, std::span<std::byte> memory) = 0;
  virtual void abandon(const Part& part) = 0;
  virtual void complete(OperationId operation, const Status& status) = 0;
  virtual void release(OperationId operation) = 0;
};

/// The operation's device memory, borrowed until its release(). Input and output are of equal size and may be the same.
struct Job {
  DeviceSpan input;
  DeviceSpan output;
  ForeignEvent ready;  ///< Both are ready when it is done; 0: they are.
  Instant deadline;
  Until until = Until::kDone;
};

class Pump final {
 public:
  /// `memory` holds options.slots slots, pinned best, and outlives the Pump; the streams are the device's. Device and
  /// owner outlive it too.
  Pump(Device& device, StreamHandle out, StreamHandle back, Options options, std::span<std::byte> memory, Owner& owner);

  /// kAgain, kInvalidArgument, or the device's failure: nothing happened.
  Status submit(Instant now, OperationId id, const Job& job);
  void reduced(Instant now, OperationId id, std::uint32_t part, const Status& status);
  void cancel(Instant now, OperationId id, const Status& reason);
  /// Looks at the copies and the time. True where anything happened.
  bool run(Instant now);

  /// No later than this run() is to be called; while copies are in flight, much earlier (has_copies()).
  Instant next_deadline() const { return engine_.next_deadline(); }
  bool has_copies() const { return !copies_.empty() || !unrecorded_.empty(); }
  /// What was completed with Until::kSubmitted is there for whoever waits for what this stream has now.
  StreamHandle back_stream() const { return back_; }
  const Engine& engine() const { return engine_; }

 private:
  struct Copy {
    Part part;
    bool is_back = false;
  };

  /// Carries out what the engine asked for, and what that leads to.
  void act(Instant now);
  void perform(Instant now, const Action& action);
  void copy_out(Instant now, const Part& part);
  void copy_back(Instant now, const Part& part);
  /// Asks for the copy's ticket; later where there is none just now.
  void watch(const Copy& copy);
  bool record_waiting();
  void check_device(Instant now);
  std::span<std::byte> slot(const Part& part) const;

  Device& device_;
  const StreamHandle out_;
  const StreamHandle back_;
  const Options options_;
  const std::span<std::byte> memory_;
  Owner& owner_;
  Engine engine_;
  std::map<OperationId, Job> jobs_;
  std::vector<std::unique_ptr<std::byte[]>> grown_;
  std::map<Ticket, Copy> copies_;
  std::deque<Copy> unrecorded_;
  Actions asked_;
  std::deque<Action> queue_;
  bool is_acting_ = false;
};

}  // namespace herring::staging
