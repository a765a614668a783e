#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "runtime/peer_group.h"
#include "runtime/peer_groups.h"

namespace herring::torch_binding {

/// HERRING_ON_HOST and what belongs to it.
struct PeerSettings {
  enum class Mode : std::uint8_t { kHost, kDevice, kAuto, kNccl };
  Mode mode = Mode::kHost;
  std::uint64_t memory_bytes = 0;
  std::uint32_t blocks = 0;
  std::string nccl;  ///< Path of its library, where not empty.
  /// Whether it is an error where the GPUs cannot sum.
  bool is_strict() const { return mode == Mode::kDevice || mode == Mode::kNccl; }
};

/// A process group whose tensors are reduced on the GPUs where that can be: opened by its first call on device tensors,
/// driven by the stager. Safe from any thread.
class PeerSeat final {
 public:
  PeerSeat(std::shared_ptr<runtime::Communicator> runtime, std::shared_ptr<HostMemory> memory, PeerSettings settings,
           GroupId group, std::string name, std::vector<std::uint32_t> ranks);
  ~PeerSeat();
  PeerSeat(const PeerSeat&) = delete;
  PeerSeat& operator=(const PeerSeat&) = delete;

  /// Whether a call goes this way. The group's first one blocks until all ranks have made theirs. Throws where
  /// HERRING_ON_HOST=device or nccl cannot be.
  bool takes(const OpDescriptor& descriptor, c10::Device device, std::chrono::milliseconds timeout);
  Status submit(Instant now, runtime::PeerGroup::Job job);
  bool run(Instant now);
  /// As PeerGroup has it.
  runtime::Awaited awaited();
  /// Nothing is reduced here any more; all that is under way ends with `why`, on all ranks.
  void close(const Status& why);
  /// This rank calls nothing more here. What is under way on the device keeps its memory.
  void leave();

 private:
  enum class State : std::uint8_t { kNew, kOpen, kNever };
  bool is_nccl() const { return settings_.mode == PeerSettings::Mode::kNccl; }
  bool open(c10::Device device, std::chrono::milliseconds timeout);

  const std::shared_ptr<runtime::Communicator> runtime_;
  const std::shared_ptr<HostMemory> memory_;
  const PeerSettings settings_;
  const GroupId group_id_;
  const std::string name_;
  const std::vector<std::uint32_t> ranks_;
  std::mutex mutex_;  // guards all below
  State state_ = State::kNew;
  c10::DeviceIndex device_ = 0;
  std::atomic<bool> has_network_ = false;
  std::string obstacle_;  ///< Why its ranks cannot reduce on their GPUs, where not empty.
  runtime::PeerPlaces places_;
  std::shared_ptr<runtime::PeerGroups> groups_;
  std::unique_ptr<runtime::PeerGroup> group_;
};

/// An all-reduce of one device tensor there.
class PeerWork final : public DeviceWork {
 public:
  PeerWork(std::shared_ptr<runtime::Communicator> runtime, int rank, const char* title, const at::Tensor& tensor,
           const OpDescriptor& descriptor, std::chrono::milliseconds timeout, std::shared_ptr<PeerSeat> seat,
           std::shared_ptr<void> ticket);

  bool isCompleted() override { return is_submitted() && is_written(); }
  void synchronize() override;

  bool try_start(std::chrono::steady_clock::time_point now) override;
  bool turn(std::chrono::steady_clock::time_point now) override;
  bool is_over() override;

 private:
  runtime::Awaited awaited() override { return seat_->awaited(); }
  /// Tells the caller what the group has said.
  bool tell_end();
  bool is_written();
  bool is_released();

  const at::Tensor tensor_;
  const at::Tensor dense_;  ///< `tensor_` itself, or a contiguous copy.
  const OpDescriptor descriptor_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<PeerSeat> seat_;
  c10::Event ready_;  ///< What the caller's stream had at the call.
  std::optional<c10::Event> written_;
  std::mutex end_mutex_;  // guards all below, which the group says
  std::optional<Status> end_;
  bool is_released_ = false;
};

}  // namespace herring::torch_binding
