#include "runtime/checked_endpoint.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "runtime/checked_frame.h"
#include "transport/contract.h"
#include "transport/sim.h"
#include "wire/action.h"

namespace herring::runtime {
namespace {

using transport::Completion;
using transport::CompletionKind;
using transport::SimNetwork;
using transport::SimOptions;
using Bytes = std::vector<std::byte>;

CheckedOptions checked_options(std::uint32_t self, const SimNetwork& network) {
  CheckedOptions options;
  options.self = PeerId{self};
  options.job_id = 0xC0FFEE;
  options.max_head_bytes = 1 << 20;
  options.is_pooled = [](Tag tag) { return tag == kControlTag; };
  options.now = [&network] { return network.now(); };
  return options;
}

class CheckedWorld final : public transport::ContractWorld {
 public:
  CheckedWorld(std::size_t count, const SimOptions& options) : network_(20203, options) {
    for (std::uint32_t i = 0; i < count; ++i) {
      endpoints_.push_back(
          std::make_unique<CheckedEndpoint>(network_.open_endpoint(), checked_options(i, network_)));
    }
    for (auto& from : endpoints_) {
      for (std::uint32_t to = 0; to < count; ++to) from->add_peer(PeerId{to}, endpoints_[to]->address());
    }
  }
  transport::Endpoint& endpoint(std::size_t index) override { return *endpoints_[index]; }
  void drive() override {
    Instant next = network_.next_event();
    for (const auto& endpoint : endpoints_) next = std::min(next, endpoint->next_deadline());
    if (next != Instant::max()) network_.advance_to(std::max(next, network_.now()));
  }
  bool blocks() const override { return false; }

 private:
  SimNetwork network_;
  std::vector<std::unique_ptr<CheckedEndpoint>> endpoints_;
};

transport::ContractFactory factory(const std::string& name, const SimOptions& options) {
  return {name, [options](std::size_t endpoints, std::string&) -> std::unique_ptr<transport::ContractWorld> {
            return std::make_unique<CheckedWorld>(endpoints, options);
          }};
}

SimOptions refusing() {
  SimOptions options;
  options.again_chance = 0.3;
  options.max_sends = 8;
  options.straggler_chance = 0.1;
  return options;
}

}  // namespace
}  // namespace herring::runtime

namespace herring::transport {
INSTANTIATE_TEST_SUITE_P(Checked, TransportContract,
                         ::testing::Values(runtime::factory("plain", {}),
                                           runtime::factory("refusing", runtime::refusing())),
                         [](const auto& param) { return param.param.name; });
}  // namespace herring::transport
