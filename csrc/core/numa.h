#pragma once

#include <cstdint>
#include <span>
#include <string>

/// Which of a machine's NUMA nodes a process or a device is on: memory and cards of its own node are near.
namespace herring {

/// As bits, node 0 lowest; 0: any of them, or it is not known.
using NumaNodes = std::uint64_t;
inline constexpr int kUnknownNode = -1;

constexpr bool is_near(int node, NumaNodes nodes) {
  return node < 0 || node >= 64 || nodes == 0 || (nodes >> node & 1) != 0;
}

/// The nodes of these cores; 0 where those are all that have cores. `cores_of_node`: of each node, as the kernel writes
/// it: "0-3,8".
NumaNodes nodes_of_cores(std::span<const std::uint32_t> cores, std::span<const std::string> cores_of_node);
/// Of the cores on which the process's first thread may run.
NumaNodes nodes_of_process();
/// Of a device of the PCI bus ("0000:9f:00.0"), or kUnknownNode.
int node_of_pci_device(const std::string& address);

}  // namespace herring
