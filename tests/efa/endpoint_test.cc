#include <memory>
#include <span>
#include <string>
#include <vector>

#include "efa/address.h"
#include "efa/fabric_under_test.h"
#include "transport/network.h"

namespace herring::efa {
namespace {

class TcpOnLoopback final : public transport::Network {
 public:
  explicit TcpOnLoopback(std::unique_ptr<FabricUnderTest> fabric) : fabric_(std::move(fabric)) {}
  std::unique_ptr<transport::Endpoint> open_endpoint() override { return fabric_->open_endpoint(); }

 private:
  std::unique_ptr<FabricUnderTest> fabric_;
};

std::unique_ptr<transport::Network> make_network(const transport::NetworkOptions& wanted, std::string& reason) {
  FabricOptions options = options_under_test();
  options.connect_timeout_s = wanted.connect_timeout_s;
  auto fabric = fabric_under_test(reason, options);
  return fabric == nullptr ? nullptr : std::make_unique<TcpOnLoopback>(std::move(fabric));
}

}  // namespace
}  // namespace herring::efa

namespace herring::transport {

INSTANTIATE_TEST_SUITE_P(Fabric, NetworkEndpoint,
                         ::testing::Values(NetworkFactory{"libfabric tcp on lo", efa::make_network}),
                         [](const auto&) { return "Tcp"; });

}  // namespace herring::transport

namespace herring::efa {
namespace {

using Bytes = std::vector<std::byte>;

TEST(FabricEndpoint, SaysWhereItIs) {
  std::string reason;
  const auto fabric = fabric_under_test(reason);
  if (fabric == nullptr) GTEST_SKIP() << reason;
  const auto endpoint = fabric->open_endpoint();
  const std::string text = endpoint->description();
  EXPECT_NE(text.find("libfabric "), std::string::npos) << text;
  EXPECT_NE(text.find("lo"), std::string::npos) << text;
  EXPECT_EQ(endpoint->memory(), nullptr);
}

std::string refusal(transport::Endpoint& endpoint, std::span<const std::byte> address) {
  try {
    endpoint.add_peer(PeerId{5}, address);
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kInvalidArgument);
    return error.what();
  }
  return {};
}

TEST(FabricEndpoint, AddressesOfAnotherKindAreRefusedWithAHint) {
  std::string reason;
  const auto fabric = fabric_under_test(reason);
  if (fabric == nullptr) GTEST_SKIP() << reason;
  const auto opened = fabric->open_endpoint();
  transport::Endpoint& endpoint = *opened;
  transport::Address address = endpoint.address();
  EXPECT_NE(refusal(endpoint, {}).find("peer 5"), std::string::npos);
  EXPECT_NE(refusal(endpoint, std::span(address).first(9)), "");
  EXPECT_NE(refusal(endpoint, std::span(address).first(20)), "");
  EXPECT_NE(refusal(endpoint, Bytes(5000, std::byte{1})), "");

  transport::Address other = address;
  other[4] = std::byte{1};
  EXPECT_NE(refusal(endpoint, other).find("HERRING_PROVIDER"), std::string::npos);
  other[4] = std::byte{200};
  EXPECT_NE(refusal(endpoint, other), "");
  transport::Address elsewhere = address;
  elsewhere[9 + 4] = std::byte{10};  // sin_addr of 127.0.0.1 becomes 10.0.0.1.
  EXPECT_NE(refusal(endpoint, elsewhere).find("HERRING_INTERFACE"), std::string::npos);
  EXPECT_EQ(refusal(endpoint, address), "");
}

}  // namespace
}  // namespace herring::efa
