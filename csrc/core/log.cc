#include "core/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/text.h"

namespace herring {
namespace {

constexpr std::size_t kMaxKeys = 256;  // Keys name call sites; more would mean that they are made from data.
constexpr int kWriteWaitMs = 100;      // Patience with a full pipe: logging must not hold a job up.

std::string_view name_of(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return "error";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kDebug:
      return "debug";
  }
  return "unknown";
}

}  // namespace

LoggerOptions logger_options(const Config& config, std::string who) {
  LoggerOptions options;
  options.level = config.log_level;
  options.who = std::move(who);
  return options;
}

Logger::Logger(LoggerOptions options)
    : options_([&] {
        if (!options.now) options.now = [] { return std::chrono::steady_clock::now(); };
        options.burst = std::max<std::uint32_t>(options.burst, 1);
        return std::move(options);
      }()) {}

std::string Logger::lines(LogLevel level, std::string_view text) const {
  std::string prefix = "herring";
  if (!options_.who.empty()) prefix.append("[").append(options_.who).append("]");
  prefix.append(" ").append(name_of(level)).append(": ");
  std::string out;
  while (true) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    out += prefix;
    out += printable(text.substr(0, end));
    out += '\n';
    text.remove_prefix(std::min(end + 1, text.size()));
    if (text.empty()) return out;
  }
}

void Logger::write_all(std::string_view text) {
  // Not every kernel moves a file's position atomically with the write.
  const std::scoped_lock lock(write_mutex_);
  while (!text.empty()) {
    const ssize_t written = ::write(options_.descriptor, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return;  // Nobody is left to tell.
    pollfd full{options_.descriptor, POLLOUT, 0};
    if (::poll(&full, 1, kWriteWaitMs) <= 0) return;
  }
}

void Logger::log(LogLevel level, std::string_view text) {
  if (is_on(level)) write_all(lines(level, text));
}

Logger::Limit& Logger::limit_of(std::string_view key, Instant now) {
  auto found = limits_.find(key);
  if (found == limits_.end()) {
    if (limits_.size() >= kMaxKeys) {
      const auto oldest = std::min_element(limits_.begin(), limits_.end(), [](const auto& a, const auto& b) {
        return a.second.period_start < b.second.period_start;
      });
      limits_.erase(oldest);
    }
    found = limits_.emplace(std::string(key), Limit{now, 0, 0}).first;
  }
  if (now - found->second.period_start >= options_.period) {
    found->second.period_start = now;
    found->second.written = 0;
  }
  return found->second;
}

void Logger::log_limited(LogLevel level, std::string_view key, std::string_view text) {
  if (!is_on(level)) return;
  std::uint64_t held_back = 0;
  {
    const std::scoped_lock lock(mutex_);
    Limit& limit = limit_of(key, options_.now());
    if (limit.written >= options_.burst) {
      ++limit.held_back;
      ++suppressed_;
      return;
    }
    ++limit.written;
    held_back = std::exchange(limit.held_back, 0);
  }
  if (held_back == 0) {
    log(level, text);
  } else {
    log(level, std::string(text) + " (and " + std::to_string(held_back) + " more like this)");
  }
}

std::uint64_t Logger::suppressed() const {
  const std::scoped_lock lock(mutex_);
  return suppressed_;
}

}  // namespace herring
