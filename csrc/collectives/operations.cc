#include "collectives/operations.h"
#include "core/clock.h"
#include "core/log.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace herring::collectives {
namespace {

using runtime::Communicator;
using runtime::Request;
using runtime::Work;

// Past this a bucket saves no more than its copies cost.
constexpr std::uint64_t kMostTensorBytes = 1 << 20;

FusionSettings settings_of(const Config& config, std::uint32_t rank) {
  FusionSettings settings;
  settings.engine.bucket_bytes = config.fusion_bytes;
  settings.engine.cycle = std::chrono::milliseconds(config.fusion_cycle_ms);
  settings.tensor_bytes = std::min<std::uint64_t>(config.fusion_bytes, kMostTensorBytes);
  settings.checks_finite = config.check_finite == Toggle::kOn;
  settings.timeout = duration_of(config.timeout_s);
  settings.stall_warning = duration_of(config.stall_warning_s);
  settings.warn = [logger = std::make_shared<Logger>(logger_options(config, "rank " + std::to_string(rank)))](
                      const std::string& text) { logger->log(LogLevel::kWarning, text); };
  settings.queues_names = true;
  return settings;
}

bool may_travel(const Request& request) {
  return request.descriptor.collective == Collective::kAllReduce && !request.is_waited_for && !request.has_backup &&
         !request.timeout;
}

std::span<const std::byte> source_of(const Request& request) {
  return request.input.empty() ? std::span<const std::byte>(request.output) : request.input;
}

/// What the runtime says of an operation by its key, with its name.
Status with_name(const Status& status, const std::string& name) {
  if (status.is_ok() || status.message().find("'" + name + "'") != std::string::npos) return status;
  return {status.code(), "'" + name + "': " + status.message()};
}

/// An operation with a name, of which a Fusion knows: in a bucket, or outside when its turn has come.
class Ticketed final : public Work, public std::enable_shared_from_this<Ticketed> {
 public:
  Ticketed(std::shared_ptr<Fusion> fusion, const std::shared_ptr<Communicator>& runtime, const Request& request)
      : fusion_(std::move(fusion)), runtime_(runtime), request_(request) {}
  ~Ticketed() override {
    if (ticket_ != 0) static_cast<void>(fusion_->forget(ticket_));
  }
  Ticketed(const Ticketed&) = delete;
  Ticketed& operator=(const Ticketed&) = delete;

  void set_ticket(Ticket ticket) { ticket_ = ticket; }

  bool is_done() const override {
    if (is_over_.load(std::memory_order_acquire)) return true;
    const Fusion::State state = fusion_->state(ticket_);
    if (state == Fusion::State::kDone) is_over_.store(true, std::memory_order_release);
    return state == Fusion::State::kDone || (state == Fusion::State::kAlone && alone_->is_done());
  }
  bool wait(Instant deadline) override {
    const Fusion::State state = fusion_->wait(ticket_, deadline);
    return state == Fusion::State::kDone || (state == Fusion::State::kAlone && alone_->wait(deadline));
  }
  std::shared_ptr<void> block(bool from_pool) override {
    return runtime_->block([self = shared_from_this()] { return self->awaited(); }, from_pool);
  }
  Status status() const override {
    Fusion::Outcome outcome = fusion_->outcome(ticket_);
    if (outcome.state != Fusion::State::kAlone) return std::move(outcome.status);
    return with_name(alone_->status(), *request_.name);
  }
  std::vector<std::uint32_t> contributors() const override {
    return is_alone() ? alone_->contributors() : std::vector<std::uint32_t>();
  }
  void on_done(std::function<void(const Status&)> callback) override {
    fusion_->on_end(ticket_, [self = shared_from_this(), callback = std::move(callback)](Fusion::State state) {
      if (state != Fusion::State::kAlone) return callback(self->status());
      self->alone_->on_done([self, callback](const Status&) { callback(self->status()); });
    });
  }

  /// Of its own, now.
  void go_alone() {
    alone_ = runtime_->submit(request_);
    alone_->on_done([fusion = fusion_, name = *request_.name](const Status&) { fusion->came_back(name); });
  }

 private:
  bool is_alone() const { return fusion_->state(ticket_) == Fusion::State::kAlone; }
  runtime::Awaited awaited() const {
    return is_alone() ? runtime::Awaited{alone_.get(), {}, alone_} : fusion_->awaited(ticket_);
  }

  const std::shared_ptr<Fusion> fusion_;
  const std::shared_ptr<Communicator> runtime_;
  const Request request_;
  Ticket ticket_ = 0;                         // Set before anybody has this.
  std::shared_ptr<Work> alone_;               // Written before the ticket says that it goes alone.
  mutable std::atomic<bool> is_over_{false};  // In a bucket, and somebody has seen that.
};

/// Outside of its group's Fusion. Where the caller waits no callback is needed to tell the end.
class Outside final : public Work {
 public:
  Outside(std::shared_ptr<Work> work, std::shared_ptr<Fusion> fusion, std::string name, bool is_waited_for)
      : work_(std::move(work)), fusion_(std::move(fusion)), name_(std::move(name)) {
    if (!is_waited_for) come_back_when_done();
  }
  ~Outside() override { come_back_when_done(); }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

