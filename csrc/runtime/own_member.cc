#include "runtime/own_member.h"

#include <unistd.h>

#include <utility>

#include "core/numa.h"
#include "core/process.h"
#include "intra_node/neighborhood.h"

namespace herring::runtime {
namespace {

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? std::string(name) : std::string("unknown host");
}

}  // namespace

Member own_member(Role role, std::uint32_t rank, std::string launch) {
  Member member;
  member.role = role;
  member.rank = rank;
  member.pid = static_cast<std::uint32_t>(process_id());
  member.host_identity = intra_node::host_identity();
  member.host_name = host_name();
  member.launch = std::move(launch);
  member.nodes = nodes_of_process();
  return member;
}

}  // namespace herring::runtime
