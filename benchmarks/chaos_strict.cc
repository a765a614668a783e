// A library to preload (LD_PRELOAD) into processes of a job: every endpoint of theirs then behaves as a network card
// that wants memory registered (tests/transport/strict_card.h), and ends the process where the job does what such a
// card does not forgive. chaos.py builds it.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "memory/domain.h"
#include "runtime/network.h"
#include "transport/strict_card.h"

namespace herring::runtime {
namespace {

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "herring: %s\n", why.c_str());
  std::abort();
}

class StrictNetwork final : public Network {
 public:
  StrictNetwork(std::unique_ptr<Network> inner, memory::Domain& domain) : inner_(std::move(inner)), domain_(domain) {}
  std::unique_ptr<transport::Endpoint> open_endpoint(std::uint32_t number) override {
    transport::StrictOptions options;
    options.on_fault = die;
    return std::make_unique<transport::StrictCard>(inner_->open_endpoint(number), domain_, options);
  }

  bool takes_descriptors() const override { return inner_->takes_descriptors(); }
  std::string no_devices() const override { return inner_->no_devices(); }

 private:
  std::unique_ptr<Network> inner_;
  memory::Domain& domain_;
};

}  // namespace

std::unique_ptr<Network> open_network(const Config& config, const NetworkOptions& options, memory::Domain& domain) {
  using Open = std::unique_ptr<Network> (*)(const Config&, const NetworkOptions&, memory::Domain&);
  constexpr const char* kName =
      "_ZN7herring7runtime12open_networkERKNS_6ConfigERKNS0_14NetworkOptionsERNS_6memory6DomainE";
  const auto original = reinterpret_cast<Open>(dlsym(RTLD_NEXT, kName));
  if (original == nullptr) die("chaos_strict: open_network() is not in the library that comes next");
  std::fprintf(stderr, "herring: chaos_strict: this process's endpoints are strict\n");
  return std::make_unique<StrictNetwork>(original(config, options, domain), domain);
}

}  // namespace herring::runtime
