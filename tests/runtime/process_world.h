#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/process_endpoint.h"
#include "transport/contract.h"

namespace herring::runtime {

/// Endpoints of one process that all know each other, each itself too.
inline std::vector<std::unique_ptr<ProcessEndpoint>> introduced(std::size_t count) {
  std::vector<std::unique_ptr<ProcessEndpoint>> endpoints;
  for (std::uint32_t i = 0; i < count; ++i) {
    endpoints.push_back(std::make_unique<ProcessEndpoint>());
    for (std::uint32_t k = 0; k <= i; ++k) {
      ProcessEndpoint::introduce(*endpoints[i], PeerId{i}, *endpoints[k], PeerId{k});
    }
  }
  return endpoints;
}

class ProcessWorld final : public transport::ContractWorld {
 public:
  explicit ProcessWorld(std::size_t count) : endpoints_(introduced(count)) {}
  transport::Endpoint& endpoint(std::size_t index) override { return *endpoints_[index]; }
  void drive() override {}

 private:
  std::vector<std::unique_ptr<ProcessEndpoint>> endpoints_;
};

}  // namespace herring::runtime