  bool is_done() const override { return work_->is_done() && come_back(); }
  bool wait(Instant deadline) override { return work_->wait(deadline) && come_back(); }
  std::shared_ptr<void> block(bool from_pool) override { return work_->block(from_pool); }
  Status status() const override { return with_name(work_->status(), name_); }
  void on_done(std::function<void(const Status&)> callback) override {
    work_->on_done(
        [callback = std::move(callback), name = name_](const Status& status) { callback(with_name(status, name)); });
  }
  std::vector<std::uint32_t> contributors() const override { return work_->contributors(); }

 private:
  bool come_back() const {
    if (!has_come_back_.exchange(true)) fusion_->came_back(name_);
    return true;
  }
  void come_back_when_done() {
    if (has_come_back_.exchange(true)) return;
    work_->on_done([fusion = fusion_, name = name_](const Status&) { fusion->came_back(name); });
  }

  const std::shared_ptr<Work> work_;
  const std::shared_ptr<Fusion> fusion_;
  const std::string name_;
  mutable std::atomic<bool> has_come_back_{false};
};

}  // namespace

Operations::Operations(std::shared_ptr<Communicator> runtime, const Config& config)
    : runtime_(std::move(runtime)), settings_(settings_of(config, runtime_->rank())) {
  if (settings_.engine.bucket_bytes == 0) return;
  std::vector<std::uint32_t> ranks(runtime_->size());
  std::iota(ranks.begin(), ranks.end(), 0U);
  open(GroupId{0}, ranks);
}

Operations::~Operations() { close(std::chrono::steady_clock::now()); }

void Operations::open(GroupId id, std::span<const std::uint32_t> ranks) {
  if (settings_.engine.bucket_bytes == 0 || ranks.size() == 1) return;
  FusionSettings settings = settings_;
  const auto place = std::ranges::find(ranks, runtime_->rank());
  settings.engine.index = static_cast<std::uint32_t>(place - ranks.begin());
  auto fusion = std::make_shared<Fusion>(runtime_, fused_group(id), ranks, settings,
                                         [](Ticket, const std::shared_ptr<void>& owner) {
                                           static_cast<Ticketed*>(owner.get())->go_alone();
                                           return Status::ok();
                                         });
  const std::scoped_lock lock(mutex_);
  groups_[id.value] = std::move(fusion);
}

void Operations::close(GroupId id, Instant deadline) { close(id, deadline, Fusion::Leaving::kGroup); }

void Operations::close(GroupId id, Instant deadline, Fusion::Leaving leaving) {
  std::shared_ptr<Fusion> fusion;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = groups_.find(id.value);
    if (found == groups_.end()) return;
    fusion = std::move(found->second);
    groups_.erase(found);
  }
  fusion->close(deadline, leaving);
  runtime_->remove_group(fused_group(id));
}

void Operations::close(Instant deadline) {
  std::vector<std::uint32_t> ids;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [id, fusion] : groups_) ids.push_back(id);
  }
  for (const std::uint32_t id : ids) close(GroupId{id}, deadline, Fusion::Leaving::kJob);
}

/// Null where its name is nobody's business.
std::shared_ptr<Fusion> Operations::fusion_of(const Request& request) const {
  if (!request.name) return nullptr;
  const std::scoped_lock lock(mutex_);
  const auto found = groups_.find(request.group.value);
  return found == groups_.end() ? nullptr : found->second;
}

std::shared_ptr<Work> Operations::submit(const Request& request) {
  const std::shared_ptr<Fusion> fusion = fusion_of(request);
  if (!fusion) return runtime_->submit(request);
  if (!may_travel(request)) return submit_outside(fusion, request);
  TensorSpec spec;
  spec.descriptor = request.descriptor;
  const auto work = std::make_shared<Ticketed>(fusion, runtime_, request);
  const auto ticket = fusion->submit({*request.name, spec, source_of(request), request.output, work});
  if (!ticket) return begin_outside(fusion, request);
  work->set_ticket(*ticket);
  return work;
}

TensorRow Operations::place(GroupId group, std::span<const NamedBytes> tensors) {
  std::shared_ptr<Fusion> fusion;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = groups_.find(group.value);
    if (found != groups_.end()) fusion = found->second;
  }
  return fusion ? fusion->place(tensors) : make_row(*runtime_, tensors);
}

std::shared_ptr<Work> Operations::submit_alone(const Request& request) {
  const std::shared_ptr<Fusion> fusion = fusion_of(request);
  return fusion ? submit_outside(fusion, request) : runtime_->submit(request);
}

std::shared_ptr<Work> Operations::submit_outside(const std::shared_ptr<Fusion>& fusion, const Request& request) {
  const auto work = std::make_shared<Ticketed>(fusion, runtime_, request);
  const auto ticket = fusion->queue_outside(*request.name, work);
  if (!ticket) return begin_outside(fusion, request);
  work->set_ticket(*ticket);
  return work;
}

/// Its turn has come, and went_outside() has been done.
std::shared_ptr<Work> Operations::begin_outside(const std::shared_ptr<Fusion>& fusion, const Request& request) {
  return std::make_shared<Outside>(runtime_->submit(request), fusion, *request.name, request.is_waited_for);
}

std::shared_ptr<Work> Operations::run(const Request& request, Status& status) {
  const std::shared_ptr<Fusion> fusion = fusion_of(request);
  if (!fusion) return runtime_->run(request, status);
  if (!fusion->go_outside(*request.name)) return submit_outside(fusion, request);
  std::shared_ptr<Work> work = runtime_->run(request, status);
  if (work) return std::make_shared<Outside>(std::move(work), fusion, *request.name, true);
  fusion->came_back(*request.name);
  status = with_name(status, *request.name);
  return nullptr;
}

}  // namespace herring::collectives
