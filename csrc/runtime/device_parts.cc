#include "runtime/device_parts.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "staging/pump.h"

namespace herring::runtime {
namespace {

constexpr staging::OperationId kOnly{1};
// The runtime has a time limit of its own for what is here, and names who is missing.
constexpr Duration kNoHaste = std::chrono::hours(24 * 365);

class Parts final : public DeviceParts, private staging::Owner {
 public:
  Parts(Device& device, Options options)
      : options_(std::move(options)),
        count_(static_cast<std::uint32_t>((options_.tensor.bytes + options_.part_bytes - 1) / options_.part_bytes)),
        has_come_(count_),
        is_answered_(count_),
        pump_(device, options_.out, options_.back, {.slots = count_, .part_bytes = options_.part_bytes}, options_.host,
              *this) {}

  void begin(Instant now) {
    staging::Job job;
    job.input = job.output = options_.tensor;
    job.deadline = now + kNoHaste;
    job.until = staging::Until::kSubmitted;
    const Status status = pump_.submit(now, kOnly, job);
    if (!status.is_ok()) throw Error(status.code(), status.message());
  }

  std::uint64_t bytes_there() const override { return there_.load(std::memory_order_acquire); }

  Status status() const override {
    const std::scoped_lock lock(mutex_);
    return status_;
  }

  void on_result(std::uint64_t offset, std::uint64_t) override {
    const std::scoped_lock lock(mutex_);
    results_.push_back(static_cast<std::uint32_t>(offset / options_.part_bytes));
  }

  void host_ended(const Status& status) override {
    const std::scoped_lock lock(mutex_);
    host_end_ = status;
  }

  Turn run(Instant now) override {
    std::vector<std::uint32_t> results;
    std::optional<Status> host_end;
    {
      const std::scoped_lock lock(mutex_);
      results.swap(results_);
      host_end.swap(host_end_);
    }
    for (const std::uint32_t part : results) answer(now, part, Status::ok());
    if (host_end) end_host(now, *host_end);
    if (!has_ended_ && there_.load() < options_.tensor.bytes && now >= options_.deadline) {
      pump_.cancel(now, kOnly,
                   {Code::kTimeout, "the tensor was not ready in time: a kernel that writes it has not ended"});
    }
    const bool has_moved = pump_.run(now) || !results.empty() || host_end;
    return {has_moved, std::exchange(has_news_, false)};
  }

  bool has_ended() const override { return has_ended_; }
  bool is_released() const override { return is_released_; }

 private:
  void answer(Instant now, std::uint32_t part, const Status& status) {
    if (!has_come_[part] || is_answered_[part]) return;
    is_answered_[part] = true;
    pump_.reduced(now, kOnly, part, status);
  }

  /// Nothing that the runtime has not answered for by now will it answer for.
  void end_host(Instant now, const Status& status) {
    const Status why = status.is_ok() ? Status(Code::kInternal, "a part was not reduced") : status;
    is_host_over_ = true;
    if (!status.is_ok()) pump_.cancel(now, kOnly, status);
    for (std::uint32_t part = 0; part < count_; ++part) answer(now, part, why);
  }

  void reduce(const staging::Part& part, std::span<std::byte> memory) override {
    has_come_[part.index] = true;
    // The engine hands out slots in the order of the parts, so a slot is the part's own place.
    const bool is_in_place = memory.data() == options_.host.data() + part.offset;
    if (!is_in_place || is_host_over_) {
      const Status why(Code::kInternal, "a part was copied to another part's place, or after the end");
      is_answered_[part.index] = true;
      pump_.reduced({}, kOnly, part.index, why);
      return;
    }
    while (next_ < count_ && has_come_[next_]) ++next_;
    there_.store(std::min(next_ * options_.part_bytes, std::uint64_t{options_.tensor.bytes}),
                 std::memory_order_release);
    has_news_ = true;
  }

  void abandon(const staging::Part&) override {}  // The runtime ends all of it: status().

  void complete(staging::OperationId, const Status& status) override {
    has_ended_ = true;
    if (status.is_ok()) return;
    has_news_ = true;
    const std::scoped_lock lock(mutex_);
    status_ = status;
  }

  void release(staging::OperationId) override { is_released_ = true; }

  const Options options_;
  const std::uint32_t count_;
  std::atomic<std::uint64_t> there_{0};
  mutable std::mutex mutex_;
  std::vector<std::uint32_t> results_;  ///< Parts, guarded by mutex_, as these:
  std::optional<Status> host_end_;
  Status status_;
  // Of the thread that calls run():
  std::vector<bool> has_come_;     ///< By part.
  std::vector<bool> is_answered_;  ///< By part.
  std::uint64_t next_ = 0;         ///< The first part that has not come.
  bool is_host_over_ = false;
  bool has_news_ = false;
  std::atomic<bool> has_ended_{false};
  std::atomic<bool> is_released_{false};
  staging::Pump pump_;
};

}  // namespace

std::shared_ptr<DeviceParts> DeviceParts::start(Instant now, Device& device, Options options) {
  if (options.part_bytes == 0 || options.tensor.empty()) {
    throw Error(Code::kInvalidArgument, "a tensor in parts needs bytes, and parts that have some");
  }
  auto parts = std::make_shared<Parts>(device, std::move(options));
  parts->begin(now);
  return parts;
}

}  // namespace herring::runtime
