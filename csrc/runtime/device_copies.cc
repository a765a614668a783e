#include "runtime/device_copies.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

namespace herring::runtime {
namespace {

Status forked() {
  return {Code::kShutdown, "this is a forked child of the process that uses the GPU; start it with spawn"};
}

void keep_first(Status& status, Status other) {
  if (status.is_ok()) status = std::move(other);
}

}  // namespace

std::shared_ptr<DeviceCopies> DeviceCopies::of(std::string_view kind, DeviceId id,
                                               const std::function<std::unique_ptr<Device>(DeviceId)>& open) {
  static auto* const mutex = new std::mutex();
  // Never destroyed: the driver goes before the process does.
  static auto* const all = new std::map<std::pair<std::string, DeviceId>, std::shared_ptr<DeviceCopies>>();
  const std::scoped_lock lock(*mutex);
  std::shared_ptr<DeviceCopies>& one = (*all)[{std::string(kind), id}];
  if (!one) one = std::make_shared<DeviceCopies>(open(id));
  return one;
}

DeviceCopies::Queue::Queue(std::shared_ptr<DeviceCopies> device, Way way) : device_(std::move(device)) {
  if (!device_->guard_.in_owner()) throw Error(forked());
  const std::scoped_lock lock(device_->mutex_);
  device_->device_->health().or_throw();
  line_.is_shared = way != Way::kOwn;
  line_.stream = line_.is_shared ? device_->stream_of(way) : device_->take_stream();
}

DeviceCopies::Queue::Queue(std::shared_ptr<DeviceCopies> device, ForeignStream stream) : device_(std::move(device)) {
  if (!device_->guard_.in_owner()) throw Error(forked());
  const std::scoped_lock lock(device_->mutex_);
  device_->device_->health().or_throw();
  line_.is_shared = true;
  line_.stream = device_->device_->adopt_stream(stream);
}

DeviceCopies::Queue::~Queue() {
  if (!device_->guard_.in_owner()) return;
  Owners gone;
  const std::scoped_lock lock(device_->mutex_);
  device_->look(gone);
  device_->take_back(std::move(line_), gone);
  for (Copy& copy : later_) gone.push_back(std::move(copy.owner));
}

Status DeviceCopies::Queue::is_capturing(bool& answer) {
  if (!device_->guard_.in_owner()) return forked();
  const std::scoped_lock lock(device_->mutex_);
  return device_->device_->is_capturing({line_.stream.value}, answer);
}

Status DeviceCopies::Queue::after(ForeignStream stream) {
  if (!device_->guard_.in_owner()) return forked();
  Owners gone;
  const std::scoped_lock lock(device_->mutex_);
  Device& device = *device_->device_;
  device_->look(gone);
  Ticket ticket;
  if (Status status = device.record(device.adopt_stream(stream), ticket); !status.is_ok()) return status;
  line_.tickets.push_back(ticket);
  return device.wait_ticket(line_.stream, ticket);
}

Status DeviceCopies::Queue::before(ForeignStream stream) {
  if (!device_->guard_.in_owner()) return forked();
  if (!later_.empty()) return Status::again();
  Owners gone;
  const std::scoped_lock lock(device_->mutex_);
  Device& device = *device_->device_;
  device_->look(gone);
  Ticket ticket;
  if (Status status = device.record(line_.stream, ticket); !status.is_ok()) return status;
  line_.tickets.push_back(ticket);
  line_.is_unmarked = false;
  return device.wait_ticket(device.adopt_stream(stream), ticket);
}

Status DeviceCopies::Queue::submit(Copy copy) {
  if (!device_->guard_.in_owner()) return forked();
  const std::scoped_lock lock(device_->mutex_);
  Device& device = *device_->device_;
  const bool is_now =
      later_.empty() && device.kind_of(reinterpret_cast<std::uint64_t>(copy.host.data())) == PointerKind::kPinned;
  if (is_now) return device_->start(line_, copy);
  if (!device.health().is_ok()) return device.health();
  later_.push_back(std::move(copy));
  line_.is_unmarked = true;
  Status status = device_->mark(line_);
  return status.is_again() ? Status::ok() : status;
}

Status DeviceCopies::Queue::to_host(std::span<std::byte> to, DeviceSpan from, std::shared_ptr<void> owner) {
  return submit({to, from, true, std::move(owner)});
}

Status DeviceCopies::Queue::to_device(DeviceSpan to, std::span<std::byte> from, std::shared_ptr<void> owner) {
  return submit({from, to, false, std::move(owner)});
}

Status DeviceCopies::Queue::inside(DeviceSpan to, DeviceSpan from) {
  return submit([&](Device& device) { return device.copy_inside(line_.stream, to, from); });
}

Status DeviceCopies::Queue::launch(KernelId kernel, std::span<const std::byte> parameters, std::uint32_t blocks) {
  return submit([&](Device& device) { return device.launch(line_.stream, kernel, parameters, blocks); });
}

Status DeviceCopies::Queue::submit(const std::function<Status(Device&)>& work) {
  if (!device_->guard_.in_owner()) return forked();
  const std::scoped_lock lock(device_->mutex_);
  Status status = work(*device_->device_);
  if (status.is_ok()) line_.is_unmarked = true;
  return status;
}

bool DeviceCopies::Queue::has_ended(Status& status) {
  if (!device_->guard_.in_owner()) {
    status = forked();
    return true;
  }
  Owners gone;
  const std::scoped_lock lock(device_->mutex_);
  device_->look(gone);
  while (true) {
    if (!device_->has_ended(line_, status_)) return false;
    if (later_.empty() || !status_.is_ok()) break;
    status_ = device_->start(line_, later_.front());
    gone.push_back(std::move(later_.front().owner));
    later_.pop_front();
    device_->look(gone);
  }
  if (!line_.is_unmarked && line_.tickets.empty()) {
    gone.insert(gone.end(), line_.owners.begin(), line_.owners.end());
    line_.owners.clear();
  }
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
  if (!guard_.in_owner()) return forked();
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

StreamHandle DeviceCopies::stream_of(Way way) {
  if (!shared_streams_.contains(way)) shared_streams_.emplace(way, device_->create_stream());
  return shared_streams_.at(way);
}

Status DeviceCopies::start(Line& line, const Copy& copy) {
  if (Status status = copy.is_to_host ? device_->copy_to_host(line.stream, copy.host, copy.there)
                                      : device_->copy_to_device(line.stream, copy.there, copy.host);
      !status.is_ok()) {
    return status;
  }
  line.owners.push_back(copy.owner);
  line.is_unmarked = true;
  Status status = mark(line);
  return status.is_again() ? Status::ok() : status;
}

Status DeviceCopies::mark(Line& line) {
  if (!line.is_unmarked) return Status::ok();
  Ticket ticket;
  Status status = device_->record(line.stream, ticket);
  if (status.is_ok()) line.tickets.push_back(ticket);
  // On a device that has failed nothing goes on.
  line.is_unmarked = !status.is_ok() && device_->health().is_ok();
  return status;
}

void DeviceCopies::look(Owners& gone) {
  std::array<TicketDone, 32> done;
  for (std::size_t count = done.size(); count == done.size();) {
    count = device_->poll(done);
    for (std::size_t i = 0; i < count; ++i) ended_.emplace(done[i].ticket, std::move(done[i].status));
  }
  std::vector<Line> rests = std::move(rests_);
  rests_.clear();
  for (Line& rest : rests) take_back(std::move(rest), gone);
}

bool DeviceCopies::has_ended(Line& line, Status& status) {
  std::erase_if(line.tickets, [&](Ticket ticket) {
    const auto found = ended_.find(ticket);
    if (found == ended_.end()) return false;
    keep_first(status, std::move(found->second));
    ended_.erase(found);
    return true;
  });
  if (Status marked = mark(line); !marked.is_ok() && !marked.is_again()) {
    keep_first(status, std::move(marked));
    return true;
  }
  return line.tickets.empty() && !line.is_unmarked;
}

void DeviceCopies::take_back(Line line, Owners& gone) {
  Status status;
  static_cast<void>(has_ended(line, status));
  if (line.is_unmarked || !line.tickets.empty()) {
    rests_.push_back(std::move(line));
    return;
  }
  if (!line.is_shared) idle_streams_.push_back(line.stream);
  gone.insert(gone.end(), line.owners.begin(), line.owners.end());
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
