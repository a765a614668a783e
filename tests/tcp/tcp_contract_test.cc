#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 takes the comparison of two std::vector<std::byte> in the suite for one of unbounded size.
#pragma GCC diagnostic ignored "-Wstringop-overread"
#endif

#include "tcp/tcp.h"
#include "transport/contract.h"

namespace herring::transport {
namespace {

class TcpWorld final : public ContractWorld {
 public:
  explicit TcpWorld(std::size_t count, const std::string& interface) {
    tcp::Options options;
    options.interfaces = {interface};
    for (std::size_t i = 0; i < count; ++i) endpoints_.push_back(tcp::open_endpoint(options));
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

ContractFactory on(const std::string& interface) {
  return {"builtin tcp on " + interface,
          [interface](std::size_t endpoints, std::string& reason) -> std::unique_ptr<ContractWorld> {
            if (tcp::probe({interface}).chosen < 0) {
              reason = "no interface " + interface;
              return nullptr;
            }
            return std::make_unique<TcpWorld>(endpoints, interface);
          }};
}

INSTANTIATE_TEST_SUITE_P(Builtin, TransportContract, ::testing::Values(on("lo"), on("::1")),
                         [](const auto& param) { return param.index == 0 ? "Tcp" : "TcpOverIpv6"; });

}  // namespace
}  // namespace herring::transport
