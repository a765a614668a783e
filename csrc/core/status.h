#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

namespace herring {

/// Why something did not happen. Numbers are part of the wire format (Error messages carry them).
enum class Code : std::uint8_t {
  kOk = 0,
  kAgain = 1,            ///< A queue is full; nothing happened; try again after polling.
  kInvalidArgument = 2,  ///< The caller's value is bad; the message names it.
  kMismatch = 3,         ///< Ranks disagree about an operation; the message says who said what.
  kTimeout = 4,          ///< A deadline passed; the message names who is missing.
  kPeerLost = 5,         ///< A process died, stopped answering, or left.
  kProtocol = 6,         ///< A peer sent something that no correct peer sends.
  kTransport = 7,        ///< A network or system call failed; the message names the call and the peer.
  kShutdown = 8,         ///< The runtime is stopping or stopped.
  kUnavailable = 9,      ///< Something needed is not on this machine (a library, a device).
  kCancelled = 10,       ///< Given up on purpose by its owner.
  kInternal = 11,        ///< A bug in Herring.
  kCorrupted = 12,       ///< Data arrived damaged, again and again; the message names the peer.
  kNotFinite = 13,       ///< A tensor holds NaN or infinity; the message names the rank and where.
};

inline constexpr Code kLastCode = Code::kNotFinite;

/// "timeout", "mismatch", ...
std::string_view name(Code code) noexcept;

/// The result of a data-path call. Ok costs one null pointer; anything else carries a code and a message for people:
/// what failed, with whom, how many bytes, what to do next. Copies share the text. Safe to read from any thread.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;  // Ok.
  Status(Code code, std::string message);

  static Status ok() noexcept { return {}; }
  static Status again() noexcept;

  bool is_ok() const noexcept { return detail_ == nullptr; }
  bool is_again() const noexcept { return code() == Code::kAgain; }
  Code code() const noexcept;
  const std::string& message() const noexcept;
  /// "timeout: rank 3 has not called all_reduce ..."; "ok" where is_ok().
  std::string to_string() const;
  /// Throws Error where not ok.
  void or_throw() const;

 private:
  struct Detail;
  std::shared_ptr<const Detail> detail_;
};

/// What set-up throws. The data path returns Status instead.
class Error : public std::exception {
 public:
  explicit Error(Status status);
  Error(Code code, std::string message) : Error(Status(code, std::move(message))) {}
  const char* what() const noexcept override { return text_.c_str(); }
  const Status& status() const noexcept { return status_; }

 private:
  Status status_;
  std::string text_;
};

}  // namespace herring
