#include "runtime/device_copies.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

namespace herring::runtime {
DeviceCopies::Queue::Queue(std::shared_ptr<DeviceCopies> device) : device_(std::move(device)) {
  const std::scoped_lock lock(device_->mutex_);
  device_->device_->health().or_throw();
  stream_ = device_->take_stream();
}

DeviceCopies::Queue::~Queue() {
  if (!device_->guard_.in_owner()) return;
  Owners gone;
  const std::scoped_lock lock(device_->mutex_);
  device_->look(gone);
  static_cast<void>(device_->take_ended(tickets_));
  if (tickets_.empty()) {
    device_->idle_streams_.push_back(stream_);
    gone.insert(gone.end(), owners_.begin(), owners_.end());
    owners_.clear();
  } else {
    device_->rests_.push_back({stream_, std::move(tickets_), std::move(owners_)});
  }
}

Status DeviceCopies::Queue::is_capturing(bool& answer) {
  const std::scoped_lock lock(device_->mutex_);
  return device_->device_->is_capturing({stream_.value}, answer);
}

template <class Copy>
Status DeviceCopies::Queue::submit(std::shared_ptr<void> owner, const Copy& copy) {
  Owners gone;
  const std::scoped_lock lock(device_->mutex_);
  Status status = copy(*device_->device_);
  Ticket ticket;
  while (status.is_ok()) {
    status = device_->device_->record(stream_, ticket);
    if (!status.is_again()) break;
    device_->look(gone);
    status = Status::ok();
  }
  if (status.is_ok()) {
    tickets_.push_back(ticket);
    owners_.push_back(std::move(owner));
  }
  return status;
}

Status DeviceCopies::Queue::to_host(std::span<std::byte> to, DeviceSpan from, std::shared_ptr<void> owner) {
  return submit(std::move(owner), [&](Device& device) { return device.copy_to_host(stream_, to, from); });
}

Status DeviceCopies::Queue::to_device(DeviceSpan to, std::span<const std::byte> from, std::shared_ptr<void> owner) {
  return submit(std::move(owner), [&](Device& device) { return device.copy_to_device(stream_, to, from); });
}

bool DeviceCopies::Queue::has_ended(Status& status) {
  Owners gone;
  const std::scoped_lock lock(device_->mutex_);
  device_->look(gone);
  const Status ended = device_->take_ended(tickets_);
  if (status_.is_ok()) status_ = ended;
  if (!tickets_.empty()) return false;
  gone.insert(gone.end(), owners_.begin(), owners_.end());
  owners_.clear();
  status = status_;
  return true;
}

bool DeviceCopies::Queue::wait(Instant deadline, Status& status) {
  constexpr std::chrono::microseconds kLongestNap(200);
  std::chrono::microseconds nap(5);
  while (!has_ended(status)) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, kLongestNap);
  }
  return true;
}

Status DeviceCopies::pin(std::span<std::byte> memory) {
  const std::scoped_lock lock(mutex_);
  return device_->pin(memory);
}

void DeviceCopies::unpin(std::span<std::byte> memory) {
  if (!guard_.in_owner()) return;
  const std::scoped_lock lock(mutex_);
  static_cast<void>(device_->unpin(memory));  // Where the driver has gone, nothing is pinned any more.
}

StreamHandle DeviceCopies::take_stream() {
  if (idle_streams_.empty()) return device_->create_stream();
  const StreamHandle stream = idle_streams_.back();
  idle_streams_.pop_back();
  return stream;
}

void DeviceCopies::look(Owners& gone) {
  std::array<TicketDone, 32> done;
  for (std::size_t count = done.size(); count == done.size();) {
    count = device_->poll(done);
    for (std::size_t i = 0; i < count; ++i) ended_.emplace(done[i].ticket, std::move(done[i].status));
  }
  std::erase_if(rests_, [&](Rest& rest) {
    static_cast<void>(take_ended(rest.tickets));
    if (!rest.tickets.empty()) return false;
    idle_streams_.push_back(rest.stream);
    gone.insert(gone.end(), rest.owners.begin(), rest.owners.end());
    return true;
  });
}

Status DeviceCopies::take_ended(std::vector<Ticket>& tickets) {
  Status status;
  std::erase_if(tickets, [&](Ticket ticket) {
    const auto found = ended_.find(ticket);
    if (found == ended_.end()) return false;
    if (status.is_ok()) status = std::move(found->second);
    ended_.erase(found);
    return true;
  });
  return status;
}

/// Pinned as long as it lives.
class PinnedMemory::Pages final {
 public:
  /// Throws Error.
  Pages(std::shared_ptr<std::byte> memory, std::size_t bytes, std::shared_ptr<DeviceCopies> device)
      : memory_(std::move(memory)), bytes_(bytes), device_(std::move(device)) {
    device_->pin({memory_.get(), bytes_}).or_throw();
  }
  ~Pages() { device_->unpin({memory_.get(), bytes_}); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<std::byte> memory_;
  const std::size_t bytes_;
  const std::shared_ptr<DeviceCopies> device_;
};

PinnedMemory::PinnedMemory(std::weak_ptr<Communicator> runtime) : runtime_(std::move(runtime)) {}

PinnedMemory::~PinnedMemory() = default;

std::shared_ptr<std::byte> PinnedMemory::take(std::size_t bytes, const std::shared_ptr<DeviceCopies>& device,
                                              Status& why_not) {
  if (bytes < kLeastBytes) return nullptr;
  std::unique_ptr<Pages> pages = pool_.find(bytes, [](const Pages&) { return true; });
  if (!pages) pages = make(pooled_bytes(bytes), device, why_not);
  while (!pages && !is_refused_) {
    // The arena is used up, perhaps by sizes that nobody asks for any more.
    if (!pool_.oldest()) return nullptr;
    pages = make(pooled_bytes(bytes), device, why_not);
  }
  if (!pages) return nullptr;
  pool_.lend(*pages);
  std::byte* const start = pages->data();
  return {start, [home = weak_from_this(), held = pages.release()](std::byte*) {
            std::unique_ptr<Pages> back(held);
            if (const auto self = home.lock()) self->pool_.give_back(std::move(back));
          }};
}

std::unique_ptr<PinnedMemory::Pages> PinnedMemory::make(std::size_t bytes, const std::shared_ptr<DeviceCopies>& device,
                                                        Status& why_not) {
  if (is_refused_) return nullptr;
  const auto runtime = runtime_.lock();
  std::shared_ptr<std::byte> memory = runtime ? runtime->allocate(bytes) : nullptr;
  if (!memory) return nullptr;
  try {
    return std::make_unique<Pages>(std::move(memory), bytes, device);
  } catch (const Error& error) {
    if (!is_refused_.exchange(true)) why_not = error.status();
    return nullptr;
  }
}

}  // namespace herring::runtime
