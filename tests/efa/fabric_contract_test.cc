#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 takes the comparison of two std::vector<std::byte> in the suite for one of unbounded size.
#pragma GCC diagnostic ignored "-Wstringop-overread"
#endif

#include "efa/fabric.h"
#include "efa/fabric_under_test.h"
#include "transport/contract.h"

// What libfabric allocates once when it looks for providers is never freed, and its frames have no names to tell by.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }

namespace herring::transport {
namespace {

class FabricWorld final : public ContractWorld {
 public:
  FabricWorld(efa::Fabric& fabric, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) endpoints_.push_back(fabric.open_endpoint());
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
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

std::unique_ptr<ContractWorld> make_fabric_world(std::size_t endpoints, std::string& reason) {
  const auto fabric = efa::fabric_under_test(reason);
  if (fabric == nullptr) return nullptr;
  return std::make_unique<FabricWorld>(*fabric, endpoints);
}

INSTANTIATE_TEST_SUITE_P(Fabric, TransportContract,
                         ::testing::Values(ContractFactory{"libfabric tcp on lo", make_fabric_world}),
                         [](const auto&) { return "Tcp"; });

}  // namespace
}  // namespace herring::transport
