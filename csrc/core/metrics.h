#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/status.h"

namespace herring {

/// Counts up. Any thread; add() is one relaxed atomic addition. Alone on its cache line, so that two threads that count
/// different things do not slow each other down.
class alignas(64) Counter final {
 public:
  void add(std::uint64_t count = 1) noexcept { value_.fetch_add(count, std::memory_order_relaxed); }
  std::uint64_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// A level that goes up and down. Any thread.
class alignas(64) Gauge final {
 public:
  void set(std::uint64_t value) noexcept { value_.store(value, std::memory_order_relaxed); }
  /// Keeps the highest of all values given.
  void raise_to(std::uint64_t value) noexcept {
    std::uint64_t seen = value_.load(std::memory_order_relaxed);
    while (seen < value && !value_.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }
  std::uint64_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// The named counters and gauges of one owner (a runtime, a server). Whoever counts asks once for the counter by name,
/// at set-up, and keeps the reference, which is good for the life of the Metrics.
class Metrics final {
 public:
  Metrics() = default;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// The counter of that name, made on first use. Throws Error(kInternal) where the name is a gauge's. Any thread;
  /// takes a lock.
  Counter& counter(std::string_view name) { return find<Counter>(name); }
  Gauge& gauge(std::string_view name) { return find<Gauge>(name); }

  /// All values, by name. Each value is exact; they need not be of the same moment.
  std::vector<std::pair<std::string, std::uint64_t>> snapshot() const {
    const std::scoped_lock lock(mutex_);
    std::vector<std::pair<std::string, std::uint64_t>> values;
    values.reserve(entries_.size());
    for (const auto& [name, entry] : entries_) {
      values.emplace_back(name, std::visit([](const auto& owned) { return owned->value(); }, entry));
    }
    return values;
  }

 private:
  using Entry = std::variant<std::unique_ptr<Counter>, std::unique_ptr<Gauge>>;

  template <class Kind>
  Kind& find(std::string_view name) {
    const std::scoped_lock lock(mutex_);
    auto found = entries_.find(name);
    if (found == entries_.end()) found = entries_.emplace(std::string(name), std::make_unique<Kind>()).first;
    auto* const owned = std::get_if<std::unique_ptr<Kind>>(&found->second);
    if (owned == nullptr) {
      throw Error(Code::kInternal, "metric " + std::string(name) + " is asked for as a counter and as a gauge");
    }
    return **owned;
  }

  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace herring
