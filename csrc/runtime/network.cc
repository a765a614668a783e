#include "runtime/network.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/hmac.h"
#include "core/status.h"
#include "core/text.h"
#include "tcp/congestion.h"

namespace herring::runtime {
namespace {

constexpr std::string_view kAuto = "auto";
constexpr std::string_view kBuiltin = "builtin";
/// Where auto finds neither EFA nor verbs. docs/adr/0014-builtin-tcp.md has the measurements.
constexpr bool kAutoTakesBuiltin = true;

/// A Fabric for each card or interface that endpoints are opened on, all from the start (NetworkOptions::cards).
class FabricNetwork final : public Network {
 public:
  FabricNetwork(efa::FabricOptions options, std::vector<std::string> interfaces, memory::Domain& domain)
      : options_(std::move(options)), interfaces_(std::move(interfaces)) {
    auto first = open(0, domain);
    nodes_ = first->nodes();
    fabrics_.resize(interfaces_.empty() ? nodes_.size() : interfaces_.size());
    fabrics_[place_of(0)] = std::move(first);
    for (std::uint32_t number = 1; number < options_.cards.endpoints(); ++number) {
      auto& fabric = fabrics_[place_of(number)];
      if (!fabric) fabric = open(number, domain);
    }
  }
  std::unique_ptr<transport::Endpoint> open_endpoint(std::uint32_t number) override {
    return fabrics_[place_of(number)]->open_endpoint();
  }
  bool takes_descriptors() const override { return !is_rdma(); }
  std::string no_devices() const override {
    for (const auto& fabric : fabrics_) {
      if (fabric && !fabric->no_devices().empty()) return fabric->no_devices();
    }
    return {};
  }
  bool is_rdma() const {
    const std::string& provider = fabrics_[place_of(0)]->provider();
    return provider.starts_with("efa") || provider.starts_with("verbs");
  }

 private:
  /// Of the interfaces that are named, or of all cards.
  std::size_t place_of(std::uint32_t number) const {
    if (interfaces_.empty()) return efa::place_among(nodes_, options_.cards, number);
    return (options_.cards.turn() + number) % interfaces_.size();
  }
  std::unique_ptr<efa::Fabric> open(std::uint32_t number, memory::Domain& domain) const {
    efa::FabricOptions options = options_;
    options.number = number;
    if (!interfaces_.empty()) options.interface = interfaces_[place_of(number)];
    return std::make_unique<efa::Fabric>(options, domain);
  }

  const efa::FabricOptions options_;
  const std::vector<std::string> interfaces_;
  std::vector<int> nodes_;                             // Of the cards, where no interface is named.
  std::vector<std::unique_ptr<efa::Fabric>> fabrics_;  // Null where nothing is opened.
};

class BuiltinNetwork final : public Network {
 public:
  /// `first`: the interface of this process's first endpoint.
  BuiltinNetwork(tcp::Options options, std::uint32_t first) : options_(std::move(options)), first_(first) {}
  /// The job's own bytes, this process's and a number: others are told most of that only once.
  std::unique_ptr<transport::Endpoint> open_endpoint(std::uint32_t number) override {
    const std::uint64_t opened = ++opened_;
    for (std::size_t i = 0; i < 4; ++i) options_.instance[12 + i] = static_cast<std::byte>(opened >> (8 * i) & 0xFF);
    options_.number = first_ + number;
    return tcp::open_endpoint(options_);
  }
  bool takes_descriptors() const override { return true; }
  std::string no_devices() const override { return "Herring's builtin tcp takes no GPU memory"; }

