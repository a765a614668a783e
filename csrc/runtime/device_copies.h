#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "core/idle_pool.h"
#include "core/process.h"
#include "runtime/communicator.h"

namespace herring::runtime {

/// A GPU for callers that wait for their copies themselves: one queue each. Any thread.
class DeviceCopies final : public std::enable_shared_from_this<DeviceCopies> {
 public:
  using Owners = std::vector<std::shared_ptr<void>>;
  struct Copy {
    std::span<std::byte> host;
    DeviceSpan there;
    bool is_to_host = false;
    std::shared_ptr<void> owner;
  };
  /// What was submitted to a stream, and what it touches.
  struct Line {
    StreamHandle stream;
    bool is_shared = false;       ///< The stream is of other queues too.
    std::vector<Ticket> tickets;  ///< Under way.
    bool is_unmarked = false;     ///< Some of it has no ticket.
    Owners owners;
  };

  /// On which stream the copies of a queue go: one of its own, or the one that all have for this direction.
  enum class Way : std::uint8_t { kOwn, kOut, kBack };

  /// This process's one for a device, which is opened for the first who asks. `kind` tells apart what different ways to
  /// open devices give the same number. Throws what `open` does.
  static std::shared_ptr<DeviceCopies> of(std::string_view kind, DeviceId id,
                                          const std::function<std::unique_ptr<Device>(DeviceId)>& open);

  explicit DeviceCopies(std::unique_ptr<Device> device) : device_(std::move(device)) {}
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  /// Copies that follow one another. One thread at a time.
  class Queue final {
   public:
    /// Throws Error where the device has failed. With another way than kOwn, host memory is pinned: other queues'
    /// copies would hold up one that begins late.
    explicit Queue(std::shared_ptr<DeviceCopies> device, Way way = Way::kOwn);
    /// On a framework's stream itself, which lives as long as the process. Host memory is pinned.
    Queue(std::shared_ptr<DeviceCopies> device, ForeignStream stream);
    /// Copies that are under way go on: what they touch is kept until they end.
    ~Queue();
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    /// For libraries that make it wait for what they have submitted: the driver's handle.
    std::uint64_t stream() const { return line_.stream.value; }
    /// Whether what it waits for is being captured into a graph.
    Status is_capturing(bool& answer);
    // How copies lie between the work of a framework's stream, which lives as long as they are under way. kAgain:
    // nothing happened, because too many tickets are out or not all copies have begun; look, and ask again.
    /// What is submitted next comes after what the stream has now.
    Status after(ForeignStream stream);
    /// What the stream gets from now on comes after all copies.
    Status before(ForeignStream stream);
    /// `owner`: of both memories. Host memory that is not pinned makes the driver wait for all that the stream waits
    /// for, with its lock and ours: such a copy begins when a look finds the stream empty.
    Status to_host(std::span<std::byte> to, DeviceSpan from, std::shared_ptr<void> owner);
    Status to_device(DeviceSpan to, std::span<std::byte> from, std::shared_ptr<void> owner);
    Status inside(DeviceSpan to, DeviceSpan from);
    /// kUnavailable: no kernels here (the driver is too old, no memory for them); all else goes on.
    Status launch(KernelId kernel, std::span<const std::byte> parameters, std::uint32_t blocks);
    /// Whether all copies have ended; `status`: how.
    bool has_ended(Status& status);
    /// Waits for it, no longer than that: false then.
    bool wait(Instant deadline, Status& status);

   private:
    Status submit(Copy copy);
    /// What it puts on the stream is marked when somebody asks whether it has ended, or this goes.
    Status submit(const std::function<Status(Device&)>& work);

    const std::shared_ptr<DeviceCopies> device_;
    Line line_;
    std::deque<Copy> later_;
    Status status_;
  };

  std::string description() const { return device_->description(); }
  Status pin(std::span<std::byte> memory);
  void unpin(std::span<std::byte> memory);

 private:
  // With the lock:
  StreamHandle take_stream();
  StreamHandle stream_of(Way way);
  Status start(Line& line, const Copy& copy);
  /// A ticket for what has none. kAgain: too many are out; look, and try again.
  Status mark(Line& line);
  /// Owners that `gone` gets may come here again: they go after the lock.
  void look(Owners& gone);
  /// Whether all of the line has ended; adds what went wrong to `status` where that is ok.
  bool has_ended(Line& line, Status& status);
  /// For other queues, when its copies have ended.
  void take_back(Line line, Owners& gone);

  const ForkGuard guard_;
  std::mutex mutex_;  // guards all below; in a forked child somebody who is not there may have it
  std::unique_ptr<Device> device_;
  std::vector<StreamHandle> idle_streams_;
  std::map<Way, StreamHandle> shared_streams_;
  std::map<Ticket, Status> ended_;  ///< Handed out by the device, and not taken yet.
  std::vector<Line> rests_;         ///< Of queues that are gone, whose copies are not.
};

/// Host memory for arrays of GPUs: of the runtime's arena, where the ranks of a host read each other's without a copy,
/// and pinned. What was used is kept. Any thread.
class PinnedMemory final : public std::enable_shared_from_this<PinnedMemory> {
 public:
  /// Smaller arrays are not worth pages of their own.
  static constexpr std::size_t kLeastBytes = 64 << 10;

  explicit PinnedMemory(std::weak_ptr<Communicator> runtime);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  /// So many bytes at least, back here when the last owner goes: by then no copy may use them. Null where there are
  /// none: few bytes, the arena is used up, or the system pins no more (`why_not` says so once).
  std::shared_ptr<std::byte> take(std::size_t bytes, const std::shared_ptr<DeviceCopies>& device, Status& why_not);

 private:
  class Pages;

  std::unique_ptr<Pages> make(std::size_t bytes, const std::shared_ptr<DeviceCopies>& device, Status& why_not);

  const std::weak_ptr<Communicator> runtime_;
  IdlePool<Pages> pool_;
  std::atomic<bool> is_refused_ = false;
};

}  // namespace herring::runtime
