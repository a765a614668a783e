#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <unordered_map>
#include <vector>

#include "bindings/tensorflow/keys.h"
#include "bindings/tensorflow/on_gpu.h"
#include "bindings/tensorflow/tensor.h"
#include "bindings/tensorflow/tf_c_api.h"
#include "core/status.h"
#include "runtime/communicator.h"

/// What was submitted and not waited for. A graph knows its operations by numbers.
namespace herring::tensorflow_binding {

/// Of a call, or of an operation that is pending: a number that no other one has just now.
using Number = std::int32_t;

/// One operation, and the tensors that it reads and writes.
struct Pending {
  Tensor input;
  Tensor splits;  ///< All-to-all alone.
  std::vector<Tensor> outputs;
  /// Instead of both: they are on a GPU, and what is reduced is what stands for them. The first step begins when that
  /// is there.
  std::unique_ptr<OnGpu> gpu;
  std::string name;
  Number call = 0;                                    ///< Of Process::begin_call().
  std::uint64_t place = 0;                            ///< In the order of Process::add().
  std::vector<std::shared_ptr<runtime::Work>> works;  ///< Of its current step.
  std::function<void(Pending&)> next;                 ///< Starts the next step, if there is one. Throws Error.
  std::unique_ptr<InFlight> in_flight;                ///< Where ranks find it by its key.
};

/// Lets go of it; its tensors live until nothing reads or writes them.
inline void drop(const std::shared_ptr<Pending>& pending) {
  for (const auto& work : pending->works) {
    if (!work->is_done()) work->on_done([kept = pending](const Status&) {});
  }
}

/// The process's job, and what goes on there. Safe from any thread.
class Process final {
 public:
  static Process& instance();

  /// Operations go to this job from now on. `limit`: its time limit of operations.
  void attach(const std::shared_ptr<runtime::Communicator>& job, Duration limit);
  /// Null where there is none, and in a forked child, which has no thread of it.
  std::shared_ptr<runtime::Communicator> job() const;

  Duration limit() const;
  /// The job's memory for what GPUs copy. Throws Error where it is in none.
  std::shared_ptr<runtime::PinnedMemory> pinned_memory() const;

  /// A graph is about to submit operations, and to wait for them: until end_call() it may call something, whoever
  /// waits.
  Number begin_call();
  void end_call(Number call);
  /// Part of it cannot be submitted, so nobody waits for the rest: that is let go, now or when it comes.
  void give_up_call(Number call);

  Number add(std::shared_ptr<Pending> pending);
  /// Null where nobody submitted it, or somebody waited for it.
  std::shared_ptr<Pending> take(Number handle);
  std::size_t size() const;

  /// Ranks of a process set, in order.
  void set_group(std::uint32_t group, std::vector<std::uint32_t> ranks);
  /// None: not known. Group 0, all ranks, needs no set_group().
  std::optional<std::vector<std::uint32_t>> group(std::uint32_t group) const;
  /// This rank's place on its host, where the launcher counts otherwise than the job does.
  void set_local(std::uint32_t rank, std::uint32_t size);
  std::optional<std::pair<std::uint32_t, std::uint32_t>> local() const;
  /// Another generation of the job: process sets, keys and what is pending are gone.
  void begin_again();
  Keys& keys() { return keys_; }

 private:
  void let_go_of_pending();

  mutable std::mutex mutex_;
  std::weak_ptr<runtime::Communicator> job_;
  std::shared_ptr<runtime::PinnedMemory> pinned_;
  Duration limit_ = Duration::max();
  int pid_ = 0;
  std::uint64_t last_ = 0;
  std::uint64_t last_call_ = 0;
  std::unordered_map<Number, std::shared_ptr<void>>
      calls_;  ///< That go on, and what the job has for that, if anything.
  std::unordered_map<Number, std::shared_ptr<Pending>> pending_;
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> groups_;
  std::optional<std::pair<std::uint32_t, std::uint32_t>> local_;
  Keys keys_;
};

}  // namespace herring::tensorflow_binding
