// Which interface an endpoint is on, and that cards that register memory are all known before any is allocated.
#include "runtime/network.h"

#include <gtest/gtest.h>

#include "core/status.h"
#include "runtime/job.h"

namespace herring::runtime {
namespace {

using namespace testing;

TEST(Network, EndpointsTakeSeveralInterfacesInTurns) {
  Config config;
  config.provider = "builtin";
  config.interface = "lo, 127.0.0.1";
  memory::Domain domain;
  const auto network = open_network(config, {}, domain);
  for (std::uint32_t number = 0; number < 4; ++number) {
    EXPECT_EQ(network->open_endpoint(number)->description(), "tcp (builtin, lo; also lo)");
  }
  config.interface = "lo,nosuchif0";
  EXPECT_THROW(open_network(config, {}, domain)->open_endpoint(0), Error);
}

TEST(Network, TheCardsOfAllLanesAreThereBeforeTheFirstLanesMemory) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  Config config;
  config.provider = "tcp";
  config.interface = "lo,127.0.0.1";
  NetworkOptions options;
  options.fabric_search = fabric_search();
  options.cards = {{{0, 2}}, 0, 1};
  options.always_registers = true;
  memory::Domain domain;
  const auto network = open_network(config, options, domain);
  const auto one = network->open_endpoint(0);
  const memory::Buffer slots = domain.allocate(1 << 16);
  const auto other = network->open_endpoint(1);
  EXPECT_NE(other->memory(), nullptr);
}

}  // namespace
}  // namespace herring::runtime
