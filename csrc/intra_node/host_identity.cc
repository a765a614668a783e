#include <sys/utsname.h>
#include <unistd.h>

#include <string>

#include "core/first_line.h"
#include "intra_node/neighborhood.h"

namespace herring::intra_node {
namespace {

std::string link_target(const char* path) {
  char target[128] = {};
  const ssize_t length = readlink(path, target, sizeof(target) - 1);
  return length > 0 ? std::string(target, static_cast<std::size_t>(length)) : std::string();
}

}  // namespace

std::string host_identity() {
  utsname names{};
  const std::string host = uname(&names) == 0 ? names.nodename : "unknown-host";
  // Different users may not share memory: to them it is another host.
  return first_line("/proc/sys/kernel/random/boot_id") + "/" + link_target("/proc/self/ns/net") + "/" +
         link_target("/proc/self/ns/ipc") + "/uid:" + std::to_string(geteuid()) + "/" + host;
}

}  // namespace herring::intra_node
