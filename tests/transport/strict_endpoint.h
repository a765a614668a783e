#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "transport/strict_card.h"

/// A strict card whose faults fail the test that runs.
namespace herring::transport {

class StrictEndpoint final : public StrictCard {
 public:
  StrictEndpoint(std::unique_ptr<Endpoint> inner, memory::Domain& domain, StrictOptions options = {})
      : StrictCard(std::move(inner), domain, fails_test(std::move(options))) {}

 private:
  static StrictOptions fails_test(StrictOptions options) {
    options.on_fault = [](const std::string& what) { ADD_FAILURE() << what; };
    return options;
  }
};

}  // namespace herring::transport
