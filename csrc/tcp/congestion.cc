#include "tcp/congestion.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/descriptors.h"
#include "core/first_line.h"
#include "core/status.h"
#include "tcp/text.h"

namespace herring::tcp {
namespace {

constexpr std::size_t kMostName = 16;  // TCP_CA_NAME_MAX

bool set(int socket, const std::string& name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

std::string allowed() { return first_line("/proc/sys/net/ipv4/tcp_allowed_congestion_control"); }

/// On a socket that goes nowhere.
void check(const std::string& name) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP);
  if (socket < 0) throw Error(Code::kTransport, "socket: " + error_text(errno) + descriptor_hint());
  const bool is_set = set(socket, name);
  const int error = errno;
  close(socket);
  if (is_set) return;
  const std::string why = error == ENOENT ? "this kernel has no such congestion control" : error_text(error);
  throw Error(Code::kUnavailable, "HERRING_TCP_CONGESTION=" + name + ": " + why +
                                      ". Possible: auto, system, or what every user may take here: " + allowed());
}

}  // namespace

CongestionControl::CongestionControl(const std::string& wanted) : is_auto_(wanted == kAuto) {
  if (is_auto_) {
    // Linux lets everybody have reno, and cubic where it is the default or the administrator allows it.
    names_ = {"cubic", "reno"};
  } else if (wanted != kSystem) {
    check(wanted);
    names_ = {wanted};
  }
}

void CongestionControl::apply(int socket) const {
  if (names_.empty() || (is_auto_ && !of(socket).starts_with("bbr"))) return;
  for (const std::string& name : names_) {
    if (set(socket, name)) return;
  }
}

std::string CongestionControl::of(int socket) {
  std::array<char, kMostName> name{};
  socklen_t length = name.size();
  if (getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &length) != 0) return {};
  return std::string(name.data(), strnlen(name.data(), length));
}

}  // namespace herring::tcp