 private:
  tcp::Options options_;
  const std::uint32_t first_;
  std::uint32_t opened_ = 0;
};

/// Without a device there is neither EFA nor verbs, and libfabric need not be loaded to know.
bool has_rdma_device() {
  std::error_code ignored;
  for (const char* folder : {"/sys/class/infiniband", "/dev/infiniband"}) {
    if (std::filesystem::exists(folder, ignored) && !std::filesystem::is_empty(folder, ignored)) return true;
  }
  return false;
}

efa::FabricOptions fabric_options(const Config& config, std::span<const std::string> search) {
  efa::FabricOptions options;
  options.library = config.libfabric;
  options.provider = config.provider == kBuiltin ? kAuto : std::string_view(config.provider);
  options.search.assign(search.begin(), search.end());
  return options;
}

tcp::Options builtin_options(const Config& config, const NetworkOptions& given) {
  tcp::Options options;
  options.interfaces = split_list(config.interface);
  options.congestion = config.tcp_congestion;
  constexpr std::string_view kLabel = "herring tcp connections";
  std::vector<std::byte> text;
  for (const char letter : kLabel) text.push_back(static_cast<std::byte>(letter));
  for (unsigned shift = 0; shift < 64; shift += 8) text.push_back(static_cast<std::byte>(given.job_id >> shift & 0xFF));
  options.key = hmac_sha256(std::as_bytes(std::span(config.secret)), text);
  const Digest job = hmac_sha256(options.key, std::as_bytes(std::span(std::string_view("herring tcp endpoints"))));
  std::copy_n(job.begin(), 8, options.instance.begin());
  for (std::size_t i = 0; i < 4; ++i) options.instance[8 + i] = static_cast<std::byte>(given.member >> (8 * i) & 0xFF);
  options.on_stranger = given.on_stranger;
  options.strangers = given.strangers;
  return options;
}

bool is_builtin_asked(const Config& config) { return config.provider == kBuiltin; }
/// auto, and nobody has named a libfabric.
bool may_choose(const Config& config) {
  return kAutoTakesBuiltin && config.provider == kAuto && config.libfabric.empty();
}

}  // namespace

std::unique_ptr<Network> open_network(const Config& config, const NetworkOptions& given, memory::Domain& domain) {
  const bool is_free = may_choose(config);
  if (is_builtin_asked(config) || (is_free && !has_rdma_device())) {
    return std::make_unique<BuiltinNetwork>(builtin_options(config, given), given.cards.turn());
  }
  efa::FabricOptions options = fabric_options(config, given.fabric_search);
  options.receives = std::max(options.receives, given.receives);
  options.cards = given.cards;
  options.always_registers = given.always_registers;
  options.takes_devices = given.takes_devices;
  const std::vector<std::string> interfaces = split_list(config.interface);
  if (!is_free) return std::make_unique<FabricNetwork>(options, interfaces, domain);
  try {
    auto fabric = std::make_unique<FabricNetwork>(options, interfaces, domain);
    if (fabric->is_rdma()) return fabric;
  } catch (const Error& error) {
    if (error.status().code() != Code::kUnavailable) throw;
  }
  return std::make_unique<BuiltinNetwork>(builtin_options(config, given), given.cards.turn());
}

NetworkReport probe_network(const Config& config, std::span<const std::string> search) {
  NetworkReport report;
  const std::vector<std::string> interfaces = split_list(config.interface);
  report.builtin = tcp::probe(interfaces);
  try {
    const tcp::CongestionControl checked(config.tcp_congestion);
  } catch (const Error& error) {
    report.no_builtin = error.status().message();
  }
  efa::FabricOptions options = fabric_options(config, search);
  if (!interfaces.empty()) options.interface = interfaces.front();
  options.takes_devices = config.gpudirect != Switch::kOff && config.cuda != Switch::kOff;
  report.fabric = efa::probe(options);
  if (is_builtin_asked(config)) {
    report.is_builtin = true;
    report.why = "provider builtin was asked for";
  } else if (may_choose(config)) {
    const int chosen = report.fabric.chosen;
    const std::string name = chosen < 0 ? "" : report.fabric.providers[static_cast<std::size_t>(chosen)].name;
    report.is_builtin = !name.starts_with("efa") && !name.starts_with("verbs");
    report.why = "there is neither EFA nor verbs here, and it is faster than libfabric's tcp";
  }
  return report;
}

}  // namespace herring::runtime
