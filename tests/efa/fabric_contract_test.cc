#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 takes the comparison of two std::vector<std::byte> in the suite for one of unbounded size.
#pragma GCC diagnostic ignored "-Wstringop-overread"
#endif

#include "efa/fabric.h"
#include "efa/fabric_under_test.h"
#include "transport/contract.h"
#include "transport/holding_endpoint.h"

// What libfabric allocates once when it looks for providers is never freed, and its frames have no names to tell by.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }

namespace herring::transport {
namespace {

class FabricWorld final : public ContractWorld {
 public:
  FabricWorld(std::unique_ptr<efa::FabricUnderTest> fabric, std::size_t count) : fabric_(std::move(fabric)) {
    for (std::size_t i = 0; i < count; ++i) {
      endpoints_.push_back(fabric_->open_endpoint());
      if (endpoints_.back()->memory() == nullptr) continue;
      endpoints_.back() = std::make_unique<HoldingEndpoint>(std::move(endpoints_.back()));
    }
    for (auto& endpoint : endpoints_) {
      for (std::size_t i = 0; i < count; ++i) {
        endpoint->add_peer(PeerId{static_cast<std::uint32_t>(i)}, endpoints_[i]->address());
      }
    }
  }
  Endpoint& endpoint(std::size_t index) override { return *endpoints_[index]; }
  void drive() override {
    // One thread plays all of them, so nobody may block for long.
    for (auto& endpoint : endpoints_) endpoint->wait(std::chrono::steady_clock::now() + std::chrono::microseconds(200));
  }

 private:
  std::unique_ptr<efa::FabricUnderTest> fabric_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

ContractFactory on_tcp(const std::string& name, bool registers) {
  return {name, [registers](std::size_t endpoints, std::string& reason) -> std::unique_ptr<ContractWorld> {
            efa::FabricOptions options = efa::options_under_test();
            options.always_registers = registers;
            auto fabric = efa::fabric_under_test(reason, options);
            if (fabric == nullptr) return nullptr;
            return std::make_unique<FabricWorld>(std::move(fabric), endpoints);
          }};
}

ContractFactory on_strict_cards(const std::string& name) {
  return {name, [](std::size_t endpoints, std::string& reason) -> std::unique_ptr<ContractWorld> {
            auto fabric = efa::fabric_under_test(reason, efa::strict_options());
            if (fabric == nullptr) return nullptr;
            return std::make_unique<FabricWorld>(std::move(fabric), endpoints);
          }};
}

std::string name_of(const ::testing::TestParamInfo<ContractFactory>& param) {
  constexpr const char* kNames[] = {"Tcp", "RegisteredTcp", "StrictTcp"};
  return kNames[param.index];
}

// Registered: endpoints that share one libfabric domain, as on EFA.
INSTANTIATE_TEST_SUITE_P(Fabric, TransportContract,
                         ::testing::Values(on_tcp("libfabric tcp on lo", false),
                                           on_tcp("libfabric tcp on lo, registered memory", true),
                                           on_strict_cards("libfabric tcp on lo, cards that reach devices")),
                         name_of);

TEST(SharedDomain, EndpointsOfOneCardShareARegistration) {
  std::string reason;
  efa::FabricOptions options = efa::options_under_test();
  options.always_registers = true;
  const auto fabric = efa::fabric_under_test(reason, options);
  if (fabric == nullptr) GTEST_SKIP() << reason;
  const auto one = fabric->open_endpoint();
  const auto two = fabric->open_endpoint();
  ASSERT_EQ(one->memory(), &fabric->domain);
  ASSERT_EQ(two->memory(), one->memory());
  const memory::Buffer buffer = fabric->domain.allocate(100'000);
  EXPECT_TRUE(one->post_receive(Tag{1}, buffer.bytes(), {}, Token{1}).is_ok());
  EXPECT_TRUE(two->post_receive(Tag{2}, buffer.bytes().first(10), buffer.bytes().subspan(99'000), Token{2}).is_ok());
  EXPECT_EQ(fabric->domain.stats().registered, 1u);
  std::vector<std::byte> elsewhere(100);
  const Status status = one->post_receive(Tag{3}, elsewhere, {}, Token{3});
  EXPECT_FALSE(status.is_ok());
  EXPECT_NE(status.message().find("not registered"), std::string::npos) << status.to_string();
  one->shut_down();
  two->shut_down();
}

}  // namespace
}  // namespace herring::transport
