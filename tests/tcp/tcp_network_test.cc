#include "tcp/tcp.h"
#include "transport/network.h"

namespace herring::transport {
namespace {

class BuiltinOnLoopback final : public Network {
 public:
  explicit BuiltinOnLoopback(const NetworkOptions& wanted) {
    options_.interfaces = {"lo"};
    options_.connect_timeout_s = wanted.connect_timeout_s;
  }
  std::unique_ptr<Endpoint> open_endpoint() override { return tcp::open_endpoint(options_); }

 private:
  tcp::Options options_;
};

INSTANTIATE_TEST_SUITE_P(Builtin, NetworkEndpoint,
                         ::testing::Values(NetworkFactory{
                             "builtin tcp on lo",
                             [](const NetworkOptions& options, std::string&) -> std::unique_ptr<Network> {
                               return std::make_unique<BuiltinOnLoopback>(options);
                             }}),
                         [](const auto&) { return "Tcp"; });

}  // namespace
}  // namespace herring::transport
