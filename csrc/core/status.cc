#include "core/status.h"

#include <utility>

#include "core/text.h"

namespace herring {

struct Status::Detail {
  Code code;
  std::string message;
};

std::string_view name(Code code) noexcept {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kAgain:
      return "again";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kMismatch:
      return "mismatch";
    case Code::kTimeout:
      return "timeout";
    case Code::kPeerLost:
      return "peer lost";
    case Code::kProtocol:
      return "protocol";
    case Code::kTransport:
      return "transport";
    case Code::kShutdown:
      return "shutdown";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal";
    case Code::kCorrupted:
      return "corrupted";
    case Code::kNotFinite:
      return "not finite";
  }
  return "unknown";
}

Status::Status(Code code, std::string message) {
  if (code != Code::kOk) detail_ = std::make_shared<const Detail>(Detail{code, printable(message)});
}

Status Status::again() noexcept {
  // One shared instance: "again" is common on the data path and must not allocate.
  static const Status instance(Code::kAgain, "queue full");
  return instance;
}

Code Status::code() const noexcept { return detail_ ? detail_->code : Code::kOk; }

const std::string& Status::message() const noexcept {
  static const std::string empty;
  return detail_ ? detail_->message : empty;
}

std::string Status::to_string() const {
  if (is_ok()) return "ok";
  return std::string(name(code())) + ": " + message();
}

void Status::or_throw() const {
  if (!is_ok()) throw Error(*this);
}

Error::Error(Status status) : status_(std::move(status)), text_(status_.to_string()) {}

}  // namespace herring
