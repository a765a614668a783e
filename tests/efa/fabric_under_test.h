#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "core/status.h"
#include "efa/fabric.h"
#include "memory/domain.h"

/// The library that the tests run on: HERRING_TEST_LIBFABRIC (a path), or what the search finds. Always tcp on
/// loopback: nothing leaves this machine.
namespace herring::efa {

inline FabricOptions options_under_test() {
  FabricOptions options;
  if (const char* path = std::getenv("HERRING_TEST_LIBFABRIC"); path != nullptr) options.library = path;
  options.provider = "tcp";
  options.interface = "lo";
  return options;
}

/// With the memory of its endpoints, which go before it.
struct FabricUnderTest {
  explicit FabricUnderTest(const FabricOptions& options) : fabric(options, domain) {}
  std::unique_ptr<transport::Endpoint> open_endpoint() { return fabric.open_endpoint(); }

  memory::Domain domain;
  Fabric fabric;
};

/// Null, and a reason, where there is no libfabric.
inline std::unique_ptr<FabricUnderTest> fabric_under_test(std::string& reason,
                                                          const FabricOptions& options = options_under_test()) {
  try {
    return std::make_unique<FabricUnderTest>(options);
  } catch (const Error& error) {
    if (error.status().code() != Code::kUnavailable) throw;
    reason = error.what();
    return nullptr;
  }
}

/// The same behind strict_fabric.cc, whose card takes memory of devices. Without a path there is no libfabric.
inline FabricOptions strict_options() {
  FabricOptions options = options_under_test();
  const FabricReport report = probe(options);
  setenv("STRICT_FABRIC_LIBRARY", report.path.c_str(), 1);
  options.library = report.path.empty() ? "" : HERRING_STRICT_FABRIC;
  options.takes_devices = true;
  return options;
}

}  // namespace herring::efa
