#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "core/config.h"
#include "core/types.h"

namespace herring {

struct LoggerOptions {
  LogLevel level = LogLevel::kWarning;  ///< This and what is more important is written.
  std::string who;                      ///< "rank 3", "server 1": stands in front of every line.
  int descriptor = 2;                   ///< Where lines go; borrowed for the life of the logger. 2: stderr.
  std::uint32_t burst = 5;              ///< Limited messages of one key that are written in one period.
  Duration period = std::chrono::seconds(10);
  std::function<Instant()> now;  ///< Empty: the monotonic clock.
};

/// For this process, or a part of it, at the level that was set.
LoggerOptions logger_options(const Config& config, std::string who);

/// Lines for people, one owner, passed to what needs it. Any thread. "herring[rank 3] warning: text": whole lines in
/// one write, so that those of several processes do not mix. What would steer a terminal is shown as '?'
/// (core/text.h): texts may come from peers.
class Logger final {
 public:
  explicit Logger(LoggerOptions options);
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool is_on(LogLevel level) const noexcept { return level <= options_.level; }

  void log(LogLevel level, std::string_view text);
  /// For what may repeat (a stray packet, a retry): after `burst` messages of a key within a period the rest are only
  /// counted, and the next one that is written says how many. `key` names the call site: "server.rejected".
  void log_limited(LogLevel level, std::string_view key, std::string_view text);

  std::uint64_t suppressed() const;  ///< Limited messages not written, over all keys.

 private:
  struct Limit {
    Instant period_start;
    std::uint32_t written = 0;
    std::uint64_t held_back = 0;
  };

  std::string lines(LogLevel level, std::string_view text) const;
  void write_all(std::string_view text);
  Limit& limit_of(std::string_view key, Instant now);

  const LoggerOptions options_;
  std::mutex write_mutex_;
  mutable std::mutex mutex_;  // Guards all below.
  std::map<std::string, Limit, std::less<>> limits_;
  std::uint64_t suppressed_ = 0;
};

}  // namespace herring
