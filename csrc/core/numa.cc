#include "core/numa.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "core/first_line.h"
#include "core/text.h"

namespace herring {
namespace {

constexpr std::uint32_t kMostNodes = 64;

struct Range {
  std::uint32_t first = 0;
  std::uint32_t last = 0;
};

/// What cannot be read is no range.
std::vector<Range> ranges_of(const std::string& list) {
  std::vector<Range> ranges;
  for (const std::string& item : split_list(list)) {
    std::istringstream text(item);
    Range range;
    char dash = 0;
    if (!(text >> range.first)) continue;
    range.last = range.first;
    if (text >> dash && !(text >> range.last)) continue;
    ranges.push_back(range);
  }
  return ranges;
}

}  // namespace

NumaNodes nodes_of_cores(std::span<const std::uint32_t> cores, std::span<const std::string> cores_of_node) {
  if (cores_of_node.size() > kMostNodes) return 0;
  NumaNodes with_cores = 0;
  NumaNodes found = 0;
  for (std::size_t node = 0; node < cores_of_node.size(); ++node) {
    const std::vector<Range> ranges = ranges_of(cores_of_node[node]);
    if (!ranges.empty()) with_cores |= NumaNodes{1} << node;
    const auto is_here = [&ranges](std::uint32_t core) {
      return std::ranges::any_of(ranges,
                                 [core](const Range& range) { return range.first <= core && core <= range.last; });
    };
    if (std::ranges::any_of(cores, is_here)) found |= NumaNodes{1} << node;
  }
  return found == with_cores ? 0 : found;
}

NumaNodes nodes_of_process() {
  cpu_set_t allowed;
  // A machine with more cores than the set has bits: not known.
  if (sched_getaffinity(getpid(), sizeof(allowed), &allowed) != 0) return 0;
  std::vector<std::uint32_t> cores;
  for (std::uint32_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  std::vector<std::string> cores_of_node;
  for (std::uint32_t node = 0; node < kMostNodes; ++node) {
    cores_of_node.push_back(first_line("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist"));
  }
  return nodes_of_cores(cores, cores_of_node);
}

int node_of_pci_device(const std::string& address) {
  std::istringstream text(first_line("/sys/bus/pci/devices/" + address + "/numa_node"));
  int node = kUnknownNode;
  return text >> node && node >= 0 ? node : kUnknownNode;
}

}  // namespace herring
